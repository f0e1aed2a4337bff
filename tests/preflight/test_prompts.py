"""The reader without transformers writes and counts what transformers does."""

import json

import pytest
from transformers import AutoTokenizer

from verl.data.table import DataError
from verl.preflight.rows import compiled, read_folder, template_marks
from verl.utils.tiny_model import make_tokenizer
from verl.utils.tokenizer import hf_tokenizer

CHATS = [
    [{"role": "user", "content": "What is 3 + 5?"}],
    [{"role": "system", "content": "Be brief.\n\n"}, {"role": "user", "content": "  spaces\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]
TRICKY = """
{%- set ns = namespace(first=true) %}
{%- for message in messages %}
    {%- if message.role == 'system' and not ns.first %}{{ raise_exception('system must come first') }}{%- endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}
{{ message | tojson }}
    {% endif %}
    {%- set ns.first = false %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<go {{ mode | default('slow') }}>{% endif %}
"""


@pytest.fixture(params=["plain", "tricky"])
def folder(request, tmp_path):
    tokenizer = make_tokenizer("byte")
    if request.param == "tricky":
        tokenizer.chat_template = TRICKY
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kwargs", [{}, {"mode": "<fast> é"}])
def test_prompts_are_those_of_transformers(folder, kwargs):
    reader, theirs = read_folder(str(folder), template_kwargs=kwargs), AutoTokenizer.from_pretrained(folder)
    texts = [theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **kwargs) for chat in CHATS]
    assert [reader.text(chat) for chat in CHATS] == texts
    assert reader.encode(texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    assert set(theirs.all_special_tokens) <= set(reader.special_tokens)


def test_a_plain_string_is_a_user_message_and_null_fields_are_left_out(folder):
    reader = read_folder(str(folder))
    assert reader.text("What is 3 + 5?") == reader.text(CHATS[0]) == reader.text([{**CHATS[0][0], "tool_calls": None}])


def test_templates_are_found_wherever_a_folder_keeps_them(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for template in (
        "one {{ bos_token }}",
        [{"name": "tool", "template": "x"}, {"name": "default", "template": "one "}],
    ):
        settings["chat_template"] = template
        settings["bos_token"] = {"content": "<s>", "lstrip": False}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert read_folder(str(tmp_path)).text(CHATS[0]) == ("one <s>" if isinstance(template, str) else "one ")
    (tmp_path / "mine.jinja").write_text("mine {{ messages[0].content }}")
    for given in (str(tmp_path / "mine.jinja"), "mine {{ messages[0].content }}"):
        assert read_folder(str(tmp_path), given).text("x") == "mine x"


def test_without_a_template_text_stays_and_chats_are_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    reader, theirs = read_folder(str(tmp_path)), hf_tokenizer(str(tmp_path))
    assert reader.text("as it is") == "as it is" and reader.encode(["as it is"]) == theirs(["as it is"])["input_ids"]
    with pytest.raises(DataError, match="no chat template"):
        reader.text(CHATS[0])


def test_what_a_template_refuses_is_said_with_the_roles(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="roles user, system: system must come first"):
        read_folder(str(tmp_path), TRICKY).text([CHATS[0][0], {"role": "system", "content": "late"}])


def test_templates_cannot_reach_python():
    with pytest.raises(Exception, match="unsafe"):
        compiled("{{ messages.__class__.__mro__ }}").render(messages=[])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_folder(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        read_folder(str(tmp_path))


def test_marks_of_templates_are_found_in_texts(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    marks = template_marks(read_folder(str(tmp_path)))
    assert marks.findall("<|im_start|>user <|pad|> [INST] <b> |") == ["<|im_start|>", "<|pad|>", "[INST]"]
    assert not template_marks(None).findall("3 < 5 | [x] <answer>")

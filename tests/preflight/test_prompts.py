"""Prompts of the checks are those of the run: rendered and counted as by transformers, with a lighter import."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from verl.config.data import DataConfig
from verl.data.readers import table_in_memory
from verl.data.table import RowTable
from verl.preflight.rows import Prompts, load_tokenizer, special_tokens, template_marks
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


def rendered(tokenizer, prompts, **kwargs) -> Prompts:
    table = RowTable([table_in_memory({"prompt": prompt} for prompt in prompts)], ["rows"])
    found = Prompts(table, DataConfig(apply_chat_template_kwargs=kwargs), tokenizer)
    found.count(np.arange(len(prompts)), np.zeros(len(prompts), int))
    return found


def text(tokenizer, prompt):
    return rendered(tokenizer, [prompt]).texts([0])[0]


@pytest.mark.parametrize("kwargs", [{}, {"mode": "<fast> é"}])
def test_prompts_are_those_of_transformers(folder, kwargs):
    own, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    found = rendered(own, CHATS, **kwargs)
    texts = [theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **kwargs) for chat in CHATS]
    assert list(found.texts(range(3)).values()) == texts
    ids = theirs(texts, add_special_tokens=False)["input_ids"]
    assert own(texts, add_special_tokens=False)["input_ids"] == ids
    assert list(found.tokens.values()) == list(map(len, ids))
    assert set(theirs.all_special_tokens) <= set(special_tokens(own))


def test_a_plain_string_is_a_user_message_and_null_fields_are_left_out(folder):
    own = load_tokenizer(str(folder))
    assert text(own, "What is 3 + 5?") == text(own, CHATS[0]) == text(own, [{**CHATS[0][0], "tool_calls": None}])


def test_templates_are_found_wherever_a_folder_keeps_them(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for template in (
        "one {{ bos_token }}",
        [{"name": "tool", "template": "x"}, {"name": "default", "template": "one "}],
    ):
        settings["chat_template"] = template
        settings["bos_token"] = {"content": "<s>", "lstrip": False, "__type": "AddedToken"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        found = text(load_tokenizer(str(tmp_path)), CHATS[0])
        assert found == ("one <s>" if isinstance(template, str) else "one ")
    (tmp_path / "mine.jinja").write_text("mine {{ messages[0].content }}")
    for given in (str(tmp_path / "mine.jinja"), "mine {{ messages[0].content }}"):
        assert text(load_tokenizer(str(tmp_path), given), "x") == "mine x"


def test_a_tokenizer_that_no_run_could_read_is_refused(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    with pytest.raises(ValueError, match="cannot be read .*bos_token"):
        load_tokenizer(str(tmp_path))


def test_without_a_template_text_stays_and_chats_are_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    own, theirs = load_tokenizer(str(tmp_path)), hf_tokenizer(str(tmp_path))
    found = rendered(own, ["as it is"])
    assert found.texts([0]) == {0: "as it is"} and found.tokens == {0: len(theirs("as it is")["input_ids"])}
    assert "no chat template" in rendered(own, CHATS[:1]).refused[0]


def test_what_a_template_refuses_is_said_with_the_roles(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    found = rendered(load_tokenizer(str(tmp_path), TRICKY), [[CHATS[0][0], {"role": "system", "content": "late"}]])
    assert "roles user, system: system must come first" in found.refused[0] and not found.tokens


def test_templates_cannot_reach_python(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    own = load_tokenizer(str(tmp_path), "{{ messages.__class__.__mro__ }}")
    assert "unsafe" in rendered(own, CHATS[:1]).refused[0]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_marks_of_templates_are_found_in_texts(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    marks = template_marks(load_tokenizer(str(tmp_path)))
    assert marks.findall("<|im_start|>user <|pad|> [INST] <b> |") == ["<|im_start|>", "<|pad|>", "[INST]"]
    assert not template_marks(None).findall("3 < 5 | [x] <answer>")

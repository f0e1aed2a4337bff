import json
import subprocess
import sys

import pytest
import transformers

from tests.support.families import FAMILIES
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.tiny_model import make_tokenizer
from verl.utils.tiny_vl_model import make_tiny_vl_model
from verl.utils.tokenizer import tokenizer_class


@pytest.fixture
def folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_tokenizer_loads_with_its_own_padding_token(folder):
    tokenizer = hf_tokenizer(str(folder))
    assert tokenizer.pad_token == make_tokenizer().pad_token and tokenizer.chat_template


def test_a_tokenizer_without_padding_token_pads_with_its_end_token(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no padding token"):
        assert hf_tokenizer(str(tmp_path)).pad_token_id == tokenizer.eos_token_id
    assert hf_tokenizer(str(tmp_path), correct_pad_token=False).pad_token_id is None


def test_the_home_folder_is_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert hf_tokenizer(f"~/{folder.name}").eos_token


def test_a_text_model_has_no_processor(folder):
    assert hf_processor(str(folder)) is None


def test_a_chat_template_is_given_as_text_or_as_a_file_and_saved(folder, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in ("{{ messages[0].content }}!", str(file)):
        tokenizer = hf_tokenizer(str(folder), chat_template=given)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
        tokenizer.save_pretrained(tmp_path / "saved")
        assert hf_tokenizer(str(tmp_path / "saved")).chat_template == "{{ messages[0].content }}!"
    with pytest.raises(ValueError, match="custom_chat_template='nowhere.jinja' is neither a Jinja template"):
        hf_tokenizer(str(folder), chat_template="nowhere.jinja")


def test_importing_the_helpers_of_utils_does_not_import_transformers():
    code = "import sys, verl.utils, verl.utils.fs, verl.data; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


# -- the class of a folder's tokenizer, without AutoTokenizer ----------------------------------------------------------

KINDS = sorted({name.split(" ")[0] for name in FAMILIES} | {"deepseek_v3", "phi3", "qwen3_5", "smolvlm", "glm4_moe"})
CLASSES = [None, "TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast", "NoTokenizer"]
CHAT = [{"role": "system", "content": "Be  brief."}, {"role": "user", "content": "Zwölf & 12?\n\t<|im_end|> ok"}]


def renamed(folder, tokenizer, kind, **entries):
    """Save a tokenizer as that of a model of type ``kind``, with other entries in its configuration."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder)


def assert_equal_tokenizers(found, expected):
    assert type(found) is type(expected)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    odd = {"_tokenizer", "_in_target_context_manager"}
    for name in vars(expected).keys() - odd:
        assert str(getattr(found, name)) == str(getattr(expected, name)), name
    assert found.special_tokens_map == expected.special_tokens_map and len(found) == len(expected)
    assert found.all_special_ids == expected.all_special_ids and found.chat_template == expected.chat_template
    for text in (CHAT[1]["content"], "  two spaces\r\nand 1234567890 \u0301 \U0001f600 "):
        ids = found(text)["input_ids"]
        assert ids == expected(text)["input_ids"]
        assert found.decode(ids) == expected.decode(ids)
        assert found.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
    if expected.chat_template:
        chats = [one.apply_chat_template(CHAT, add_generation_prompt=True) for one in (found, expected)]
        assert chats[0]["input_ids"] == chats[1]["input_ids"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_of_a_tokenizer_is_that_of_autotokenizer(tmp_path, name):
    without = set()
    for kind in KINDS:
        if name is None and kind == "xglm":  # its class reads no vocabulary of this kind
            continue
        folder = renamed(tmp_path, make_tokenizer(), kind, tokenizer_class=name)
        found = tokenizer_class(folder)
        if found is None:
            without.add(kind)
        else:
            assert found is type(transformers.AutoTokenizer.from_pretrained(folder)), kind
    # with mistral-common there is another class; and the other is one in Python
    assert without <= {"ministral", "ministral3", "mistral", "mixtral", "biogpt"}


@pytest.mark.parametrize("spelling", ["char", "byte"])
@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("qwen2", {}),
        ("qwen2", {"tokenizer_class": "Qwen2TokenizerFast"}),
        ("qwen3", {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False}),
        ("llama", {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}),
        ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "padding_side": "left"}),
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 77}),
        ("gemma2", {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}),
    ],
)
def test_a_tokenizer_without_autotokenizer_is_equal_to_one_with_it(tmp_path, spelling, kind, entries):
    folder = renamed(tmp_path, make_tokenizer(spelling), kind, **entries)
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    assert_equal_tokenizers(tokenizer_class(folder).from_pretrained(folder), expected)


def test_a_tokenizer_of_images_is_equal_to_that_of_autotokenizer(tmp_path):
    folder = str(make_tiny_vl_model(tmp_path))
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    assert_equal_tokenizers(tokenizer_class(folder).from_pretrained(folder), expected)


def test_a_folder_without_a_model_has_the_class_that_its_tokenizer_names(folder):
    assert tokenizer_class(str(folder)) is type(transformers.AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "code.Own"]}}),
        ("config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"}),  # in Python
        ("config.json", {"model_type": "of_nobody"}),
        ("config.json", {"auto_map": {"AutoConfig": "code.Own"}}),
    ],
)
def test_what_only_autotokenizer_can_tell_is_left_to_it(tmp_path, file, entries):
    folder = renamed(tmp_path, make_tokenizer(), "llama", tokenizer_class=None)
    assert tokenizer_class(folder) is not None
    (tmp_path / file).write_text(json.dumps({**json.loads((tmp_path / file).read_text()), **entries}))
    assert tokenizer_class(folder) is None
    (tmp_path / file).write_text("{")
    assert tokenizer_class(folder) is None
    (tmp_path / "tokenizer.json").unlink()
    assert tokenizer_class(folder) is None


def test_opening_a_tokenizer_imports_no_models(tmp_path):
    folder = renamed(tmp_path, make_tokenizer(), "qwen2", tokenizer_class="Qwen2Tokenizer")
    code = (
        "import sys\nfrom verl.utils.tokenizer import hf_tokenizer\n"
        f"print(type(hf_tokenizer({folder!r}, trust_remote_code=True)).__name__)\n"
        "print(sorted({'torch', 'sympy', 'transformers.models.auto.modeling_auto'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Qwen2Tokenizer", "[]"]

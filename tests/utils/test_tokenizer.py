import subprocess
import sys

import pytest

from verl.utils import hf_processor, hf_tokenizer
from verl.utils.tiny_model import make_tokenizer


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

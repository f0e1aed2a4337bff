"""The command line of the check: its words, its output, its exit codes."""

import json
import subprocess
import sys

import pytest

from tests.preflight.files import row, sums, write
from verl.config.base import ConfigError
from verl.preflight.command import check as main
from verl.preflight.command import read_options
from verl.utils.tiny_model import make_tokenizer

from .conftest import BASE


@pytest.fixture
def data(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    return [write(tmp_path, sums(30)), f"model={tmp_path}"]


def test_exit_codes_tell_good_data_from_bad_and_from_a_bad_command(data, tmp_path, capsys):
    assert main(data) == 0 and "30 rows, ready to train on" in capsys.readouterr().out
    assert main([write(tmp_path, [row(prompt=[])], "bad.parquet"), *data]) == 2
    assert "bad.parquet, row 0: 'prompt' (data.prompt_key) is an empty list" in capsys.readouterr().out
    assert main([*data, "data.promt_key=x"]) == 2
    assert "did you mean 'data.prompt_key'" in capsys.readouterr().err
    assert main(["--jsn", *data]) == 2
    with pytest.raises(SystemExit) as end:
        main([data[1]])
    assert end.value.code == 2


def test_the_json_form_is_one_object_with_everything(data, tmp_path, capsys):
    bad = write(tmp_path, [row(prompt=[]), *sums(2)], "bad.parquet")
    assert main(["--json", *data, bad, "data.max_prompt_length=20"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["rows"] == 33 and found["duplicates"] == 2
    assert found["bad_rows"] == {
        "count": 1,
        "rows": [{"file": bad, "row": 0, "why": "'prompt' (data.prompt_key) is an empty list"}],
    }
    assert found["lengths"]["overlong"] == 32 and found["data_sources"] == {"openai/gsm8k": 33}
    [scores] = found["scores"]
    assert scores["gold"] == 1.0 and scores["garbage"] == 0.0 and scores["form"] == "#### answer"
    assert found["files"][0]["columns"]["data_source"] == "string"


def test_the_picture_shows_special_tokens_histogram_and_scores(data, capsys):
    main(data)
    out = capsys.readouterr().out
    assert "<|im_start|>user" in out and "█" in out and "#### answer" in out and "openai/gsm8k" in out


def test_with_the_words_of_a_training_all_of_it_is_checked(there, capsys):
    assert main([*BASE, "trainer.save_freq=-1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "72 rows, ready to train on; no errors, 1 warning" in out and "trainer.save_freq=-1 writes no" in out
    assert main([*BASE, "actor_rollout_ref.model.path=modle"]) == 2


def test_what_a_look_at_files_does_not_read_is_said(data, capsys):
    assert main([*data, "trainer.n_gpus_per_node=8"]) == 0
    assert "trainer.n_gpus_per_node has no effect on data" in " ".join(capsys.readouterr().out.split())


def test_values_are_typed_as_in_a_training():
    words = [
        "data.max_prompt_length=1e3",
        "+data.apply_chat_template_kwargs.enable_thinking=false",
        "data.train_files=[a,b]",
    ]
    config, given = read_options([*words, "custom_reward_function.reward_kwargs={bonus: 1}", "data.prompt_key='q: a'"])
    assert config.data.max_prompt_length == 1000 and config.data.train_files == ["a", "b"]
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False} and config.data.prompt_key == "q: a"
    assert config.custom_reward_function.reward_kwargs == {"bonus": 1} and len(given) == 5
    with pytest.raises(ConfigError, match="data.max_prompt_length=-1 must be greater than 0"):
        read_options(["data.max_prompt_length=-1"])


def test_a_module_runs_it(data):
    done = subprocess.run([sys.executable, "-m", "verl.data_check", *data, "--json"], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"]

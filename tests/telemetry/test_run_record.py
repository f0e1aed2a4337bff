"""What a run leaves of itself from its first second."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.telemetry import run_record
from verl.telemetry.progress import Progress
from verl.telemetry.run_record import is_secret, log_only, mask, recorded, say_early

WORDS = ["trainer.device=cpu", "data.train_files=/data/my files/x.parquet"]


@pytest.fixture
def run(tmp_path):
    """``run(words, config)``: a context in which a record is kept, and its folder."""
    folder = tmp_path / "run"
    return lambda words=WORDS, config=None: recorded(folder, words, config or {"a": {"b": 1}}, str), folder


def test_command_configuration_environment_and_log_are_there_before_anything_heavy_is_imported(tmp_path):
    program = (
        "import sys\nfrom verl.config.load import load\nfrom verl.trainer.run_folder import recorded_run\n"
        f"loaded = load(['actor_rollout_ref.rollout.name=hf', 'trainer.default_local_dir={tmp_path}/run'])\n"
        "record = recorded_run(loaded.config, ['a=1'])\nrecord.__enter__()\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)\nimport os; os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "command.sh", "config.yaml", "environment.json", "run.lock", "run.log"
    }  # fmt: skip
    assert "main_ppo a=1" in (tmp_path / "run" / "run.log").read_text()
    tree = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert tree["trainer"]["default_local_dir"] == f"{tmp_path}/run"


def test_the_environment_names_versions_commit_machine_and_instruction_sets(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    context, folder = run
    with context():
        found = json.loads((folder / "environment.json").read_text())
    assert found["packages"]["torch"] and found["verl"]["version"] and found["cpu"]["cores"] >= 1
    assert {"host", "python", "system", "time", "gpus", "memory_gib"} <= found.keys() and "isa" in found["cpu"]
    assert found["variables"]["OMP_NUM_THREADS"] == "3"


def test_the_command_starts_the_run_again_and_takes_further_options(run, tmp_path):
    context, folder = run
    with context():
        pass
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stub.chmod(0o755)
    script = folder / "command.sh"
    script.write_text(script.read_text().replace(sys.executable, str(stub)))
    done = subprocess.run(["bash", str(script), "a=1"], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "verl.trainer.main_ppo", *WORDS, "a=1"]


def test_a_run_made_in_python_records_what_started_the_process(run):
    context, folder = run
    with context(words=None):
        pass
    assert os.path.basename(sys.orig_argv[0]) in (folder / "command.sh").read_text()


def test_the_log_holds_what_was_printed_with_warnings_and_the_error_that_ended_it(run, capsys):
    context, folder = run
    say_early("note: said before")
    with pytest.raises(ValueError), context():
        print("to stdout")
        print("\x1b[31mred\x1b[0m\rdrawn again", file=sys.stderr)
        print("a warning", file=sys.stderr)
        log_only("of a worker\n")
        raise ValueError("a.b=1 is wrong. Set 2.")
    log = (folder / "run.log").read_text()
    for text in ("note: said before", "to stdout\n", "drawn again\n", "a warning", "of a worker\n", "Traceback"):
        assert text in log
    assert log.endswith("error: a.b=1 is wrong. Set 2.\n") and "\x1b" not in log and "red" not in log
    shown = capsys.readouterr()
    assert "to stdout" in shown.out and "of a worker" not in shown.out
    print("later")
    assert "later" not in (folder / "run.log").read_text()


def test_a_second_start_goes_on_in_the_log_and_keeps_what_differed(run):
    context, folder = run
    for words in (["a=1"], ["a=2"], ["a=3"]):
        with context(words=words, config={"n": words[0]}):
            print("in", words[0])
    log = (folder / "run.log").read_text()
    assert log.index("in a=1") < log.index("in a=2") < log.index("in a=3") and log.count("== ") == 3
    assert [yaml.safe_load((folder / name).read_text())["n"] for name in ("config.1.yaml", "config.2.yaml")] == [
        "a=1", "a=2"
    ]  # fmt: skip
    assert "a=3" in (folder / "command.sh").read_text() and "a=1" in (folder / "command.1.sh").read_text()


def test_no_secret_is_readable_in_any_file(run, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    words = [
        "trainer.tracker_kwargs.wandb.api_key=of-an-option",
        "ray_init.env={MY_SECRET: in-a-mapping}",
        "data.train_files=s3://me:of-a-url@host/x",
        "actor_rollout_ref.model.path=hf_abcdefghijklmnopqrstuvwxyz",
    ]
    tree = {"ray_init": {"env": {"HF_TOKEN": "of-a-tree"}}, "data": {"files": ["s3://me:of-a-url@host/x"]}}
    context, folder = run
    with pytest.raises(ValueError), context(words=words, config=tree):
        print("using from-the-environment, password=printed-one")
        raise ValueError("401 for sk-abcdefghijklmnopqrstuvwx")
    secrets = ["from-the-env", "of-an-option", "in-a-map", "of-a-url", "hf_abc", "of-a-tree", "printed-one", "sk-abc"]
    for path in folder.iterdir():
        text = path.read_text()
        assert not [secret for secret in secrets if secret in text], path
    assert "${API_KEY:?" in (folder / "command.sh").read_text()


def test_words_that_only_look_like_secrets_stay():
    names = [
        "ppo_max_token_len_per_gpu",
        "model.tokenizer",
        "data.prompt_key",
        "pad_token",
        "token2text",
        "reward_fn_key",
    ]
    assert not [name for name in names if is_secret(name)]
    tree = {"tokenizer": "gpt2", "pad_token": "</s>", "n": [1, None, True], "token2text": True}
    assert mask(tree) == tree
    assert mask({"path": Path("a"), "seen": {1: (2.5,)}}) == {"path": "a", "seen": {1: [2.5]}}
    assert run_record.mask_text("max_tokens=4096 token: Berlin step:3 - a/b:0.12345") == (
        "max_tokens=4096 token: Berlin step:3 - a/b:0.12345"
    )


def test_the_log_has_plain_lines_where_the_terminal_has_a_bar(run, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    context, folder = run
    with context():
        with Progress(2) as progress:
            progress.update(1, {"critic/score/mean": 0.5})
            progress.say("said above")
            print("printed above")
        print("after the bar")
    log = (folder / "run.log").read_text().splitlines()[1:]
    assert [line for line in log if line.startswith("step")] == ["step 1/2  reward 0.500  eta 0 s"]
    assert {"said above", "printed above", "after the bar"} <= set(log) and "━" not in "".join(log)
    assert all(text in screen.getvalue() for text in ("━", "said above", "printed above", "after the bar"))


def test_a_folder_that_cannot_be_written_costs_the_record_and_not_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with recorded(tmp_path / "file" / "run", WORDS, {}, str) as record:
        assert record is None
    assert "no record of this run is kept" in capsys.readouterr().err

"""Secrets given as options stay where they were given: no file, log or tracker of a run has them."""

import os
import subprocess
import sys
from types import SimpleNamespace

from verl.checkpoint.run_state import save_options
from verl.config.describe import CONFIG_FILE
from verl.telemetry import trackers
from verl.telemetry.progress import stop_notice
from verl.telemetry.run_record import recorded

KEY = "0123456789abcdef0123456789abcdef"  # looks like nothing special
WORDS = ["trainer.device=cpu", f"+ray_init.env.WANDB_API_KEY={KEY}", f"trainer.tracker_kwargs.wandb.api_key={KEY}"]
TREE = {
    "ray_init": {"env": {"WANDB_API_KEY": KEY}},
    "trainer": {"tracker_kwargs": {"wandb": {"api_key": KEY}}, "n": 1, "lr": 0.5, "x": None},
}


def test_the_command_to_go_on_takes_secrets_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert KEY not in stop_notice(7, 40, tmp_path / "run/global_step_6", WORDS)
    assert KEY not in stop_notice(7, 40, tmp_path / "cannot be written/global_step_6", WORDS)
    script = tmp_path / "run" / "resume.sh"
    assert KEY not in script.read_text()
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stub.chmod(0o755)
    script.write_text(script.read_text().replace(sys.executable, str(stub)))
    env = {name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "API_KEY")}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
    assert done.returncode and "WANDB_API_KEY: its value was not kept" in done.stderr
    env |= {"WANDB_API_KEY": KEY, "API_KEY": KEY}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[2:5] == WORDS


def test_options_saved_with_a_checkpoint_and_sent_to_a_tracker_have_no_secrets(tmp_path, monkeypatch):
    sent = {}
    wandb = SimpleNamespace(init=lambda **options: sent.update(options) or SimpleNamespace())
    monkeypatch.setattr(trackers, "import_for", lambda *names: wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers.WandbBackend("p", "e", TREE)
    assert KEY not in str(sent) and sent["config"]["trainer"]["n"] == 1 and sent["config"]["trainer"]["lr"] == 0.5
    save_options(tmp_path, TREE)
    text = (tmp_path / CONFIG_FILE).read_text()
    assert KEY not in text and '"lr": 0.5' in text and '"x": null' in text


def test_a_secret_option_that_is_printed_later_is_masked_in_the_log(tmp_path):
    with recorded(tmp_path / "run", WORDS, TREE, str):
        print(f"401: the key {KEY} is not known")
    for file in (tmp_path / "run").iterdir():
        assert KEY not in file.read_text(), file.name

"""The command line of main_ppo: flags, exit codes, and what an error costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl.config.command_line import quoted
from verl.config.load import run_from_command_line

from .helpers import RUNNABLE

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path):
    """Words that name files and a model folder that exist."""
    (tmp_path / "x.parquet").write_bytes(b"")
    return [f"data.{split}_files={tmp_path}/x.parquet" for split in ("train", "val")] + [
        f"actor_rollout_ref.model.path={tmp_path}",
        f"critic.model.path={tmp_path}",
    ]


def _exit(*words):
    with pytest.raises(SystemExit) as error:
        run_from_command_line(lambda config: config, list(words))
    return error.value.code


def test_the_function_gets_the_typed_tree_and_its_result_comes_back(files):
    seed = run_from_command_line(lambda config: config.trainer.seed, [*RUNNABLE, *files, "trainer.seed=5"])
    assert seed == 5


def test_problems_go_to_stderr_with_exit_code_two(capsys):
    assert _exit("trainer.sav_freq=3") == 2
    assert "error: trainer.sav_freq is not an option; did you mean 'trainer.save_freq'?" in capsys.readouterr().err


def test_missing_files_are_refused_before_anything_runs(capsys, files):
    words = ["data.val_files=/no/such.parquet", "custom_reward_function.path=nope.py"]
    words += ["algorithm.adv_estimator=my/nope.py:f", "actor_rollout_ref.actor.policy_loss.loss_mode=~/nope.py:f"]
    assert _exit(*RUNNABLE, *files, *words) == 2
    text = capsys.readouterr().err
    assert "data.val_files=/no/such.parquet does not exist" in text
    assert "custom_reward_function.path=nope.py does not exist" in text
    assert "algorithm.adv_estimator=my/nope.py:f does not exist: no my/nope.py in " in text
    assert "policy_loss.loss_mode=~/nope.py:f does not exist" in text


def test_unwritable_folders_are_refused_before_anything_runs(capsys, files, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    (tmp_path / "file").touch()
    words = [f"trainer.default_local_dir={tmp_path}/run/a", f"trainer.rollout_data_dir={tmp_path}/file/samples"]
    assert _exit(*RUNNABLE, *files, *words) == 2
    text = capsys.readouterr().err
    assert f"trainer.default_local_dir={tmp_path}/run/a cannot be written: no permission in {tmp_path}" in text
    assert f"trainer.rollout_data_dir={tmp_path}/file/samples cannot be a folder: {tmp_path}/file is a file" in text


def test_notices_go_to_stderr(capsys, files):
    words = ["trainer.device=cpu", "actor_rollout_ref.actor.strategy=fsdp"]
    run_from_command_line(lambda config: None, [*RUNNABLE, *files, *words])
    assert "note: actor_rollout_ref.actor.strategy=fsdp is FSDP2" in capsys.readouterr().err


def test_an_exception_of_the_function_is_not_swallowed(files):
    with pytest.raises(ZeroDivisionError):
        run_from_command_line(lambda config: 1 / 0, [*RUNNABLE, *files])


@pytest.mark.parametrize("flags", [["--config-path={}", "--config-name=mine"], ["-cp", "{}", "-cn", "mine.yaml"],
                                   ["--config-dir", "{}", "--config-name", "mine"]])  # fmt: skip
def test_flags_name_a_yaml_of_the_user(tmp_path, files, flags):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {seed: 77}\n")
    words = [flag.format(tmp_path) for flag in flags]
    assert run_from_command_line(lambda config: config.trainer.seed, [*words, *RUNNABLE, *files]) == 77


def test_help_says_usage_and_where_the_tree_is(capsys):
    run_from_command_line(lambda config: pytest.fail("ran"), ["--help"])
    text = capsys.readouterr().out
    assert "usage: python -m" in text and "verl config" in text


def test_help_explains_an_option(capsys):
    run_from_command_line(lambda config: pytest.fail("ran"), ["--help", "actor_rollout_ref.actor.clip_ratio_c"])
    assert "Dual-clip" in capsys.readouterr().out
    assert _exit("--help", "trainer.sede") == 2


def test_cfg_job_prints_the_composed_tree(capsys):
    run_from_command_line(lambda config: pytest.fail("ran"), ["--cfg", "job", "trainer.project_name=p"])
    text = capsys.readouterr().out
    assert "default_local_dir: checkpoints/${trainer.project_name}/${trainer.experiment_name}" in text
    run_from_command_line(
        lambda config: pytest.fail("ran"), ["--cfg=job", "--resolve", "--package=trainer", "trainer.project_name=p"]
    )
    assert "default_local_dir: checkpoints/p/gsm8k" in capsys.readouterr().out


def test_check_shows_the_batch_arithmetic(capsys, files):
    run_from_command_line(lambda config: pytest.fail("ran"), ["--check", *RUNNABLE, *files])
    assert "one training step: 8 prompts" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--multirun", "-m", "--cfgg", "--config-name"])
def test_a_flag_that_does_not_exist_is_refused(flag, capsys):
    assert _exit(flag) == 2
    assert flag in capsys.readouterr().err


def test_hydra_keys_pass(files):
    run_from_command_line(
        lambda config: None, [*RUNNABLE, *files, "hydra.run.dir=/tmp/x", "hydra/job_logging=disabled"]
    )


@pytest.mark.parametrize(
    ("words", "code", "heavy"),
    [
        (["--help"], 0, {"hydra", "omegaconf", "torch", "ray", "transformers"}),
        (["+trainer.sav_freq=3"], 2, {"hydra", "omegaconf", "torch", "ray", "transformers"}),
        (["--check"], 2, {"torch", "ray", "transformers"}),
    ],
)
def test_what_is_wrong_is_said_before_anything_heavy_is_imported(words, code, heavy):
    command = [sys.executable, "-X", "importtime", "-m", "verl.trainer.main_ppo", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == code and "verl.config.command_line" in imported, done.stderr[-2000:]
    assert not imported & heavy


@pytest.mark.parametrize(
    "text", ["", "a b", "it's", r"C:\new", "end\\", r"a\'b", r"\\'", "[1,2]", "null", "~/data", "x=1,y={2}"]
)
def test_a_quoted_text_is_read_as_it_was(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"key={quoted(text)}").value() == text

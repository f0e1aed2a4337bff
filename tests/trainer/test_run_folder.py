"""The folder of a run, and the commands that start it again, from real runs."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.support.runs import main_ppo, make_task, overrides, run_job
from tests.support.tiny_models import make_tiny_model
from verl.config.base import ConfigError
from verl.config.command_line import parse
from verl.config.load import load
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.run_log import RunLog
from verl.trainer.run_folder import gpu_options, recorded_run


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def config_of(words):
    flags, rest = parse(words)
    loaded = load(rest, **{name: value for name, value in flags.items() if name.startswith("config_")})
    assert not loaded.problems
    return loaded.config.to_dict()


def differences(one, other, prefix=""):
    """Dotted keys whose values differ."""
    found = set()
    for name in one:
        if isinstance(one[name], dict) and isinstance(other[name], dict):
            found |= differences(one[name], other[name], f"{prefix}{name}.")
        elif one[name] != other[name]:
            found.add(f"{prefix}{name}")
    return found


def settings(tmp_path, **more):
    return {
        "trainer__default_local_dir": tmp_path / "run",
        "trainer__rollout_data_dir": tmp_path / "run" / "samples",
        "trainer__total_training_steps": 1,
        "trainer__save_freq": 1,
        **more,
    }


def test_the_same_on_a_gpu_is_the_same_run_from_python_too(task, tmp_path, capsys):
    config = load(overrides(task, **settings(tmp_path))).config
    run_ppo(config)
    text = capsys.readouterr().out
    command = text.split("The same on a GPU")[1].split("\n", 1)[1].replace("\\\n", " ")
    words = shlex.split(command)
    assert words[1:3] == ["-m", "verl.trainer.main_ppo"]
    again = config_of(words[3:])
    moved = {"trainer.device", "trainer.default_local_dir", "trainer.rollout_data_dir"}
    assert differences(config.to_dict(), again) == moved | {"actor_rollout_ref.actor.use_remove_padding"}
    assert again["trainer"]["device"] == "cuda"
    assert again["trainer"]["rollout_data_dir"] == f"{tmp_path}/run-gpu/samples"
    log = (tmp_path / "run" / "run.log").read_text()
    assert "step:1 - critic/score/mean" in log and "The same on a GPU" in log
    assert (tmp_path / "run" / "samples" / "1.jsonl").exists()


def test_the_options_for_a_gpu_leave_the_rest_of_a_command_line_as_it_is(task, tmp_path):
    tensorboard = {"trainer__tracker_kwargs__tensorboard__log_dir": tmp_path / "run" / "tb"}
    words = overrides(task, **settings(tmp_path, trainer__logger="[file,tensorboard]", **tensorboard))
    before, after = config_of(words), config_of([*words, *gpu_options(load(words).config)])
    changed = {"trainer.device", "trainer.default_local_dir", "trainer.rollout_data_dir"}
    changed |= {"trainer.tracker_kwargs.tensorboard.log_dir", "actor_rollout_ref.actor.use_remove_padding"}
    assert differences(before, after) == changed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"actor_rollout_ref__model__use_remove_padding": True},
        {"actor_rollout_ref__model__use_prefix_sharing": False},
        {
            "actor_rollout_ref__rollout__n": 1,
            "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2,
            "algorithm__adv_estimator": "reinforce_plus_plus",
        },
    ],
    ids=["default", "packed", "padded", "nothing to share"],
)
def test_rows_that_a_cpu_packs_by_default_are_packed_on_a_gpu(options, task):
    words = gpu_options(load(overrides(task, **options)).config)
    assert ("actor_rollout_ref.actor.use_remove_padding=true" in words) == (options == {})


def test_rows_of_a_family_that_a_cpu_leaves_padded_stay_so(task, tmp_path):
    make_tiny_model(tmp_path, "gemma2")
    words = gpu_options(load(overrides(task, actor_rollout_ref__model__path=tmp_path)).config)
    assert not [word for word in words if "use_remove_padding" in word]


OF_OTHERS = {"pandas", "datasets", "sklearn", "ray", "peft", "deepspeed", "wandb", "tensorboard", "aiohttp", "vllm"}
"""Packages that a run on one process with the console as logger must not wait for."""


def test_a_run_that_dies_in_its_first_seconds_leaves_its_folder(task, tmp_path):
    (tmp_path / "falls_over.py").write_text(  # known once imported, which is after the checks and the trainer's modules
        f"import sys\nprint('loaded', sorted({OF_OTHERS} & set(sys.modules)))\n"
        "raise OSError('the licence server is away')\n"
    )
    words = overrides(task, **settings(tmp_path, actor_rollout_ref__model__external_lib="falls_over"))
    done = main_ppo(words, PYTHONPATH=os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    assert done.returncode == 1 and "loaded []" in done.stdout
    folder = tmp_path / "run"
    log = (folder / "run.log").read_text()
    shown = [line for line in done.stderr.splitlines() if line.startswith(("verl ", "warning: ", "OSError: "))]
    assert len(shown) > 1 and all(line in log for line in shown) and "OSError: the licence server is away" in log
    assert "falls_over" in (folder / "command.sh").read_text() and (folder / "config.yaml").exists()
    assert json.loads((folder / "environment.json").read_text())["packages"]["torch"]


def test_a_configuration_that_was_recorded_is_the_run_again(task, tmp_path):
    words = overrides(task, **settings(tmp_path), trainer__show_samples=1)
    run_job(words)
    again = config_of(["--config-path", str(tmp_path / "run"), "--config-name", "config"])
    assert again == config_of(words)
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("samples of step 1, by score") == 1 and "   response  " in log


def test_a_trainer_that_a_script_drives_has_the_record_while_it_trains(task, tmp_path, capsys):
    before = sys.stdout
    for folder in ("left open", "run"):  # the first one's script died, and its process goes on
        config = load(overrides(task, trainer__logger="[console]", trainer__default_local_dir=tmp_path / folder)).config
        log = RunLog(config, tokenizer=None)
        log.open(3)
        log.log(1, {"critic/score/mean": 0.5})
        print("in", folder)
    log.close()
    assert sys.stdout is before
    for folder in ("left open", "run"):
        text = (tmp_path / folder / "run.log").read_text()
        assert text.count("step:1 - critic/score/mean:0.5\n") == 1 and text.endswith(f"in {folder}\n")
        assert (tmp_path / folder / "config.yaml").exists() and (tmp_path / folder / "environment.json").exists()


def test_the_first_word_comes_before_hydra_and_torch():
    """In seconds it depends on the machine's load: what is imported before it is what counts."""
    program = (
        "import sys\nimport verl.telemetry.run_record as record\n"
        "def stop(line):\n    print(line)\n"
        "    print(sorted({'torch', 'hydra', 'transformers', 'ray'} & set(sys.modules)))\n"
        "    raise SystemExit\n"
        "record.say_early = stop\nfrom verl.trainer.main_ppo import main\nmain(['trainer.device=cpu'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    lines = done.stdout.splitlines()
    assert re.match(r"verl [\d.]+: reading the configuration", lines[0]) and lines[1] == "[]", done.stderr


def test_a_folder_belongs_to_one_run_and_names_it(task, tmp_path):
    config = load(overrides(task, **settings(tmp_path))).config
    ready, is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        with recorded_run(config, None), recorded_run(config, None):
            os.write(is_ready, b"1")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        with pytest.raises(ConfigError, match=f"belongs to a run that has not ended: process {child} on .*pytest"):
            with recorded_run(config, None):
                pass
        # one that only validates writes no checkpoint
        with recorded_run(config.with_values({"trainer.val_only": True}), None):
            pass
    finally:
        os.kill(child, signal.SIGKILL)  # freed by the system with its process
        os.waitpid(child, 0)
    for _ in range(2):
        with recorded_run(config, None):
            pass


def test_a_folder_that_cannot_be_written_is_known_before_anything_starts(task, tmp_path):
    (tmp_path / "run").symlink_to("/proc/nowhere")
    with pytest.raises(ConfigError, match=r"trainer.default_local_dir=.*/run cannot be written \(.*save_freq=1 saves"):
        with recorded_run(load(overrides(task, **settings(tmp_path))).config, None):
            pass

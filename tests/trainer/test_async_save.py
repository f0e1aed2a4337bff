"""Runs with checkpoint.async_save: the same checkpoints, named complete only when they are."""

import pytest

from tests.config.helpers import typed
from tests.support.runs import make_task, overrides, run_job
from tests.trainer.test_resume import assert_same_checkpoint
from verl.checkpoint import checkpoint_manager
from verl.config.base import ConfigError
from verl.single_controller.errors import WorkerError
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback

RUN = {
    "algorithm__adv_estimator": "gae",
    "critic__ppo_micro_batch_size_per_gpu": 8,
    "critic__strategy": "local",
    "trainer__total_training_steps": 3,
    "trainer__save_freq": 1,
    "trainer__max_actor_ckpt_to_keep": 2,
}
BOTH = {f"{role}__checkpoint__async_save": True for role in ("actor_rollout_ref__actor", "critic")}


def run(tmp_path, name, **settings):
    task = make_task(tmp_path / "task", rows=12)
    return run_job(overrides(task, **{**RUN, "trainer__default_local_dir": str(tmp_path / name), **settings}))


def tracker(folder):
    path = folder / "latest_checkpointed_iteration.txt"
    return path.read_text() if path.exists() else None


CALLBACK = """
from pathlib import Path

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class Register(CheckpointCallback):
    def on_save(self, trainer, global_step, checkpoint_dir, async_save=False, **kwargs):
        folder = Path(checkpoint_dir)
        complete = (folder.parent / "latest_checkpointed_iteration.txt").read_text()
        with open(folder.parent / "registered", "a") as file:
            print(global_step, folder.name, complete, async_save, (folder / "actor").is_dir(), file=file)
        if global_step == self.config.trainer.get("seed") - 39:
            raise OSError("the store is closed")
"""


def test_the_checkpoints_are_those_of_a_run_that_waits_and_a_callback_gets_them_complete(tmp_path):
    (tmp_path / "register.py").write_text(CALLBACK)
    run(tmp_path, "waits")
    callback = {"trainer__checkpoint_callback_class": f"{tmp_path}/register.py:Register"}
    trainer = run(tmp_path, "goes_on", **BOTH, **callback)
    registered = (tmp_path / "goes_on" / "registered").read_text().splitlines()
    assert registered == [f"{step} global_step_{step} {step} False True" for step in (1, 2, 3)]
    assert tracker(tmp_path / "goes_on") == "3" and trainer.last_checkpoint.name == "global_step_3"
    for step in (2, 3):
        assert_same_checkpoint(tmp_path / "waits" / f"global_step_{step}", tmp_path / "goes_on" / f"global_step_{step}")
    assert not (tmp_path / "goes_on" / "global_step_1" / "actor").exists()


def test_a_save_that_fails_behind_training_stops_the_run_and_is_not_named(tmp_path, monkeypatch):
    write, named = checkpoint_manager.write_file, []

    def full(content, path):
        if "global_step_2/critic" in str(path):
            named.append(tracker(tmp_path / "goes_on"))
            raise OSError(28, f"{path} needs more than there is")
        return write(content, path)

    monkeypatch.setattr(checkpoint_manager, "write_file", full)
    with pytest.raises(WorkerError, match="global_step_2/critic.partial/.* needs more than there is"):
        run(tmp_path, "goes_on", **BOTH)
    assert named == ["1"] and tracker(tmp_path / "goes_on") == "1"


def test_a_callback_that_fails_ends_the_run_and_one_that_is_none_does_not_start_it(tmp_path, monkeypatch):
    (tmp_path / "register.py").write_text(CALLBACK)
    name = f"{tmp_path}/register.py:Register"
    with pytest.raises(OSError, match="the store is closed"):
        run(tmp_path, "failing", trainer__checkpoint_callback_class=name, trainer__seed=40)
    assert tracker(tmp_path / "failing") == "1"
    for name, words in {
        "no.such.Class": "cannot be loaded: No module named 'no'",
        f"{tmp_path}/register.py:Registr": "Did you mean",
        "pathlib.Path": "is no class with a method on_save",
    }.items():
        with pytest.raises(ConfigError, match=f"trainer.checkpoint_callback_class={name} .*{words}"):
            build_checkpoint_callback(typed().with_values({"trainer.checkpoint_callback_class": name}))

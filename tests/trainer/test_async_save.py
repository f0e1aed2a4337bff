"""Runs with checkpoint.async_save: the same checkpoints, named complete only when they are."""

import pytest

from tests.support.runs import make_task, overrides, run_job
from tests.trainer.test_resume import assert_same_checkpoint
from verl.checkpoint import checkpoint_manager
from verl.single_controller.errors import WorkerError

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


def test_the_checkpoints_are_those_of_a_run_that_waits(tmp_path):
    run(tmp_path, "waits")
    trainer = run(tmp_path, "goes_on", **BOTH)
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

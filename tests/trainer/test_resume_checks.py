"""A run that goes on looks at what it goes on from, and says what it found."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.runs import make_task, overrides, run_job, write_prompts
from tests.trainer.test_resume import assert_same_checkpoint
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.checkpoint.manifest import read_manifest
from verl.checkpoint.resume_changes import model_identity
from verl.config.base import ConfigError
from verl.single_controller.errors import WorkerError
from verl.utils.exit_codes import ExitCode, exit_code

RUN = {"trainer__total_training_steps": 3, "trainer__save_freq": 1, "data__train_batch_size": 4}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), rows=12)


@pytest.fixture(scope="module")
def done(task, tmp_path_factory):
    """The folder of a run of three steps, each of them saved."""
    folder = tmp_path_factory.mktemp("done") / "run"
    run_job(overrides(task, **RUN, trainer__default_local_dir=folder))
    return folder


@pytest.fixture
def again(task, done, tmp_path):
    """A copy of that folder, and a function that runs in it."""
    folder = tmp_path / "run"
    shutil.copytree(done, folder)

    def run(**settings):
        return run_job(overrides(task, **RUN | {"trainer__default_local_dir": folder} | settings))

    return folder, run


def test_a_damaged_step_is_passed_over_and_made_again(again, done, capsys):
    folder, run = again
    for step, name in ((3, "actor/optim_world_size_1_rank_0.pt"), (2, "data.pt")):
        path = folder / f"global_step_{step}" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    run()
    text = capsys.readouterr().out
    assert "optim_world_size_1_rank_0.pt does not hold what was written" in text and "data.pt does not hold" in text
    assert f"resumed from {folder}/global_step_1: 1 of 3 steps are done" in text
    assert_same_checkpoint(done / "global_step_3", folder / "global_step_3")
    assert set(read_manifest(folder / "global_step_3").files) >= {"data.pt", "trainer.json", "actor/manifest.json"}


def test_what_differs_is_listed_and_what_changes_learning_is_refused(again, task, tmp_path, capsys):
    folder, run = again
    more = {"trainer__total_training_steps": 4, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4}
    with pytest.raises(ConfigError) as refused:
        run(**more, actor_rollout_ref__actor__optim__lr=0.033, data__train_batch_size=8)
    text = str(refused.value)
    assert "actor_rollout_ref.actor.optim.lr: 0.001 -> 0.033; data.train_batch_size: 4 -> 8. The run would" in text
    assert "trainer.resume_allow_changes=true" in text and "micro_batch" not in text
    # as many rows with other content, below the same name
    rows, other = Path(task["data.train_files"]), write_prompts(tmp_path / "other.parquet", rows=12, first=100)
    before = rows.read_bytes()
    try:
        rows.write_bytes(other.read_bytes())
        with pytest.raises(ConfigError, match="data.train_files: content of 0 train.parquet -> another. The run"):
            run(**more)
        capsys.readouterr()
        run(**more, trainer__resume_allow_changes=True)
    finally:
        rows.write_bytes(before)
    text = capsys.readouterr().out
    assert f"{folder}/global_step_3: what differs from the run that saved it: " in text
    assert "ppo_micro_batch_size_per_gpu: 8 -> 4" in text and "trainer.total_training_steps: 3 -> 4" in text
    assert "data.train_files: content of 0 train.parquet -> another" in text and "3 of 4 steps are done" in text


def test_a_reward_function_that_was_changed_is_refused_unless_that_is_meant(again, task):
    folder, run = again
    reward, more = Path(task["custom_reward_function.path"]), {"trainer__total_training_steps": 4}
    before = reward.read_text()
    try:
        reward.write_text(before.replace("/ 8", "/ 4"))
        words = "custom_reward_function.path: content of reward.py -> another. The run would.*resume_allow_changes=true"
        with pytest.raises(ConfigError, match=words):
            run(**more)
    finally:
        reward.write_text(before)


def test_another_model_of_one_shape_is_noticed(task, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(task["actor_rollout_ref.model.path"], model)
    before = model_identity(str(model))
    assert before == model_identity(task["actor_rollout_ref.model.path"]) and "model.safetensors" in before
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    after = model_identity(str(model))
    assert [name for name in before if before[name] != after[name]] == ["model.safetensors"]


def test_weights_that_are_not_finite_end_the_run_and_the_last_good_step_stays(again, monkeypatch, capsys):
    folder, run = again
    save = CheckpointManager.save

    def poisoned(self, path, step=0, *options):
        if step == 4:
            with torch.no_grad():
                next(self.engine.module.parameters()).fill_(float("nan"))
        save(self, path, step, *options)

    monkeypatch.setattr(CheckpointManager, "save", poisoned)
    with pytest.raises(WorkerError, match="embed_tokens.weight has [0-9,]+ NaN and 0 infinite") as raised:
        run(trainer__total_training_steps=5, trainer__max_actor_ckpt_to_keep=1)
    assert exit_code(raised.value) is ExitCode.UNHEALTHY
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (folder / "global_step_3" / "actor").exists() and not (folder / "global_step_4" / "actor").exists()
    out = capsys.readouterr().out
    assert "Stopped in step 4 of 5. " in out and f"{folder}/global_step_3" in out.split("Stopped in step")[1]

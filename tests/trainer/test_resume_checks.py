"""A run that goes on looks at what it goes on from, and says what it found."""

import shutil

import pytest

from tests.support.runs import make_task, overrides, run_job
from tests.trainer.test_resume import assert_same_checkpoint
from verl.checkpoint.manifest import read_manifest

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

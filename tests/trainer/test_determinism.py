"""Two runs with fsdp_config.full_determinism are equal bit for bit."""

import pytest
import torch

from tests.support.runs import make_task, overrides, run_job
from tests.trainer.test_resume import assert_same_checkpoint


@pytest.fixture
def restored():
    """Leaves torch as other tests expect it."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_two_runs_are_equal_and_use_algorithms_that_repeat(tmp_path, monkeypatch, restored):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    task = make_task(tmp_path / "task")
    for name in ("one", "other"):
        settings = {
            "actor_rollout_ref__actor__fsdp_config__full_determinism": True,
            "trainer__total_training_steps": 1,
            "trainer__save_freq": 1,
            "trainer__default_local_dir": tmp_path / name,
        }
        assert torch.are_deterministic_algorithms_enabled() is (name == "other")
        run_job(overrides(task, **settings))
    assert_same_checkpoint(tmp_path / "one" / "global_step_1", tmp_path / "other" / "global_step_1")

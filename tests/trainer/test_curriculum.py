"""A curriculum sampler hears of every batch, and a checkpoint holds what it made of it."""

import torch

from tests.support.runs import make_task, overrides, run_job

SAMPLER = """
from verl.experimental.dataset.sampler import AbstractCurriculumSampler


class Hearing(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.rows, self.at, self.heard = len(data_source), 0, 0

    def __len__(self):
        return self.rows

    def __iter__(self):
        while self.at < self.rows:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def update(self, batch):
        assert batch.batch["advantages"].shape[0] > 0
        self.heard += 1

    def state_dict(self):
        return {"at": self.at, "heard": self.heard}

    def load_state_dict(self, state):
        self.at, self.heard = state["at"], state["heard"]
"""


def test_the_checkpoint_of_a_step_knows_what_the_sampler_learned_of_it(tmp_path):
    (tmp_path / "hearing.py").write_text(SAMPLER)
    settings = {
        "data__sampler__class_path": str(tmp_path / "hearing.py"),
        "data__sampler__class_name": "Hearing",
        "trainer__save_freq": 1,
        "trainer__default_local_dir": str(tmp_path / "run"),
    }
    task = make_task(tmp_path / "task", rows=12)
    run_job(overrides(task, **settings, trainer__total_training_steps=1))
    run_job(overrides(task, **settings, trainer__total_training_steps=2))  # resumes
    for step in (1, 2):
        state = torch.load(tmp_path / "run" / f"global_step_{step}" / "data.pt", weights_only=True)
        assert state["sampler"] == {"at": 4 * step, "heard": step}

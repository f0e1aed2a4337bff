"""Runs of the main job with rollout.mode=async."""

import json

import pytest

from tests.support.runs import make_task, overrides, run_job

ROLLOUT, ACTOR = "actor_rollout_ref__rollout", "actor_rollout_ref__actor"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the job in this process; returns the trainer and the rows it dumped, by step."""
    monkeypatch.chdir(tmp_path)
    task = make_task(tmp_path / "task")

    def start(mode="async", **settings):
        folder = tmp_path / f"samples_{mode}_{len(list(tmp_path.iterdir()))}"
        merged = {
            f"{ROLLOUT}__mode": mode,
            "trainer__total_training_steps": 2,
            "trainer__save_freq": -1,
            "trainer__rollout_data_dir": str(folder),
            "trainer__default_local_dir": str(tmp_path / "run"),
            **settings,
        }
        trainer = run_job(overrides(task, **merged))
        files = sorted(folder.iterdir(), key=lambda path: int(path.stem))
        return trainer, [[json.loads(line) for line in path.read_text().splitlines()] for path in files]

    return start


def outputs(steps):
    return [[row["output"] for row in rows] for rows in steps]

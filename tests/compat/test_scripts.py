"""Entry points: verl's with a YAML of the user's, and one the user wrote."""

import os
import subprocess
import sys

import pytest

from tests.compat.support import FILES
from tests.support.runs import main_ppo
from verl.config.compose import CONFIG_DIR

REPOSITORY = CONFIG_DIR.parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(FILES)])}


def words(task: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in task.items() if not key.startswith("critic")]


def test_a_users_yaml_with_old_names_and_plus_signs_trains(task, tmp_path):
    text = (FILES / "config" / "my_trainer.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.partition("my_project:")[0])
    result = main_ppo(
        [
            f"--config-path={tmp_path}",
            "--config-name=mine",
            *words(task),
            "+actor_rollout_ref.rollout.n=4",
            "++trainer.n_gpus_per_node=1",
            "+trainer.controller=local",
            "actor_rollout_ref.actor.ppo_micro_batch_size=8",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
        ],
        PYTHONPATH=ENV["PYTHONPATH"],
    )
    assert result.returncode == 0, result.stderr
    assert "actor/my_ratio:1.0" in result.stdout and "ppo_micro_batch_size=8" in result.stderr


@pytest.mark.ray
def test_an_entry_point_like_verls_own_runs_on_ray(task, tmp_path):
    done = subprocess.run(
        [sys.executable, str(FILES / "my_main.py"), *words(task), "++ray_init.num_cpus=5", "hydra.run.dir=."],
        cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TRAINED 1 1.0 1.0" in done.stdout and "NOTE read by our own code" in done.stdout
    assert "SCORED ([0.5, 1.5, 2.5], [0.5, 1.5, 2.5], [(0, ('x',))])" in done.stdout

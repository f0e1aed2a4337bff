"""Runs of the main job with strategy=megatron on two gloo ranks, as a user starts them."""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

from tests.support.learning import check_learned
from tests.support.runs import main_ppo, make_task, overrides, read_metrics
from tests.trainer.test_learning import ACTOR, LEARNING, TINY
from verl.utils.exit_codes import ExitCode

pytestmark = pytest.mark.skipif(find_spec("mbridge") is None, reason="needs megatron-core and mbridge")

SETTINGS = {
    **{key: value for key, value in {**LEARNING, **TINY}.items() if key != "size" and "fsdp_config" not in key},
    "trainer__n_gpus_per_node": 2,
    f"{ACTOR}__strategy": "megatron",
    f"{ACTOR}__megatron__dtype": "float32",
    "trainer__total_training_steps": 12,
}
CPU = {
    "VERL_USE_EXTERNAL_MODULES": "tests.support.with_cuda_shim",
    "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
}
"""What makes megatron-core run in the workers of a machine without a GPU."""


def words_of(folder, **settings):
    words = overrides(make_task(folder / "task", size="tiny"), **{**SETTINGS, **settings})
    return [word for word in words if "fsdp_config" not in word]


@pytest.mark.learning
def test_ppo_on_two_pipeline_stages_learns_on_ray_and_saves(tmp_path):
    ppo = {
        "algorithm__adv_estimator": "gae",
        "critic__strategy": "megatron",
        "critic__optim__lr": "1e-3",
        "critic__megatron__dtype": "float32",
        "critic__ppo_micro_batch_size_per_gpu": 16,
        "critic__model__use_remove_padding": True,
        f"{ACTOR}__use_kl_loss": True,
        "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref__model__use_remove_padding": True,
        f"{ACTOR}__megatron__pipeline_model_parallel_size": 2,
        "trainer__save_freq": 12,
        "trainer__controller": "ray",
    }
    env = {**CPU, "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl")}
    done = main_ppo(words_of(tmp_path, **ppo), **env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_learned("megatron", [row["data"]["critic/score/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")])
    for role in ("actor", "critic"):
        assert (tmp_path / "task/run/global_step_12" / role / "dist_ckpt" / "metadata.json").exists()


@pytest.mark.ranks
def test_a_killed_rank_of_two_tensor_parallel_ones_ends_the_run_by_name(tmp_path):
    shared = {f"{ACTOR}__megatron__tensor_model_parallel_size": 2, "trainer__controller": "local"}
    words = words_of(tmp_path, **shared, trainer__total_training_steps=500, trainer__logger="[console]")
    command = [sys.executable, "-u", "-m", "verl.trainer.main_ppo", *words, "trainer.save_freq=1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **CPU}
    ) as run:
        lines = []
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step:2 "):
                ranks = psutil.Process(run.pid).children()
                os.kill(max(rank.pid for rank in ranks), signal.SIGKILL)
    text = "".join(lines)
    assert run.returncode == ExitCode.WORKER, text[-3000:]
    assert re.search(r"died while running|was killed", text), text[-3000:]
    assert (tmp_path / "task/run/global_step_1/actor/manifest.json").exists()

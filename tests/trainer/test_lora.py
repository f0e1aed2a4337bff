"""Runs with LoRA as a user starts them: the reference costs no second model, checkpoints resume, the reward rises."""

import io
from contextlib import redirect_stdout

import pytest
import torch
from safetensors.torch import load_file

from tests.support.learning import check_learned
from tests.support.runs import main_ppo, make_task, overrides, read_metrics, run_job
from tests.trainer.test_learning import LEARNING, SHORT
from tests.trainer.test_resume import assert_same_checkpoint, numbers
from tests.workers.rollout.conftest import COMMON
from verl.config.base import ConfigError
from verl.single_controller.errors import WorkerError
from verl.trainer.ppo.placement import Role
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.base import RolloutEngine

MODEL, ROLLOUT = "actor_rollout_ref__model", "actor_rollout_ref__rollout"
LORA = {
    f"{MODEL}__lora_rank": 4,
    f"{MODEL}__lora_alpha": 8,
    "actor_rollout_ref__actor__use_kl_loss": True,
    "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    "trainer__total_training_steps": 3,
    "trainer__logger": "[file]",
}
CRITIC = {
    "algorithm__adv_estimator": "gae",
    "critic__model__lora_rank": 4,
    "critic__ppo_micro_batch_size_per_gpu": 8,
    "critic__strategy": "local",
}


def run(tmp_path, monkeypatch, name="run", task=None, **settings):
    """A run's trainer and its metrics by step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.jsonl"))
    monkeypatch.chdir(tmp_path)
    task = task or make_task(tmp_path / "task", rows=12)
    folder = {"trainer__default_local_dir": str(tmp_path / name)}
    trainer = run_job(overrides(task, **{**LORA, **folder, **settings}))
    return trainer, {row["step"]: row["data"] for row in read_metrics(tmp_path / f"{name}.jsonl")}


@pytest.fixture(scope="module")
def merged_run(tmp_path_factory):
    """A run in which all weights travel: its trainer, its metrics by step, and what it printed."""
    printed, folder = io.StringIO(), tmp_path_factory.mktemp("merged")
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(printed):
        return *run(folder, monkeypatch, **{f"{ROLLOUT}__calculate_log_probs": True}), printed.getvalue()


def test_whole_distributions_are_compared_with_the_actor_below_its_adapter(tmp_path, monkeypatch):
    trainer, metrics = run(tmp_path, monkeypatch, actor_rollout_ref__actor__kl_loss_type="full")
    assert Role.RefPolicy not in trainer.worker_groups and "timing_s/ref" not in metrics[1]
    assert metrics[1]["actor/kl_loss"] == 0 < metrics[2]["actor/kl_loss"] < metrics[3]["actor/kl_loss"]


def test_the_reference_is_the_actor_and_starts_where_it_starts(merged_run):
    trainer, metrics, printed = merged_run
    assert trainer.ref_in_actor and Role.RefPolicy not in trainer.worker_groups
    assert trainer.ref_wg is trainer.actor_wg
    assert metrics[1]["actor/kl_loss"] == 0 < metrics[2]["actor/kl_loss"] < metrics[3]["actor/kl_loss"]
    assert printed.count("actor: LoRA trains 8,192 of 88,896 parameters (9.22%)") == 1


WAYS = {
    "the adapter alone": {f"{ROLLOUT}__lora_sync": "adapter"},
    "to a server": {f"{ROLLOUT}__lora_sync": "adapter", f"{ROLLOUT}__mode": "async"},
    "to devices of its own": {"actor_rollout_ref__hybrid_engine": False, f"{ROLLOUT}__n_gpus_per_node": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_samples_do_not_depend_on_how_the_policy_reaches_the_engine(way, merged_run, tmp_path, monkeypatch):
    _, metrics = run(tmp_path, monkeypatch, **{f"{ROLLOUT}__calculate_log_probs": True}, **WAYS[way])
    for step, row in merged_run[1].items():
        assert max(row["training/rollout_probs_diff_max"], metrics[step]["training/rollout_probs_diff_max"]) < 1e-6
        for name in ("critic/score/mean", "response_length/mean", "actor/kl_loss", "actor/grad_norm"):
            assert metrics[step][name] == pytest.approx(row[name], rel=1e-4)


def test_a_reference_of_its_own_is_loaded_where_one_is_named(tmp_path, monkeypatch):
    task = make_task(tmp_path / "task", rows=12)
    other = {"actor_rollout_ref__ref__model__path": task["actor_rollout_ref.model.path"]}
    trainer, metrics = run(tmp_path, monkeypatch, task=task, **other, trainer__total_training_steps=2)
    assert not trainer.ref_in_actor and Role.RefPolicy in trainer.worker_groups
    assert metrics[1]["actor/kl_loss"] < 1e-5 < metrics[2]["actor/kl_loss"]  # it computes in bf16


def test_a_resumed_run_equals_the_one_that_never_stopped(tmp_path, monkeypatch):
    settings = {**CRITIC, "trainer__save_freq": 1}
    _, whole = run(tmp_path, monkeypatch, "whole", **settings)
    run(tmp_path, monkeypatch, "parts", **settings, trainer__total_training_steps=2)
    _, resumed = run(tmp_path, monkeypatch, "parts", **settings)
    assert numbers(resumed[3]) == numbers(whole[3])
    assert_same_checkpoint(tmp_path / "whole/global_step_3", tmp_path / "parts/global_step_3")
    folder = tmp_path / "whole/global_step_3"
    assert set(torch.load(folder / "actor/model_world_size_1_rank_0.pt")) == {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        for name in load_file(folder / "actor/lora_adapter/adapter_model.safetensors")
    }
    assert "base_model.model.score.weight" in load_file(folder / "critic/lora_adapter/adapter_model.safetensors")


def test_layers_that_do_not_exist_stop_the_run_with_the_names_there_are(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="names query, and .* has no such layer.* k_proj"):
        run(tmp_path, monkeypatch, **{f"{MODEL}__target_modules": "[query]"})


def test_an_adapter_is_not_sent_to_an_engine_that_takes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "verl.workers.rollout.hf.rollout.HFRollout.adapter_unsupported_reason", RolloutEngine.adapter_unsupported_reason
    )
    with pytest.raises(WorkerError, match="lora_sync=adapter: rollout.name=hf holds no adapter .*Use lora_sync=merge"):
        run(tmp_path, monkeypatch, **{f"{ROLLOUT}__lora_sync": "adapter"})


LEARNS = {
    **LEARNING,
    **SHORT,
    **{f"{MODEL}__lora_rank": 8, f"{MODEL}__lora_alpha": 16, "actor_rollout_ref__actor__optim__lr": "5e-3"},
    "trainer__total_training_steps": 24,
    "actor_rollout_ref__actor__use_kl_loss": False,
}


@pytest.mark.learning
@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_grpo_learns_with_an_adapter(name, tmp_path, monkeypatch):
    settings = {f"{ROLLOUT}__name": name, f"{ROLLOUT}__lora_sync": "merge" if name == "hf" else "adapter"}
    task = make_task(tmp_path / "task", size="2.5M")
    _, metrics = run(tmp_path, monkeypatch, task=task, **{**LEARNS, **settings})
    check_learned(f"adapter, {name}", [step["critic/score/mean"] for step in metrics.values()])


@pytest.mark.vllm
def test_two_ranks_share_one_engine_with_an_adapter(tmp_path):
    task = make_task(tmp_path / "task", rows=12)
    task["actor_rollout_ref.model.path"] = make_tiny_model(tmp_path / "heads_of_32", **COMMON["tied"])
    settings = {
        **LORA,
        f"{ROLLOUT}__name": "vllm",
        f"{ROLLOUT}__mode": "async",
        f"{ROLLOUT}__tensor_model_parallel_size": 2,
        f"{ROLLOUT}__lora_sync": "adapter",
        f"{ROLLOUT}__calculate_log_probs": True,
        "trainer__n_gpus_per_node": 2,
        "actor_rollout_ref__actor__strategy": "fsdp2",
        "trainer__save_freq": -1,
        "trainer__total_training_steps": 2,
    }
    path = tmp_path / "ranks.jsonl"
    done = main_ppo(overrides(task, **settings), VERL_FILE_LOGGER_PATH=str(path))
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [row["data"] for row in read_metrics(path)]
    assert len(steps) == 2 and steps[-1]["actor/kl_loss"] > 0
    assert all(step["training/rollout_probs_diff_max"] < 1e-6 for step in steps)

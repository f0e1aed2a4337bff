"""Every recipe trains a tiny model from its own module's configuration, and leaves the command that goes on with it."""

import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from recipe.prime.prime_algos import batch_norm, compute_prime_advantage
from tests.support.runs import make_task, overrides, read_metrics
from verl.trainer.main_ppo import main

ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = sum(c.isdigit() for c in solution_str) / 8
    return {"score": digits, "acc": digits}
"""
OF_RECIPE = {"actor_rollout_ref.rollout.n", "algorithm.adv_estimator"}
"""What the recipe says and not the test."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("task"), rows=16)
    Path(task["custom_reward_function.path"]).write_text(REWARD)
    return task


def trained(name, task, folder, monkeypatch, module=None, **settings):
    """The metrics of each step of ``python -m recipe.{name}.main_{name}``, or of another ``module``."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    settings = {f"{ACTOR}__ppo_mini_batch_size": 2, "trainer__total_training_steps": 1, "trainer__logger": "[file]",
                "trainer__default_local_dir": folder / "run", "data__train_batch_size": 4, **settings}  # fmt: skip
    words = [word for word in overrides(task, **settings) if word.partition("=")[0] not in OF_RECIPE]
    main(words, importlib.import_module(module or f"recipe.{name}.main_{name}").RECIPE)
    steps = [row["data"] for row in read_metrics(folder / "metrics.jsonl")]
    assert all(step["actor/grad_norm"] > 0 and step["actor/nonfinite_steps"] == 0 for step in steps)
    return steps


SIMPLE = {
    "dapo": {"algorithm__reward_shaping__overlong_buffer__enable": True,
             "algorithm__reward_shaping__overlong_buffer__len": 4, "data__gen_batch_size": 6, f"{ROLLOUT}__n": 4},
    "entropy": {},
    "gkd": {f"{ACTOR}__ppo_mini_batch_size": 4, f"{ACTOR}__ppo_micro_batch_size_per_gpu": 4},
    "gspo": {},
    "sppo": {},
}  # fmt: skip


@pytest.mark.parametrize("name", SIMPLE)
def test_a_recipe_of_options_trains(name, task, tmp_path, monkeypatch):
    # a policy that is its own teacher has nothing to learn, but for another temperature of the teacher's
    model = {"distillation__teacher_models__own__model_path": task["actor_rollout_ref.model.path"],
             "distillation__temperature": 0.5, "distillation__distillation_loss__topk": 8}  # fmt: skip
    [step] = trained(name, task, tmp_path, monkeypatch, **SIMPLE[name], **(model if name == "gkd" else {}))
    assert step["training/global_step"] == 1
    assert f"-m recipe.{name}.main_{name}" in (tmp_path / "run" / "command.sh").read_text()


def test_online_dpo_follows_with_its_reference_also_after_a_restart(task, tmp_path, monkeypatch):
    settings = {
        "trainer__save_freq": 1,
        "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 3,
        f"{ACTOR}__ppo_micro_batch_size_per_gpu": 4,
        f"{ACTOR}__ppo_mini_batch_size": 4,
        f"{ACTOR}__optim__lr_warmup_steps": 0,
        "actor_rollout_ref__ref__fsdp_config__mixed_precision__param_dtype": "fp32",
    }
    loss = "actor/preference_loss"
    for steps in (2, 3):  # the second run goes on
        found = trained("spin", task, tmp_path, monkeypatch, trainer__total_training_steps=steps, **settings)
    # where policy and reference are equal both responses are
    assert [step["training/global_step"] for step in found] == [1, 2, 3]
    assert [step[loss] for step in found] == pytest.approx([math.log(2)] * 3, abs=1e-6)
    assert all(0 < step["spin/pairs_per_prompt"] <= 1 for step in found)
    settings |= {"trainer__ref_update_freq": 0, "trainer__total_training_steps": 2}
    _, second = trained("spin", task, tmp_path / "fixed", monkeypatch, **settings)
    assert second[loss] != pytest.approx(math.log(2), abs=1e-6)


def test_a_reference_that_no_checkpoint_holds_is_refused(task, tmp_path, monkeypatch):
    settings = {"trainer__save_freq": 1, "trainer__ref_update_freq": 2, f"{ACTOR}__ppo_micro_batch_size_per_gpu": 4}
    settings |= {"actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8}
    trained("spin", task, tmp_path, monkeypatch, trainer__total_training_steps=1, **settings)
    with pytest.raises(ValueError, match="ref_update_freq=2: the reference of step 1 is the policy of an earlier one"):
        trained("spin", task, tmp_path, monkeypatch, trainer__total_training_steps=2, **settings)


def test_prime_rewards_tokens_and_learns_outcomes(task, tmp_path, monkeypatch):
    settings = {"critic__strategy": "local", "critic__ppo_micro_batch_size_per_gpu": 8, "critic__optim__lr": "1e-2",
                "critic__model__fsdp_config__mixed_precision__param_dtype": "fp32", "trainer__save_freq": 1,
                "algorithm__filter_groups__enable": False, "critic__prime__update": "after"}  # fmt: skip
    task = {key: value for key, value in task.items() if key != "critic.model.path"}
    for steps in (1, 2):  # the second run goes on
        found = trained("prime", task, tmp_path, monkeypatch, trainer__total_training_steps=steps, **settings)
    first, second = found
    assert first["critic/process_reward/mean"] == pytest.approx(0, abs=1e-6), "the model begins as its reference"
    assert first["critic/prime_loss"] == pytest.approx(math.log(2), abs=0.05)
    assert abs(second["critic/process_reward/mean"]) > 1e-4, "what it learned was saved"


def test_the_advantage_of_prime_by_hand():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    outcomes = torch.tensor([[0, 1.0, 0], [0, 0, 0], [1.0, 0, 0]])
    process = torch.tensor([[0.2, 0.4, 9], [0.1, 0, -0.1], [0.5, 9, 9]])
    config = SimpleNamespace(reward_gt_coef=2.0, reward_dpo_coef=1.0)
    index = np.array(["a", "a", "b"], dtype=object)
    _, returns = compute_prime_advantage(outcomes, process, mask, index, config, whiten_advantages=False)
    # row 0 against a mean of 0 and an outcome of 0, row 1 against a mean of 0.3 and an outcome of 1
    expected = [[2.6, 2.4, 0], [-2 - 0.9, -2 - 0.7, -2 - 0.4], [2.5, 0, 0]]
    assert_close(returns, torch.tensor(expected))
    assert_close(batch_norm(process, mask)[0], torch.tensor([0.2, 0.4, 0]) / 0.6, atol=1e-4, rtol=0)


@pytest.mark.ranks
def test_policy_and_critic_train_in_pools_of_their_own(task, tmp_path, monkeypatch):
    settings = {
        "critic__strategy": "local",
        "critic__ppo_micro_batch_size_per_gpu": 2,
        "critic__ppo_mini_batch_size": 2,
        f"{ACTOR}__ppo_micro_batch_size_per_gpu": 2,
    }
    module = "examples.split_placement.main_ppo_split"
    [step] = trained("split", task, tmp_path, monkeypatch, module=module, **settings)
    assert step["critic/grad_norm"] > 0 and step["timing_s/update_actor_and_critic"] > 0

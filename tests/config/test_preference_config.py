"""Options of preference training: what workers are given, and what contradicts."""

import pytest

from verl.config.base import ConfigError
from verl.config.load import load
from verl.config.preference import DPOConfig, RewardTrainConfig

RUNNABLE = ("model.path=/m", "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.logger=[console]")


def loaded(*words, root=DPOConfig):
    return load([*RUNNABLE, *words], config_name=root.config_name, root=root)


def test_the_worker_gets_pairs_of_rows_and_the_reference_the_engine_of_the_policy():
    words = ["data.micro_batch_size_per_gpu=3", "ref.path=/r", "engine.strategy=fsdp1", "ref.param_offload=true"]
    config = loaded(*words, "algorithm.beta=0.3").config
    shared = config.actor_rollout_ref
    assert (shared.actor.update_split.size, shared.ref.log_prob_split.size) == (6, 6)
    assert shared.actor.preference.beta == 0.3 and shared.ref.own_path == "/r"
    assert shared.ref.strategy == "fsdp1" and shared.ref.fsdp_config.param_offload
    assert config.trainer.default_local_dir == "checkpoints/dpo/test" and config.learns_from["ref.path"] == "/r"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["algorithm.loss_type=kto"], "sigmoid"),
        (["algorithm.label_smoothing=0.5"], "algorithm.label_smoothing=0.5 must be less than 0.5"),
        (["data.max_length=8192", "data.max_token_len_per_gpu=9000"], "data.max_length=8192 for each of a pair"),
        (["algorithm.loss_type=sppo", "algorithm.reference_free=true"], "whose targets are log-ratios"),
        (["data.messages_key=x"], "data.messages_key is not an option"),
    ],
)
def test_what_cannot_run_is_refused(words, text):
    try:
        problems = [problem.text for problem in loaded(*words).problems]
    except ConfigError as error:
        problems = [str(error)]
    assert any(text in problem for problem in problems), problems


def test_a_run_that_sets_nothing_unusual_is_warned_of_nothing():
    assert loaded("data.val_files=v.parquet").warnings == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["algorithm.loss_type=simpo", "ref.path=/r"], "ref.path has no effect"),
        (["algorithm.loss_type=ipo", "algorithm.label_smoothing=0.1"], "algorithm.label_smoothing has no effect"),
        (["algorithm.simpo_gamma=1"], "algorithm.simpo_gamma has no effect"),
        (["algorithm.reference_free=true", "algorithm.precompute_ref=true"], "algorithm.precompute_ref=true has no"),
    ],
)
def test_what_has_no_effect_is_said(words, key):
    assert key in " ".join(loaded(*words).warnings)


def test_a_reward_model_has_no_reference_and_no_beta():
    config = loaded("algorithm.center_rewards_coefficient=0.01", "data.margin_key=m", root=RewardTrainConfig).config
    assert config.actor_rollout_ref.actor.preference.center_rewards_coefficient == 0.01
    with pytest.raises(ConfigError, match="algorithm.beta is not an option"):
        loaded("algorithm.beta=0.1", root=RewardTrainConfig)

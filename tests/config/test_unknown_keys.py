"""A key that does not exist never gets through, with or without plus, and the nearest one is named."""

import pytest

from verl.config.base import ConfigError
from verl.config.load import load_ppo_config

MISSPELT = {
    "actor_rollout_ref.actor.clip_rato": "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ration": "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.ppo_minibatch_size": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.optim.learning_rate_warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.optm.lr": "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.rollout.temprature": "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.topp": "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rolout.n": "actor_rollout_ref.rollout.n",
    "actor_rollout.rollout.n": "actor_rollout_ref.rollout.n",
    "rollout.n": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.model.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "trainer.sav_freq": "trainer.save_freq",
    "trainer.n_gpu_per_node": "trainer.n_gpus_per_node",
    "trainer.train_batch_size": "data.train_batch_size",
    "trainer.loggers": "trainer.logger",
    "data.trian_batch_size": "data.train_batch_size",
    "data.max_prompt_lenght": "data.max_prompt_length",
    "algorithm.kl_ctrl.kl_coeff": "algorithm.kl_ctrl.kl_coef",
    "algorithm.adv_estimater": "algorithm.adv_estimator",
    "algoritm.gamma": "algorithm.gamma",
    "critic.cliprange_values": "critic.cliprange_value",
    "critic.model.fsdp_config.param_offloading": "critic.model.fsdp_config.param_offload",
    "custom_reward_function.paht": "custom_reward_function.path",
    "ray_init.num_cpu": "ray_init.num_cpus",
    "reward_model.reward_manger": "reward_model.reward_manager",
}


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("key", MISSPELT)
def test_a_misspelt_key_is_refused_and_the_right_one_named(key, plus):
    with pytest.raises(ConfigError) as error:
        load_ppo_config([f"{plus}{key}=1"])
    assert f"{key} is not an option; did you mean {MISSPELT[key]!r}?" in str(error.value)


def test_all_misspelt_keys_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        load_ppo_config(["trainer.sav_freq=1", "+data.trian_batch_size=2", "algorithm.gama=1"])
    assert len(error.value.problems) == 3
    assert str(error.value).startswith("3 problems")


def test_a_key_far_from_any_other_lists_what_is_there():
    with pytest.raises(ConfigError, match="qqq is not an option. Options there: .*num_cpus"):
        load_ppo_config(["ray_init.qqq=1"])


@pytest.mark.parametrize("word", ["trainer.seed.x=1", "trainer.logger.0=console"])
def test_nothing_lies_below_a_plain_value(word):
    with pytest.raises(ConfigError, match="is not an option"):
        load_ppo_config([word])


def test_a_misspelt_key_inside_a_mapping_is_refused_too():
    with pytest.raises(ConfigError, match="data.custom_cls.pth is not an option; did you mean 'data.custom_cls.path'"):
        load_ppo_config(["data.custom_cls={pth: x.py}"])


@pytest.mark.parametrize("word", ["trainer.seed", "trainer.seed 3", "=3", ""])
def test_a_word_that_is_no_override_is_refused(word):
    with pytest.raises(ConfigError, match="is no override"):
        load_ppo_config([word])

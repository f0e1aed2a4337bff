"""Recipes: trainers that subclass RayPPOTrainer, built by a script from what hydra composed."""

import json

import hydra
import pytest
from omegaconf import DictConfig, open_dict

from tests.compat.support import FILES
from tests.support.runs import overrides
from verl.config.base import ConfigError, ConfigWarning
from verl.config.compose import CONFIG_DIR
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FILES))


def compose(task, **settings) -> DictConfig:
    """The tree as ``@hydra.main`` hands it over, with a section of the project's own."""
    settings = {"trainer__total_training_steps": 2, **settings}
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = hydra.compose("ppo_trainer", [f"++{word}" for word in overrides(task, **settings)])
    with open_dict(config):
        config.my_project = {"note": "ours"}
    return config


def run(cls, config, worker=ActorRolloutRefWorker):
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    roles = {Role.ActorRollout: worker, Role.Critic: CriticWorker, Role.RefPolicy: worker}
    pools = ResourcePoolManager({"pool": [config.trainer.n_gpus_per_node]}, mapping=dict.fromkeys(roles, "pool"))
    trainer = cls(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=roles,
        resource_pool_manager=pools,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
        val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
    )
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.controller.stop()
    return trainer


def test_a_loop_of_its_own_trains_dumps_validates_saves_and_resumes(task, tmp_path):
    from my_recipe import OwnLoop

    settings = {
        "trainer__val_before_train": True,
        "trainer__test_freq": 1,
        "trainer__save_freq": 1,
        "trainer__default_local_dir": tmp_path,
        "trainer__rollout_data_dir": tmp_path / "samples",
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__ref__strategy": "local",
        "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    }
    with pytest.warns(ConfigWarning, match="left to the script.*my_project"):
        trainer = run(OwnLoop, compose(task, **settings))
    assert trainer.note == "ours" and trainer.critic_wg is None  # the mapping names a critic GRPO does not use
    metrics = trainer.history[-1][1]
    for name in (
        "actor/kl_loss",
        "actor/grad_norm",
        "critic/score/mean",
        "timing_s/gen",
        "val-core/digits/reward/mean@1",
    ):
        assert name in metrics
    dumped = [json.loads(line) for line in (tmp_path / "samples" / "2.jsonl").read_text().splitlines()]
    assert len(dumped) == 16 and {"input", "output", "score", "step"} <= dumped[0].keys()
    resumed = run(OwnLoop, compose(task, **{**settings, "trainer__total_training_steps": 3}))
    assert len(resumed.history) == 1 and resumed.global_steps == 3


def test_every_call_and_every_rank_samples_anew(task):
    from my_recipe import OwnLoop

    trainer = run(
        OwnLoop,
        compose(
            task,
            trainer__n_gpus_per_node=2,
            data__train_batch_size=2,
            actor_rollout_ref__actor__strategy="fsdp2",
            actor_rollout_ref__actor__ppo_mini_batch_size=2,
            actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=4,
            actor_rollout_ref__actor__optim__lr="1e-9",
            trainer__balance_batch=False,
        ),
    )
    rows = [tuple(row.tolist()) for batch, _ in trainer.history for row in batch.batch["responses"]]
    assert len(set(rows)) == len(rows) == 16


def test_ppo_with_a_critic_in_a_loop_of_its_own(task):
    from my_recipe import OwnLoop

    critic = {"critic__strategy": "local", "critic__ppo_micro_batch_size_per_gpu": 8}
    trainer = run(OwnLoop, compose(task, algorithm__adv_estimator="gae", **critic))
    assert {"critic/vf_loss", "critic/values/mean", "actor/pg_loss"} <= set(trainer.history[-1][1])


def test_overridden_stages_are_what_the_loop_runs(task, tmp_path):
    from my_recipe import OwnStage
    from my_worker import MyActor

    config = compose(task, trainer__test_freq=1, trainer__save_freq=2, trainer__default_local_dir=tmp_path)
    trainer = run(OwnStage, config, worker=MyActor)
    assert trainer.metrics["val-core/mine"] == 1.0 and trainer.saved == 2
    assert trainer.metrics["critic/advantages/max"] == pytest.approx(0.5)
    assert trainer.metrics["actor/my_updates"] == 2  # of a worker whose constructor takes config and role only


def test_a_wrong_value_in_the_tree_of_a_script_is_refused(task):
    from my_recipe import OwnLoop

    config = compose(task)
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 256
    with pytest.raises(ConfigError, match="ppo_mini_batch_size=256 is larger than data.train_batch_size=4"):
        run(OwnLoop, config)

"""Recipes: trainers that subclass RayPPOTrainer, built by a script from what hydra composed."""

import json
import os
from pathlib import Path

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


def run(cls, config, worker=ActorRolloutRefWorker, group_cls=None):
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    roles = {Role.ActorRollout: worker, Role.Critic: CriticWorker, Role.RefPolicy: worker}
    pools = ResourcePoolManager({"pool": [config.trainer.n_gpus_per_node]}, mapping=dict.fromkeys(roles, "pool"))
    trainer = cls(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=roles,
        resource_pool_manager=pools,
        ray_worker_group_cls=group_cls,
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


def test_every_call_and_every_rank_samples_with_new_seeds(task):
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


def test_filtered_groups_train_from_the_tree_of_a_script(task):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    settings = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "seq_reward"}
    trainer = run(RayPPOTrainer, compose(task, **settings))
    assert trainer.global_steps == 2 and trainer.metrics["filter_groups/kept"] == 4


def test_every_feature_of_the_driver_runs_from_the_tree_of_a_script(task, tmp_path):
    """What reads derived options: rows divided among ranks, mismatch, long tails, kept rollouts, saved options."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    settings = {
        "actor_rollout_ref__rollout__calculate_log_probs": True,
        "actor_rollout_ref__rollout__mismatch_threshold": "1e-12",
        "actor_rollout_ref__rollout__skip_rollout": True,
        "actor_rollout_ref__rollout__skip_dump_dir": tmp_path / "kept",
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__ref__strategy": "local",
        "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
        "trainer__save_freq": 2,
        "trainer__default_local_dir": tmp_path,
        "trainer__memory_ledger": True,
    }
    trainer = run(RayPPOTrainer, compose(task, **settings))
    assert trainer.global_steps == 2 and (tmp_path / "global_step_2" / "config.json").exists()
    assert json.loads((tmp_path / "global_step_2" / "config.json").read_text())["trainer"]["save_freq"] == 2


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_workers_that_a_recipe_starts_itself_from_hydras_sections_train(task, estimator):
    from my_workflow import OwnWorkers, ProfiledActor

    from verl.single_controller.local import LocalWorkerGroup

    settings = {
        "algorithm__adv_estimator": estimator,
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__ref__strategy": "local",
        "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
        "critic__strategy": "local",
        "critic__ppo_micro_batch_size_per_gpu": 8,
    }
    trainer = run(OwnWorkers, compose(task, **settings), worker=ProfiledActor, group_cls=LocalWorkerGroup)
    assert trainer.global_steps == 2 and trainer.metrics["actor/grad_norm"] > 0
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 2
    assert ("critic/vf_loss" in trainer.metrics) == (estimator == "gae") and "actor/kl_loss" in trainer.metrics


def test_a_loop_over_kept_rollouts_reads_what_another_run_drew(task, tmp_path):
    from my_workflow import ProfiledActor, Skipping

    from verl.single_controller.local import LocalWorkerGroup

    settings = {"actor_rollout_ref__rollout__skip_dump_dir": tmp_path, "trainer__default_local_dir": tmp_path / "run"}
    trees = [compose(task, **settings) for _ in range(2)]
    runs = [run(Skipping, tree, worker=ProfiledActor, group_cls=LocalWorkerGroup) for tree in trees]
    assert runs[0].texts == runs[1].texts and list(tmp_path.rglob("step0-*.safetensors"))


def test_a_task_runner_of_a_projects_own_trains_with_its_actor(task, capfd):
    from my_workflow import MyTaskRunner

    from verl.trainer.main_ppo import run_ppo

    config = compose(task)
    with open_dict(config):
        config.my_project.note = "ours"
    run_ppo(config, task_runner_class=MyTaskRunner)
    assert "RAN 2 grpo {'x': 2.0}" in capfd.readouterr().out


@pytest.mark.ray
def test_a_task_runner_in_an_actor_trains_with_its_actor(task, monkeypatch):
    import ray
    from my_workflow import MyTaskRunner

    from verl.trainer.main_ppo import run_ppo

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FILES), os.environ.get("PYTHONPATH", "")]))
    config = compose(task, trainer__controller="ray", ray_init__num_cpus=4)
    run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(MyTaskRunner))
    assert not ray.is_initialized()
    # what an actor prints last may be lost when Ray ends
    assert Path(config.trainer.default_local_dir, "ran.txt").read_text().startswith("RAN 2 grpo")


def test_an_agent_loop_prepares_its_class_once_and_reads_the_tree_of_the_script(task):
    import my_loops

    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    config = compose(
        task,
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__agent__agent_loop_config_path=FILES / "my_loops.yaml",
        actor_rollout_ref__rollout__agent__default_agent_loop="shouting_agent",
        data__return_raw_chat=True,
    )
    trainer = run(RayPPOTrainer, config)
    assert my_loops.ShoutingLoop.prepared == 1 and my_loops.ShoutingLoop.note == "ours"
    assert trainer.global_steps == 2 and trainer.metrics["timing_s/agent_loop/generate_sequences/mean"] > 0


def test_run_ppo_takes_a_tree_with_keys_of_its_own_and_tells_of_them_once(task, capfd):
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.config import validate_config

    config = compose(task, trainer__total_training_steps=1)
    validate_config(config)
    with pytest.warns(ConfigWarning) as warned:
        run_ppo(config)
    assert len([warning for warning in warned if "left to the script" in str(warning.message)]) == 1
    assert "step:1" in capfd.readouterr().out


def test_a_wrong_value_in_the_tree_of_a_script_is_refused(task):
    from my_recipe import OwnLoop

    config = compose(task)
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 256
    with pytest.raises(ConfigError, match="ppo_mini_batch_size=256 is larger than data.train_batch_size=4"):
        run(OwnLoop, config)

"""Names of verl's asynchronous trainers: what they mean here, and what is refused by the name of its feature."""

import pytest

from verl.config.base import get_path
from verl.config.load import load
from verl.config.ppo import ROLLOUT

from .helpers import RUNNABLE, notes, problems

A, V1 = "async_training", "trainer.v1"
LAUNCHED = [
    *RUNNABLE,
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=2",
    "rollout.total_rollout_steps=100",
    "rollout.test_freq=3",
    f"{A}.staleness_threshold=1.5",
    f"{A}.trigger_parameter_sync_step=3",
    f"{A}.require_batches=2",
    f"{A}.partial_rollout=True",
    f"{A}.use_rollout_log_probs=True",
    f"{A}.compute_prox_log_prob=False",
    f"{A}.checkpoint_engine.enable=True",
    f"{A}.checkpoint_engine.device_buffer_size_M=64",
    "+async_training.use_trainer_do_validate=False",
]
APART = {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.partial_rollout": True}


@pytest.mark.parametrize("name", ["ppo_trainer", "fully_async_ppo_trainer"])
def test_a_command_of_the_fully_asynchronous_trainer_is_translated(name):
    loaded = load(LAUNCHED, config_name=name)
    assert not loaded.problems, loaded.problems
    meant = APART | {
        f"{ROLLOUT}.max_staleness": 2,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.n_gpus_per_node": 2,
        f"{ROLLOUT}.update_weights_bucket_megabytes": 64,
        "data.train_batch_size": 3 * 2 * 4,
        "data.gen_batch_size": None,
        "trainer.total_training_steps": 100 // 24,
        "trainer.test_freq": 3,
        "algorithm.rollout_correction.bypass_mode": True,
    }
    assert {key: get_path(loaded.config, key) for key in meant} == meant
    assert loaded.config.actor_rollout_ref.generates_continuously


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ([f"{A}.staleness_threshold=2", f"{A}.partial_rollout=true"], {f"{ROLLOUT}.max_staleness": 2}),
        ([f"{A}.staleness_threshold=0"], {f"{ROLLOUT}.max_staleness": 0, f"{ROLLOUT}.partial_rollout": False}),
        ([f"{A}.staleness_threshold=1", f"{A}.partial_rollout=false"], {f"{ROLLOUT}.partial_rollout": False}),
        (["trainer.use_v1=true", f"{V1}.trainer_mode=sync"], {"actor_rollout_ref.hybrid_engine": True}),
        (["trainer.use_v1=true", f"{V1}.trainer_mode=separate_async", f"{V1}.sampler.max_off_policy_threshold=3",
          f"{V1}.separate_async.num_warmup_batches=1"], APART | {f"{ROLLOUT}.max_staleness": 3}),
        ([f"{V1}.trainer_mode=separate_async", f"{V1}.separate_async.parameter_sync_step=2",
          f"{V1}.sampler.max_off_policy_strategy=wait", "data.gen_batch_size=1"],
         APART | {"data.train_batch_size": 2 * 4, "data.gen_batch_size": None}),
        ([f"{V1}.trainer_mode=colocate_async", f"{V1}.colocate_async.num_warmup_batches=2",
          f"{V1}.sampler.max_off_policy_threshold=8"],
         {"actor_rollout_ref.hybrid_engine": True, f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.over_sample_rate": 2.0,
          f"{ROLLOUT}.partial_rollout": True, f"{ROLLOUT}.max_staleness": 8}),
        ([f"{V1}.trainer_mode=colocate_async", f"{V1}.colocate_async.num_warmup_batches=0"],
         {f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.over_sample_rate": 0.0, f"{ROLLOUT}.partial_rollout": False}),
    ],
)  # fmt: skip
def test_modes_of_other_trainers_are_translated(words, meant):
    loaded = load([*RUNNABLE, *words])
    assert not loaded.problems, loaded.problems
    assert {key: get_path(loaded.config, key) for key in meant} == meant


def test_the_old_name_of_the_bound_is_understood():
    words = ["actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.async_ratio=1"]
    assert load([*RUNNABLE, *words]).config.actor_rollout_ref.rollout.staleness == 1
    assert "async_ratio is now called actor_rollout_ref.rollout.max_staleness" in notes(*words)
    assert "disagree" in problems(*words, f"{ROLLOUT}.max_staleness=2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([f"{V1}.trainer_mode=separate_async", f"{V1}.sampler.max_off_policy_strategy=keep"], "generated again"),
        ([f"{A}.staleness_threshold=2", f"{ROLLOUT}.max_staleness=3"], "threshold=2 means actor_rollout_ref.rollout."),
        ([f"{A}.compute_advantage_in_rollout=true"], "a part of verl's fully asynchronous trainer"),
        ([f"{V1}.trainer_mode=async"], "Its modes are sync, colocate_async, separate_async."),
        (
            [f"{V1}.trainer_mode=separate_async", f"{V1}.separate_async.parameter_sync_step=4"],
            "4 x 4 means data.train_batch_size=16, and data.train_batch_size=8 was given",
        ),
        ([f"{V1}.sampler.custom_sampler.path=x.py"], "asks for a replay buffer of yours"),
        ([f"{V1}.trainer_mode=separate_async", f"{V1}.sampler.sampler_kwargs={{a: 1}}"], "a replay buffer of yours"),
        ([f"{V1}.trainer_mode=sync", f"{V1}.sampler.sync_refill_failed_groups=true"], "in the place of groups that"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_here_is_refused(words, sentence):
    assert sentence in problems(*words)


def test_a_section_of_v1_that_is_off_changes_nothing_and_is_said():
    said = notes("trainer.use_v1=false", f"{V1}.sampler.custom_sampler.path=x.py", f"{V1}.trainer_mode=separate_async")
    assert "custom_sampler.path=x.py has no effect" in said and "trainer_mode=separate_async has no effect" in said

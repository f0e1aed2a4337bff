"""What a run computes does not depend on where and in what pieces it is computed."""

import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.single_controller.base.worker import FETCH_COLUMN

TWO_RANKS = {
    "trainer__n_gpus_per_node": 2,
    "actor_rollout_ref__actor__strategy": "fsdp2",
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4,
}
PACKED = {"actor_rollout_ref__model__use_remove_padding": True}
SHARED_PROMPTS = {**PACKED, "actor_rollout_ref__model__use_prefix_sharing": True}
SHARED_BY_DEFAULT = {"actor_rollout_ref__model__use_prefix_sharing": None}
SHARED_SEQUENCES = {**TWO_RANKS, **PACKED, "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2}
"""The reference follows the actor."""
WAYS = {
    "one row at a time": {
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 1,
    },
    "a token budget": {
        "actor_rollout_ref__actor__use_dynamic_bsz": True,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 200,
    },
    "small decode batches": {"actor_rollout_ref__rollout__max_num_seqs": 3},
    "sharded on one rank": {"actor_rollout_ref__actor__strategy": "fsdp2"},
    "two ranks": TWO_RANKS,
    "two ranks, not balanced": {**TWO_RANKS, "trainer__balance_batch": False},
    "packed rows": PACKED,
    "shared prompts, the default on a CPU": SHARED_BY_DEFAULT,
    "two ranks with shared prompts": {**TWO_RANKS, **SHARED_PROMPTS},
    "two ranks that share sequences": SHARED_SEQUENCES,
    "two ranks with ZeRO-3": {
        **TWO_RANKS,
        "actor_rollout_ref__actor__strategy": "deepspeed",
        "actor_rollout_ref__actor__deepspeed__zero_stage": 3,
        "actor_rollout_ref__actor__deepspeed__stage3_param_persistence_threshold": 0,
    },
}
TOLERANCES = {  # relative; Adam's first steps divide by tiny gradients, and the KL is what rounding grows into
    "critic/score/mean": 0,
    "response_length/mean": 0,
    "actor/pg_loss": 1e-4,
    "actor/grad_norm": 1e-4,
    "actor/kl_loss": 5e-3,
}


def numbers(folder, name, monkeypatch, **settings):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / f"{name}.jsonl"))
    trainer = run_job(
        overrides(
            make_task(folder / "task"),
            trainer__total_training_steps=3,
            trainer__logger="[file]",
            data__train_batch_size=4,
            actor_rollout_ref__actor__ppo_mini_batch_size=2,
            actor_rollout_ref__actor__use_kl_loss=True,
            actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu=8,
            **{"actor_rollout_ref__model__use_prefix_sharing": False, **settings},
        )
    )
    rows = read_metrics(folder / f"{name}.jsonl")
    fetched = [size for (_, method), size in trainer.actor_wg.traffic.received.items() if method == FETCH_COLUMN]
    return [row["data"] | {"fetched": sum(fetched)} for row in rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return numbers(tmp_path_factory.mktemp("plain"), "plain", monkeypatch)


@pytest.mark.parametrize("way", WAYS)  # on Ray: tests/test_cluster.py
def test_three_steps_give_the_same_numbers(way, plain, tmp_path, monkeypatch):
    steps = numbers(tmp_path, "way", monkeypatch, **WAYS[way])
    for key, tolerance in TOLERANCES.items():
        assert [s[key] for s in steps] == pytest.approx([s[key] for s in plain], rel=tolerance, abs=2e-6), key
    assert steps[-1]["fetched"] == 0  # log-probs of policy and reference stayed where the update reads them
    if WAYS[way] is SHARED_BY_DEFAULT:
        assert all(0.3 < s["actor/prefix_tokens_saved"] < 1 for s in steps)


def test_a_critic_whose_ranks_share_packed_sequences_gives_the_same_numbers(tmp_path, monkeypatch):
    critic = {
        "algorithm__adv_estimator": "gae",
        "critic__ppo_micro_batch_size_per_gpu": 2,
        "critic__model__fsdp_config__mixed_precision__param_dtype": "fp32",
    }
    plain = numbers(tmp_path, "plain", monkeypatch, **critic)
    shares = {
        "critic__strategy": "fsdp2",
        "critic__model__use_remove_padding": True,
        "critic__ulysses_sequence_parallel_size": 2,
    }
    shared = numbers(tmp_path, "shared", monkeypatch, **critic, **SHARED_SEQUENCES, **shares)
    for key, tolerance in {**TOLERANCES, "critic/vf_loss": 1e-4, "critic/grad_norm": 1e-4}.items():
        assert [s[key] for s in shared] == pytest.approx([s[key] for s in plain], rel=tolerance, abs=2e-6), key

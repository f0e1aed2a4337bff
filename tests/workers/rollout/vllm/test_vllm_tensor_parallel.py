"""One vLLM engine over two ranks, by tensors or by layers, generates what an engine of one rank generates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import main_ppo, make_task, overrides
from tests.workers.rollout.conftest import COMMON
from tests.workers.rollout.test_contract import mixed_requests, processed_log_probs
from verl.utils.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def python_segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


@pytest.fixture(scope="module")
def ranks(model_folder):
    """What the ranks of three jobs side by side saw: two of each job; the last one is a pipeline."""
    before = python_segments()
    command = [sys.executable, "-m", "tests.workers.rollout.vllm.tensor_parallel_job", model_folder("tied")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[4]}
    jobs = [subprocess.Popen([*command, spread], **pipes) for spread in ("tensor", "tensor", "pipeline")]
    ranks = []
    try:
        for job in jobs:
            out, err = job.communicate(timeout=280)
            assert job.returncode == 0, err[-4000:]
            ranks += json.loads(next(row for row in out.splitlines() if row.startswith("RESULT"))[len("RESULT") :])
    finally:
        for job in jobs:
            job.kill()
    assert python_segments() <= before, "shared memory was left behind"
    return ranks


def test_all_ranks_generate_the_same_and_log_probs_are_the_models(ranks, reference):
    *tensor, pipeline, same_pipeline = [rank["generated"] for rank in ranks]
    assert tensor == tensor[:1] * 4 and pipeline == same_pipeline
    assert [tokens for tokens, _ in pipeline] == [tokens for tokens, _ in tensor[0]]
    for generated in (tensor[0], pipeline):
        for request, (tokens, log_probs) in zip(mixed_requests(), generated, strict=True):
            expected = processed_log_probs(reference("tied"), request, tokens)
            assert log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_each_rank_holds_its_share_and_survives_a_nap(ranks, reference):
    whole = sum(parameter.numel() for parameter in reference("tied").parameters())
    assert all(0.45 * whole < rank["held"] < 0.6 * whole for rank in ranks)
    assert all(rank["same after sleep"] for rank in ranks)


def test_a_server_over_two_ranks_generates_what_one_call_generates_and_ends_cleanly(ranks):
    leader, follower = (rank["served"] for rank in ranks[:2])
    for (tokens, log_probs), (expected, expected_log_probs) in zip(
        leader["generated"], ranks[0]["generated"], strict=True
    ):
        assert tokens == expected and log_probs == pytest.approx(expected_log_probs, abs=1e-4)
    assert all(reason == "abort" and 0 <= count < 180 for reason, count in leader["aborted"])
    assert follower == {"ended": True, "left": 0} and leader["left"] == 0


def test_a_fault_on_one_rank_fails_the_sync_on_all_of_them(ranks):
    assert all("shards of model.layers.1.mlp.down_proj.weight" in rank["caught"] for rank in ranks)
    assert all("gate_up_proj.weight" in rank["lost"] for rank in ranks)


def test_weights_that_both_sides_shard_alike_arrive_bit_for_bit_without_a_gather(ranks):
    layers = [f"model.layers.{i}.{part}_proj" for i in range(2) for part in ("mlp.gate", "mlp.up", "self_attn.q")]
    for sharded in (rank["sharded"] for rank in ranks[:4]):
        assert {f"{layer}.weight" for layer in layers} <= set(sharded["names"])
        assert not [name for name in sharded["names"] if any(part in name for part in ("o_proj", "down_proj", "norm"))]
        assert sharded["problem"] == sharded["compared"] == "" and sharded["equal"]


def test_a_fault_of_one_ranks_rows_fails_the_sync_on_all_ranks_and_the_next_one_brings_all_weights(ranks):
    for sharded in (rank["sharded"] for rank in ranks[:4]):
        assert "model.layers.0.self_attn.q_proj.weight in the memory of rank 1" in sharded["spoiled in memory"]
        assert "shards of model.layers.0.self_attn.q_proj.weight" in sharded["spoiled"]
        assert sharded["after a failure"] is None and sharded["again"] == ""
        assert "model.layers.1.mlp.gate_up_proj.weight" in sharded["lost"]


def test_shared_memory_has_a_name_of_its_own_in_every_job(ranks):
    one, same_job, other, _ = names = [rank["shared memory"] for rank in ranks[:4]]
    assert one == same_job and one != other
    for name in names:
        assert "/" not in name and len(name.split("-")[0]) == 12
        assert not list(Path("/dev/shm").glob(f"{name.split('-')[0]}*")), "left behind"


def test_an_asynchronous_run_with_two_ranks_a_replica_equals_a_synchronous_one_with_two_replicas(tmp_path):
    task, samples = make_task(tmp_path), {}
    task["actor_rollout_ref.model.path"] = make_tiny_model(tmp_path / "heads_of_32", **COMMON["tied"])
    for size in (1, 2):
        done = main_ppo(
            overrides(
                task,
                trainer__n_gpus_per_node=2,
                trainer__total_training_steps=2,
                trainer__save_freq=-1,
                trainer__rollout_data_dir=str(tmp_path / f"tp{size}"),
                actor_rollout_ref__actor__strategy="fsdp2",
                actor_rollout_ref__rollout__name="vllm",
                actor_rollout_ref__rollout__tensor_model_parallel_size=size,
                actor_rollout_ref__rollout__mode="async" if size == 2 else "sync",
            )
        )
        assert done.returncode == 0, done.stderr[-4000:]
        samples[size] = [json.loads(line) for line in (tmp_path / f"tp{size}" / "1.jsonl").read_text().splitlines()]
    assert len(samples[1]) == 16
    assert [row["output"] for row in samples[1]] == [row["output"] for row in samples[2]]

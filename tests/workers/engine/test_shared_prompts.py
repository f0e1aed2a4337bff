"""A prompt that runs once for all of its responses gives the numbers of one that runs for each."""

import itertools
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config

from tests.support.images import MIXED, image_dataset, image_row, make_tiny_vl_model, picture
from tests.support.images import make_batch as make_images
from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_siblings, make_tiny_model
from verl.batch import WHOLE
from verl.models.loader import ModelSpec
from verl.protocol import DataProto
from verl.workers import model_worker
from verl.workers.engine import MicroBatching, Want, build_engine
from verl.workers.engine.micro_batch import find_shared_prompts, split_batch

PROMPTS = ((5, 3), (9, 4), (1, 1), (30, 2))
SAVED = 5 * 2 + 9 * 3 + 30
CLEAR = {"initializer_range": 0.2}  # weights so large that a wrong mask or position shows
FAMILIES = {
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "windows": ("mistral", {"sliding_window": 6}),
    "windows in some layers": ("gemma3_text", {"sliding_window": 6}),
    "caps": ("gemma2", {"sliding_window": 6}),
    "sinks": ("gpt_oss", {"sliding_window": 6, "num_local_experts": 4}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), **CLEAR)


def one_step(folder, data, split=WHOLE, strategy="local", head="lm", dtype="fp32", rounding_seed=None, **spec):
    """Log-probs (or values), metrics and gradient of one step; ``rounding_seed`` gives weights other last bits."""
    spec = ModelSpec(folder, head, param_dtype=dtype, compute_dtype=dtype, **spec)
    engine = build_engine(strategy, spec, None, optim_section(), total_steps=10, grad_clip=None, seed=1)
    if rounding_seed is not None:
        draw = torch.Generator().manual_seed(rounding_seed)
        with torch.no_grad():
            for weight in engine.module.parameters():
                weight *= 1 + EPSILON * (2 * torch.rand(weight.shape, generator=draw) - 1)
    place = engine.topology
    data = data[place.dp_rank :: place.dp_size]
    want = Want.VALUES if head == "value" else Want.LOG_PROBS | Want.ENTROPY
    scores, gradient = engine.infer(data, want, split), []

    def keep_gradient():
        parts = [p.grad for p in engine.optimizer.param_groups[0]["params"]]
        gradient.extend(p.full_tensor() if hasattr(p, "full_tensor") else p for p in parts)
        return 1.0

    engine.optimizer_step = keep_gradient
    metrics = engine.train_step(data, value_loss() if head == "value" else ppo_loss(), split)
    columns = {name: scores.ragged(name).values for name in scores.keys()}
    return columns, metrics, torch.cat([part.flatten() for part in gradient])


PACKED = {"remove_padding": True}
SHARED = {**PACKED, "share_prompts": True}


EPSILON = torch.finfo(torch.float32).eps


def rounding(folder, data, head="lm", plain=None):
    """How far two ways to compute one gradient may be apart in fp32, relative to its norm.

    Kernels sum in an order of their own, which depends on the CPU and on the number of rows. How much of a rounding
    error reaches the gradient depends on the model: measured here as what moves when each weight moves by its last
    bit. It is 0.7e-6 to 4e-6 for the families above and 5e-6 to 1.5e-5 with images; a gradient in fp32 is as far from
    that in fp64. Two gradients are off by sqrt(2) of it; four times is nearly three standard deviations of that.
    """
    gradient = (plain or one_step(folder, data, head=head))[2]
    moved = (one_step(folder, data, head=head, rounding_seed=seed)[2] - gradient for seed in range(2))
    return 4 * max(float(change.norm() / gradient.norm()) for change in moved)


def check_same(one, other, tolerance):
    (scores, metrics, gradient), (other_scores, other_metrics, other_gradient) = one, other
    for name, column in scores.items():
        torch.testing.assert_close(other_scores[name], column, rtol=tolerance, atol=5 * tolerance)
    for name in metrics.keys() - {"prefix_tokens_saved"}:
        assert other_metrics[name] == pytest.approx(metrics[name], rel=5 * tolerance, abs=tolerance), name
    assert (other_gradient - gradient).norm() <= tolerance * gradient.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_loss_and_gradient_are_those_of_prompts_that_run_for_each_response(family, tmp_path):
    name, extra = FAMILIES[family]
    folder, data = make_tiny_model(tmp_path, name, **CLEAR, **extra), make_siblings(PROMPTS, seed=5)
    shared = one_step(folder, data, **SHARED)
    plain = one_step(folder, data)
    tolerance = rounding(folder, data, plain=plain)
    check_same(plain, shared, tolerance)
    check_same(one_step(folder, data, **PACKED), shared, tolerance)
    tokens = int(data.ragged("input_ids").layout.lengths.sum())
    assert shared[1]["prefix_tokens_saved"] == pytest.approx(SAVED / tokens)


@pytest.mark.parametrize("split", [MicroBatching(size=1), MicroBatching(size=2), MicroBatching(max_tokens=60)])
def test_groups_that_do_not_fit_a_micro_batch_run_their_prompt_once_a_piece(folder, split):
    data = make_siblings(PROMPTS, seed=5)
    shared = one_step(folder, data, split, **SHARED)
    plain = one_step(folder, data)
    check_same(plain, shared, rounding(folder, data, plain=plain))
    most = SAVED / int(data.ragged("input_ids").layout.lengths.sum())
    assert shared[1]["prefix_tokens_saved"] == 0 if split.size == 1 else 0 < shared[1]["prefix_tokens_saved"] <= most


def test_checkpointed_layers_are_recomputed_with_the_same_prompts(folder, monkeypatch):
    monkeypatch.setattr("verl.models.activation_memory.KEEP_BELOW_BYTES", 0)
    data = make_siblings(PROMPTS, seed=5)
    plain = one_step(folder, data, gradient_checkpointing=False, **SHARED)
    check_same(plain, one_step(folder, data, gradient_checkpointing=True, **SHARED), rounding(folder, data))


def test_values_of_a_critic_share_prompts_too(folder):
    data = make_siblings(PROMPTS, seed=5)
    plain = one_step(folder, data, head="value")
    check_same(plain, one_step(folder, data, head="value", **SHARED), rounding(folder, data, "value", plain))


@pytest.mark.parametrize("split", [MicroBatching(size=4), MicroBatching(max_tokens=60)])
def test_two_sharded_ranks_share_what_they_have(folder, split):
    data = make_siblings(PROMPTS, seed=5)
    plain = scores, metrics, gradient = one_step(folder, data)
    tolerance = rounding(folder, data, plain=plain)
    shared = run_ranks(2, _shared_step, folder, data, split)
    for rank, (theirs, their_metrics, their_gradient) in enumerate(shared):
        rows = data.ragged("responses").like(scores["log_probs"]).select(torch.arange(len(data))[rank::2])
        torch.testing.assert_close(theirs["log_probs"], rows.values, rtol=tolerance, atol=5 * tolerance)
        assert (their_gradient - gradient).norm() <= tolerance * gradient.norm()
        assert their_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=5 * tolerance)
        assert their_metrics["prefix_tokens_saved"] > 0
    assert shared[0][1] == shared[1][1]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A vision model, and rows in which responses of a group are not neighbours, with images and without."""
    folder = make_tiny_vl_model(tmp_path_factory.mktemp("vl"), **CLEAR)
    path = str(tmp_path_factory.mktemp("data") / "rows.parquet")
    repeated = [MIXED[i] for i in (0, 2, 1, 2, 0, 0, 2, 1)]
    repeated[5] = ("<image>What is it?", [picture(seed=9)])  # the same tokens, of another image
    rows = [image_row(text, images, i) for i, (text, images) in enumerate(repeated)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return folder, make_images(image_dataset(folder, path))


@pytest.mark.parametrize("split", [WHOLE, MicroBatching(size=3)])
def test_images_of_a_shared_prompt_are_looked_at_once(pictures, split):
    folder, data = pictures
    assert find_shared_prompts(data).numbers == [0, 1, 2, 1, 0, 3, 1, 2]
    shared = one_step(folder, data, split, **SHARED)
    plain = one_step(folder, data)
    check_same(plain, shared, rounding(folder, data, plain=plain))
    if split == WHOLE:
        groups = [list(range(len(data)))]
        [micro] = split_batch(data, groups, packed=True, prompts=find_shared_prompts(data)).micro_batches
        assert len(micro.vision_inputs["image_grid_thw"]) == 1 + 2 + 1


def test_what_sets_shared_images_apart_is_rounding(pictures):
    """In fp64 it goes: to that of the norms and of the losses, which transformers and we compute in fp32 (2e-7)."""
    folder, data = pictures
    check_same(one_step(folder, data, dtype="fp64"), one_step(folder, data, dtype="fp64", **SHARED), tolerance=2e-6)


def test_two_ranks_share_images_of_which_one_has_none(pictures):
    folder, data = pictures
    data = data[[0, 2, 4, 7, 1, 2, 3, 7]]  # every second row has no image
    plain = _, metrics, gradient = one_step(folder, data)
    tolerance = rounding(folder, data, plain=plain)
    for _, their_metrics, theirs in run_ranks(2, _shared_step, folder, data, WHOLE):
        assert (theirs - gradient).norm() <= tolerance * gradient.norm()
        assert their_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=5 * tolerance)


def _shared_step(folder, data, split):
    return one_step(folder, data, split, "fsdp2", **SHARED)


def test_tokens_that_did_not_run_do_not_count_as_use_of_the_device(monkeypatch):
    monkeypatch.setattr(model_worker, "get_device_flops", lambda **_: 1.0)
    seconds = itertools.count()
    monkeypatch.setattr(model_worker.time, "perf_counter", lambda: float(next(seconds)))
    config = Qwen2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    engine = SimpleNamespace(model_config=config, device=torch.device("cpu"), topology=SimpleNamespace(world_size=1))
    data, found = DataProto(meta_info={"global_token_num": [100, 200]}), []
    for metrics in ({}, {"actor/prefix_tokens_saved": 0.25}):
        bag = model_worker.MetricBag()
        with model_worker.mfu_metrics("actor", engine, data, 1, bag):
            bag.add(metrics)
        found += bag.lists()["perf/mfu/actor"]
    assert found[1] == pytest.approx(0.75 * found[0]) and found[0] > 0

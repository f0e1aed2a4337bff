"""FSDP1 in the place of FSDP2: the same numbers, names and files. Built directly, since a CPU run takes FSDP2."""

import io

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.fsdp1 import FSDP1Engine

SPLIT = MicroBatching(size=2)
LORA = LoRASpec(rank=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def build(backend, spec, config=None, train=True, **options):
    options = {"total_steps": 10, "grad_clip": 1.0, "seed": 1, **options}
    return backend(spec, config, optim_section() if train else None, **options)


def share(engine, seed=5):
    """This rank's rows of a batch of seven."""
    size, place = engine.topology.dp_size, engine.topology.dp_rank
    return make_batch(7, seed=seed)[7 * place // size : 7 * (place + 1) // size]


def steps_of(engine, steps=3, seed=5):
    loss = value_loss() if engine.spec.head == "value" else ppo_loss()
    return [engine.train_step(share(engine, seed), loss, SPLIT) for _ in range(steps)]


def trained(backend, spec, config=None):
    """Metrics of three steps, scores after them, and all weights by name."""
    engine = build(backend, spec, config)
    metrics = steps_of(engine)
    want = Want.VALUES if spec.head == "value" else Want.LOG_PROBS | Want.ENTROPY
    scores = engine.infer(share(engine), want, SPLIT)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return metrics, [scores.ragged(name).values for name in scores.keys()], weights, engine.parameter_counts()


def local_run(spec):
    engine = build_engine("local", spec, None, optim_section(), total_steps=10, grad_clip=1.0, seed=1)
    metrics = steps_of(engine)
    want = Want.VALUES if spec.head == "value" else Want.LOG_PROBS | Want.ENTROPY
    scores = engine.infer(make_batch(7, seed=5), want, SPLIT)
    return (
        metrics,
        [scores.ragged(name).values for name in scores.keys()],
        dict(engine.weights()),
        engine.parameter_counts(),
    )


LESS_GATHERING = {"forward_prefetch": True, "reshard_after_forward": False, "wrap_policy": {"min_num_params": 20_000}}
CASES = {
    "one rank": (1, {}, None),
    "two ranks": (2, {}, None),
    "less gathering": (2, {"gradient_checkpointing": False}, LESS_GATHERING),
    "replicas": (2, {}, {"fsdp_size": 1}),
    "groups": (4, {}, {"fsdp_size": 2}),
    "value": (2, {"head": "value"}, None),
    "adapter": (2, {"lora": LORA}, None),
}


@pytest.mark.parametrize("ranks, changes, config", CASES.values(), ids=CASES)
def test_fsdp1_matches_the_local_engine(folder, ranks, changes, config):
    spec = ModelSpec(folder, compute_dtype="fp32", **changes)
    metrics, scores, weights, sizes = local_run(spec)
    results = run_ranks(ranks, trained, FSDP1Engine, spec, config)
    for theirs, _, their_weights, their_sizes in results:
        assert their_sizes == sizes
        for one, other in zip(metrics, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
        assert their_weights.keys() == weights.keys()
        assert all((their_weights[name] - weights[name]).abs().max() < 1e-4 for name in weights)
    for number, expected in enumerate(scores):
        found = torch.cat([result[1][number] for result in results])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bf16_is_that_of_fsdp2(folder):
    spec = ModelSpec(folder, compute_dtype="bf16")
    one, other = (run_ranks(2, trained, backend, spec)[0] for backend in (FSDP1Engine, FSDPEngine))
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-3)
    assert all(one[2][name].dtype == torch.float32 for name in one[2])


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _go_on(first, second, spec, config, whole):
    """A run that changes its engine after two steps; with ``whole`` it is given whole tensors."""
    uninterrupted = steps_of(build(FSDPEngine, spec, config), 3)
    engine = build(first, spec, config)
    steps_of(engine, 2)
    state = engine.state()
    kinds = {type(piece) for piece in state["model"].values()}
    if whole:
        joined = {name: _whole(piece) for name, piece in state["model"].items()}
        entries = state["optimizer"]["state"].items()
        moments = {name: {key: _whole(piece) for key, piece in entry.items()} for name, entry in entries}
        state |= {"model": joined, "optimizer": state["optimizer"] | {"state": moments}}
    fresh = build(second, spec, config)
    steps_of(fresh, 1, seed=9)
    fresh.load_state(_through_a_file(state))
    named = all("_fsdp" not in name for name in [*state["model"], *state["optimizer"]["state"]])
    return uninterrupted[2:], steps_of(fresh, 1), kinds, named


def _whole(piece):
    return piece.full_tensor() if isinstance(piece, DTensor) else piece


@pytest.mark.parametrize(
    "first, second, changes, config, whole",
    [
        (FSDP1Engine, FSDPEngine, {}, None, False),
        (FSDPEngine, FSDP1Engine, {}, None, False),
        (FSDP1Engine, FSDP1Engine, {"lora": LORA}, None, False),
        (FSDP1Engine, FSDP1Engine, {}, None, True),
        (FSDP1Engine, FSDP1Engine, {}, {"fsdp_size": 1}, False),
    ],
)
def test_checkpoints_of_both_are_interchangeable(folder, first, second, changes, config, whole):
    spec = ModelSpec(folder, compute_dtype="fp32", **changes)
    for expected, found, kinds, named in run_ranks(2, _go_on, first, second, spec, config, whole):
        assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert kinds == ({torch.Tensor} if config else {DTensor})
        assert named


def _experts(spec):
    return {name: tensor.clone() for name, tensor in build(FSDP1Engine, spec, train=False).weights()}


def _before_the_first_step(spec):
    engine, fresh = build(FSDP1Engine, spec), build(FSDP1Engine, spec)
    fresh.load_state(_through_a_file(engine.state()))
    return steps_of(engine, 2), steps_of(fresh, 2)


def test_a_checkpoint_from_before_the_first_step_is_one(folder):
    for expected, found in run_ranks(2, _before_the_first_step, ModelSpec(folder, compute_dtype="fp32")):
        assert found == expected


def test_experts_leave_it_one_by_one(tmp_path):
    from safetensors.torch import load_file

    folder = make_tiny_model(tmp_path, "mixtral", num_local_experts=4, tie_word_embeddings=False)
    saved = load_file(f"{folder}/model.safetensors")
    for found in run_ranks(2, _experts, ModelSpec(folder, compute_dtype="fp32")):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def _moved_about(backend, spec, config):
    """Metrics of steps between which everything leaves the device, and of steps between which it stays."""
    results = []
    for is_moved in (True, False):
        engine = build(backend, spec, config)
        engine._offload_params = engine._offload_optimizer = is_moved
        metrics = []
        for _ in range(3):
            with engine.on_device(optimizer=True):
                metrics += steps_of(engine, 1)
            with engine.on_device():
                engine.infer(share(engine), Want.LOG_PROBS)
            weights = {name: tensor.clone() for name, tensor in engine.weights()}
        results.append((metrics, weights))
    return results


@pytest.mark.parametrize("backend, config", [(FSDPEngine, None), (FSDP1Engine, None), (FSDP1Engine, {"fsdp_size": 1})])
def test_moving_between_phases_changes_nothing(folder, backend, config):
    for (moved, weights), (kept, expected) in run_ranks(2, _moved_about, backend, ModelSpec(folder), config):
        assert moved == kept
        assert all(torch.equal(weights[name], expected[name]) for name in expected)

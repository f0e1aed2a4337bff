"""Activations that went to the host and came back give the same gradients, and take nothing else along."""

import pytest
import torch
from torch import nn

from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.models.activation_memory import ActivationOffload, Recompute
from verl.models.loader import ModelSpec
from verl.workers.engine import MicroBatching
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.fsdp1 import FSDP1Engine
from verl.workers.engine.local import LocalEngine

CPU = torch.device("cpu")


def small(**options):
    return ActivationOffload(CPU, min_bytes=0, **options)


def gradients(around, x, layers):
    with around:
        out = layers(x).square().sum()
    return torch.autograd.grad(out, [x, *layers.parameters()])


class Around:
    """No offload."""

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return None


@pytest.mark.parametrize("ahead", [0, 200, 1 << 20])
def test_gradients_are_the_same_to_the_bit(ahead):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Tanh())
    x = torch.randn(5, 8, requires_grad=True)
    offload = small(prefetch_bytes=ahead)
    for one, other in zip(gradients(Around(), x, layers), gradients(offload, x, layers), strict=True):
        assert torch.equal(one, other)
    assert offload.kept_bytes > 0


def test_what_is_saved_twice_travels_once_and_weights_stay():
    weight, x = nn.Parameter(torch.randn(100, 100)), torch.randn(10, 100, requires_grad=True)
    with small() as offload:
        h = x * 1.5
        out = (h @ weight.t()).sum() + h.exp().sum() + (h * h).sum() + (weight * weight).sum()
    assert offload.kept_bytes == 2 * x.numel() * 4  # h, and the result of exp
    out.backward()
    torch.testing.assert_close(x.grad, 1.5 * (weight.sum(0) + (1.5 * x).exp() + 3 * x))


def test_a_tensor_changed_between_two_uses_is_two_tensors():
    x = torch.randn(4, requires_grad=True)
    with small() as offload:
        h = x.detach().clone()
        first = x * h
        h.add_(1.0)
        (first + x * h).sum().backward()
    torch.testing.assert_close(x.grad, 2 * h - 1)
    assert offload.kept_bytes == 2 * 16


def test_small_and_expanded_tensors_stay():
    x = torch.randn(4, requires_grad=True)
    with ActivationOffload(CPU, min_bytes=17) as offload:
        x.exp().sum().backward()
    assert offload.kept_bytes == 0
    with small() as offload:
        (x.expand(100, 4) * torch.ones(1).expand(100, 4)).sum().backward()
    assert offload.kept_bytes == 0


def test_the_memory_of_an_activation_is_free_before_the_backward_pass():
    x = torch.randn(4, requires_grad=True)
    with small():
        h = x * 2
        seen = torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage())
        out = h.exp()
        del h
        assert seen.expired()
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x).exp())


def _steps(backend, spec, forced):
    engine = backend(spec, None, optim_section(), total_steps=10, grad_clip=1.0, seed=1)
    offloads = []
    if forced:
        engine._activations = lambda: offloads.append(small()) or offloads[-1]
    engine._recompute = Recompute(engine.module, always=True)  # as on a device
    size, place = engine.topology.dp_size, engine.topology.dp_rank
    data = make_batch(8, seed=5)[8 * place // size : 8 * (place + 1) // size]
    loss = value_loss() if spec.head == "value" else ppo_loss()
    metrics = [engine.train_step(data, loss, MicroBatching(size=2)) for _ in range(2)]
    shapes = {tuple(kept.host_copy.host.shape) for offload in offloads for kept in offload._order}
    weights = {tuple(parameter.shape) for parameter in engine.module.parameters() if parameter.ndim == 2}
    return metrics, sum(offload.kept_bytes for offload in offloads), len(shapes & weights)


@pytest.mark.parametrize(
    "backend, ranks, changes",
    [
        (LocalEngine, 1, {}),
        (LocalEngine, 1, {"gradient_checkpointing": False}),
        (LocalEngine, 1, {"head": "value", "compute_dtype": "bf16"}),
        (FSDPEngine, 2, {"compute_dtype": "bf16"}),
        (FSDP1Engine, 2, {}),
    ],
)
def test_engines_train_the_same_with_their_activations_on_the_host(tmp_path, backend, ranks, changes):
    spec = ModelSpec(make_tiny_model(tmp_path), **{"compute_dtype": "fp32", **changes})
    run = run_ranks if ranks > 1 else lambda _, fn, *args: [fn(*args)]
    plain, offloaded = (run(ranks, _steps, backend, spec, forced) for forced in (False, True))
    for (expected, _, _), (found, kept, weights) in zip(plain, offloaded, strict=True):
        assert found == expected
        assert kept > 0 and weights == 0

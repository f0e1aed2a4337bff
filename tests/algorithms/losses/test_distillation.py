"""The loss that draws a policy to its teacher: divergences over k tokens, estimates, and the policy-gradient form."""

import pytest
import torch

from verl.algorithms.kl import kl_full
from verl.algorithms.losses import TokenOutputs
from verl.algorithms.losses.distillation import (
    TEACHER_LOG_PROBS,
    TOP_IDS,
    TOP_LOG_PROBS,
    DistillationLoss,
    top_divergence,
)
from verl.config.actor import ActorConfig
from verl.config.distillation import DistillationLossConfig

VOCAB = 7
BETAS = [0.0, 1.0, 0.5, 0.2]


def logits(seed, rows=5):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def over_all(x, y, beta):
    """The divergence over the whole vocabulary, from logits."""
    if beta in (0.0, 1.0):
        return kl_full(x[None], y[None])[0] if beta else kl_full(y[None], x[None])[0]
    middle = (beta * y.softmax(-1) + (1 - beta) * x.softmax(-1)).log()
    return beta * kl_full(y[None], middle[None])[0] + (1 - beta) * kl_full(x[None], middle[None])[0]


def loss_of(**options):
    return DistillationLoss(ActorConfig(), DistillationLossConfig(**{"use_task_rewards": False, **options}), 8)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("with_tail", [True, False])
def test_over_all_tokens_it_is_the_divergence_and_has_its_gradient(beta, with_tail):
    x, y = logits(0).requires_grad_(), logits(1)
    ids = y.topk(VOCAB).indices
    found = top_divergence(x.log_softmax(-1).gather(1, ids), y.log_softmax(-1).gather(1, ids), beta, with_tail)
    expected = over_all(x, y, beta)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(part.sum(), x, retain_graph=True)[0] for part in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_over_k_tokens_and_the_rest_it_lies_between_zero_and_the_whole_and_grows_with_k(beta):
    x, y = logits(2).log_softmax(-1), logits(3).log_softmax(-1)
    order = y.argsort(-1, descending=True)
    found = [top_divergence(x.gather(1, order[:, :k]), y.gather(1, order[:, :k]), beta) for k in range(1, VOCAB)]
    for smaller, larger in zip(found, [*found[1:], over_all(x, y, beta)], strict=True):
        assert (smaller >= 0).all() and (smaller <= larger + 1e-6).all()
    assert (top_divergence(y[:, :3], y[:, :3], beta).abs() < 1e-12).all()


def test_minus_the_log_ratio_as_advantage_has_the_gradient_of_the_kl_and_as_loss_none():
    """Each token of the vocabulary is a response of its own, weighed by how often the policy samples it."""
    x, y = logits(4, 1).requires_grad_(), logits(5, 1)
    log_p, log_q = x.log_softmax(-1), y.log_softmax(-1)
    exact = torch.autograd.grad(kl_full(x[None], y[None]).sum(), x, retain_graph=True)[0]
    loss = loss_of(loss_mode="k1", use_policy_gradient=True)
    grads = {True: 0, False: 0}
    for token in range(VOCAB):
        own = log_p[:, token : token + 1]
        micro = {"response_mask": torch.ones(1, 1), "old_log_probs": own.detach(), "advantages": torch.zeros(1, 1)}
        micro[TEACHER_LOG_PROBS] = log_q[:, token : token + 1]
        share = own.detach().exp().item()
        value, metrics = loss(TokenOutputs(own), micro)
        assert metrics["distill/kl"].item() == pytest.approx((own - micro[TEACHER_LOG_PROBS]).item())
        grads[True] += share * torch.autograd.grad(value, x, retain_graph=True)[0]
        as_loss = loss.divergence(TokenOutputs(own), micro).sum()
        grads[False] += share * torch.autograd.grad(as_loss, x, retain_graph=True)[0]
    torch.testing.assert_close(grads[True], exact)
    assert grads[False].abs().max() < 1e-9 < exact.abs().max()


def micro_batch(k=3):
    """Two responses of three tokens at most, of which the second has two."""
    draw = torch.Generator().manual_seed(6)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    top = [torch.randn(2, 3, VOCAB, generator=draw).log_softmax(-1)[..., :k] for _ in range(2)]
    names = ("old_log_probs", "advantages", TEACHER_LOG_PROBS, "own")
    flat = {name: -torch.rand(2, 3, generator=draw) * mask for name in names}
    own = flat.pop("own").requires_grad_()
    micro = {**flat, "response_mask": mask, TOP_LOG_PROBS: top[0], TOP_IDS: torch.zeros(2, 3, k, dtype=torch.int32)}
    return TokenOutputs(own, top_log_probs=top[1].requires_grad_()), micro


@pytest.mark.parametrize("mode", ["forward_kl_topk", "reverse_kl_topk", "jsd_topk", "k3", "k1+"])
def test_it_is_added_to_the_loss_of_the_task_by_its_coefficient_and_masked_tokens_count_nothing(mode):
    out, micro = micro_batch()
    with_task = loss_of(loss_mode=mode, use_task_rewards=True, distillation_loss_coef=0.25)
    value, metrics = with_task(out, micro)
    alone, _ = loss_of(loss_mode=mode)(out, micro)
    assert value.item() == pytest.approx(metrics["actor/pg_loss"].item() + 0.25 * alone.item(), rel=1e-5)
    assert metrics["distill/loss"].item() == pytest.approx(alone.item(), rel=1e-5)
    kept = micro["response_mask"] > 0
    expected = (out.log_probs - micro[TEACHER_LOG_PROBS])[kept].mean().item()
    assert metrics["distill/kl"].item() == pytest.approx(expected, rel=1e-5)
    if mode.endswith("topk"):
        mass = micro[TOP_LOG_PROBS].exp().sum(-1)[kept].mean().item()
        assert metrics["distill/topk_mass"].item() == pytest.approx(mass, rel=1e-5)
    alone.backward()
    read = out.top_log_probs if mode.endswith("topk") else out.log_probs
    assert read.grad[kept].abs().min() > 0 and not read.grad[~kept].any()


def test_clamps_bound_log_probs_and_losses():
    found = top_divergence(torch.tensor([-50.0]), torch.tensor([-0.1]), 0.0, with_tail=False, smallest=-10.0)
    assert found.item() == pytest.approx(0.9048374 * 9.9, rel=1e-5)
    out, micro = micro_batch()
    loss = loss_of(loss_mode="forward_kl_topk", loss_max_clamp=1e-3)
    assert loss.divergence(out, micro).abs().max() <= 1e-3

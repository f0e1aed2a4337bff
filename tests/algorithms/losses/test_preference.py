"""Losses of preference pairs: by hand, and the same gradient however a batch of pairs is split."""

from functools import partial
from math import exp, log
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from verl.algorithms.losses import TokenOutputs
from verl.algorithms.losses.preference import (
    PairwiseLoss,
    best_and_worst,
    bradley_terry_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    odds_ratio_loss,
    of_difference,
    policy_pair_loss,
    reward_loss,
    robust_dpo_loss,
    simpo_loss,
    sppo_pair_loss,
)
from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.config.preference import DPOAlgorithmConfig
from verl.protocol import DataProto

D = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)


def softplus(x):
    return log(1 + exp(x))


def test_dpo_by_hand():
    assert_close(dpo_loss(D, 0.5), torch.tensor([log(2), softplus(-0.5), softplus(1)], dtype=torch.float64))
    smoothed = [0.9 * softplus(-0.5 * d) + 0.1 * softplus(0.5 * d) for d in D.tolist()]
    assert_close(dpo_loss(D, 0.5, 0.1), torch.tensor(smoothed, dtype=torch.float64))
    with pytest.raises(ValueError, match="label_smoothing=0.5 must be at least 0 and below 0.5"):
        dpo_loss(D, 0.5, 0.5)


def test_smoothed_dpo_has_its_minimum_where_the_label_is_as_sure_as_it_says():
    d = torch.tensor([log(0.9 / 0.1) / 0.5], dtype=torch.float64, requires_grad=True)
    dpo_loss(d, 0.5, 0.1).backward()
    assert_close(d.grad, torch.zeros(1, dtype=torch.float64))


def test_ipo_by_hand_is_zero_at_its_margin():
    assert ipo_loss(D, 0.5).tolist() == [1, 0, 9]


def test_bradley_terry_by_hand_with_and_without_a_margin():
    assert_close(bradley_terry_loss(D), torch.tensor([log(2), softplus(-1), softplus(2)], dtype=torch.float64))
    margins = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    assert_close(bradley_terry_loss(D, margins), torch.tensor([log(2), log(2), softplus(2.5)], dtype=torch.float64))


def test_relatives_of_dpo_by_hand():
    assert hinge_loss(D, 0.5).tolist() == [1, 0.5, 2]
    assert_close(simpo_loss(D, 2.0, 0.5), torch.tensor([softplus(0.5), softplus(-1.5), softplus(4.5)]).double())
    chosen, rejected = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5])
    assert sppo_pair_loss(chosen, rejected, 0.5).tolist() == [0, 1 + 2.25]
    # probabilities 0.5 and 0.2: odds 1 and 1/4
    means = torch.tensor([0.5, 0.2], dtype=torch.float64).log()
    assert odds_ratio_loss(means[:1], means[1:], 0.1).item() == pytest.approx(0.1 * log(1 + 1 / 4))
    # each pair once labelled rightly with 0.9, once wrongly with 0.1: the mean is the loss of the right label
    mean = 0.9 * robust_dpo_loss(D, 0.5, 0.1) + 0.1 * robust_dpo_loss(-D, 0.5, 0.1)
    assert_close(mean, dpo_loss(D, 0.5))


def test_a_reward_models_loss_by_hand():
    found = reward_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0.5]), 0.1)
    assert found.item() == pytest.approx(softplus(-0.5) + 0.9)


def test_the_best_of_a_group_is_paired_with_its_worst_and_equal_ones_with_none():
    scores = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.0, 0.5, 0.5])
    assert best_and_worst(scores, torch.tensor([0, 0, 0, 1, 1, 2, 2])).tolist() == [0, 1, -1, 0, 0, 0, 0]
    assert best_and_worst(scores, torch.tensor([0, 1, 0, 1, 0, 1, 2])).tolist() == [0, 2, -1, 0, 1, -2, 0]


# ------------------------------------------------------------------------------------------------ as an engine's loss

PAIRS = torch.tensor([1, -1, 0, -2, 2, 3, -3])
CUTS = ([[0, 1, 2, 3, 4, 5, 6]], [[0, 3, 5], [1, 2], [4, 6]], [[6], [2], [0, 4], [1, 3, 5]])


def made_batch():
    mask = ragged_mask(7, 9, seed=3, holes=False)
    lengths = mask.sum(-1)
    layout = Layout(torch.zeros_like(lengths), lengths, mask.shape[1])
    packed = lambda x: Ragged(x[mask.bool()], layout)  # noqa: E731
    columns = {"response_mask": mask, "ref_log_prob": -normal(mask, 1).abs() * mask}
    batch = DataProto.from_ragged({name: packed(column) for name, column in columns.items()})
    return batch.put("pairs", PAIRS), (-normal(mask, 2).abs() * mask).requires_grad_(True), mask, packed


def gather_of(outputs, packed):
    """What an engine gives a loss: scores of all rows under the present weights, and a function of all ranks' rows."""
    of_batch = lambda: packed(outputs.detach())  # noqa: E731
    return SimpleNamespace(log_probs=of_batch, values=of_batch, apply=lambda function, values: function(*values))


@pytest.mark.parametrize("cut", CUTS, ids=len)
@pytest.mark.parametrize("score", ["log_ratio", "log_prob", "value"])
def test_loss_and_gradient_are_those_of_all_pairs_at_once_however_rows_are_split(score, cut):
    batch, outputs, mask, packed = made_batch()
    loss = PairwiseLoss(of_difference(partial(dpo_loss, beta=0.3, label_smoothing=0.1)), score, scale=0.3)
    prepared, is_sum = loss.prepare(batch, gather_of(outputs, packed))
    assert not is_sum and "pair_loss" not in batch
    columns = {name: prepared.column(name) for name in loss.columns}

    of_rows = outputs - columns["ref_log_prob"] if score == "log_ratio" else outputs
    if score == "value":
        of_rows = of_rows * (mask * (torch.arange(mask.shape[1]) == mask.sum(-1, keepdim=True) - 1))
    s = (of_rows * mask).sum(-1)
    d = torch.stack([s[0] - s[1], s[4] - s[3], s[5] - s[6]])
    expected = dpo_loss(d, 0.3, 0.1).mean()
    (gradient,) = torch.autograd.grad(expected, outputs, retain_graph=True)

    total, margin, whole = 0, 0, loss.weight(columns)
    for rows in cut:
        micro = {name: column[rows] for name, column in columns.items()}
        out = TokenOutputs(**{"values" if score == "value" else "log_probs": outputs[rows]})
        value, metrics = loss(out, micro)
        share = loss.weight(micro) / whole
        total, margin = total + share * value, margin + share * metrics["actor/preference_margin"]
    assert_close(total, expected)
    assert_close(margin, 0.3 * d.detach().mean())
    assert_close(torch.autograd.grad(total, outputs)[0], gradient)


def test_a_step_with_half_a_pair_is_refused():
    batch, outputs, _, packed = made_batch()
    batch.put("pairs", torch.tensor([1, -1, 0, -2, 0, 3, 3]))
    with pytest.raises(ValueError, match=r"pair 2 has 0 chosen and 1 rejected rows .*\(2 such pairs\).*whole pairs"):
        PairwiseLoss(of_difference(dpo_loss)).prepare(batch, gather_of(outputs, packed))


def test_a_batch_without_pairs_costs_nothing():
    batch, outputs, _, packed = made_batch()
    batch.put("pairs", torch.zeros(7, dtype=torch.int64))
    loss = PairwiseLoss(of_difference(dpo_loss))
    prepared, _ = loss.prepare(batch, gather_of(outputs, packed))
    columns = {name: prepared.column(name) for name in loss.columns}
    value, _ = loss(TokenOutputs(log_probs=outputs), columns)
    assert value == 0 and loss.weight(columns) == 0


ALGORITHMS = [
    dict(loss_type="sigmoid", label_smoothing=0.1, rpo_alpha=0.3),
    dict(loss_type="sigmoid", reference_free=True),
    *(dict(loss_type=name) for name in ("robust", "hinge", "ipo", "sppo", "simpo", "orpo")),
]


@pytest.mark.parametrize("options", ALGORITHMS, ids=lambda options: "-".join(map(str, options.values())))
def test_micro_batches_of_whole_pairs_give_the_gradient_of_all_pairs_without_another_pass(options):
    options = DPOAlgorithmConfig(**options)
    batch, _, mask, packed = made_batch()
    mask = mask * (torch.arange(7) != 2)[:, None]  # a row of no pair may be empty
    outputs = (-normal(mask, 2).abs() * mask).requires_grad_(True)
    apart, together = (policy_pair_loss(options, together=is_so) for is_so in (False, True))
    prepared, _ = apart.prepare(batch, gather_of(outputs, packed))
    results = []
    for loss, cuts in ((apart, ([0, 4], [1, 3, 6], [2, 5])), (together, ([0, 1, 2], [5, 3, 6, 4]))):
        columns = {name: prepared.column(name) for name in loss.columns}
        parts = [
            (loss.weight(micro) / 6, *loss(TokenOutputs(log_probs=outputs[rows]), micro))
            for rows in cuts
            for micro in [{name: column[rows] for name, column in columns.items()}]
        ]
        total = sum(share * value for share, value, _ in parts)
        names = set.intersection(*(set(metrics) for *_, metrics in parts))
        means = {name: float(sum(share * metrics[name] for share, _, metrics in parts)) for name in names}
        results.append((total, means, torch.autograd.grad(total, outputs)[0]))
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][2], results[1][2])
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-6)
    # what validation computes of the same rows is what the step logs
    columns = {name: prepared.column(name) for name in together.columns}
    rows = [0, 1, 4, 3, 5, 6]
    lengths = (columns["response_mask"] != 0).sum(-1)
    measured = {"score": together.scores(outputs.detach(), columns), "tokens": lengths}
    measured["log_prob"] = (outputs.detach() * (columns["response_mask"] != 0)).sum(-1)
    found = together.of_pairs({name: column[rows].double() for name, column in measured.items()})
    assert found == pytest.approx({name: results[1][1][f"train/{name}"] for name in found}, rel=1e-5)

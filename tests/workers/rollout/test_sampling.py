import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.sampling import Sampler, cut_to_top_k, cut_to_top_p, pick, uniforms


def test_uniforms_fill_the_unit_interval_evenly_in_both_directions():
    table = np.stack([uniforms(np.arange(300, dtype=np.uint64), step) for step in range(300)])
    assert 0 <= table.min() and table.max() < 1
    for values in (table.ravel(), table[0], table[:, 0], table.diagonal()):
        counts = np.histogram(values, bins=10, range=(0, 1))[0]
        expected = len(values) / 10
        assert ((counts - expected) ** 2 / expected).sum() < 35  # chi-square, 9 degrees, p < 1e-4
    steps = np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]
    seeds = np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]
    assert abs(steps) < 0.015 and abs(seeds) < 0.015
    assert len(np.unique(table)) == table.size


@pytest.mark.parametrize("vocab", [1, 3, 256, 257, 1000, 1024, 50257])
def test_pick_inverts_the_cumulative_distribution(vocab):
    weights = torch.rand(40, vocab, generator=torch.Generator().manual_seed(vocab)) ** 8
    weights[:, ::3] = 0
    weights[:, vocab // 2] += 0.1
    uniform = torch.linspace(0, 1 - 2**-52, 40, dtype=torch.float64)[:, None]
    tokens, total = pick(weights, uniform)
    cumulative = weights.double().cumsum(-1)
    assert torch.allclose(total, cumulative[:, -1:])
    before = torch.where(tokens > 0, cumulative.gather(-1, (tokens - 1).clamp(min=0)), 0.0)
    slack = 1e-6 * total
    assert (before - slack <= uniform * total).all() and (
        uniform * total <= cumulative.gather(-1, tokens) + slack
    ).all()


def test_a_token_of_weight_zero_is_never_picked():
    weights = torch.zeros(2000, 512)
    weights[:, 100] = 1e-30
    weights[:, 300] = torch.rand(2000)
    extremes = torch.tensor([0.0, 1 - 2**-52], dtype=torch.float64).repeat(1000)[:, None]
    assert set(pick(weights, extremes)[0].flatten().tolist()) <= {100, 300}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_top_p_keeps_the_smallest_set_of_likeliest_tokens(data):
    rows = data.draw(st.lists(st.lists(st.floats(0, 1, width=32), min_size=9, max_size=9), min_size=1, max_size=4))
    weights = torch.tensor(rows) + torch.linspace(0.1, 0.2, 9)
    top_p = torch.tensor([[data.draw(st.sampled_from([0.05, 0.3, 0.7, 0.999, 1.0]))] for _ in rows])
    kept = weights.clone()
    cut_to_top_p(kept, top_p)
    for before, after, p in zip(weights.double(), kept, top_p.flatten().double(), strict=True):
        inside = after > 0
        assert torch.equal(after[inside], before[inside].float())
        lightest = before[inside].min()
        assert not (before[~inside] >= lightest).any()
        assert before[inside].sum() >= p * before.sum() * (1 - 1e-6)
        assert p == 1 or before[before > lightest].sum() < p * before.sum() * (1 + 1e-6)


def test_top_k_keeps_k_and_ties():
    weights = torch.tensor([[5.0, 4, 4, 3, 2], [5.0, 4, 4, 3, 2], [1.0, 2, 3, 4, 5], [1.0, 2, 3, 4, 5]])
    cut_to_top_k(weights, torch.tensor([[1], [2], [0], [99]]))
    assert (weights > 0).sum(-1).tolist() == [1, 3, 5, 5]


def test_rows_are_generated_alike_in_one_piece_and_in_many(monkeypatch):
    sampling = [SamplingParams(9, temperature=0.5 + i / 8, top_k=i % 5, want_log_probs=True) for i in range(20)]
    sampler = Sampler([Request((1,), s, i) for i, s in enumerate(sampling)], torch.device("cpu"))
    logits = torch.randn(20, 130, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = sampler.sample(logits.clone(), step=4)
    monkeypatch.setattr("verl.workers.rollout.sampling._LOGITS_AT_ONCE", 400)
    again, log_probs_again = sampler.sample(logits.clone(), step=4)
    assert torch.equal(tokens, again) and torch.equal(log_probs, log_probs_again)
    sampler.keep(torch.tensor([3, 11]))
    assert torch.equal(sampler.sample(logits[[3, 11]], step=4)[0], tokens[[3, 11]])

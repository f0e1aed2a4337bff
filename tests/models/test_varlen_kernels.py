"""Attention of packed rows is each row's own, whatever its length, window, cap, sinks and shared prompt."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from verl.models.attention import kernels
from verl.models.attention.kernels import (
    LONGEST,
    AttentionOptions,
    Packing,
    attend,
    attend_row_by_row,
    choose_kernel,
    flash_attn,
    flash_attn_kernel,
    torch_varlen,
)

LENGTHS = {
    "one row": (9,),
    "equal rows": (8, 8, 8),
    "unequal rows": (3, 17, 1, 30, 16),
    "long and short rows": (LONGEST + 5, 4, LONGEST + 40, 1),
}
ATTENTION_OPTIONS = {
    "plain": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, window=5),
    "window of itself": AttentionOptions(0.3, window=1),
    "cap": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, window=7, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


def layer(tokens, heads=4, kv_heads=2, width=8, value_width=8, dtype=torch.float64):
    draw = torch.Generator().manual_seed(tokens)
    shapes = (heads, width), (kv_heads, width), (kv_heads, value_width)
    return [torch.randn(tokens, *shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def shared_prompts():
    """A row of 12 tokens, two rows that see its first 5 before their own, and a row on its own."""
    own = [torch.arange(12), torch.arange(12, 16), torch.arange(16, 26), torch.arange(26, 29)]
    keys = [own[0], *(torch.cat([torch.arange(5), tokens]) for tokens in own[1:3]), own[3]]
    return Packing.with_shared_keys([len(tokens) for tokens in own], keys)


def formula(q, k, v, packing, scoring):
    """Token by token: softmax over the keys it sees."""
    index = packing.kv_index if packing.kv_index is not None else torch.arange(packing.tokens)
    k, v = (x[index].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, first_key = [], 0
    for queries, keys in zip(q.split(packing.q_lengths), packing.k_lengths, strict=True):
        for number, query in enumerate(queries):
            last = first_key + keys - len(queries) + number + 1
            first = max(first_key, last - (scoring.window or last))
            scores = torch.einsum("hd,khd->hk", query, k[first:last]) * scoring.scale
            if scoring.softcap:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            sinks = query.new_empty(len(scores), 0) if scoring.sinks is None else scoring.sinks[:, None].to(query)
            weights = torch.softmax(torch.cat([scores, sinks], 1), 1)[:, : scores.shape[1]]
            rows.append(torch.einsum("hk,khd->hd", weights, v[first:last]))
        first_key += keys
    return torch.stack(rows)


def assert_same(found, expected, parts, tolerance):
    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=expected.dtype)
    gradients = (torch.autograd.grad(out, parts, pull, retain_graph=True) for out in (found, expected))
    for one, other in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scoring", ATTENTION_OPTIONS.values(), ids=ATTENTION_OPTIONS)
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), None], ids=[*LENGTHS, "shared prompts"])
def test_every_token_sees_its_own_row_up_to_itself(lengths, scoring):
    packing = shared_prompts() if lengths is None else Packing.of_lengths(lengths)
    parts = layer(packing.tokens)
    # short rows are scored in fp32
    assert_same(attend(*parts, packing, scoring), formula(*parts, packing, scoring), parts, 1e-5)


@pytest.mark.parametrize("scoring", ATTENTION_OPTIONS.values(), ids=ATTENTION_OPTIONS)
@pytest.mark.parametrize("value_width", [5, 12])
def test_values_may_be_of_another_width(value_width, scoring):
    packing = Packing.of_lengths((LONGEST + 1, 7))
    parts = layer(packing.tokens, value_width=value_width)
    assert_same(attend(*parts, packing, scoring), formula(*parts, packing, scoring), parts, 1e-5)


def test_a_row_is_the_same_bit_by_bit_whatever_other_rows_hold():
    packing = Packing.of_lengths((7, 20, 11))
    q, k, v = layer(packing.tokens, dtype=torch.float32)
    before = attend(q, k, v, packing, AttentionOptions(0.3))
    with torch.no_grad():
        for x in (q, k, v):
            x[:7] += 1
            x[27:] -= 1
    assert torch.equal(attend(q, k, v, packing, AttentionOptions(0.3))[7:27], before[7:27])


# -- what the CUDA kernels are called with ------------------------------------------------------------------------


def reference_kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, scale, window, softcap=0.0):
    """What the CUDA kernels compute, and the shapes they ask for."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32
    lengths, k_lengths = (tuple(cu.diff().tolist()) for cu in (cu_q, cu_k))
    assert (max(lengths), max(k_lengths)) == (longest_q, longest_k) and window[1] == 0
    scoring = AttentionOptions(scale, None if window[0] < 0 else window[0] + 1, softcap or None)
    return attend_row_by_row(q, k, v, Packing(cu_q, cu_k, lengths, k_lengths), scoring)


@pytest.mark.parametrize("scoring", [AttentionOptions(0.3), AttentionOptions(0.3, window=5)], ids=["plain", "window"])
@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("packing", [Packing.of_lengths((3, 17, 1)), shared_prompts()], ids=["rows", "shared prompts"])
def test_torchs_kernel_is_asked_for_what_by_rows_computes(packing, takes_groups, scoring, monkeypatch):
    signature = inspect.signature(varlen.varlen_attn)

    def kernel(*args, **options):
        if not takes_groups:
            assert args[0].shape[1] == args[1].shape[1] == args[2].shape[1]
        else:
            assert signature.bind(*args, **options).arguments["enable_gqa"]
        return reference_kernel(*args, options["scale"], options["window_size"])

    names = frozenset(signature.parameters) - (set() if takes_groups else {"enable_gqa"})
    monkeypatch.setattr(kernels, "_varlen", lambda: (kernel, names))
    monkeypatch.setattr(kernels, "choose_kernel", lambda q, v, scoring: torch_varlen)
    parts = layer(packing.tokens, width=12, value_width=10)
    assert_same(attend(*parts, packing, scoring), formula(*parts, packing, scoring), parts, 1e-5)


@pytest.mark.parametrize(
    "scoring",
    [ATTENTION_OPTIONS["plain"], ATTENTION_OPTIONS["window"], ATTENTION_OPTIONS["cap"]],
    ids=["plain", "window", "cap"],
)
def test_flash_attn_gets_the_options_of_the_row_by_row_kernel(scoring, monkeypatch):
    def kernel(*args, softmax_scale, causal, window_size, softcap):
        assert causal
        return reference_kernel(*args, softmax_scale, window_size, softcap)

    monkeypatch.setattr(kernels, "flash_attn_kernel", lambda: kernel)
    monkeypatch.setattr(kernels, "choose_kernel", lambda q, v, scoring: flash_attn)
    packing = shared_prompts()
    parts = layer(packing.tokens, width=12, value_width=10)
    assert_same(attend(*parts, packing, scoring), formula(*parts, packing, scoring), parts, 1e-5)


def on_cuda(dtype=torch.bfloat16, width=64):
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(5, 4, width), device="cuda")


@pytest.mark.parametrize(
    "query, scoring, has_flash, has_varlen, kernel",
    [
        (on_cuda(), AttentionOptions(1.0), True, True, flash_attn),
        (on_cuda(), AttentionOptions(1.0), False, True, torch_varlen),
        (on_cuda(), AttentionOptions(1.0, softcap=3.0), True, True, flash_attn),
        (on_cuda(), AttentionOptions(1.0, softcap=3.0), False, True, attend_row_by_row),
        (on_cuda(), ATTENTION_OPTIONS["sinks"], True, True, attend_row_by_row),
        (on_cuda(), AttentionOptions(1.0), False, False, attend_row_by_row),
        (on_cuda(torch.float32), AttentionOptions(1.0), True, True, attend_row_by_row),
        (on_cuda(width=512), AttentionOptions(1.0), True, True, attend_row_by_row),
    ],
)
def test_the_fastest_kernel_that_can_is_chosen(query, scoring, has_flash, has_varlen, kernel, monkeypatch):
    monkeypatch.setattr(kernels, "flash_attn_kernel", lambda: flash_attn if has_flash else None)
    monkeypatch.setattr(kernels, "_can_use_varlen", lambda device, window: has_varlen)
    assert choose_kernel(query, query, scoring) is kernel


def test_a_slow_way_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "flash_attn_kernel", lambda: None)
    kernels._warn_slow_attention.cache_clear()
    for _ in range(2):
        choose_kernel(on_cuda(), on_cuda(), AttentionOptions(1.0, softcap=3.0))
    assert caplog.text.count("pip install flash-attn") == 1


@pytest.mark.parametrize(
    "text",
    ["", "raise ImportError('libtorch: undefined symbol _ZN3c10')", "raise OSError('libcudart.so.12: cannot open')"],
    ids=["a namespace without the function", "built for another torch", "a library is missing"],
)
def test_a_flash_attn_that_cannot_be_used_gives_way_to_torch(text, tmp_path, monkeypatch, caplog):
    # SGLang requires flash-attn-4, whose wheel holds flash_attn/cute/ and no flash_attn/__init__.py
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    if text:
        (tmp_path / "flash_attn" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    flash_attn_kernel.cache_clear()
    monkeypatch.setattr(kernels, "_can_use_varlen", lambda device, window: True)
    try:
        assert choose_kernel(on_cuda(), on_cuda(), AttentionOptions(1.0)) is torch_varlen
        assert "no usable flash_attn_varlen_func" in caplog.text
    finally:
        flash_attn_kernel.cache_clear()
        sys.modules.pop("flash_attn", None)


def test_keys_are_repeated_for_heads_that_share_them_on_a_gpu(monkeypatch):
    # torch's memory-efficient kernel takes no shared keys; the one that does builds whole matrices of scores
    asked = []
    monkeypatch.setattr(kernels, "_is_cuda", lambda q: True)
    monkeypatch.setattr(
        kernels.F, "scaled_dot_product_attention", lambda q, k, v, **options: asked.append((k, options)) or q
    )
    q, k, v = (part.unsqueeze(0).transpose(1, 2) for part in layer(9))
    kernels._dense(q, k, v, AttentionOptions(1.0))
    ((keys, options),) = asked
    assert keys.shape[1] == q.shape[1] and not options["enable_gqa"]

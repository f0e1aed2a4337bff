from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.tiny_models import make_tiny_model
from verl.algorithms.kl import kl_full
from verl.models import liger
from verl.models import logits as chunks
from verl.models import token_outputs as module
from verl.models.distributions import (
    TopTokens,
    chunked_divergence,
    chunked_log_probs_of,
    chunked_top_log_probs,
)
from verl.models.heads import OutputHead, detect_output_head, score_layer
from verl.models.loader import ModelSpec, load_model
from verl.models.token_outputs import (
    LogitTransform,
    ReferenceStates,
    chunked_log_probs,
    full_log_probs,
    token_outputs,
)

MATHS = [
    LogitTransform(),
    LogitTransform(0.7),
    LogitTransform(1.3, scale=0.2),
    LogitTransform(0.9, softcap=5.0),
    LogitTransform(1.1, 0.5, 3.0),
]


def reference(hidden, weight, targets, maths):
    logits = (hidden @ weight.t()) * maths.scale
    if maths.softcap:
        logits = torch.tanh(logits / maths.softcap) * maths.softcap
    return plain_log_probs_64(logits / maths.temperature, targets)


def plain_log_probs_64(logits, targets):
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("maths", MATHS)
@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("chunk_rows", [64, 1000])
def test_chunks_give_the_values_and_gradients_of_whole_logits(monkeypatch, maths, want_entropy, chunk_rows):
    rows, vocab, size = 150, 211, 24
    monkeypatch.setitem(chunks._CHUNK_BYTES, "cpu", chunk_rows * 4 * vocab)
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 7 * 4 * vocab)
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, size, requires_grad=True), torch.randn(vocab, size, requires_grad=True)
    targets, pull = torch.randint(0, vocab, (rows,)), torch.randn(2, rows)
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, maths, want_entropy)
    hidden_64, weight_64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_probs_64, entropy_64 = reference(hidden_64, weight_64, targets, maths)
    loss, loss_64 = (log_probs * pull[0]).sum(), (log_probs_64 * pull[0]).sum()
    if want_entropy:
        loss, loss_64 = loss + (entropy * pull[1]).sum(), loss_64 + (entropy_64 * pull[1]).sum()
        torch.testing.assert_close(entropy.double(), entropy_64, rtol=1e-5, atol=1e-5)
        # of old log-probs with entropy and an update without, the ratio is exactly 1
        assert torch.equal(log_probs, chunked_log_probs(hidden, weight, targets, maths)[0])
    loss.backward()
    loss_64.backward()
    torch.testing.assert_close(log_probs.double(), log_probs_64, rtol=1e-5, atol=1e-5)
    for ours, theirs in ((hidden.grad, hidden_64.grad), (weight.grad, weight_64.grad)):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_a_second_backward_pass_gives_the_same_gradient():
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8)
    log_probs, _ = chunked_log_probs(hidden, weight, torch.arange(9))
    first = torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)[0]
    second = torch.autograd.grad(log_probs.sum(), hidden)[0]
    torch.testing.assert_close(first, second)


def test_bf16_weights_get_gradients_summed_in_fp32(monkeypatch):
    vocab, size, rows = 64, 16, 4096
    monkeypatch.setitem(chunks._CHUNK_BYTES, "cpu", 64 * 2 * vocab)
    torch.manual_seed(0)
    hidden = torch.randn(rows, size, dtype=torch.bfloat16) + 1
    weight = (torch.randn(vocab, size) * 0.1).bfloat16().requires_grad_()
    log_probs, _ = chunked_log_probs(hidden, weight, torch.randint(0, vocab, (rows,)))
    log_probs.sum().backward()
    wide = weight.detach().double().requires_grad_()
    torch.manual_seed(0)
    torch.randn(rows, size, dtype=torch.bfloat16), torch.randn(vocab, size)
    reference(hidden.double(), wide, torch.randint(0, vocab, (rows,)), LogitTransform())[0].sum().backward()
    assert (weight.grad - wide.grad).norm() < 0.01 * wide.grad.norm()


def test_no_rows_give_no_log_probs_and_a_zero_gradient():
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    log_probs, entropy = chunked_log_probs(hidden, weight, torch.zeros(0, dtype=torch.long), want_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == (0,) and not weight.grad.any()


class Largest(TorchDispatchMode):
    """The most numbers that any tensor held which was made within the block."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *made])
        return result


@contextmanager
def kept_for_backward():
    """Sizes of the tensors that autograd keeps within the block."""
    sizes = []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("want_full_kl", [False, True])
def test_whole_logits_are_never_held_forward_or_backward(monkeypatch, tmp_path, want_entropy, want_full_kl):
    vocab = 4000
    make_tiny_model(tmp_path, vocab_size=vocab)
    model = load_model(ModelSpec(str(tmp_path)))
    monkeypatch.setitem(chunks._CHUNK_BYTES, "cpu", 64 * 4 * vocab)
    ids, positions = torch.randint(4, 100, (2, 400)), torch.arange(799)
    limit = 130 * vocab  # two chunks of 64 rows, of 799
    assert model.get_output_embeddings().weight.numel() < limit < 799 * vocab / 5
    head = OutputHead("fused")
    with Largest() as largest, kept_for_backward() as kept:
        read = (model, ids, None, positions, ids.flatten()[1:], head, 1.0, want_entropy)
        reference = None
        if want_full_kl:
            with torch.no_grad():
                states = token_outputs(*read, want_states=True).states
            reference = ReferenceStates(states + 0.1, torch.randn(vocab, states.shape[1]), head)
        scores = token_outputs(*read, reference=reference)
        sum(part.sum() for part in scores if part is not None).backward()
    assert max(largest.numbers, *kept) < limit
    with Largest() as largest:
        model(input_ids=ids)
    assert largest.numbers >= 799 * vocab


def divergence_64(logits, ref_logits, beta):
    """KL(p || q) for 1, KL(q || p) for 0, between them the generalised Jensen-Shannon divergence, as published."""
    if beta in (0.0, 1.0):
        return kl_full(logits, ref_logits) if beta else kl_full(ref_logits, logits)
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    middle = (beta * q + (1 - beta) * p + 1e-300).log()
    return beta * kl_full(ref_logits, middle) + (1 - beta) * kl_full(logits, middle)


@pytest.mark.parametrize("maths", MATHS)
@pytest.mark.parametrize("ref_maths", [LogitTransform(0.7), LogitTransform(1.1, 0.5, 3.0)])
@pytest.mark.parametrize(("chunk_rows", "beta"), [(64, 1.0), (1000, 1.0), (64, 0.0), (64, 0.3)])
def test_chunks_give_the_divergence_of_whole_logits_and_its_gradient(monkeypatch, maths, ref_maths, chunk_rows, beta):
    rows, vocab, size, ref_size = 150, 211, 24, 16
    monkeypatch.setitem(chunks._CHUNK_BYTES, "cpu", chunk_rows * 2 * 4 * vocab)
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 7 * 4 * vocab)
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, size, requires_grad=True), torch.randn(vocab, size, requires_grad=True)
    ref_hidden, ref_weight = torch.randn(rows, ref_size), torch.randn(vocab, ref_size)
    pull = torch.randn(rows)
    pull[::3] = 0.0  # masked tokens
    maths, ref_maths = maths._replace(excluded_tokens=(5, 9)), ref_maths._replace(excluded_tokens=(5, 9))
    kl = chunked_divergence(hidden, weight, ref_hidden, ref_weight, maths, ref_maths, beta)
    (kl * pull).sum().backward()

    def logits(hidden, weight, maths):
        made = (hidden @ weight.t()) * maths.scale
        made = torch.tanh(made / maths.softcap) * maths.softcap if maths.softcap else made
        return (made / maths.temperature).index_fill(1, torch.tensor(maths.excluded_tokens), -torch.inf)[None]

    hidden_64, weight_64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    ref_logits = logits(ref_hidden.double(), ref_weight.double(), ref_maths)
    kl_64 = divergence_64(logits(hidden_64, weight_64, maths), ref_logits, beta)[0]
    (kl_64 * pull).sum().backward()
    torch.testing.assert_close(kl.double(), kl_64, rtol=1e-5, atol=1e-5)
    assert not hidden.grad[::3].any()
    for ours, theirs in ((hidden.grad, hidden_64.grad), (weight.grad, weight_64.grad)):
        assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("maths", MATHS)
def test_chunks_give_the_likeliest_tokens_of_whole_logits_and_log_probs_of_any(monkeypatch, maths):
    rows, vocab, size, k = 150, 211, 24, 5
    monkeypatch.setitem(chunks._CHUNK_BYTES, "cpu", 64 * 4 * vocab)
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 7 * 4 * vocab)
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, size, requires_grad=True), torch.randn(vocab, size, requires_grad=True)
    targets, pull = torch.randint(0, vocab, (rows,)), torch.randn(rows, k)
    hidden_64, weight_64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    whole = torch.stack([reference(hidden_64, weight_64, torch.full((rows,), v), maths)[0] for v in range(vocab)], 1)
    of_targets, values, ids = chunked_top_log_probs(hidden, weight, targets, TopTokens(k, vocab - 11), maths)
    expected = whole[:, : vocab - 11].topk(k)
    assert torch.equal(ids.long(), expected.indices) and ids.dtype == torch.int32
    torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_targets.double(), whole.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)

    found = chunked_log_probs_of(hidden, weight, ids, maths)
    torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-5)
    (found * pull).sum().backward()
    (expected.values * pull).sum().backward()
    for ours, theirs in ((hidden.grad, hidden_64.grad), (weight.grad, weight_64.grad)):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_the_full_kl_to_itself_is_exactly_zero_and_so_is_its_gradient():
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    kl = chunked_divergence(hidden, weight, hidden, weight)
    kl.sum().backward()
    assert not kl.any() and not hidden.grad.any() and not weight.grad.any()
    none = chunked_divergence(hidden[:0], weight, hidden[:0], weight)
    assert none.shape == (0,) and not torch.autograd.grad(none.sum(), weight)[0].any()


@pytest.mark.parametrize("maths", MATHS)
def test_a_kernel_of_log_probs_takes_the_place_of_the_torch_code(monkeypatch, maths):
    calls = []

    def log_probs(logits, targets):
        assert logits.dtype == torch.float32
        calls.append(len(logits))
        return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)

    monkeypatch.setattr(liger, "target_log_probs", log_probs)
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets, pull, results = torch.randint(0, 50, (30,)), torch.randn(30), []
    for triton in (False, True):
        found, _ = chunked_log_probs(hidden, weight, targets, maths, triton=triton)
        results.append((found.detach(), *torch.autograd.grad((found * pull).sum(), (hidden, weight))))
    assert calls
    for ours, kernels in zip(*results, strict=True):
        torch.testing.assert_close(kernels, ours, rtol=1e-5, atol=1e-5)
    calls.clear()
    _, entropy = chunked_log_probs(hidden, weight, targets, maths, want_entropy=True, triton=True)
    entropy.sum().backward()
    assert not calls  # it gives no entropy


FAMILIES = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": False},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {},
    "granite": {"logits_scaling": 8.0},
    "cohere": {},
    "phi": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "smollm3": {},
}
HEADS = {"gemma2": ("fused", 1.0, 2.0), "granite": ("fused", 0.125, 0.0), "cohere": ("fused", 0.0625, 0.0),
         "phi": ("logits", 1.0, 0.0)}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_right_padded_rows_are_those_of_the_models_own_logits(tmp_path, family):
    make_tiny_model(tmp_path, family, **FAMILIES[family])
    model = load_model(ModelSpec(str(tmp_path))).eval()
    head = detect_output_head(model, torch.device("cpu"))
    assert (head.kind, head.scale, head.softcap) == HEADS.get(family, ("fused", 1.0, 0.0))
    ids = torch.randint(4, 100, (3, 20))
    lengths = [20, 11, 5]
    positions = torch.cat([torch.arange(row * 20 + 1, row * 20 + length - 1) for row, length in enumerate(lengths)])
    targets = ids.flatten()[positions + 1]
    with torch.no_grad():
        scores = token_outputs(model, ids, None, positions, targets, head, 0.8, True)
        for row, length in enumerate(lengths):
            logits = model(input_ids=ids[row : row + 1, :length]).logits[0, 1:-1]
            expected, entropy = full_log_probs(logits, ids[row, 2:length], 0.8, True)
            here = positions // 20 == row
            torch.testing.assert_close(scores.log_probs[here], expected, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(scores.entropy[here], entropy, rtol=1e-4, atol=2e-5)


def test_values_are_the_token_classifiers_own(tmp_path):
    make_tiny_model(tmp_path, "llama")
    model = load_model(ModelSpec(str(tmp_path), head="value")).eval()
    ids = torch.randint(4, 100, (2, 9))
    positions = torch.tensor([0, 3, 8, 12])
    with torch.no_grad():
        values = token_outputs(model, ids, None, positions, None, OutputHead("value"), 1.0, False).values
        torch.testing.assert_close(values, model(input_ids=ids).logits.flatten()[positions])


def test_a_model_without_a_value_layer_is_refused(tmp_path):
    make_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="no linear layer 'score' or 'classifier'"):
        score_layer(load_model(ModelSpec(str(tmp_path))))


def test_probing_leaves_the_model_as_it_was(tmp_path):
    make_tiny_model(tmp_path)
    model = load_model(ModelSpec(str(tmp_path))).train()
    detect_output_head(model, torch.device("cpu"))
    assert model.training
    for module_ in (model.base_model, model.lm_head):
        assert not module_._forward_hooks and not module_._forward_pre_hooks


def test_a_machine_that_cannot_compile_does_without(monkeypatch, caplog):
    def cannot(function, **options):
        def run(*args):
            raise RuntimeError("no C compiler\nand a long story")

        return run

    monkeypatch.setattr(torch, "compile", cannot)
    module._compiled_blocks.cache_clear()
    try:
        hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(11, 8)
        targets = torch.arange(9)
        results = []
        for compiled in (False, True, True):
            log_probs, entropy = chunked_log_probs(hidden, weight, targets, MATHS[3], True, compiled)
            (grad,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), hidden)
            results.append((log_probs.detach(), grad))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])
    finally:
        module._compiled_blocks.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile does not work here, so the eager functions are used: no C compiler"
    ] * 2  # one for the forward pass, one for the backward

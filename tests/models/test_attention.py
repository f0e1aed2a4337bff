import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_models import make_tiny_model
from verl.models.attention.kernels import (
    LONGEST,
    NAME,
    short_sequence_attention_forward,
    use_short_sequence_attention,
)
from verl.models.loader import ModelSpec, load_model


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 3


@pytest.mark.parametrize("length", [1, 7, 64, LONGEST, LONGEST + 1])
def test_outputs_and_gradients_are_those_of_causal_attention(length):
    torch.manual_seed(0)
    q = torch.randn(2, length, 6, 8).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, length, 2, 8).transpose(1, 2).requires_grad_() for _ in range(2))
    out, _ = short_sequence_attention_forward(Layer(), q, k, v, None, scaling=0.3)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    pull = torch.randn(out.shape)
    found = torch.autograd.grad(out, (q, k, v), pull)
    expected_grads = torch.autograd.grad(expected, wide, pull.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected_grads, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max().clamp_min(1.0)


def test_values_may_be_narrower_than_keys():
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 5, requires_grad=True)
    out, _ = short_sequence_attention_forward(torch.nn.Module(), q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert v.grad.shape == v.shape


def test_bf16_is_as_near_to_the_truth_as_the_fused_kernel():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, 70, 16).bfloat16() for _ in range(3))
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True).transpose(1, 2)
    ours, _ = short_sequence_attention_forward(torch.nn.Module(), q, k, v, None)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert (ours - truth).norm() < 1.3 * (fused - truth).norm()


@pytest.mark.parametrize("family, changes", [("qwen2", {}), ("mistral", {"sliding_window": 8})])
def test_a_model_gives_the_logits_it_gave_before(tmp_path, family, changes):
    make_tiny_model(tmp_path, family, **changes)
    model = load_model(ModelSpec(str(tmp_path))).eval()
    ids = torch.randint(4, 100, (2, 30))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert use_short_sequence_attention(model) and model.config._attn_implementation == NAME
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)


def test_a_model_that_chose_another_attention_keeps_it(tmp_path):
    make_tiny_model(tmp_path, "gemma2")
    model = load_model(ModelSpec(str(tmp_path)))
    assert not use_short_sequence_attention(model) and model.config._attn_implementation == "eager"


def test_the_name_does_not_reach_saved_configs(tmp_path):
    make_tiny_model(tmp_path)
    model = load_model(ModelSpec(str(tmp_path)))
    use_short_sequence_attention(model)
    model.config.save_pretrained(tmp_path / "saved")
    assert NAME not in (tmp_path / "saved" / "config.json").read_text()

"""What an engine finds out about its model at the start: it is mended, or refused by name."""

import pytest
import torch
from torch import nn

from tests.support.families import FAMILIES, LONGEST, PROMPTS, RESPONSES, ROUNDING, alone, judge, make_family
from tests.support.losses import optim_section, ppo_loss
from tests.support.tiny_models import join_batch, make_batch, make_tiny_model
from verl.models.loader import ModelSpec, load_model
from verl.workers.engine import Want, build_engine

NO_CACHE = ("doge", "minimax", "recurrent_gemma", "xlstm")
OWN_NAMES = ("gpt_bigcode", "starcoder2")
"""Families with dropout under names of their own."""


def engine_for(folder, strategy="local", **spec):
    spec = ModelSpec(folder, compute_dtype="fp32", **spec)
    return build_engine(strategy, spec, None, optim_section(), total_steps=9, grad_clip=1.0)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = make_family(tmp_path_factory.mktemp(name.replace(" ", "_")), name)
        return folders[name]

    return make


# -- train mode ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*OWN_NAMES, "phimoe", "gpt2", "opt"])
@pytest.mark.parametrize("how", ["padded", "packed"])
def test_the_training_pass_scores_as_inference_does(family, how, folder_of):
    assert judge(folder_of(family), how).startswith("right")


def test_dropout_under_any_name_is_off_and_nothing_is_clipped_on_policy(tmp_path):
    rates = {name: 0.4 for name in ("embedding_dropout", "residual_dropout", "attention_dropout")}
    engine = engine_for(make_tiny_model(tmp_path, "starcoder2", initializer_range=0.15, **rates))
    data = make_batch(4)
    data.put("old_log_probs", engine.infer(data, Want.LOG_PROBS).ragged("log_probs"))
    metrics = engine.train_step(data, ppo_loss(use_kl_loss=False))
    assert metrics["actor/pg_clipfrac"] == 0 and abs(metrics["actor/ppo_kl"]) < 1e-6


def test_dropout_that_the_user_asks_for_stays_and_the_rest_is_off(tmp_path, caplog):
    folder = make_tiny_model(tmp_path, "gpt2", head_dim=None)
    engine = engine_for(folder, override_config={"resid_pdrop": 0.2})
    rates = {name: module.p for name, module in engine.module.named_modules() if isinstance(module, nn.Dropout)}
    assert {rate for name, rate in rates.items() if "resid" in name or "mlp" in name} == {0.2}
    assert {rate for name, rate in rates.items() if "attn_dropout" in name or name.endswith("drop")} == {0.0}
    assert "importance ratios are random" in caplog.text


def test_a_rate_of_zero_that_the_user_sets_leaves_no_other_on(tmp_path):
    folder = make_tiny_model(tmp_path, "gpt2", head_dim=None)
    model = load_model(ModelSpec(folder, override_config={"resid_pdrop": 0.0}))
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.0}


def test_what_else_is_random_is_trained_in_inference_mode_and_layers_are_still_recomputed(folder_of, caplog):
    engine = engine_for(folder_of("phimoe"))
    assert "random in modules of the class PhimoeTopKRouter" in caplog.text
    engine.train_step(make_batch(4), ppo_loss())
    training = {type(module).__name__: module.training for module in engine.module.modules()}
    assert training["PhimoeDecoderLayer"] and not training["PhimoeTopKRouter"]


class _Noise(nn.Module):
    """A layer of a user's model, random where its ``when`` says so."""

    def __init__(self, inner, when):
        super().__init__()
        self.inner, self.when = inner, when

    def forward(self, x):
        found = self.inner(x)
        is_random = self.when == "always" or (self.when == "training" and self.training)
        return found + torch.rand_like(found) if is_random else found


def with_noise(monkeypatch, when):
    def load(*args, **kwargs):
        model = load_model(*args, **kwargs)
        model.model.layers[0].mlp = _Noise(model.model.layers[0].mlp, when)
        return model

    monkeypatch.setattr("verl.workers.engine.local.load_model", load)


def test_a_layer_of_no_known_name_that_is_random_in_train_mode_is_found(tmp_path, monkeypatch, caplog):
    with_noise(monkeypatch, "training")
    engine = engine_for(make_tiny_model(tmp_path))
    assert "random in modules of the class _Noise" in caplog.text
    data = make_batch(4)
    data.put("old_log_probs", engine.infer(data, Want.LOG_PROBS).ragged("log_probs"))
    assert abs(engine.train_step(data, ppo_loss(use_kl_loss=False))["actor/ppo_kl"]) < 1e-6


def test_a_model_that_is_random_in_inference_too_is_refused_by_name(tmp_path, monkeypatch):
    with_noise(monkeypatch, "always")
    with pytest.raises(ValueError, match="model_type='qwen2': Qwen2ForCausalLM uses random numbers.*another family"):
        engine_for(make_tiny_model(tmp_path))


def test_the_trial_leaves_the_random_state_alone(folder_of):
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    engine_for(folder_of("phimoe"))
    assert torch.equal(torch.get_rng_state(), expected)


# -- neighbours ----------------------------------------------------------------------------------------------------


class _LongestRow(nn.Module):
    """A layer that depends on the width of the micro-batch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * (1 + x.shape[1] / 10)


def test_rows_that_depend_on_their_neighbours_run_one_by_one(tmp_path, monkeypatch, caplog):
    def load(*args, **kwargs):
        model = load_model(*args, **kwargs)
        model.model.layers[0].mlp = _LongestRow(model.model.layers[0].mlp)
        return model

    monkeypatch.setattr("verl.workers.engine.local.load_model", load)
    engine = engine_for(make_tiny_model(tmp_path, initializer_range=0.15))
    assert "every micro-batch has one row" in caplog.text
    data = make_batch(4)
    together = engine.infer(data, Want.LOG_PROBS).ragged("log_probs").rows()
    each = [engine.infer(data[i : i + 1], Want.LOG_PROBS).ragged("log_probs").rows()[0] for i in range(4)]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(together, each, strict=True))


@pytest.mark.parametrize("how", ["padded", "packed", "hf"])
def test_long_rope_is_that_of_the_longest_sequence_of_the_run_for_every_row(how, folder_of):
    assert judge(folder_of("phi3 longrope"), how) == "right"


def test_short_runs_keep_the_short_factors_of_long_rope(folder_of):
    short, long = (
        load_model(ModelSpec(folder_of("phi3 longrope"), max_sequence_length=length)).model.rotary_emb.inv_freq
        for length in (16, 17)
    )
    torch.testing.assert_close(short, 4 * long)


def test_dynamic_rope_scores_a_row_alike_whatever_its_micro_batch(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    sizes = {"max_position_embeddings": 16, "initializer_range": 0.15}
    folder = make_tiny_model(tmp_path, "llama", rope_parameters=rope, **sizes)
    draw = torch.Generator().manual_seed(0)
    rows = [[torch.randint(4, 100, (n,), generator=draw) for n in lengths] for lengths in (PROMPTS, RESPONSES)]
    engine = engine_for(folder, max_sequence_length=LONGEST)
    data = join_batch(*rows, max(PROMPTS), max(RESPONSES), draw)
    found = engine.infer(data, Want.LOG_PROBS).ragged("log_probs").rows()
    # the frequencies of a sequence of LONGEST tokens, by the formula of dynamic NTK scaling
    base = 1e4 * (4.0 * LONGEST / 16 - 3.0) ** (16 / 14)
    plain = load_model(
        ModelSpec(folder, override_config={"rope_parameters": {"rope_type": "default", **{"rope_theta": base}}})
    )
    for got, pair in zip(found, zip(*rows, strict=True), strict=True):
        assert (got - alone(folder, *pair, model=plain.eval())).abs().max() < ROUNDING


# -- code that does not run ----------------------------------------------------------------------------------------


def test_a_forward_pass_that_raises_names_the_model_and_what_to_do(tmp_path, monkeypatch):
    def load(*args, **kwargs):
        model = load_model(*args, **kwargs)
        model.model.layers[0].mlp.up_proj = nn.Linear(3, 3)
        return model

    monkeypatch.setattr("verl.workers.engine.local.load_model", load)
    why = (
        r"model_type='qwen2'\) cannot be trained here: a forward pass of Qwen2ForCausalLM .*RuntimeError: mat1.*family"
    )
    with pytest.raises(ValueError, match=why):
        engine_for(make_tiny_model(tmp_path))


@pytest.mark.parametrize("family", ["bamba", "hunyuan_v1_moe", "jetmoe", *NO_CACHE])
def test_a_family_that_used_to_end_in_a_trace_trains(family, folder_of):
    assert judge(folder_of(family), "padded").startswith("right")


# -- generation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "falcon_h1", "bamba", "hunyuan_v1_moe"])
def test_a_state_is_carried_from_token_to_token(family, folder_of):
    assert judge(folder_of(family), "hf") == "right"


@pytest.mark.parametrize("family", NO_CACHE)
def test_a_model_with_a_cache_of_its_own_generates_without_one(family, folder_of):
    assert "so every token reads its whole row once more" in judge(folder_of(family), "hf")


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, left_out",
    [
        ("glm4_moe", ["experts.gate_up_proj"]),
        ("deepseek_v3", ["experts.down_proj"]),
        ("qwen3_next", ["experts.down_proj"]),
        ("llama4_text", ["router"]),
        ("mamba", ["mixer.out_proj", "mixer.x_proj"]),
        ("falcon_h1", ["mamba.out_proj"]),
    ],
)
def test_all_linear_means_the_layers_that_a_sync_can_carry(family, left_out, folder_of):
    verdict = judge(folder_of(family), "all-linear")
    assert verdict.startswith("right") and all(f"{name} (" in verdict for name in left_out)


def test_the_families_that_were_judged_are_many():
    assert len(FAMILIES) > 80

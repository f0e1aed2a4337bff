"""Promises of every engine, shown on the local one; test_parity.py carries them over to the others."""

import logging

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.algorithms.aggregate import AGG_MODES
from verl.algorithms.losses import PPOLoss
from verl.batch import WHOLE
from verl.config.actor import ActorConfig
from verl.models.loader import ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine

SPLITS = [*(MicroBatching(size=n) for n in (1, 2, 4)), MicroBatching(max_tokens=60), MicroBatching(max_tokens=200)]
"""Of seven rows: 7, 4 and 2 pieces, the last one shorter, and unequal ones by tokens."""
MODES = list(AGG_MODES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def engine_for(folder, head="lm", compute="fp32", optim=None, grad_clip=1.0, **spec):
    return build_engine(
        "local",
        ModelSpec(folder, head, compute_dtype=compute, **spec),
        None,
        optim_section(**(optim or {})),
        total_steps=10,
        grad_clip=grad_clip,
    )


def flat_weights(engine):
    return torch.cat([tensor.float().flatten() for _, tensor in engine.weights()])


def test_log_probs_and_entropy_are_those_of_a_plain_forward_pass(folder):
    data, engine = make_batch(6), engine_for(folder)
    found = engine.infer(data, Want.LOG_PROBS | Want.ENTROPY, MicroBatching(size=4), temperature=0.7)
    ids, mask = data.column("input_ids"), data.column("attention_mask")
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = engine.module(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 11:-1] / 0.7
    log_p = logits.log_softmax(-1)
    expected = log_p.gather(-1, data.column("responses")[..., None])[..., 0]
    real = data.column("response_mask").bool()
    torch.testing.assert_close(found.column("log_probs")[real], expected[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        found.column("entropy")[real], -(log_p.exp() * log_p).sum(-1)[real], rtol=1e-4, atol=1e-5
    )
    assert not found.column("log_probs")[~real].any()


@pytest.mark.parametrize("split", SPLITS)
def test_scores_do_not_depend_on_how_the_rows_are_cut(folder, split):
    data, engine = make_batch(7), engine_for(folder)
    whole = engine.infer(data, Want.LOG_PROBS | Want.ENTROPY)
    cut = engine.infer(data, Want.LOG_PROBS | Want.ENTROPY, split)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(cut.ragged(name).values, whole.ragged(name).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", SPLITS)
def test_the_step_does_not_depend_on_how_the_mini_batch_is_cut(folder, mode, split):
    data = make_batch(7, seed=5)
    whole, cut = engine_for(folder), engine_for(folder)
    one = whole.train_step(data, ppo_loss(loss_agg_mode=mode))
    other = cut.train_step(data, ppo_loss(loss_agg_mode=mode), split)
    assert one.keys() == other.keys()
    # clip fractions and ppo_kl are means over tokens, whatever the loss is a mean of
    exact = {name for name in one if "clipfrac" not in name and "ppo_kl" not in name}
    for name in one if mode == "token-mean" else exact:
        assert one[name] == pytest.approx(other[name], rel=2e-5, abs=1e-6), name


def test_weights_of_responses_do_not_depend_on_how_the_mini_batch_is_cut(folder):
    actor = ActorConfig().with_values({"difficulty_loss_weight": True, "length_loss_weight": True})
    data, norms = make_batch(7, seed=5), []
    data.put("difficulty", torch.linspace(-0.2, 1.2, 7))
    for split in (WHOLE, MicroBatching(size=1), MicroBatching(size=3)):
        norms.append(engine_for(folder).train_step(data, PPOLoss(actor), split)["grad_norm"])
    assert norms == pytest.approx(norms[:1] * 3, rel=2e-5)
    plain = engine_for(folder).train_step(data, PPOLoss(ActorConfig()))["grad_norm"]
    assert plain != pytest.approx(norms[0], rel=1e-2)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_metrics_do_not_depend_on_how_the_mini_batch_is_cut(folder, mode):
    data, found = make_batch(7, seed=5), []
    is_far = torch.rand(data.column("old_log_probs").shape, generator=torch.Generator().manual_seed(0)) < 0.3
    data.put("old_log_probs", data.column("old_log_probs") + 2.0 * is_far)
    for split in (WHOLE, MicroBatching(size=1), MicroBatching(size=3)):
        metrics = engine_for(folder).train_step(data, ppo_loss(loss_agg_mode=mode, clip_ratio_c=1.5), split)
        found.append(metrics)
    assert 0 < found[0]["actor/pg_clipfrac"] < 1 and found[0]["actor/ppo_kl"] > 0.1
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_metrics_of_a_critic_do_not_depend_on_how_the_mini_batch_is_cut(folder, mode):
    data, found = make_batch(7, seed=5), []
    for split in (WHOLE, MicroBatching(size=1), MicroBatching(size=3)):
        found.append(engine_for(folder, "value").train_step(data, value_loss(loss_agg_mode=mode), split))
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_a_loss_that_compares_all_tokens_does_not_depend_on_how_the_mini_batch_is_cut(folder, loss_mode):
    actor = ActorConfig().with_values(
        {
            "policy_loss.loss_mode": loss_mode,
            "policy_loss.clip_cov_lb": 0.0,
            "policy_loss.clip_cov_ratio": 0.1,
            "policy_loss.kl_cov_ratio": 0.1,
            "policy_loss.ppo_kl_coef": 10.0,
        }
    )
    data, norms = make_batch(7, seed=5), []
    for split in (WHOLE, MicroBatching(size=1), MicroBatching(size=3)):
        metrics = engine_for(folder).train_step(data, PPOLoss(actor), split)
        assert metrics["actor/pg_clipfrac"] > 0.05
        norms.append(metrics["grad_norm"])
    assert norms == pytest.approx(norms[:1] * 3, rel=2e-5)
    assert "selected_tokens" not in data
    plain = engine_for(folder).train_step(data, PPOLoss(ActorConfig()))["grad_norm"]
    assert plain != pytest.approx(norms[0], rel=1e-3)


def test_a_sum_over_tokens_is_their_number_times_the_mean(folder):
    data = make_batch(7, seed=5)
    mean = engine_for(folder).train_step(data, ppo_loss(), MicroBatching(size=3))
    total = engine_for(folder).train_step(data, ppo_loss(loss_agg_mode="token-sum"), MicroBatching(size=2))
    tokens = int(data.ragged("response_mask").values.sum())
    assert total["grad_norm"] == pytest.approx(tokens * mean["grad_norm"], rel=1e-4)
    assert total["actor/pg_loss"] == pytest.approx(mean["actor/pg_loss"], rel=1e-4)


def test_squared_probabilities_are_those_of_a_plain_forward_pass(folder):
    data, engine = make_batch(5), engine_for(folder)
    found = engine.infer(data, Want.SUM_PI_SQUARED, MicroBatching(size=2), temperature=0.7).ragged("sum_pi_squared")
    with torch.no_grad():
        for row in range(5):
            ids = data.ragged("input_ids").row(row)
            count = len(found.row(row))
            p = torch.softmax(engine.module(ids[None]).logits[0, -count - 1 : -1].float() / 0.7, -1)
            torch.testing.assert_close(found.row(row), p.square().sum(-1), rtol=1e-4, atol=1e-6)


def test_masked_tokens_do_not_move_the_weights(folder):
    data = make_batch(6, seed=5)
    mask = data.ragged("response_mask")
    hidden = torch.arange(len(mask.values)) % 3 == 0
    data.put("response_mask", mask.like(mask.values.masked_fill(hidden, 0)))
    other = data.select()
    advantages = data.ragged("advantages")
    other.put("advantages", advantages.like(advantages.values.masked_fill(hidden, 1e3)))
    one = engine_for(folder).train_step(data, ppo_loss(), MicroBatching(size=2))
    two = engine_for(folder).train_step(other, ppo_loss(), MicroBatching(size=2))
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-6)


def test_a_batch_of_nothing_but_masked_tokens_is_a_step_of_zero_gradient(folder):
    data, engine = make_batch(4), engine_for(folder)
    mask = data.ragged("response_mask")
    data.put("response_mask", mask.like(torch.zeros_like(mask.values)))
    metrics = engine.train_step(data, ppo_loss(), MicroBatching(size=2))
    assert metrics == {"grad_norm": 0.0, "nonfinite_steps": 0.0}


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(folder, caplog):
    data, engine = make_batch(4), engine_for(folder, compute="bf16")
    advantages = data.ragged("advantages")
    broken = data.select()
    broken.put("advantages", advantages.like(advantages.values.clone().index_fill_(0, torch.tensor([0]), float("nan"))))
    engine.train_step(data, ppo_loss())
    before, version = flat_weights(engine), engine.version
    with caplog.at_level(logging.WARNING):
        metrics = engine.train_step(broken, ppo_loss(), MicroBatching(size=2))
    assert metrics["nonfinite_steps"] == 1.0 and "skipped" in caplog.text
    assert "NaN or infinite: advantages in 1 places, first in row 0" in caplog.text
    assert torch.equal(flat_weights(engine), before) and engine.version == version
    assert engine.train_step(data, ppo_loss())["nonfinite_steps"] == 0.0


def test_the_version_grows_with_every_step(folder):
    engine = engine_for(folder)
    assert engine.version == 0
    for expected in (1, 2):
        engine.train_step(make_batch(4), ppo_loss())
        assert engine.version == expected


def test_bf16_compute_keeps_fp32_master_weights(folder):
    engine = engine_for(folder, compute="bf16", optim={"lr": 1e-6, "weight_decay": 0.0})
    before = flat_weights(engine)
    for _ in range(2):
        engine.train_step(make_batch(4), ppo_loss())
    moved = (flat_weights(engine) - before).abs()
    assert 0 < moved.max() < 1e-5  # far below what bf16 could hold
    assert next(engine.module.parameters()).dtype is torch.bfloat16
    for (name, master), (_, copy) in zip(engine.weights(), engine.weights(torch.bfloat16), strict=True):
        assert torch.equal(master.bfloat16(), copy), name


def test_bf16_compute_is_near_fp32(folder):
    data = make_batch(6)
    exact = engine_for(folder).infer(data, Want.LOG_PROBS).ragged("log_probs").values
    coarse = engine_for(folder, compute="bf16").infer(data, Want.LOG_PROBS).ragged("log_probs").values
    assert (exact - coarse).abs().max() < 0.03


def test_gradient_checkpointing_changes_no_number(folder):
    data = make_batch(4)
    one = engine_for(folder, gradient_checkpointing=True).train_step(data, ppo_loss())
    other = engine_for(folder, gradient_checkpointing=False).train_step(data, ppo_loss())
    assert one == pytest.approx(other, rel=1e-6)


def test_the_schedule_steps_on_call_not_with_the_optimizer(folder):
    engine = engine_for(folder, optim={"lr": 1.0, "lr_warmup_steps": 2})
    rates = []
    for _ in range(3):
        rates.append(engine.learning_rate())
        engine.train_step(make_batch(2), ppo_loss())
        engine.train_step(make_batch(2), ppo_loss())
        engine.step_schedule()
    assert rates == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_a_step_can_say_what_a_pass_before_it_would_have(folder, entropy_coeff):
    data, want = make_batch(7, seed=5), Want.LOG_PROBS | Want.ENTROPY
    engine, plain = engine_for(folder), engine_for(folder)
    before = engine.infer(data, want, MicroBatching(size=3))
    loss = ppo_loss(entropy_coeff=entropy_coeff)
    metrics, scored = engine.train_and_score(data, loss, want, MicroBatching(size=2))
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(scored.ragged(name).values, before.ragged(name).values, rtol=1e-4, atol=1e-5)
    assert metrics == pytest.approx(plain.train_step(data, loss, MicroBatching(size=2)), rel=1e-5)
    assert torch.equal(flat_weights(engine), flat_weights(plain))


def test_a_critic_learns_the_returns(folder):
    data = make_batch(6)
    returns = data.ragged("returns")
    data.put("returns", returns.like(torch.full_like(returns.values, 0.7)))
    engine = engine_for(folder, head="value", compute="bf16", optim={"lr": 3e-3})
    for _ in range(40):
        data.put("values", engine.infer(data, Want.VALUES).ragged("values"))
        metrics = engine.train_step(data, value_loss(), MicroBatching(size=3))
    assert metrics["critic/vpred_mean"] == pytest.approx(0.7, abs=0.05)


def test_an_engine_learns_to_prefer_a_token(folder):
    data = make_batch(8)
    tokens = data.ragged("responses")
    liked = (tokens.values < 50).float() * 2 - 1
    data.put("advantages", tokens.like(liked))
    engine = engine_for(folder, compute="bf16")
    first = engine.infer(data, Want.LOG_PROBS).ragged("log_probs").values
    data.put("old_log_probs", tokens.like(first))
    for _ in range(10):
        engine.train_step(data, ppo_loss(use_kl_loss=False, entropy_coeff=0.0), MicroBatching(size=4))
    moved = engine.infer(data, Want.LOG_PROBS).ragged("log_probs").values - first
    assert moved[liked > 0].mean() > 0.1 > -0.1 > moved[liked < 0].mean()


def test_weights_come_once_under_their_checkpoint_names(folder):
    from safetensors.torch import load_file

    saved = load_file(f"{folder}/model.safetensors")
    found = dict(engine_for(folder).weights())
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_what_a_head_cannot_answer_is_refused(folder):
    with pytest.raises(ValueError, match="head='lm'"):
        engine_for(folder).infer(make_batch(2), Want.VALUES)
    with pytest.raises(ValueError, match="head='value'"):
        engine_for(folder, head="value").infer(make_batch(2), Want.LOG_PROBS)


def test_a_missing_column_is_named(folder):
    data = make_batch(2).select(batch_keys=["input_ids", "attention_mask", "responses", "response_mask"])
    with pytest.raises(ValueError, match="reads column 'old_log_probs'"):
        engine_for(folder).train_step(data, ppo_loss())


def test_an_engine_without_optimizer_scores_like_the_one_it_is_a_reference_of(folder):
    data = make_batch(4)
    reference = build_engine("local", ModelSpec(folder), None, None)
    actor = engine_for(folder, compute="bf16")
    values = [engine.infer(data, Want.LOG_PROBS).ragged("log_probs").values for engine in (reference, actor)]
    assert torch.equal(*values)
    with pytest.raises(RuntimeError, match="can score, not train"):
        reference.train_step(data, ppo_loss())


def test_offload_asked_for_on_cpu_is_said_to_have_no_effect(folder, caplog):
    with caplog.at_level(logging.INFO, logger="verl.workers.engine.engine"):
        build_engine("local", ModelSpec(folder), {"param_offload": True}, None)
    assert "param_offload has no effect on a CPU device" in caplog.text


def test_a_precision_that_cannot_train_is_refused_and_a_poor_one_pointed_out(folder, caplog):
    with pytest.raises(ValueError, match="train in bf16 or fp32"):
        engine_for(folder, compute="fp16")
    with caplog.at_level(logging.WARNING):
        engine_for(folder, compute="bf16", param_dtype="bf16")
    assert "rounded away" in caplog.text


def test_an_unknown_strategy_names_the_known_ones(folder):
    with pytest.raises(ValueError, match="supported training backends: local, fsdp2, .*, deepspeed, megatron"):
        build_engine("mindspeed", ModelSpec(folder))


def test_a_row_longer_than_the_token_budget_is_refused(folder):
    with pytest.raises(ValueError, match="does not fit a micro-batch of max_tokens=5"):
        engine_for(folder).infer(make_batch(2), Want.LOG_PROBS, MicroBatching(max_tokens=5))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_state_continues_to_the_same_numbers(folder, compute):
    data, optim = make_batch(4), {"warmup_style": "cosine", "lr_warmup_steps": 1}
    one = engine_for(folder, compute=compute, optim=optim)
    for _ in range(2):
        one.train_step(data, ppo_loss())
        one.step_schedule()
    state = one.state()
    other = engine_for(folder, compute=compute, optim=optim)
    other.load_state({part: torch.load(_saved(content), weights_only=True) for part, content in state.items()})
    assert other.version == one.version and other.learning_rate() == one.learning_rate()
    for _ in range(2):
        assert one.train_step(data, ppo_loss()) == other.train_step(data, ppo_loss())
    assert torch.equal(flat_weights(one), flat_weights(other))


def test_weights_loaded_back_are_not_taken_for_those_already_handed_out(folder):
    engine = engine_for(folder)
    state = engine.state()
    for _ in range(2):
        engine.train_step(make_batch(2), ppo_loss())
    engine.load_state(state)
    assert engine.version == 3


def _saved(content):
    import io

    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def test_state_of_another_model_is_refused(folder, tmp_path):
    other = engine_for(make_tiny_model(tmp_path, num_hidden_layers=1))
    with pytest.raises(ValueError, match="saved weights differ"):
        other.load_state({"model": engine_for(folder).state()["model"]})

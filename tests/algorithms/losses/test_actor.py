from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from tests.algorithms.test_aggregate import MODES, partitions
from verl.algorithms.aggregate import agg_loss
from verl.algorithms.losses import (
    POLICY_LOSS_REGISTRY,
    PPOLoss,
    TokenOutputs,
    ValueLoss,
    compute_policy_loss,
    imitation_loss,
    register_policy_loss,
)
from verl.config.actor import ActorConfig

WIDTH = 7


def actor(**changed):
    section = {
        "policy_loss": SimpleNamespace(loss_mode="vanilla"),
        "loss_agg_mode": "token-mean",
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
        "entropy_coeff": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
    }
    return SimpleNamespace(**vars(ActorConfig()) | section | changed)


def critic(**changed):
    return SimpleNamespace(**{"cliprange_value": 0.3, "loss_agg_mode": "token-mean"} | changed)


@pytest.fixture
def batch():
    mask = ragged_mask(5, WIDTH, seed=0)
    names = ["old_log_probs", "advantages", "ref_log_prob", "values", "returns", "rollout_is_weights"]
    columns = {name: normal(mask, seed) * mask for seed, name in enumerate(names)}
    return columns | {"response_mask": mask}


@pytest.fixture
def outputs(batch):
    mask = batch["response_mask"]
    log_probs = (batch["old_log_probs"] + 0.3 * normal(mask, 10) * mask).requires_grad_(True)
    entropy = (normal(mask, 11).abs() * mask).requires_grad_(True)
    values = (normal(mask, 12) * mask).requires_grad_(True)
    full_kl = (normal(mask, 13).square() * mask).requires_grad_(True)
    return TokenOutputs(log_probs, entropy, values, full_kl)


def part_of(batch, outputs, rows):
    """Some rows, trimmed to the longest of them: what an engine's micro-batch looks like."""
    width = max(1, int(batch["response_mask"][rows].sum(-1).max()))
    cut = lambda x: None if x is None else x[rows][:, :width]  # noqa: E731
    return TokenOutputs(*map(cut, outputs)), {name: cut(column) for name, column in batch.items()}


def losses_under_test(mode):
    both = {"loss_agg_mode": mode, "entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
    policy = [PPOLoss(actor(**both, kl_loss_type=kind), WIDTH) for kind in ("k3", "full")]
    imitating = actor(loss_agg_mode=mode, rl_loss_coef=0.5, sft_loss_coef=0.25)
    return [*policy, ValueLoss(critic(loss_agg_mode=mode), WIDTH), PPOLoss(imitating, WIDTH)]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(mode, which, batch, outputs):
    loss = losses_under_test(mode)[which]
    batch["token_level_scores"] = batch["returns"]
    whole, _ = loss(outputs, batch)
    given = [output for output in outputs if output is not None]
    gradients = torch.autograd.grad(whole, given, allow_unused=True)
    for parts in partitions(list(range(5))):
        micros = [part_of(batch, outputs, rows) for rows in parts]
        weights = torch.stack([loss.weight(micro) for _, micro in micros]).double()
        shares = weights / weights.sum()
        total = sum(share * loss(out, micro)[0] for share, (out, micro) in zip(shares, micros, strict=True))
        assert_close(total, whole)
        for a, b in zip(torch.autograd.grad(total, given, allow_unused=True), gradients, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", MODES[:3])
def test_the_loss_is_policy_loss_plus_kl_minus_entropy(mode, batch, outputs):
    config = actor(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="mse")
    ppo_loss = PPOLoss(config)
    loss, metrics = ppo_loss(outputs, {name: batch[name] for name in ppo_loss.columns})
    mask = batch["response_mask"]
    pg, clipfrac, kl, lower = compute_policy_loss(
        batch["old_log_probs"], outputs.log_probs, batch["advantages"], mask, 0.2, 0.2, 0.28, 3.0, mode
    )
    entropy = agg_loss(outputs.entropy, mask, mode)
    kl_loss = agg_loss(0.5 * (outputs.log_probs - batch["ref_log_prob"]).square(), mask, mode)
    assert_close(loss, pg + 0.1 * kl_loss - 0.01 * entropy)
    expected = {
        "actor/pg_loss": pg,
        "actor/pg_clipfrac": clipfrac,
        "actor/ppo_kl": kl,
        "actor/pg_clipfrac_lower": lower,
        "actor/entropy_loss": entropy,
        "actor/kl_loss": kl_loss,
    }
    assert metrics.pop("actor/kl_coef") == 0.1
    assert_close(metrics, {name: value.detach() for name, value in expected.items()})
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("mode", MODES[:3])
def test_the_full_kl_is_taken_from_the_forward_pass_and_no_log_probs_of_the_reference_are_read(mode, batch, outputs):
    chosen = {"loss_agg_mode": mode, "kl_loss_coef": 0.1}
    ppo_loss, without = PPOLoss(actor(**chosen, use_kl_loss=True, kl_loss_type="full")), PPOLoss(actor(**chosen))
    assert ppo_loss.want_full_kl and not without.want_full_kl and "ref_log_prob" not in ppo_loss.columns
    columns = {name: batch[name] for name in ppo_loss.columns}
    (loss, metrics), (rest, _) = ppo_loss(outputs, columns), without(outputs, columns)
    expected = agg_loss(outputs.full_kl, batch["response_mask"], mode)
    assert_close(loss - rest, 0.1 * expected)
    assert_close(metrics["actor/kl_loss"], expected.detach())
    (gradient,) = torch.autograd.grad(loss, outputs.full_kl)
    assert torch.equal(gradient != 0, batch["response_mask"].bool())


def test_a_constant_divisor_means_the_mean_over_responses_of_the_token_sum_over_the_response_length(batch, outputs):
    loss, _ = PPOLoss(actor(loss_agg_mode="seq-mean-token-sum-norm"), response_length=100)(outputs, batch)
    same, _ = PPOLoss(actor(loss_agg_mode="seq-mean-token-sum"))(outputs, batch)
    assert_close(loss, same / 100)


@pytest.mark.parametrize(
    "build", [lambda: PPOLoss(actor(loss_agg_mode=MODES[3])), lambda: ValueLoss(critic(loss_agg_mode=MODES[3]))]
)
def test_a_constant_divisor_must_be_known(build):
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm.*Pass response_length"):
        build()


def test_columns_and_wishes_follow_the_config():
    plain = PPOLoss(actor())
    assert plain.columns == ("old_log_probs", "advantages", "response_mask") and not plain.want_entropy
    full = PPOLoss(actor(use_kl_loss=True, entropy_coeff=0.01))
    assert full.columns == ("old_log_probs", "advantages", "response_mask", "ref_log_prob") and full.want_entropy
    assert ValueLoss(critic()).columns == ("values", "returns", "response_mask")


def test_the_plain_loss_needs_only_its_columns(batch, outputs):
    loss = PPOLoss(actor())
    value, metrics = loss(TokenOutputs(log_probs=outputs.log_probs), {name: batch[name] for name in loss.columns})
    assert value.isfinite() and "actor/kl_loss" not in metrics and "actor/entropy_loss" not in metrics


def test_rollout_weights_are_used_when_the_batch_has_them(batch, outputs):
    loss = PPOLoss(actor())
    without = {name: batch[name] for name in loss.columns}
    assert loss(outputs, batch)[0] != loss(outputs, without)[0]


def test_value_loss_metrics_carry_the_names_users_plot(batch, outputs):
    loss, metrics = ValueLoss(critic())(outputs, batch)
    assert set(metrics) == {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"}
    mask = batch["response_mask"].bool()
    assert_close(metrics["critic/vpred_mean"], outputs.values.detach()[mask].mean())
    assert_close(metrics["critic/vf_loss"], loss.detach())


def test_micro_batches_without_tokens_weigh_nothing_and_cost_nothing(batch, outputs):
    empty = batch | {"response_mask": torch.zeros_like(batch["response_mask"]), "token_level_scores": batch["returns"]}
    for mode in MODES:
        for loss in losses_under_test(mode):
            value, _ = loss(outputs, empty)
            assert loss.weight(empty) == 0 and value == 0


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(POLICY_LOSS_REGISTRY, "_entries", dict(POLICY_LOSS_REGISTRY._entries))


@pytest.mark.usefixtures("registry")
def test_a_users_loss_in_the_older_form_trains_in_every_mode(batch, outputs):
    @register_policy_loss("older_form")
    def older_form(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
        tokens = -advantages * (log_prob - old_log_prob).exp()
        zero = torch.zeros(())
        return agg_loss(tokens, response_mask, loss_agg_mode), torch.tensor(config.clip_ratio), zero, zero

    for mode in MODES:
        loss = PPOLoss(actor(loss_agg_mode=mode, policy_loss=SimpleNamespace(loss_mode="older_form")), WIDTH)
        whole, metrics = loss(outputs, batch)
        assert metrics["actor/pg_clipfrac"] == pytest.approx(0.2)
        micros = [part_of(batch, outputs, rows) for rows in ([0, 3], [1], [2, 4])]
        weights = torch.stack([loss.weight(micro) for _, micro in micros]).double()
        parts = sum(w * loss(out, micro)[0] for w, (out, micro) in zip(weights, micros, strict=True))
        assert_close(parts / weights.sum(), whole)


@pytest.mark.usefixtures("registry")
def test_a_users_loss_may_name_further_columns(batch, outputs):
    @register_policy_loss("with_rollout")
    def with_rollout(old_log_prob, log_prob, advantages, response_mask, rollout_log_probs, returns=None, **kwargs):
        assert returns is not None and set(kwargs) == {"loss_agg_mode", "config"}
        return (log_prob - rollout_log_probs).sum(), {"mine": 1.0}

    loss = PPOLoss(actor(policy_loss=SimpleNamespace(loss_mode="with_rollout")))
    assert loss.columns == ("old_log_probs", "advantages", "response_mask", "rollout_log_probs")
    _, metrics = loss(outputs, batch | {"rollout_log_probs": batch["old_log_probs"]})
    assert metrics["mine"] == 1.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"policy_loss": SimpleNamespace(loss_mode="vanila")}, "did you mean 'vanilla'"),
        ({"use_kl_loss": True, "kl_loss_type": "k4"}, "kl_loss_type=k4 is not known"),
        ({"loss_agg_mode": "token-means"}, "did you mean 'token-mean'"),
    ],
)
def test_unknown_names_are_refused_when_the_loss_is_built(changed, message):
    with pytest.raises(ValueError, match=message):
        PPOLoss(actor(**changed))


# ----------------------------------------------------------------------------------------------- parts and weights


def imitating(**changed):
    return PPOLoss(actor(**{"rl_loss_coef": 0.5, "sft_loss_coef": 0.25} | changed), WIDTH)


def test_imitation_by_hand():
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
    scores = torch.tensor([[0.0, 1.0], [1.0, -1.0], [2.0, -9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    assert imitation_loss(log_prob, scores, mask).tolist() == [[1, 2], [0, 0], [5, 0]]
    columns = {"old_log_probs": log_prob, "advantages": torch.zeros(3, 2), "response_mask": mask}
    for mode, expected in {MODES[0]: 8 / 5, MODES[1]: 8 / 3, MODES[2]: (1.5 + 5) / 3}.items():
        loss = imitating(loss_agg_mode=mode, sft_loss_coef=2.0)
        value, metrics = loss(TokenOutputs(log_prob), columns | {"token_level_scores": scores})
        assert_close(metrics["actor/sft_loss"], torch.tensor(expected))
        assert_close(value, torch.tensor(2 * expected))


def test_coefficients_weigh_policy_and_kl_together_but_not_entropy_and_imitation(batch, outputs):
    batch["token_level_scores"] = batch["returns"]
    parts = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    loss, metrics = imitating(**parts)(outputs, batch)
    expected = 0.5 * (metrics["actor/pg_loss"] + 0.1 * metrics["actor/kl_loss"])
    expected += 0.25 * metrics["actor/sft_loss"] - 0.01 * metrics["actor/entropy_loss"]
    assert metrics["actor/sft_loss"] != 0
    assert_close(loss.detach(), expected)


def test_without_the_policy_loss_only_successes_move(batch, outputs):
    batch["token_level_scores"] = torch.where(torch.arange(5)[:, None] == 2, 1.0, 0.0) * batch["response_mask"]
    loss, _ = imitating(rl_loss_coef=0.0, sft_loss_coef=1.0)(outputs, batch)
    (gradient,) = torch.autograd.grad(loss, outputs.log_probs)
    expected = torch.zeros_like(gradient)
    expected[2] = -batch["response_mask"][2] / batch["response_mask"].sum()
    assert_close(gradient, expected)


def test_gradients_of_all_parts_together_agree_with_finite_differences(batch, outputs):
    batch["token_level_scores"] = batch["returns"]
    loss = imitating(loss_agg_mode="seq-mean-token-mean", use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    of = lambda log_probs, entropy: loss(TokenOutputs(log_probs, entropy), batch)[0]  # noqa: E731
    assert torch.autograd.gradcheck(of, (outputs.log_probs, outputs.entropy))


def test_masked_scores_and_log_probs_have_no_influence_even_if_nan(batch, outputs):
    batch["token_level_scores"] = batch["returns"]
    is_own = batch["response_mask"] != 0
    spoiled = batch | {"token_level_scores": torch.where(is_own, batch["returns"], torch.nan)}
    loss = imitating()
    assert_close(loss(outputs, spoiled), loss(outputs, batch))


def test_imitation_asks_for_the_scores():
    assert imitating().columns == ("old_log_probs", "advantages", "response_mask", "token_level_scores")
    topr = imitating(policy_loss=SimpleNamespace(loss_mode="topr"))
    assert topr.columns.count("token_level_scores") == 1


def test_response_weights_scale_the_policy_loss_only_and_multiply_rollout_weights(batch, outputs):
    plain = {name: column for name, column in batch.items() if name != "rollout_is_weights"}
    weights = torch.tensor([0.5, 1.5, 1.0, 0.0, 2.0])[:, None].expand(5, WIDTH).double()
    parts = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    weighed = PPOLoss(actor(length_loss_weight=True, **parts))
    assert "response_weights" in weighed.columns and weighed.weighs_responses
    expected = PPOLoss(actor(**parts))(outputs, plain | {"rollout_is_weights": weights})
    assert_close(weighed(outputs, plain | {"response_weights": weights}), expected)
    both = PPOLoss(actor(**parts))(outputs, plain | {"rollout_is_weights": weights * batch["rollout_is_weights"]})
    assert_close(weighed(outputs, batch | {"response_weights": weights}), both)


@pytest.mark.usefixtures("registry")
def test_a_loss_that_takes_no_weights_cannot_be_weighed():
    @register_policy_loss("without_weights")
    def without_weights(log_prob, advantages, response_mask, loss_agg_mode):
        return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}

    section = {"policy_loss": SimpleNamespace(loss_mode="without_weights"), "difficulty_loss_weight": True}
    with pytest.raises(ValueError, match="difficulty_loss_weight=true.*does not name. Add that parameter"):
        PPOLoss(actor(**section))

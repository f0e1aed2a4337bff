"""Every built-in policy loss: by hand, against its definition traced by autograd, and the promises all of them keep."""

import inspect

import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from tests.algorithms.test_aggregate import MODES
from verl.algorithms import valid_tokens as valid_tokens_module
from verl.algorithms.losses import POLICY_LOSS_REGISTRY, PPOLoss, TokenOutputs, get_policy_loss_fn
from verl.algorithms.losses.clip_cov import choose_clip_cov, choose_kl_cov
from verl.algorithms.losses.common import TOKEN_CHOICES
from verl.config.actor import ActorConfig
from verl.config.checks.support import built_names

OLD = torch.tensor([[-1.0, -2.0, -0.5, -1.5], [-0.3, -0.7, 0.0, 0.0]])
NEW = torch.tensor([[-0.9, -1.5, -1.2, -0.2], [-0.5, -0.6, 5.0, -7.0]])
ADV = torch.tensor([[1.0, 2.0, -1.0, -0.5], [-2.0, 0.5, 3.0, 4.0]])
MU = torch.tensor([[-1.1, -1.4, -0.6, -1.0], [-0.2, -0.9, 0.0, 0.0]])
SCORES = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])

NAMES = [name for name in POLICY_LOSS_REGISTRY if POLICY_LOSS_REGISTRY[name].__module__.startswith("verl.")]
OPTIONS = {
    "clip_ratio_high": 0.28,
    "policy_loss.topr_pos_weight": 1.5,
    "policy_loss.topr_neg_weight": 0.5,
    "policy_loss.clip_cov_lb": 0.1,
    "policy_loss.clip_cov_ub": 0.3,
    "policy_loss.ppo_kl_coef": 0.5,
}


def actor(name, **changed):
    config = ActorConfig().with_values({**OPTIONS, "policy_loss.loss_mode": name})
    return config.with_values({key.replace("__", "."): value for key, value in changed.items()})


def run(name, config, new, old=OLD, adv=ADV, mask=MASK, mode="token-mean", mu=MU, scores=SCORES, **more):
    """Any loss by name, with those further columns it names."""
    fn = get_policy_loss_fn(name)
    more |= {"rollout_log_probs": mu, "token_level_scores": scores}
    named = {key: value for key, value in more.items() if key in inspect.signature(fn).parameters}
    return fn(
        old_log_prob=old,
        log_prob=new,
        advantages=adv,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        **named,
    )


@pytest.fixture(params=["dense", "packed"])
def both_layouts(request, monkeypatch):
    if request.param == "packed":
        monkeypatch.setattr(valid_tokens_module, "PADDED_BELOW", 0)


def test_the_config_offers_what_is_registered_and_every_name_has_its_literals():
    assert set(built_names("actor_rollout_ref.actor.policy_loss.loss_mode")) == set(NAMES)
    assert {name for name, *_ in BY_HAND} == set(NAMES)


# ------------------------------------------------------------------------------------------------------ closed form

BY_HAND = [  # token-mean and seq-mean-token-mean of both responses, token-mean of one alone
    ("vanilla", {}, -0.046716, 0.100573, 0.542438),
    ("bypass_mode", {}, -0.046716, 0.100573, 0.542438),
    ("gspo", {}, -0.064728, 0.129810, 0.713422),
    ("geo_mean", {}, -0.124126, 0.085261, 0.713422),
    ("cispo", {}, 0.543246, 0.346537, -0.243590),
    ("sapo", {}, -0.292451, 0.080104, 1.197769),
    ("dppo_tv", {}, 0.858940, 0.583307, -0.243590),
    ("dppo_kl", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.02}, 0.034579, -0.034963, -0.243590),
    ("gpg", {}, 0.316667, 0.15, -0.35),
    ("reinforce", {}, 0.316667, 0.15, -0.35),
    ("tis", {}, 0.402520, 0.246788, -0.220409),
    ("topr", {}, 0.597218, 0.408327, -0.158347),
    ("topr", {"policy_loss__topr_ratio": "token"}, 0.606772, 0.422659, -0.129683),
    ("kimi15", {}, 0.328750, 0.159125, -0.349750),
    ("dro", {}, 0.337417, 0.165875, -0.348750),
    ("sppo", {}, 0.183854, 0.190703, 0.211250),
    ("clip_cov", {}, 0.101156, 0.280550, -0.257631),
    ("kl_cov", {}, -0.106084, 0.056047, -0.430345),
]


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize(("name", "changed", "tokens", "responses", "alone"), BY_HAND)
def test_loss_by_hand_in_a_batch_and_alone(name, changed, tokens, responses, alone):
    config = actor(name, **changed, **({"clip_ratio_c": None} if name == "clip_cov" else {}))
    assert_close(run(name, config, NEW)[0], torch.tensor(tokens), rtol=0, atol=2e-6)
    assert_close(run(name, config, NEW, mode="seq-mean-token-mean")[0], torch.tensor(responses), rtol=0, atol=2e-6)
    one = slice(0, 1) if name in TOKEN_CHOICES else slice(1, 2)  # two tokens alone have the same covariance
    loss, _ = run(name, config, NEW[one], OLD[one], ADV[one], MASK[one], mu=MU[one], scores=SCORES[one])
    assert_close(loss, torch.tensor(alone), rtol=0, atol=2e-6)


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize(
    ("name", "changed", "clipped", "lower"),
    [
        ("gspo", {}, 1 / 6 * 2, 0),  # the first response's ratio is 1.35: above for its good tokens
        ("geo_mean", {}, 2 / 6, 0),
        ("cispo", {}, 2 / 6, 1 / 6),
        ("dppo_tv", {}, 1 / 6, 1 / 6),
        ("tis", {}, 3 / 6, 0),
        ("tis", {"policy_loss__tis_lower_bound": 0.95}, 3 / 6, 3 / 6),
        ("tis", {"policy_loss__tis_upper_bound": 0.5}, 6 / 6, 0),
        ("topr", {"policy_loss__topr_ratio": "token"}, 1 / 6, 0),
        ("clip_cov", {}, 3 / 6, 1 / 6),
        ("kl_cov", {}, 1 / 6, 0),
        ("gpg", {}, 0, 0),
    ],
)
def test_shares_of_bounded_tokens_by_hand(name, changed, clipped, lower):
    _, metrics = run(name, actor(name, **changed), NEW)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(clipped)
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(lower)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-(0.1 + 0.5 - 0.7 + 1.3 - 0.2 + 0.1) / 6)


def test_sapo_reads_its_temperatures_by_the_sign_of_the_advantage():
    new = OLD.clone().requires_grad_(True)
    run("sapo", actor("sapo", tau_pos=2.0, tau_neg=4.0), new)[0].backward()
    assert_close(new.grad, -ADV * MASK / 6)  # f'(1) = 1 for any temperature
    value = run("sapo", actor("sapo", tau_pos=2.0, tau_neg=4.0), OLD)[0]
    assert value.item() == pytest.approx(-(3.5 * 4 / 2 - 3.5 * 4 / 4) / 2 / 6)


def test_cispo_has_no_lower_bound_where_the_paper_has_none():
    far = OLD - 3.0
    loss, metrics = run("cispo", actor("cispo", clip_ratio_low=1.0), far)
    assert metrics["actor/pg_clipfrac_lower"] == 0
    assert_close(loss, (-torch.tensor(-3.0).exp() * ADV * far * MASK).sum() / 6)


def test_without_a_dual_clip_bound_a_bad_tokens_loss_grows_on():
    far, bad = torch.full((1, 1), 2.0), torch.full((1, 1), -1.0)
    one, zero = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 1)
    bounded = run("vanilla", actor("vanilla"), far, zero, bad, one)[0]
    free, metrics = run("vanilla", actor("vanilla", clip_ratio_c=None), far, zero, bad, one)
    assert bounded == 3 and free.item() == pytest.approx(torch.tensor(2.0).exp().item())
    assert metrics["actor/pg_clipfrac_lower"] == 0


# --------------------------------------------------------------------------- definitions, with constants held at x0


def mean_of(x, mask):
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def slow(name, x, x0, b, config):
    """The docstring's formula for each token, (B, R); sg[] reads ``x0``."""
    old, adv, mask, loss = b["old"], b["adv"], b["mask"], config.policy_loss
    low, high, most = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    w, w0 = (x - old).exp(), (x0 - old).exp()
    if name in ("gpg", "reinforce"):
        return -adv * x
    if name in ("vanilla", "bypass_mode"):  # the latter with its corrections off
        pessimistic = torch.maximum(-w * adv, -w.clamp(1 - low, 1 + high) * adv)
        return torch.where(adv < 0, torch.minimum(pessimistic, -most * adv), pessimistic)
    if name == "clip_cov":
        return torch.maximum(-w * adv, -w.clamp(1 - low, 1 + high) * adv) * (b["selected"] == 0)
    if name == "kl_cov":
        return -w * adv + loss.ppo_kl_coef * (x - old).abs() * b["selected"]
    if name == "gspo":
        s = mean_of(x - old, mask).exp()
        return torch.maximum(-s * adv, -s.clamp(1 - low, 1 + high) * adv)
    if name == "geo_mean":
        sign = adv.sign()
        bounded = torch.minimum(sign * (x - old), sign * (x - old).clamp(-low, high))
        return (-mean_of(adv, mask) * mean_of(sign * bounded, mask).exp()).expand_as(x)
    if name == "sapo":
        tau = torch.where(adv > 0, config.tau_pos, config.tau_neg)
        return -4 / tau * torch.sigmoid(tau * (w - 1)) * adv
    if name == "kimi15":
        d = ((x - old) * mask).sum(-1, keepdim=True)
        return -adv * x + loss.kimi15_tau / 2 * d * (x - old)
    if name == "sppo":
        tokens = mask.sum(-1, keepdim=True).clamp(min=1)
        error = (((x - old) - loss.sppo_eta * adv / tokens) * mask).sum(-1, keepdim=True)
        return error**2 / tokens
    if name == "dro":
        return -adv * x + loss.dro_beta / 2 * (x - old) ** 2
    if name == "cispo":
        return -w0.clamp(1 - low, 1 + high) * adv * x
    if name == "tis":
        return -(x0 - b["mu"]).exp().clamp(loss.tis_lower_bound, loss.tis_upper_bound) * adv * x
    if name == "topr":
        rho = ((x0 - old) * mask).sum(-1, keepdim=True).exp()
        won = (b["scores"] * mask).sum(-1, keepdim=True) > 0
        return -torch.where(won, loss.topr_pos_weight, loss.topr_neg_weight * rho.clamp(max=1)) * adv * x
    p, q = x0.exp(), old.exp()
    if name == "dppo_tv":
        held = torch.where(adv > 0, p - q > high, q - p > low)
    else:
        d = q * (old - x0) + (1 - q) * ((1 - q) / (1 - p)).log()
        held = torch.where(adv > 0, (d > high) & (p > q), (d > low) & (p < q))
    return -w0.clamp(max=most) * adv * x * ~held


def aggregated(tokens, mask, mode):
    sums, counts = (tokens * mask).sum(-1), mask.sum(-1)
    if mode == "token-mean":
        return sums.sum() / counts.sum()
    if mode == "token-sum":
        return sums.sum()
    if mode == "seq-mean-token-sum-norm":
        return sums.sum() / mask.shape[-1]
    return (sums / counts.clamp(min=1) if mode == "seq-mean-token-mean" else sums).sum() / (counts > 0).sum()


def random_batch(rows=6, width=9, seed=0, holes=True):
    """Log-probs are negative and near one another; the advantage is the response's, as GSPO's gradient wants it."""
    mask = ragged_mask(rows, width, seed, holes=holes)
    old = -normal(mask, seed + 1).abs() * mask - 0.1
    new = -(old + 0.3 * normal(mask, seed + 2) * mask).abs() - 0.01
    adv = normal(torch.ones(rows, 1), seed + 3).expand(rows, width) * mask
    g = torch.Generator().manual_seed(seed + 4)
    return {
        "mask": mask,
        "old": old,
        "new": new,
        "adv": adv,
        "mu": old + 0.2 * normal(mask, seed + 5) * mask,
        "scores": normal(mask, seed + 6) * mask,
        "selected": (torch.rand(mask.shape, generator=g) < 0.2) * mask.double(),
    }


def call(name, config, b, new=None, mode="token-mean", **more):
    new = b["new"] if new is None else new
    columns = {"mu": b["mu"], "scores": b["scores"], "selected_tokens": b["selected"]}
    return run(name, config, new, b["old"], b["adv"], b["mask"], mode, **columns, **more)


TIGHT = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.05, "clip_ratio_c": 1.3}


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_the_definition(name, mode):
    b, config = random_batch(), actor(name, **TIGHT)
    new = b["new"].clone().requires_grad_(True)
    traced = b["new"].clone().requires_grad_(True)
    loss, _ = call(name, config, b, new, mode)
    expected = aggregated(slow(name, traced, b["new"], b, config), b["mask"], mode)
    assert_close(loss, expected)
    assert_close(torch.autograd.grad(loss, new), torch.autograd.grad(expected, traced))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name):
    b, config = random_batch(rows=4, width=6, seed=3), actor(name, **TIGHT)
    x0 = b["new"]
    x = x0.clone().requires_grad_(True)

    def held(x):  # the definition, what it holds constant staying as it is at x0
        return aggregated(slow(name, x, x0, b, config), b["mask"], "token-mean")

    assert torch.autograd.gradcheck(held, x)
    (got,) = torch.autograd.grad(call(name, config, b, x)[0], x)
    step = 1e-5 * torch.eye(x0.numel(), dtype=torch.float64).view(-1, *x0.shape)
    differences = torch.stack([held(x0 + d) - held(x0 - d) for d in step]).view_as(x0) / 2e-5
    assert_close(got, differences, rtol=1e-6, atol=1e-9)
    if name not in ("cispo", "tis", "topr", "dppo_tv", "dppo_kl"):  # nothing is held: the loss itself has that slope
        assert torch.autograd.gradcheck(lambda x: call(name, config, b, x)[0], x)


# ------------------------------------------------------------------------------------------ promises of every loss


@pytest.mark.parametrize("name", NAMES)
def test_on_fresh_samples_every_loss_follows_the_policy_gradient(name):
    new = OLD.clone().requires_grad_(True)
    config = ActorConfig().with_values({"policy_loss.loss_mode": name})
    adv = torch.tensor([[0.5], [-1.5]]).expand(2, 4)
    run(name, config, new, adv=adv, mu=OLD)[0].backward()
    slope = 2 if name == "sppo" else 1  # of a square
    assert_close(new.grad, -slope * adv * MASK / MASK.sum())


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("name", NAMES)
def test_masked_positions_have_no_influence_and_no_gradient_even_if_nan(name):
    b, config = random_batch(seed=7), actor(name)
    clean = b["new"].clone().requires_grad_(True)
    loss, metrics = call(name, config, b, clean)
    spoiled = {k: v if k == "mask" else torch.where(b["mask"].bool(), v, torch.nan) for k, v in b.items()}
    new = spoiled["new"].clone().requires_grad_(True)
    same, same_metrics = call(name, config, spoiled, new)
    assert_close(same, loss)
    assert_close(same_metrics, metrics)
    (gradient,), (expected,) = torch.autograd.grad(same, new), torch.autograd.grad(loss, clean)
    assert_close(gradient, expected)
    assert (gradient[b["mask"] == 0] == 0).all() and gradient.abs().sum() > 0


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("sides", [(0, 5), (4, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_order_of_rows_and_padding_on_either_side_change_nothing_but_the_order(name, sides):
    b, config = random_batch(seed=11), actor(name)
    other = {k: pad(v.flip(0), sides) for k, v in b.items()}
    for selected in (True, False):  # both given and chosen by the loss itself
        results = []
        for batch in (b, other):
            new = batch["new"].clone().requires_grad_(True)
            loss, metrics = call(name, config, batch | {"selected": batch["selected"] if selected else None}, new)
            results.append((loss, metrics, torch.autograd.grad(loss, new)[0]))
        assert_close(results[1][:2], results[0][:2])
        assert_close(results[1][2], pad(results[0][2].flip(0), sides))


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_tokens_changes_nothing(name, mode):
    b, config = random_batch(rows=4, seed=17), actor(name)
    with_row = {k: torch.cat([v, torch.full_like(v[:1], 0 if k == "mask" else 3)]) for k, v in b.items()}
    new = with_row["new"].clone().requires_grad_(True)
    loss, _ = call(name, config, with_row, new, mode)
    assert_close(loss, call(name, config, b, mode=mode)[0])
    assert (torch.autograd.grad(loss, new)[0][-1] == 0).all()


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_is_not_finite_is_never_hidden(name, bad):
    """The engine leaves such a step out and counts it (``actor/nonfinite_steps``); no clip may make it look well."""
    b, config = random_batch(seed=19), actor(name)
    row, column = (x[0].item() for x in b["mask"].nonzero(as_tuple=True))
    new = b["new"].clone()
    new[row, column] = bad
    assert not call(name, config, b, new)[0].isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_tokens_costs_nothing_and_moves_nothing(name):
    new = NEW.clone().requires_grad_(True)
    loss, metrics = run(name, actor(name), new, mask=torch.zeros_like(MASK))
    loss.backward()
    assert loss == 0 and (new.grad == 0).all() and all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_advantages_of_zero_cost_nothing_and_move_nothing(name):
    new = OLD.clone().requires_grad_(True)
    loss, _ = run(name, actor(name), new, adv=torch.zeros_like(ADV))
    loss.backward()
    assert loss == 0 and (new.grad == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_rollout_weights_multiply_each_tokens_gradient(name):
    b, config = random_batch(seed=5), actor(name)
    weights = normal(b["mask"], 9).abs()
    gradients = []
    for more in ({}, {"rollout_is_weights": weights}):
        new = b["new"].clone().requires_grad_(True)
        call(name, config, b, new, **more)[0].backward()
        gradients.append(new.grad)
    if name == "geo_mean":  # its responses are weighed as its ratios are: by the geometric mean of their tokens
        weights = mean_of(weights.log(), b["mask"]).exp()
    assert_close(gradients[1], gradients[0] * weights)


@pytest.mark.usefixtures("both_layouts")
def test_geo_mean_weighs_a_response_by_the_geometric_mean_of_its_rollout_weights_as_verl_does():
    weights = torch.tensor([[0.5, 2.0, 2.0, 1.0], [1.0, 4.0, torch.nan, torch.nan]])  # geometric means 2^(1/4) and 2
    config, mode = actor("geo_mean"), "seq-mean-token-mean"
    alone = [run("geo_mean", config, NEW[i : i + 1], OLD[i : i + 1], ADV[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    expected = (alone[0][0] * 2**0.25 + alone[1][0] * 2) / 2
    loss, _ = run("geo_mean", config, NEW, mode=mode, rollout_is_weights=weights)
    assert_close(loss, expected)
    one, three = torch.ones(1, 3, dtype=torch.int64), torch.tensor([[0.5, 2.0, 2.0]])  # the row of docs/algorithms.md
    flat, unit = torch.zeros(1, 3), torch.ones(1, 3)
    loss, _ = run("geo_mean", config, flat, flat, unit, one, rollout_is_weights=three)
    assert loss.item() == pytest.approx(-1.259921)


CUTS = ([[0, 1, 2, 3, 4]], [[0, 1, 2], [3, 4]], [[3], [0, 4, 1, 2]], [[0, 2], [1], [4], [3]], [[4], [2], [0], [1], [3]])
"""1, 2, 4 and 5 pieces of unequal rows, in any company; test_aggregate.py goes through all there are."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_do_not_depend_on_how_the_mini_batch_is_cut(name, mode):
    b = random_batch(rows=5, seed=13)
    loss = PPOLoss(actor(name, loss_agg_mode=mode), response_length=9)
    is_own = b["mask"].bool()
    columns = {
        "old_log_probs": b["old"],
        "advantages": b["adv"],
        "response_mask": b["mask"],
        "rollout_log_probs": b["mu"],
        "token_level_scores": b["scores"],
    }
    if "selected_tokens" in loss.columns:
        columns["selected_tokens"] = torch.zeros_like(b["old"])
        columns["selected_tokens"][is_own] = loss.choose(*(b[k][is_own] for k in ("old", "new", "adv"))).double()
        assert columns["selected_tokens"].sum() > 0
    new = b["new"].clone().requires_grad_(True)
    assert set(loss.columns) <= set(columns)
    whole, _ = loss(TokenOutputs(new), columns)
    (expected,) = torch.autograd.grad(whole, new)
    for parts in CUTS:
        micros = [({name: column[rows] for name, column in columns.items()}, rows) for rows in parts]
        weights = torch.stack([loss.weight(micro) for micro, _ in micros]).double()
        shares = weights / weights.sum()
        total = sum(
            s * loss(TokenOutputs(new[rows]), micro)[0] for s, (micro, rows) in zip(shares, micros, strict=True)
        )
        assert_close(total, whole)
        assert_close(torch.autograd.grad(total, new)[0], expected)
    assert loss.aggregation.is_sum == (mode == "token-sum")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpg", "reinforce")])
def test_a_missing_config_is_said(name):
    with pytest.raises(ValueError, match=f"policy loss '{name}': config is missing"):
        run(name, None, NEW)


# ------------------------------------------------------------------------------------------------- choice of tokens


def test_clip_cov_chooses_the_requested_share_of_candidates_and_others_with_every_batch():
    g = torch.Generator().manual_seed(0)
    log_prob, adv = -torch.rand(4000, generator=g), torch.randn(4000, generator=g)
    config = actor("clip_cov", policy_loss__clip_cov_ratio=0.01, policy_loss__clip_cov_ub=9.0)
    first = choose_clip_cov(log_prob, log_prob, adv, config)
    cov = (log_prob - log_prob.mean()) * (adv - adv.mean())
    assert first.sum() == 40 and (cov[first] > 0.1).all() and (cov > 0.1).sum() > 400
    order = torch.randperm(4000, generator=g)
    assert torch.equal(choose_clip_cov(log_prob[order], log_prob[order], adv[order], config), first[order])
    second = choose_clip_cov(log_prob + 1e-4, log_prob, adv, config)
    assert (first & second).sum() < 10


def test_kl_cov_chooses_the_tokens_of_highest_covariance_and_at_least_one():
    log_prob, adv = torch.tensor([-0.1, -0.2, -3.0, -4.0]), torch.tensor([2.0, 1.0, 1.0, -1.0])
    assert choose_kl_cov(log_prob, log_prob, adv, actor("kl_cov")).tolist() == [False, False, False, True]
    half = actor("kl_cov", policy_loss__kl_cov_ratio=0.5)
    assert choose_kl_cov(log_prob, log_prob, adv, half).tolist() == [True, False, False, True]

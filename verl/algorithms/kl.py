"""KL divergence of the policy from the reference, per token, and its coefficient.

KL(policy || reference), estimated from the log-probs of the sampled tokens or summed over the vocabulary, and the
controllers of the coefficient. Where the penalty goes (reward or loss) is not decided here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.registry import About, Registry, control

KL_PENALTIES: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry(
    "kl_penalty / kl_loss_type", "KL_PENALTIES.register(name)", test="test_kl.py::test_each_estimator_by_hand"
)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate KL(policy || reference) on each sampled token.

    With d = log pi(y_t) - log pi_ref(y_t):

        kl, k1          d                      unbiased, may be negative
        abs             |d|
        mse, k2         d^2 / 2                biased, low variance; its gradient is the gradient of the KL
        low_var_kl, k3  exp(-d) + d - 1        unbiased, never negative; d is cut at +-20, the result at 10
        NAME+           the value of NAME with the gradient of k2, "straight-through": kl+ k1+ abs+ low_var_kl+ k3+
        full            the KL itself, from the logits of the whole vocabulary in place of log-probs: see ``kl_full``

    The value of k1 and k3 is right in the mean but not their gradient: of k1's it is zero, of k3's that of the KL the
    other way round. k2's is right. So the + forms report one and follow the other; ``mse+``, ``k2+`` are ``mse``.

    Args:
        logprob, ref_logprob: any equal shape, usually (B, R); differentiable in both. For ``full``: logits (B, R, V).
        kl_penalty: one of the names above.

    Raises:
        ValueError: unknown name; or ``full`` of anything but logits.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; gradients: Tang & Munos 2025 (arXiv:2506.09477).
    """
    return KL_PENALTIES[kl_penalty](logprob, ref_logprob)


@KL_PENALTIES.register(
    "kl",
    "k1",
    about=About(
        "d",
        "in the reward: unbiased, noisy, may be negative. In the loss its gradient is zero on average: do not",
        "[Schulman 2020](http://joschu.net/blog/kl-approx.html)",
    ),
)
def kl_k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """d: the log-ratio itself."""
    return logprob - ref_logprob


@KL_PENALTIES.register(
    "abs",
    about=About(
        "|d|",
        "in the reward, where it must not pay to be less likely than the reference",
        "[TRL](https://huggingface.co/docs/trl/v0.11.4/ppo_trainer)",
    ),
)
def kl_abs(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """|d|."""
    return (logprob - ref_logprob).abs()


@KL_PENALTIES.register(
    "mse",
    "k2",
    about=About(
        "d^2 / 2",
        "in the loss: its gradient is that of the KL",
        "[Schulman 2020](http://joschu.net/blog/kl-approx.html)",
    ),
)
def kl_k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * (logprob - ref_logprob).square()


@KL_PENALTIES.register(
    "low_var_kl",
    "k3",
    about=About(
        "exp(-d) + d - 1",
        "unbiased, never negative; the default of the loss. d is cut at +-20, the result at 10",
        "[Schulman 2020](http://joschu.net/blog/kl-approx.html)",
    ),
)
def kl_k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """exp(-d) + d - 1, with the cuts that keep one outlier from deciding the batch."""
    minus_d = (ref_logprob - logprob).clamp(-20, 20)  # exp(20) is half a billion: beyond, one token would be the loss
    # beyond the cut the gradient is zero, too: such a token is not pulled back
    return (torch.expm1(minus_d) - minus_d).clamp(max=10)


def _straight_through(estimate: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The value of ``estimate`` with the gradient of k2."""
    if estimate is kl_k2:
        # it has that gradient already: no second graph for the same numbers
        return kl_k2

    def with_gradient_of_k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        guide = kl_k2(logprob, ref_logprob)  # minus itself detached: adds 0 to the value, all to the gradient
        return estimate(logprob, ref_logprob).detach() + (guide - guide.detach())

    return with_gradient_of_k2


for _names, _estimate, _equation, _use in (
    (("kl+", "k1+"), kl_k1, "d", 'in the loss: the value of `k1`, the gradient of `k2` ("straight-through")'),
    (("abs+",), kl_abs, "|d|", "the same of `abs`"),
    (("mse+", "k2+"), kl_k2, "d^2 / 2", "the same as `k2`, which has that gradient already"),
    (("low_var_kl+", "k3+"), kl_k3, "exp(-d) + d - 1", "the same of `k3`: reports one, follows the other"),
):
    _test = "test_kl.py::test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2"
    KL_PENALTIES.register(*_names, about=About(_equation, _use, "arXiv:2506.09477", _test))(
        _straight_through(_estimate)
    )


@KL_PENALTIES.register(
    "full",
    about=About(
        "sum_v pi(v) (log pi(v) - log pi_ref(v))",
        "in the loss only: the KL itself at each sampled prefix, value and gradient without sampling noise",
        "[Kullback & Leibler 1951](https://doi.org/10.1214/aoms/1177729694)",
    ),
)
def kl_full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """The KL at each position, no estimate: sum_v pi(v) (log pi(v) - log pi_ref(v)).

    Its gradient by logit j is pi(j) (log pi(j) - log pi_ref(j) - KL). Tokens of probability 0 under pi count nothing.

    Args:
        logits, ref_logits: (B, R, V), up to a constant of each position: log-probs will do.

    Returns:
        (B, R), fp32 or better.

    Raises:
        ValueError: not (B, R, V) both, such as log-probs of the sampled tokens, which do not determine it.
    """
    if logits.dim() != 3 or logits.shape != ref_logits.shape:
        raise ValueError(
            f"kl_penalty=full of tensors {tuple(logits.shape)} and {tuple(ref_logits.shape)}: the KL is a sum over the "
            "vocabulary, so both must be logits (B, R, V). For the log-probs of sampled tokens (B, R) use low_var_kl."
        )
    wide = torch.promote_types(logits.dtype, torch.float32)  # bf16 sums over 100,000 words lose the KL itself
    log_p, log_q = logits.log_softmax(-1, dtype=wide), ref_logits.log_softmax(-1, dtype=wide)
    p = log_p.exp()
    # where p is 0 the logarithm may be -inf, and 0 * inf is NaN
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)


@control(
    "algorithm.use_kl_in_reward",
    "r_t - beta KL_t, on every token",
    "staying near the reference, judged token by token",
    "arXiv:1909.08593",
    "test_kl.py::test_rewards_are_scores_minus_the_charged_log_ratio",
    options="algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.kl_coef",
)
def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Charge the log-ratio against the score: r_t = score_t - kl_ratio * (log pi_old - log pi_ref), all (B, R)."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


class FixedKLController:
    """A coefficient that stays: ``value``."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Ignore what was measured."""

    def state_dict(self) -> dict[str, float]:
        """Nothing: a fixed coefficient follows the config."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed coefficient follows the config, not the checkpoint."""


class AdaptiveKLController:
    """A coefficient that steers the measured KL towards ``target_kl``:

        value <- value * (1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon)

    Args:
        init_kl_coef: the coefficient to begin with.
        target_kl: nats per token, as measured by the chosen estimator.
        horizon: samples it takes to move the coefficient by about 20%.

    Source: Ziegler et al. 2019, section 2.2 (arXiv:1909.08593).
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move after ``n_steps`` samples whose mean KL was ``current_kl``."""
        # bounded, so that one odd batch cannot throw the coefficient off
        error = min(max(float(current_kl) / self.target - 1, -0.2), 0.2)
        # samples, not optimizer steps; a batch of more than 5 horizons could turn the coefficient negative
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the part that a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with the coefficient of the checkpoint; target and horizon follow the config."""
        self.value = state.get("value", self.value)  # none in a checkpoint of a run with a fixed coefficient


@control(
    "algorithm.kl_ctrl",
    "`fixed`: beta; `adaptive`: beta <- beta (1 + clip(KL / target_kl - 1, +-0.2) samples / horizon)",
    "`adaptive`: where a KL is known that should be kept",
    "arXiv:1909.08593",
    "test_kl.py::test_an_adaptive_coefficient_moves_by_the_clipped_relative_error",
    options="algorithm.kl_ctrl.{type,kl_coef,target_kl,horizon}",
)
def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """Build the controller that ``algorithm.kl_ctrl`` asks for: ``type``, ``kl_coef``, ``target_kl``, ``horizon``.

    Raises:
        ValueError: unknown type; or an adaptive one whose ``horizon`` or ``target_kl`` is not positive.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type != "adaptive":
        raise ValueError(f"algorithm.kl_ctrl.type={kl_ctrl.type} is not known. Known: fixed, adaptive.")
    for key in ("horizon", "target_kl"):
        if not getattr(kl_ctrl, key) > 0:
            raise ValueError(
                f"algorithm.kl_ctrl.{key}={getattr(kl_ctrl, key)} must be positive: the adaptive controller divides "
                f"by it. Set a positive number, or use algorithm.kl_ctrl.type=fixed."
            )
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)

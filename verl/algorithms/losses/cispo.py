"""CISPO: a clipped importance weight, held constant, so that every token keeps its gradient."""

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "cispo",
    about=About(
        "-sg[clip(w, 1 - low, 1 + high)] A log pi",
        "rare tokens must go on teaching; `clip_ratio_low=1`: no lower bound, as published",
        "arXiv:2506.13585",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high}",
    ),
)
def compute_policy_loss_cispo(x: LossInputs) -> TokenLoss:
    """Cap the importance weight and keep the gradient of every token: PPO's clip removes that of rare tokens.

        l_t = -sg[clip(w, 1 - clip_low, 1 + clip_high)] A log pi

    The paper bounds only above: ``clip_ratio_low=1`` does that.

    Source: MiniMax-M1, 2025, equations 4 and 5 (arXiv:2506.13585).
    """
    low, high = x.clip_range
    # `ratio` is made of detached log-probs: the weight is a constant, clipped or not
    weight = x.ratio.clamp(1 - low, 1 + high)
    return TokenLoss(-weight * x.advantages * x.log_prob, x.ratio > 1 + high, x.ratio < 1 - low)

"""What is done about a sampler that is not quite the policy: the options, and what their texts stand for."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from verl.config.base import Config, option

RatioLevel = Literal["token", "sequence", "geometric"]
"""Over what pi_old / pi_rollout is taken: each token, the product over its response, or the geometric mean over it."""

RATIOS = {
    "token": "token",
    "sequence": "sequence",
    "geometric": "geometric",
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
}
"""Ways to reject by a ratio within two bounds -> its level."""

DIVERGENCES = tuple(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for kind in ("k2", "k3"))
"""Ways to reject by a divergence below one bound."""


class Rejection(NamedTuple):
    """One way to reject: kept is what lies within the bounds."""

    kind: str
    """``token``, ``sequence``, ``geometric``, or one of ``DIVERGENCES``."""
    upper: float
    lower: float | None
    """None: there is none."""


@dataclass
class RolloutCorrectionConfig(Config):
    """What is done about tokens the sampler drew with other probabilities than the trainer's. All of it is off by
    default, needs ``rollout.calculate_log_probs``, and is about r = pi_old / pi_rollout. See docs/algorithms.md."""

    _target_: ClassVar[str] = "verl.trainer.config.RolloutCorrectionConfig"

    rollout_is: RatioLevel | None = None
    """Multiply the policy loss of each token by r, within bounds, as importance sampling asks for. Null: do not."""

    rollout_is_threshold: float | str = 2.0
    """Upper bound of r in ``rollout_is``, or both as text, 0.5_5.0: weights beyond them are then 0 (IcePop). Source:
    Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl)."""

    rollout_is_threshold_lower: float | None = option(None, above=0)
    """Lower bound of r in ``rollout_is``. Null: none, with ``rollout_is_mode=mask`` 1 / upper bound."""

    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of r beyond a bound: ``truncate`` sets it to the bound, ``mask`` to 0, so that such tokens teach
    nothing (IcePop, arXiv:2510.18855). Either way they are counted where losses are averaged."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights of ``rollout_is`` by their mean over the batch: the mean of tokens with ``token``, of
    responses else."""

    rollout_rs: str | None = None
    """Reject tokens (``token``) or whole responses (``sequence``, ``geometric``) whose r is beyond the bounds below:
    the update does not see them, and they are not counted where losses are averaged. Also token_k1, seq_sum_k1,
    seq_mean_k1, verl's later names of these; token_, seq_sum_, seq_mean_ or seq_max_ with k2, (log r)^2 / 2, or k3,
    r - 1 - log r, which have an upper bound only; or several, as text with commas. Null: do not."""

    rollout_rs_threshold: float | str | None = None
    """Upper bound in ``rollout_rs``, or both as text, 0.5_2.0; with commas one for each way to reject. Null:
    ``rollout_is_threshold``. Of the geometric mean, 1.001 or so."""

    rollout_rs_threshold_lower: float | None = option(None, above=0)
    """Lower bound of r in ``rollout_rs``. Null: 1 / upper bound."""

    rollout_token_veto_threshold: float | None = option(None, above=0, below=1)
    """Reject every response with a token whose r is below this, 1e-4 for example, whatever ``rollout_rs`` is."""

    bypass_mode: bool = False
    """Take the sampler's log-probs for the old ones and leave out the pass that computes them: the ratio in the loss is
    then that of the policy to the sampler, and its clip range holds for both differences together."""

    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """With ``policy_loss.loss_mode=bypass_mode``, where r = pi / pi_rollout is that of the policy being trained:
    ``ppo_clip``, the clipped objective of r; or ``reinforce``, the policy gradient, weighed as ``rollout_is`` says."""

    @property
    def rejects(self) -> bool:
        """Whether some tokens are to be left out of updates."""
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None

    @property
    def weighting(self) -> tuple[float, float | None, str]:
        """Upper and lower bound of ``rollout_is``, and its mode.

        Raises:
            ValueError: the threshold is no text of this kind.
        """
        lower, upper = _bounds(self.rollout_is_threshold)
        if lower is not None:
            return upper, lower, "mask"
        return upper, self.rollout_is_threshold_lower, self.rollout_is_mode

    @property
    def rejections(self) -> list[Rejection]:
        """What ``rollout_rs`` asks for, in the order given.

        Raises:
            ValueError: a way to reject is unknown, or the thresholds do not fit.
        """
        kinds = [] if self.rollout_rs is None else [kind.strip() for kind in self.rollout_rs.split(",")]
        given = self.rollout_rs_threshold
        texts = [None] if given is None else [text.strip() for text in str(given).split(",")]
        if len(texts) not in (1, len(kinds)) and kinds:
            raise ValueError(f"has {len(texts)} thresholds for {len(kinds)} ways to reject: give one, or one for each")
        texts = texts * len(kinds) if len(texts) == 1 else texts
        return [self._rejection(kind, text) for kind, text in zip(kinds, texts, strict=True)]

    def _rejection(self, kind: str, text: str | None) -> Rejection:
        if kind in DIVERGENCES:
            lower, upper = _bounds(text) if text is not None else (None, None)
            if upper is None or lower is not None:
                raise ValueError(f"{kind} has one bound, from above, of its own: give a number, 0.01 for example")
            return Rejection(kind, upper, None)
        if kind not in RATIOS:
            raise ValueError(f"{kind!r} is no way to reject; there are {', '.join((*RATIOS, *DIVERGENCES))}")
        lower, upper = _bounds(self.weighting[0] if text is None else text)
        lower = self.rollout_rs_threshold_lower if lower is None else lower
        return Rejection(RATIOS[kind], upper, 1 / upper if lower is None else lower)


def _bounds(threshold: float | str) -> tuple[float | None, float]:
    """A number, the upper bound, or both as text: ``0.5_2.0``."""
    parts = str(threshold).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"{threshold!r} is neither a number above 0 nor two of them, lower_upper, as in 0.5_2.0")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])

"""From rewards to advantages: estimator, discounting, KL penalty; corrections for a sampler that is not the policy."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from verl.config.base import Config, ReadIf, option, read_if, section

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
    """Corrections for tokens that were sampled with other probabilities than the trainer's. All of it is off unless
    given, but for ``rollout_is`` with partial rollouts; it needs ``rollout.calculate_log_probs``, and is about
    r = pi_old / pi_rollout. See docs/algorithms.md."""

    _target_: ClassVar[str] = "verl.trainer.config.RolloutCorrectionConfig"

    rollout_is: RatioLevel | None = None
    """Multiply the policy loss of each token by r, within bounds, as importance sampling asks for. Null: do not.
    Unless given: ``token`` with ``rollout.partial_rollout`` and a ``max_staleness`` above 0, whose tokens are of
    several versions of the weights (not with ``rollout_rs``, ``bypass_mode``, ``loss_mode=tis``, a loss of yours or
    ``skip_old_log_probs``); null on the command line, or false, leaves it out."""

    rollout_is_threshold: float | str = 2.0
    """Upper bound of r in ``rollout_is``, or both as text, 0.5_5.0: weights beyond them are then 0 (IcePop). Source:
    Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl)."""

    rollout_is_threshold_lower: float | None = option(None, above=0)
    """Lower bound of r in ``rollout_is``. Null: none, with ``rollout_is_mode=mask`` 1 / upper bound."""

    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of r beyond a bound: ``truncate`` sets it to the bound, ``mask`` to 0, so that such tokens teach
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
        """The rejections of ``rollout_rs``, in the order given.

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
        # a divergence is never negative and 0 where both agree: there is nothing to bound from below
        if kind in DIVERGENCES:
            lower, upper = _bounds(text) if text is not None else (None, None)
            if upper is None or lower is not None:
                raise ValueError(f"{kind} has one bound, from above, of its own: give a number, 0.01 for example")
            return Rejection(kind, upper, None)
        if kind not in RATIOS:
            raise ValueError(f"{kind!r} is no way to reject; there are {', '.join((*RATIOS, *DIVERGENCES))}")
        lower, upper = _bounds(self.weighting[0] if text is None else text)
        lower = self.rollout_rs_threshold_lower if lower is None else lower
        # 1 / upper: as far below 1 as the upper bound is above, in log r
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


# -- From rewards to advantages: estimator, discounting, KL penalty --------------------------------------------------


KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full",
]  # fmt: skip
"""Estimators of the KL divergence from log-probs of sampled tokens (Schulman 2020,
http://joschu.net/blog/kl-approx.html). ``kl`` = ``k1``: the difference; ``abs``: its absolute value; ``mse`` = ``k2``:
half its square; ``low_var_kl`` = ``k3``: exp(-d) - 1 + d. With ``+``: that value, with the gradient of k2. ``full`` is
no estimate but the sum over the vocabulary, in the loss only."""


@dataclass
class KLControlConfig(Config):
    """Coefficient of the KL penalty in the reward."""

    _target_: ClassVar[str] = "verl.trainer.config.KLControlConfig"
    _read_if: ClassVar[ReadIf] = read_if("algorithm.use_kl_in_reward")

    type: Literal["fixed", "adaptive"] = "fixed"
    """``fixed``, or ``adaptive``: steered towards ``target_kl`` (Ziegler et al. 2019, arXiv:1909.08593)."""

    kl_coef: float = option(0.001, at_least=0)
    """Coefficient; the first one if adaptive. Reward points per nat."""

    horizon: int = option(10000, read_if("type", "adaptive"), above=0)
    """Adaptive: over this many responses the coefficient changes by at most about a fifth; larger is slower."""

    target_kl: float = option(0.1, read_if("type", "adaptive"), above=0)
    """Adaptive: KL per response token to steer to, in nats."""


@dataclass
class PFPPOConfig(Config):
    """Policy-filtration PPO (Shen & Zhang 2024, arXiv:2409.06957): resample responses by score before the update."""

    _read_if: ClassVar[ReadIf] = read_if("algorithm.use_pf_ppo", remark="takes every response once")

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Sampling weights made of scores s: ``pow``: |s|^weight_pow; ``max_min``: the highest and the lowest scores of
    the batch alone; ``max_random``: 4 for the highest, 1 for others."""

    weight_pow: float = option(2.0, read_if("reweight_method", "pow", remark="does not read it"), at_least=0)
    """Exponent of ``pow``. 0: every response is as likely as any other."""


@dataclass
class FilterGroupsConfig(Config):
    """Dynamic sampling (DAPO: Yu et al. 2025, arXiv:2503.14476): train on groups whose responses differ in reward."""

    _read_if: ClassVar[ReadIf] = read_if("enable", remark="trains on every group")

    enable: bool = False
    """Drop groups whose responses all score alike, and use further prompts until ``data.train_batch_size`` are left.
    ``data.gen_batch_size`` prompts are used at a time. Needs ``rollout.n`` of 2 or more."""

    metric: str = "seq_reward"
    """Must differ: ``seq_reward`` or ``seq_final_reward``, the sum of a response's rewards; or the name of a value
    that the reward function returns, ``acc`` for example. A function that returns one number gives ``acc`` and
    ``score`` too."""

    low: float | None = None
    """Drop groups whose mean of ``metric`` is not above this as well: prompts that are too hard. Null: none."""

    high: float | None = None
    """Drop groups whose mean of ``metric`` is not below this as well: prompts that are too easy. Null: none."""

    min_std: float = option(0.0, at_least=0)
    """Drop groups whose std of ``metric`` is not above this as well. 0: all that differ at all are kept."""

    max_num_gen_batches: int = option(0, at_least=0)
    """Batches of prompts that one step may use; if groups still lack then, the run stops. 0: no bound."""


ScoreGroup = Literal["batch", "group", "source", "running"]
"""Scores whose mean or std counts: those of the step, of the prompt, of the data source in this step, or of the data
source since the run began."""


@dataclass
class RewardNormConfig(Config):
    """Normalisation of scores, (s - mean) / (std + 1e-6): mean and std each of their own choice."""

    mean: ScoreGroup | None = None
    """Subtrahend: the mean over the step's responses (``batch``), over those to the same prompt (``group``) or
    of the same data source (``source``), or over all so far of the same data source, this step included (``running``;
    kept in checkpoints). Null: nothing."""

    std: ScoreGroup | None = None
    """Divisor: the unbiased std over the same choices. Null: nothing."""


@dataclass
class OverlongBufferConfig(Config):
    """Penalty of responses that come close to the length limit. Source: Yu et al. 2025, DAPO (arXiv:2503.14476)."""

    _read_if: ClassVar[ReadIf] = read_if("enable")

    enable: bool = False
    """Add -penalty_factor x clip((length - (response_length - len)) / len, 0, 1) to the score."""

    len: int = option(0, at_least=0)
    """Tokens before ``rollout.response_length`` over which the penalty grows from 0 to its full size."""

    penalty_factor: float = option(1.0, above=0)
    """Penalty of a response that fills the window, in reward points."""


@dataclass
class RewardShapingConfig(Config):
    """Changes of a response's score, in this order: ``overlong_buffer``, ``norm``, ``scale``, ``shift``,
    ``clip_range``, ``clip``, then the KL in the reward, ``clip`` again, ``whiten``. Validation and ``critic/score``
    show scores as given."""

    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig)
    """Penalty of overlong responses."""

    norm: RewardNormConfig = section(RewardNormConfig)
    """Normalisation. Equal scores, and a response alone in its group, are not divided."""

    scale: float = option(1.0, above=0)
    """Factor, after normalisation."""

    shift: float = 0.0
    """Reward points added, after ``scale``."""

    clip_range: list[float] | None = None
    """[low, high]: bounds on the score of a response, [-1,3] for example. Null: none."""

    clip: float | None = option(None, above=0)
    """Bound on the absolute score of a response and, once the KL is in, on that of every token's reward. Null: none."""

    whiten: bool = False
    """Shift and scale token rewards to mean 0 and variance 1 over the step's tokens: a score at the end becomes a
    reward on every token."""


@dataclass
class AdvantageConfig(Config):
    """Changes of advantages once they are estimated. Returns, which the critic learns, stay as they are."""

    whiten: bool | None = None
    """Shift and scale to mean 0 and variance 1 over the step's tokens. Null: as the estimator does by itself; gae,
    reinforce_plus_plus, reinforce_plus_plus_baseline and gdpo do."""

    clip: float | None = option(None, above=0)
    """Bound on their absolute value, after whitening. Null: none."""


@dataclass
class GiGPOConfig(Config):
    """Parameters of ``adv_estimator=gigpo`` (Feng et al. 2025, arXiv:2505.10978), in addition to ``step_gamma``."""

    episode_weight: float = option(1.0, at_least=0)
    """Weight of how an episode compares with its group."""

    step_weight: float = option(1.0, at_least=0)
    """Weight of how a turn compares with the turns of its group that began in the same state."""

    mode: Literal["mean_std_norm", "mean_norm"] = "mean_std_norm"
    """Both comparisons subtract the mean, and ``mean_std_norm`` divides by the std too. ``mean_norm`` leaves it out,
    as Dr. GRPO does."""


@dataclass
class SampleMaskConfig(Config):
    """Responses that neither policy nor critic learns from: their loss mask is zero. They are sampled, scored, and
    count in their group all the same."""

    drop_truncated: bool = False
    """Those cut at the length limit (DAPO's overlong filtering)."""

    error_max_len: int | None = option(None, above=0)
    """Those of this many tokens or more whose score, as the reward function gave it, is not positive: long failures.
    Null: none."""

    difficulty: list[float] | None = None
    """[low, high]: those to prompts whose mean score, as the reward function gave it, lies outside; the ends are
    inside. Null: none."""


@dataclass
class AlgorithmConfig(Config):
    """Estimation of advantages and the KL penalty in the reward."""

    _target_: ClassVar[str] = "verl.trainer.config.AlgoConfig"

    gamma: float = option(1.0, at_least=0, at_most=1)
    """Discount per token."""

    lam: float = option(1.0, at_least=0, at_most=1)
    """Bias against variance in GAE: 0 is one-step TD, 1 is Monte Carlo. Source: Schulman et al. 2016
    (arXiv:1506.02438)."""

    adv_estimator: str = "gae"
    """Advantage estimator: gae, grpo, grpo_passk, rloo, remax, reinforce, step_reinforce, agentic_reinforce, gigpo,
    reinforce_plus_plus, reinforce_plus_plus_baseline, opo, gpg, gdpo, optimal_token_baseline,
    tir_optimal_token_baseline, sppo, a name given to ``register_adv_est``, or a function of yours as
    path/to/file.py:name. Only ``gae`` needs a critic. Equations and papers: docs/algorithms.md."""

    norm_adv_by_std_in_grpo: bool = True
    """GRPO: divide by the standard deviation of the group. False is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

    step_gamma: float = option(0.95, at_least=0, at_most=1)
    """step_reinforce, gigpo: discount from turn to turn. Source: Feng et al. 2025 (arXiv:2505.10978)."""

    gigpo: GiGPOConfig = section(GiGPOConfig)
    """gigpo: how episodes and turns are compared, and weighed."""

    gdpo_reward_keys: list[str] | None = None
    """gdpo: names of the rewards to combine, which the reward function returns next to ``score``. Source: Liu et al.
    2026 (arXiv:2601.05242)."""

    gdpo_reward_weights: list[float] | None = None
    """gdpo: a weight for each of those rewards. Null: all 1."""

    use_kl_in_reward: bool = False
    """Subtract kl_coef x KL(policy || reference) from the reward of every token. Starts a reference model."""

    kl_penalty: KLKind = option("kl", read_if("use_kl_in_reward"))
    """Estimator of that KL; not ``full``, which a reward cannot know. See also ``actor.kl_loss_type``, its sibling for
    the loss."""

    kl_ctrl: KLControlConfig = section(KLControlConfig)
    """Coefficient of that KL. Read only with ``use_kl_in_reward``."""

    reward_shaping: RewardShapingConfig = section(RewardShapingConfig)
    """Shaping of rewards."""

    advantage: AdvantageConfig = section(AdvantageConfig)
    """Shaping of advantages."""

    sample_mask: SampleMaskConfig = section(SampleMaskConfig)
    """Responses left out of the loss."""

    use_pf_ppo: bool = False
    """Draw the rows of the update from the batch, with replacement, by their scores (PF-PPO). With ``gae`` only."""

    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    """Parameters of ``use_pf_ppo``."""

    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    """Dynamic sampling: which of the generated groups are trained on."""

    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    """Corrections for a sampler that is not quite the policy."""

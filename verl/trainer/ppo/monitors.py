"""Monitors of a step's metrics: steps without a learning signal, and gradients that are not finite.

Know metrics and options; no batches, no workers. The metrics themselves are of `metric_utils.compute_data_metrics`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from verl.config.ppo import PPOConfig

WINDOW, MIN_COUNT = 10, 5
"""A cause is reported once it held in ``MIN_COUNT`` of the last ``WINDOW`` steps."""


LOW_ENTROPY = 0.01
"""Nats a token below which samples of one prompt are all but the same."""


_ROLLOUT, _FILTER = "actor_rollout_ref.rollout", "algorithm.filter_groups.enable"


class LearningSignalMonitor:
    """Report, once a cause, why steps teach nothing, and what to change.

    Args:
        config: the whole tree.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.steps = 0
        self.without_signal = 0
        self._recent: dict[str, deque[bool]] = {}
        self._reported: set[str] = set()

    def note(self, metrics: Mapping[str, float], token_entropy: float | None = None) -> list[str]:
        """Count a step; return the messages about it.

        Args:
            metrics: of the step.
            token_entropy: nats a token, of the policy that sampled; None: not known.
        """
        self.steps += 1
        causes = dict(self._causes(metrics, token_entropy))
        self.without_signal += metrics.get("batch/zero_advantage_ratio", 0) == 1
        sentences = []
        for cause in dict.fromkeys((*self._recent, *causes)):
            recent = self._recent.setdefault(cause, deque(maxlen=WINDOW))
            recent.append(cause in causes)
            if sum(recent) >= MIN_COUNT and cause in causes and cause not in self._reported:
                self._reported.add(cause)
                sentences.append(f"in {sum(recent)} of the last {len(recent)} steps {causes[cause]}")
        return sentences

    def summary(self) -> str | None:
        """Return a message if a quarter of the steps or more had advantages of zero only."""
        if self.without_signal < MIN_COUNT or 4 * self.without_signal < self.steps:
            return None
        return f"{self.without_signal} of {self.steps} steps had advantages of 0 only and taught nothing"

    def _causes(self, metrics: Mapping[str, float], token_entropy: float | None) -> Iterator[tuple[str, str]]:
        """Yield name and description of every cause for which this step taught nothing, or the next will."""
        rollout, is_idle = self.config.actor_rollout_ref.rollout, metrics.get("batch/zero_advantage_ratio", 0) == 1
        if metrics.get("batch/token_ratio", 1) == 0:
            yield (
                "no token in the loss",
                "no response had a token in the loss, so the gradient was 0: see the metrics sample_mask/*_fraction "
                "and reward/errors, and the response_mask that agent loops return",
            )
        elif is_idle and metrics.get("batch/zero_std_ratio") == 1:
            yield "equal rewards", self._equal_rewards(metrics)
        elif is_idle:
            yield (
                "no advantage",
                "every advantage was 0 and so was the gradient of the policy loss: see critic/rewards/{min,max} and "
                "the options of algorithm.reward_shaping and algorithm.advantage",
            )
        elif metrics.get("actor/grad_norm") == 0:
            yield (
                "no gradient",
                "actor/grad_norm was 0 though advantages were not: see actor/pg_clipfrac, and whether anything of the "
                "model is trained",
            )
        if metrics.get("batch/truncated_ratio") == 1 and not rollout.ignore_eos:
            yield (
                "all truncated",
                f"every response was cut at the length limit, so none is complete: raise "
                f"data.max_response_length (now {rollout.response_length}), look whether the model ends its answers "
                f"(chat template, {_ROLLOUT}.stop), or set {_ROLLOUT}.ignore_eos=true if they need no end",
            )
        if token_entropy is not None and token_entropy < LOW_ENTROPY:
            yield (
                "no entropy",
                f"the policy's entropy was below {LOW_ENTROPY} nats a token (now {token_entropy:.2g}): samples of one "
                f"prompt are all but the same. Lower actor_rollout_ref.actor.optim.lr, raise "
                f"actor_rollout_ref.actor.clip_ratio_high, entropy_coeff or {_ROLLOUT}.temperature, or stop here if "
                "the reward is what it should be",
            )

    def _equal_rewards(self, metrics: Mapping[str, float]) -> str:
        score = metrics.get("critic/score/mean", 0.0)
        seen = f"all responses to each prompt had the same reward (mean {score:.3g}), so every advantage was 0"
        if metrics.get("batch/solve_all", 0) > metrics.get("batch/solve_none", 0):
            why = "The task is solved: stop, or take harder prompts"
        else:
            why = (
                "Look at samples (trainer.rollout_data_dir) and at what the reward function makes of them, take easier "
                f"prompts or a denser reward, or raise {_ROLLOUT}.n (now {self.config.actor_rollout_ref.rollout.n})"
            )
        return f"{seen}. {why}; {_FILTER}=true samples more prompts until groups differ"


class NonFiniteGuard:
    """Counts the steps in a row whose gradient was not finite.

    Args:
        tolerance: ``trainer.nonfinite_tolerance``; that many end the run.
    """

    def __init__(self, tolerance: int) -> None:
        self.tolerance = tolerance
        self.in_a_row = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a finished step by its metrics.

        Raises:
            FloatingPointError: it is one too many.
        """
        skipped = [name for name in ("actor", "critic") if metrics.get(f"{name}/nonfinite_steps", 0) > 0]
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.tolerance:
            raise FloatingPointError(
                f"{' and '.join(skipped)}: the gradient was not finite in {self.in_a_row} steps in a row, as many as "
                f"trainer.nonfinite_tolerance={self.tolerance} allows (the last is step {step}; those optimizer steps "
                f"were skipped). Lower optim.lr, look for extreme rewards, or raise the tolerance."
            )

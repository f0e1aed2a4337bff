"""Health of a run, read off the metrics of its steps: rules that warn once, and that end a run by ``trainer.halt_on``.

Knows numbers and options only: no batch, no worker. What a rule looks at is a metric of the step, so that whoever
reads the metrics of a run can apply it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from verl.config.ppo import PPOConfig
from verl.utils.exit_codes import ExitCode

WINDOW, MIN_COUNT = 10, 5
"""A cause is reported once it held in ``MIN_COUNT`` of the last ``WINDOW`` steps."""

SPAN, SETTLED = 50, 20
"""Steps over which a trend is looked for, and the fewest that show one."""

_LEAST_KL = 0.05
"""Nats: a jump that ends below is no harm."""

_LEAST_TOKENS = 16
"""A change of the mean length by less is no drift, however short responses are."""

_ENTROPY_FALL = 0.1
"""Share of the entropy of some ``SPAN`` steps ago below which it has collapsed."""

_KL_METRICS = ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty")

_TURNS = "actor_rollout_ref.rollout.multi_turn"

_ROLLOUT, _FILTER = "actor_rollout_ref.rollout", "algorithm.filter_groups.enable"

_ACTOR = "actor_rollout_ref.actor"


class UnhealthyRun(RuntimeError):
    """A run that was ended by a rule of ``trainer.halt_on``."""

    exit_class = ExitCode.UNHEALTHY


class Cause(NamedTuple):
    """Something wrong with a step."""

    rule: str
    """The name that ``trainer.halt_on`` knows it by."""
    name: str
    text: str
    """What was seen, and what to change; follows "in 5 of the last 7 steps"."""
    is_trend: bool = False
    """Whether ``text`` is of many steps already, and stands alone."""


class HealthMonitor:
    """Report, once a cause, what keeps a run from learning or will end it, and what to change.

    Args:
        config: the whole tree.
        total_steps: length of the run.

    Attributes:
        metrics: of the last step noted: the rules it broke, and how fast memory grows.
    """

    def __init__(self, config: PPOConfig, total_steps: int = 0) -> None:
        self.config, self.limits = config, config.trainer.health
        self.total_steps = total_steps
        self.steps = 0
        self.without_signal = 0
        self.halting: list[str] = []
        self.metrics: dict[str, float] = {}
        self._recent: dict[str, deque[bool]] = {}
        self._reported: set[str] = set()
        self._past: dict[str, deque[float]] = {}
        self._memory: dict[str, deque[float]] = {}

    def note(
        self,
        metrics: Mapping[str, float],
        token_entropy: float | None = None,
        memory: Mapping[str, float] | None = None,
        free_memory: float = 0.0,
    ) -> list[str]:
        """Count a step; return the messages about it.

        Args:
            metrics: of the step.
            token_entropy: nats a token, of the policy that sampled; None: not known.
            memory: MiB of each process of the run, by its name.
            free_memory: MiB that the machine has left.
        """
        self.steps += 1
        self.metrics = {}
        found = (*self._causes(metrics, token_entropy), *self._memory_growth(memory or {}, free_memory))
        causes = {cause.name: cause for cause in found}
        self.metrics["health/broken_rules"] = len({cause.rule for cause in found})
        self._remember(metrics, token_entropy)
        self.without_signal += metrics.get("batch/zero_advantage_ratio", 0) == 1
        sentences = []
        for name in dict.fromkeys((*self._recent, *causes)):
            recent = self._recent.setdefault(name, deque(maxlen=WINDOW))
            recent.append(name in causes)
            cause = causes.get(name)
            if cause is None or not (cause.is_trend or sum(recent) >= MIN_COUNT):
                continue
            seen = cause.text if cause.is_trend else f"in {sum(recent)} of the last {len(recent)} steps {cause.text}"
            if cause.rule in self.config.trainer.halt_on:
                self.halting.append(f"{cause.rule}: {seen}")
            if name not in self._reported:
                self._reported.add(name)
                sentences.append(seen)
        return sentences

    def check(self, step: int, checkpoint: Any = None) -> None:
        """End the run if a rule of ``trainer.halt_on`` asks for it.

        Args:
            checkpoint: folder of the newest complete one, if there is any.

        Raises:
            UnhealthyRun: with what was seen.
        """
        if not self.halting:
            return
        kept = f"The newest checkpoint is {checkpoint}." if checkpoint else "No checkpoint has been written."
        rules = ", ".join(self.config.trainer.halt_on)
        raise UnhealthyRun(
            f"step {step}: trainer.halt_on=[{rules}] ends the run. {'; '.join(self.halting)}. {kept} Mend the "
            "cause, or leave the rule out of trainer.halt_on, and start the same command again."
        )

    def summary(self) -> str | None:
        """Return a message if a quarter of the steps or more had advantages of zero only."""
        if self.without_signal < MIN_COUNT or 4 * self.without_signal < self.steps:
            return None
        return f"{self.without_signal} of {self.steps} steps had advantages of 0 only and taught nothing"

    def state_dict(self) -> dict[str, Any]:
        """JSON values for a checkpoint; memory is left out, since a resumed run has other processes."""
        return {
            "steps": self.steps,
            "without_signal": self.without_signal,
            "recent": {name: list(flags) for name, flags in self._recent.items()},
            "reported": sorted(self._reported),
            "past": {name: list(values) for name, values in self._past.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; an empty state, of one without, changes nothing."""
        self.steps, self.without_signal = state.get("steps", 0), state.get("without_signal", 0)
        self._recent = {name: deque(flags, WINDOW) for name, flags in state.get("recent", {}).items()}
        self._reported = set(state.get("reported", ()))
        self._past = {name: deque(values, SPAN) for name, values in state.get("past", {}).items()}

    # -- rules --------------------------------------------------------------------------------------------------------

    def _causes(self, metrics: Mapping[str, float], token_entropy: float | None) -> Iterator[Cause]:
        """Yield every cause for which this step taught nothing, or the next will."""
        yield from self._signal(metrics)
        yield from self._responses(metrics, token_entropy)
        yield from self._endings(metrics)
        yield from self._entropy(token_entropy)
        yield from self._drift(metrics)
        threshold = self.config.actor_rollout_ref.rollout.mismatch_threshold
        if (gap := metrics.get("training/rollout_probs_diff_mean", 0.0)) > threshold:
            yield Cause(
                "mismatch",
                "mismatch",
                f"the rollout's probabilities differed from the trainer's by more than {_ROLLOUT}.mismatch_threshold="
                f"{threshold:g} (now {gap:.3g}): see the causes in the warning about it and rollout_mismatch.jsonl, or "
                "weigh it with algorithm.rollout_correction.rollout_is=token",
            )

    def _signal(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Yield why the policy's gradient was zero, or most of it."""
        is_idle = metrics.get("batch/zero_advantage_ratio", 0) == 1
        share = metrics.get("critic/groups_without_signal", 0.0)
        limit = self.limits.groups_without_signal
        if metrics.get("batch/token_ratio", 1) == 0:
            yield Cause(
                "no_gradient",
                "no token in the loss",
                "no response had a token in the loss, so the gradient was 0: see the metrics sample_mask/*_fraction "
                "and reward/errors, and the response_mask that agent loops return",
            )
        elif limit is not None and share >= limit and metrics.get("batch/zero_std_ratio", 0) > 0:
            yield Cause("groups_without_signal", "equal rewards", self._equal_rewards(metrics, share))
        elif is_idle:
            yield Cause(
                "no_gradient",
                "no advantage",
                "every advantage was 0 and so was the gradient of the policy loss: see critic/rewards/{min,max} and "
                "the options of algorithm.reward_shaping and algorithm.advantage",
            )
        elif metrics.get("actor/grad_norm") == 0:
            yield Cause(
                "no_gradient",
                "no gradient",
                "actor/grad_norm was 0 though advantages were not: see actor/pg_clipfrac, and whether anything of the "
                "model is trained",
            )
        low, high, past = (metrics.get(f"critic/score/{name}") for name in ("min", "max", "mean"))
        if (spread := self.limits.constant_reward) is None or low is None or high is None or past is None:
            return
        before = self._past.get("score")
        if high - low <= spread and before and abs(before[-1] - past) <= spread:
            yield Cause(
                "constant_reward",
                "constant reward",
                f"every response of the batch had the same reward ({past:.3g}), which was that of the step before: a "
                "reward function that does not tell responses apart teaches nothing. `verl check data` scores known "
                "answers with it; trainer.rollout_data_dir shows what it was given",
            )

    def _equal_rewards(self, metrics: Mapping[str, float], share: float) -> str:
        score = metrics.get("critic/score/mean", 0.0)
        seen = "all responses to each prompt had the same reward" if share == 1 else (
            f"the responses to most prompts ({share:.0%}) had the same reward"
        )  # fmt: skip
        seen += f" (mean {score:.3g}), so {'every advantage was' if share == 1 else 'their advantages were'} 0"
        if metrics.get("batch/solve_all", 0) > metrics.get("batch/solve_none", 0):
            why = "The task is solved: stop, or take harder prompts"
        else:
            why = (
                "Look at samples (trainer.rollout_data_dir) and at what the reward function makes of them, take easier "
                f"prompts or a denser reward, or raise {_ROLLOUT}.n (now {self.config.actor_rollout_ref.rollout.n})"
            )
        return f"{seen}. {why}; {_FILTER}=true samples more prompts until groups differ"

    def _responses(self, metrics: Mapping[str, float], token_entropy: float | None) -> Iterator[Cause]:
        """Yield what is wrong with the text of the responses: repeated in a group, or cut off."""
        rollout, limits = self.config.actor_rollout_ref.rollout, self.limits
        share = metrics.get("batch/identical_responses", 0.0)
        if limits.identical_responses is not None and share >= limits.identical_responses:
            why = (
                f"look for what makes the engine repeat itself: {_ROLLOUT}.temperature (now {rollout.temperature:g}), "
                f"do_sample (now {str(rollout.do_sample).lower()}), top_k, top_p, or a seed in engine_kwargs"
                if token_entropy is not None and token_entropy > 0.5
                else f"raise {_ROLLOUT}.temperature (now {rollout.temperature:g}) or {_ACTOR}.entropy_coeff, or stop "
                "if the reward is what it should be"
            )
            entropy = "" if token_entropy is None else f", with an entropy of {token_entropy:.2g} nats a token"
            yield Cause(
                "identical_responses",
                "identical responses",
                f"most responses ({share:.0%}) were, token by token, the same as another to the same prompt{entropy}, "
                f"so that groups compare nothing: {why}",
            )
        cut, has_episodes = metrics.get("batch/truncated_ratio", 0.0), "agent/status/completed" in metrics
        if limits.truncation is not None and cut >= limits.truncation and not rollout.ignore_eos and not has_episodes:
            how_many = "every response was" if cut == 1 else f"many responses ({cut:.0%}) were"
            which = "none is" if cut == 1 else "they are not"
            yield Cause(
                "truncation",
                "truncated",
                f"{how_many} cut at the length limit, so {which} complete: raise data.max_response_length (now "
                f"{rollout.response_length}), look whether the model ends its answers (chat template, "
                f"{_ROLLOUT}.stop), or set {_ROLLOUT}.ignore_eos=true if they need no end",
            )

    def _entropy(self, token_entropy: float | None) -> Iterator[Cause]:
        limit = self.limits.entropy
        if limit is None or token_entropy is None:
            return
        advice = (
            f"Lower {_ACTOR}.optim.lr, raise {_ACTOR}.clip_ratio_high, entropy_coeff or {_ROLLOUT}.temperature, or "
            "stop here if the reward is what it should be"
        )
        past = self._past.get("entropy", ())
        if token_entropy < limit:
            yield Cause(
                "entropy",
                "no entropy",
                f"the policy's entropy was below {limit:g} nats a token (now {token_entropy:.2g}): samples of one "
                f"prompt are all but the same. {advice}",
            )
        elif len(past) >= SETTLED and token_entropy < _ENTROPY_FALL * (before := median(list(past)[:WINDOW])):
            yield Cause(
                "entropy",
                "entropy fell",
                f"the policy's entropy was less than a tenth of what it was {len(past)} steps before ({before:.2g} -> "
                f"{token_entropy:.2g} nats a token): it explores less and less. {advice}",
            )

    def _endings(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Yield the limit, or the failure, that ended more than half of the episodes."""
        turns, env = self.config.actor_rollout_ref.rollout.multi_turn, self.config.env
        length = self.config.actor_rollout_ref.rollout.response_length
        keys = {
            "max_assistant_turns": (f"{_TURNS}.max_assistant_turns", turns.max_assistant_turns, "max_steps"),
            "max_user_turns": (f"{_TURNS}.max_user_turns", turns.max_user_turns, ""),
            "max_tool_calls": (f"{_TURNS}.max_tool_calls", turns.max_tool_calls, ""),
            "max_tokens_per_turn": (f"{_TURNS}.max_tokens_per_turn", turns.max_tokens_per_turn, "max_tokens_per_step"),
            "max_tokens": ("data.max_response_length, which all turns share,", length, ""),
            "episode_timeout": ("env.episode_timeout", env.episode_timeout, ""),
            "truncated": ("a limit of the environment, set in env.registry.<tag>.kwargs", None, ""),
        }
        for status, (key, value, of_tag) in keys.items():
            if (share := metrics.get(f"agent/status/{status}", 0)) > 0.5:
                limit = key + (f" (now {value:g})" if value is not None else "")
                limit += f" or env.registry.<tag>.{of_tag}" if of_tag else ""
                yield Cause(
                    "episode_limits",
                    f"ended by {status}",
                    f"most episodes ({share:.0%}) were ended by {limit}. Raise it if they need more; `verl "
                    f"trajectories FOLDER --status {status}` shows them",
                )
        if (share := metrics.get("agent/status/error", 0)) > 0.5:
            yield Cause(
                "failed_episodes",
                "failed episodes",
                f"most episodes ({share:.0%}) failed and taught nothing: see the causes in the run's log, "
                f"env.on_error (now {env.on_error}) and env.max_error_share (now {env.max_error_share:g})",
            )

    def _drift(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Yield lengths that drifted, and a KL that jumped."""
        factor, past = self.limits.length_drift, list(self._past.get("length", ()))
        if factor is not None and len(past) >= SETTLED:
            before, now = median(past[:WINDOW]), median(past[-MIN_COUNT:])
            if max(before, now) > factor * min(before, now) and abs(before - now) >= _LEAST_TOKENS:
                way = "longer" if now > before else "shorter"
                yield Cause(
                    "length_drift",
                    f"{way} responses",
                    f"responses became {way} in the last {len(past)} steps, from {before:.0f} to {now:.0f} tokens, "
                    f"more than {factor:g} times: compare samples of both ends (trainer.rollout_data_dir). Where the "
                    "reward does not ask for it, it is the loss or the reward that favours length: see "
                    f"{_ACTOR}.loss_agg_mode and algorithm.reward_shaping.overlong_buffer",
                    is_trend=True,
                )
        jump = self.limits.kl_jump
        for name in _KL_METRICS if jump is not None else ():
            usual, now = list(self._past.get(name, ())), metrics.get(name, 0.0)
            if len(usual) >= WINDOW and now > max(_LEAST_KL, jump * (before := abs(median(usual)))):
                yield Cause(
                    "kl_jump",
                    f"{name} jumped",
                    f"{name} jumped to {now:.3g}, where {before:.3g} was usual: the policy moved much further than "
                    f"in the {len(usual)} steps before. Look at this step's samples and actor/grad_norm; lower "
                    f"{_ACTOR}.optim.lr or {_ACTOR}.grad_clip, or go back to a checkpoint before it",
                    is_trend=True,
                )

    def _memory_growth(self, memory: Mapping[str, float], free: float) -> Iterator[Cause]:
        """Yield that the run's memory will be more than the machine has before its last step."""
        sizes = {"": sum(memory.values()), **memory}  # under no name: of all, also of those that come and go
        self._memory = {name: self._memory.get(name, deque(maxlen=SPAN)) for name in sizes if memory}
        for name, past in self._memory.items():
            past.append(sizes[name])
        grown = {name: growth(list(past)) for name, past in self._memory.items()}
        total, left = grown.pop("", 0.0), max(0, self.total_steps - self.steps)
        self.metrics["perf/memory_growth_mb"] = total
        if self.limits.memory is None or not total or total * left <= self.limits.memory * free:
            return
        most = max(grown, key=lambda name: grown[name])
        yield Cause(
            "memory",
            "memory",
            f"the memory of the run grows by {total:.3g} MiB a step, most of all that of {most} "
            f"({grown[most]:.3g} MiB), and {free:.0f} MiB are left: too few for the {left} steps to come, enough for "
            f"about {free / total:.0f}. Save often enough to resume (trainer.save_freq), and look at memory.jsonl with "
            "trainer.memory_ledger=true",
            is_trend=True,
        )

    def _remember(self, metrics: Mapping[str, float], token_entropy: float | None) -> None:
        """Keep what rules compare later steps with."""
        values = {name: metrics.get(name) for name in _KL_METRICS}
        values |= {"length": metrics.get("response_length/mean"), "score": metrics.get("critic/score/mean")}
        for name, value in {**values, "entropy": token_entropy}.items():
            if value is not None and np.isfinite(value):
                self._past.setdefault(name, deque(maxlen=SPAN)).append(float(value))


def growth(sizes: list[float]) -> float:
    """Return the slope of a size a step; 0 where it does not stand out from its own noise.

    It is that of the half that grew less: what fills its caches, or takes memory once, is not growing in both. By least
    squares, and only if the line rises over all steps by more than three standard deviations of what lies beside it.
    """
    if len(sizes) < SETTLED:
        return 0.0

    def line(values: list[float]) -> tuple[float, float]:
        slope, start = np.polyfit(steps := np.arange(len(values)), values, 1)
        return float(slope), float(np.std(values - (start + slope * steps)))

    (slope, noise), half = line(sizes), len(sizes) // 2
    if slope * len(sizes) <= max(3 * noise, 1e-9):
        return 0.0
    return max(0.0, min(slope, line(sizes[:half])[0], line(sizes[half:])[0]))

"""Rules of a run of reinforcement learning: signal, responses, entropy, episodes, lengths, KL, mismatch.

What a rule looks at is a metric of the step (`verl.trainer.health`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from verl.config.ppo import PPOConfig
from verl.trainer.health import MIN_COUNT, SETTLED, WINDOW, Cause, Health, UnhealthyRun, growth

__all__ = ["HealthMonitor", "UnhealthyRun", "growth"]

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


class HealthMonitor(Health):
    """`Health` of a run of reinforcement learning.

    Args:
        config: the whole tree.
        total_steps: length of the run.
    """

    def __init__(self, config: PPOConfig, total_steps: int = 0) -> None:
        super().__init__(config.trainer, total_steps)
        self.config = config
        self.without_signal = 0
        self.token_entropy: float | None = None

    def note(
        self,
        metrics: Mapping[str, float],
        token_entropy: float | None = None,
        memory: Mapping[str, float] | None = None,
        free_memory: float = 0.0,
    ) -> list[str]:
        """As `Health.note`.

        Args:
            token_entropy: nats a token, of the policy that sampled; None: not known.
        """
        self.token_entropy = token_entropy
        self.without_signal += metrics.get("batch/zero_advantage_ratio", 0) == 1
        return super().note(metrics, memory=memory, free_memory=free_memory)

    def summary(self) -> str | None:
        """Return a message if a quarter of the steps or more had advantages of zero only."""
        if self.without_signal < MIN_COUNT or 4 * self.without_signal < self.steps:
            return None
        return f"{self.without_signal} of {self.steps} steps had advantages of 0 only and taught nothing"

    def state_dict(self) -> dict[str, Any]:
        """As `Health.state_dict`."""
        return {**super().state_dict(), "without_signal": self.without_signal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Health.load_state_dict`."""
        super().load_state_dict(state)
        self.without_signal = state.get("without_signal", 0)

    # -- rules --------------------------------------------------------------------------------------------------------

    def causes(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Yield every cause for which this step taught nothing, or the next will."""
        token_entropy = self.token_entropy
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

    def remember(self, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """KL, length, score and entropy."""
        values = {name: metrics.get(name) for name in _KL_METRICS}
        values |= {"length": metrics.get("response_length/mean"), "score": metrics.get("critic/score/mean")}
        return values | {"entropy": self.token_entropy}

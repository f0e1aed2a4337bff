"""Pool of prompts: rows of the training data in the loader's order, deferred ones first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.checkpoint.rows_file import check_savable, load_rows, save_rows
from verl.checkpoint.run_state import write_durable
from verl.config.algorithm import FilterGroupsConfig
from verl.protocol import DataProto
from verl.rewards.managers.rule import RESPONSE_ERROR_KEY, REWARD_ERROR_KEY, REWARD_ERROR_KIND_KEY
from verl.rewards.managers.scoring import failed_episodes
from verl.trainer.ppo.trajectories import trajectory_sums

STATE_FILE = "rollout.json"
"""In a step's folder: the entries of the pool, and the partial rollouts of deferred prompts."""


@dataclass
class PoolEntry:
    """A prompt that was handed out and not trained on yet."""

    step: int
    """Step that read it from the loader; with ``number``, the source of its samples' seeds."""
    number: int
    """Its place among the prompts that this step read."""
    deferrals: int = 0
    """Number of steps that have deferred it."""


class PromptPool:
    """Rows of the training data, each handed out until it is trained on.

    Every row of the loader comes once an epoch; one that is deferred comes again before any new one.

    Args:
        loader: gives batches, again and again; its own state says which.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.entries: dict[str, PoolEntry] = {}
        """By uid, of every prompt that was handed out or deferred, and not trained on yet."""
        self.batches_read = 0
        """Batches read from the loader, in all epochs."""
        self._numbered = (0, 0)
        """A step, and how many prompts it has read from the loader."""
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._back = DataProto()
        self._fresh = DataProto()

    @property
    def num_deferred(self) -> int:
        """Number of deferred prompts that were not handed out again."""
        return len(self._back)

    def take(self, count: int, step: int) -> DataProto:
        """Return the next ``count`` prompts, each with a ``uid`` that it keeps; new ones are named after ``step``.

        A step may take several times: its new prompts are numbered on.
        """
        back, self._back = self._back.slice(0, count), self._back.slice(count)
        missing = count - len(back)
        while len(self._fresh) < missing:
            self._fresh = joined(self._fresh, self._next_batch())
        fresh, self._fresh = self._fresh.slice(0, missing), self._fresh.slice(missing)
        first = self._numbered[1] if self._numbered[0] == step else 0
        self._numbered = (step, first + missing)
        entries = {f"step{step}-{number}": PoolEntry(step, number) for number in range(first, first + missing)}
        fresh.non_tensor_batch["uid"] = np.array(list(entries), dtype=object)
        self.entries.update(entries)
        return joined(back, fresh).select(deepcopy=True)

    def defer(self, prompts: DataProto) -> None:
        """Hand these prompts out again before any other, in this order, and count the deferral."""
        for uid in prompts.non_tensor_batch.get("uid", ()):
            self.entries[uid].deferrals += 1
        self._back = joined(prompts.select(deepcopy=True), self._back)

    def return_unused(self, prompts: DataProto, entries: Mapping[str, PoolEntry]) -> None:
        """Hand these finished prompts out again before any other; they do not count as deferred."""
        self.entries.update(entries)
        self._back = joined(prompts.select(deepcopy=True), self._back)

    def finish(self, uids: Iterable[str]) -> None:
        """Forget these prompts: they are being trained on."""
        for uid in uids:
            del self.entries[uid]

    def state(self) -> tuple[dict[str, DataProto], dict[str, tuple[int, int, int]]]:
        """Return all but the loader's position: the prompts ``back`` and ``fresh``, and the entries as JSON values."""
        entries = {uid: (entry.step, entry.number, entry.deferrals) for uid, entry in self.entries.items()}
        return {"back": self._back, "fresh": self._fresh}, entries

    def load_state(self, prompts: Mapping[str, DataProto], entries: Mapping[str, Sequence[int]]) -> None:
        """Restore what `state` returned; missing prompts are none."""
        self._back, self._fresh = (prompts.get(name, DataProto()) for name in ("back", "fresh"))
        self.entries = {uid: PoolEntry(*numbers) for uid, numbers in entries.items()}

    def _next_batch(self) -> DataProto:
        for _ in range(2):
            for batch in self._batches:
                self.batches_read += 1
                return DataProto.from_single_dict(batch)
            self._batches = iter(self.loader)
        raise ValueError("the training data holds no batch of prompts. Lower data.train_batch_size or add prompts.")


def joined(first: DataProto, second: DataProto) -> DataProto:
    """Return the rows of both; either may be empty."""
    return DataProto.concat([first, second]) if len(first) and len(second) else first if len(first) else second


def save_pool(folder: Path, pool: PromptPool, in_flight: DataProto | None = None, **more: Any) -> None:
    """Write into a step's folder what a resumed run needs to continue, and ``more`` JSON values.

    Args:
        in_flight: prompts that are handed out and not trained on, which a resumed run takes before all others.
    """
    prompts, entries = pool.state()
    if in_flight is not None:
        prompts["back"] = joined(in_flight, prompts["back"])
    for name, rows in prompts.items():
        (folder / f"rollout_{name}.safetensors").unlink(missing_ok=True)
        if len(rows):
            save_rows(folder / f"rollout_{name}.safetensors", rows, {})
    state = {"tickets": entries, "batches_read": pool.batches_read, **more}
    write_durable(folder / STATE_FILE, lambda path: path.write_text(json.dumps(state)))


def load_pool(folder: Path, pool: PromptPool) -> dict[str, Any]:
    """Restore what `save_pool` wrote, if it is there; return all of its JSON values."""
    if not (folder / STATE_FILE).exists():
        return {}
    state = json.loads((folder / STATE_FILE).read_text())
    files = {name: folder / f"rollout_{name}.safetensors" for name in ("back", "fresh")}
    prompts = {name: load_rows(path)[0] for name, path in files.items() if path.exists()}
    pool.load_state(prompts, state["tickets"])
    pool.batches_read = state.get("batches_read", 0)
    return state


# -- Dynamic sampling (DAPO): keep the groups of a step whose responses differ in reward -----------------------------


REWARD_SUMS = ("seq_reward", "seq_final_reward")
"""Metrics that are the sum of a response's rewards."""


_EITHER = ("acc", "score")
"""The same, if the reward function returns nothing but a number."""


_REMIND_AFTER = 10
"""Batches of one step after which a message is printed, again and again."""


def metric_values(batch: DataProto, metric: str) -> np.ndarray:
    """Return the metric of each response, (B,) float64: a value of the reward function, or the sum of its rewards.

    Raises:
        ValueError: there is no such value, or it is no finite number.
    """
    names = list(batch.meta_info.get("reward_extra_keys", ()))
    if metric not in names:
        errors = {REWARD_ERROR_KEY, REWARD_ERROR_KIND_KEY, RESPONSE_ERROR_KEY}
        if metric in REWARD_SUMS or metric in _EITHER and not set(names) - errors:
            return trajectory_sums(batch, batch.row_sums("token_level_scores")).numpy()
        raise ValueError(
            f"algorithm.filter_groups.metric={metric}: the reward function returned no such value. Use seq_reward, or "
            f"one it returns: {', '.join(names) or 'it returned the score alone'}."
        )
    try:
        values = np.array([float(value) for value in batch.non_tensor_batch[metric]])
    except (TypeError, ValueError) as problem:
        raise ValueError(_not_a_number(metric, str(problem))) from None
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(_not_a_number(metric, f"row {row} of the batch has {values[row]}"))
    return values


def varying_groups(uids: Sequence[str], values: np.ndarray) -> dict[str, bool]:
    """Return by prompt, in the order of their first rows, whether any response has another value than the rest.

    Values are compared as they are: the standard deviation of three times 0.1 is not zero in floating point.
    """
    firsts: dict[str, float] = {}
    varies: dict[str, bool] = {}
    for uid, value in zip(uids, values.tolist(), strict=True):
        varies[uid] = varies.get(uid, False) or value != firsts.setdefault(uid, value)
    return varies


def chosen_groups(uids: Sequence[str], values: np.ndarray, config: FilterGroupsConfig) -> dict[str, bool]:
    """Return by prompt whether its responses differ, and their mean and std are in the range of ``filter_groups``."""
    chosen = varying_groups(uids, values)
    if config.low is None and config.high is None and not config.min_std:
        return chosen
    rows: dict[str, list[float]] = {}
    for uid, value in zip(uids, values.tolist(), strict=True):
        rows.setdefault(uid, []).append(value)
    for uid, group in rows.items():
        mean, std = float(np.mean(group)), float(np.std(group, ddof=1)) if len(group) > 1 else 0.0
        chosen[uid] &= (config.low is None or mean > config.low) and (config.high is None or mean < config.high)
        chosen[uid] &= not config.min_std or std > config.min_std
    return chosen


class GroupFilter:
    """Collect the batch of every training step from as many batches of prompts as it takes.

    Args:
        config: ``algorithm.filter_groups``.
        pool: gives the prompts and takes back those of surplus groups.
        batch_size: groups a step trains on.
        gen_batch_size: prompts sampled at a time.
        say: prints a message to the user.
    """

    def __init__(
        self,
        config: FilterGroupsConfig,
        pool: PromptPool,
        batch_size: int,
        gen_batch_size: int,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.pool = pool
        self.batch_size = batch_size
        self.gen_batch_size = gen_batch_size
        self.say = say
        self.entries: dict[str, PoolEntry] = {}
        """Of the prompts that this step has taken."""
        self._is_savable = False
        self._begin()

    def _begin(self) -> None:
        self.entries.clear()
        self._prompts: list[DataProto] = []
        self._kept: list[DataProto] = []
        self._uids: list[str] = []
        self._num_batches = 0
        self._values: list[np.ndarray] = []
        self._dropped: list[np.ndarray] = []

    def take(self, step: int) -> DataProto:
        """Return the next prompts to sample."""
        return self.register(self.pool.take(self.gen_batch_size, step))

    def register(self, prompts: DataProto) -> DataProto:
        """Record prompts that the pool has handed out."""
        if not self._is_savable:
            try:
                check_savable(prompts)
            except ValueError as problem:
                raise ValueError(
                    "algorithm.filter_groups.enable=true samples prompts again, and a checkpoint could not hold "
                    f"these: {problem} Leave that column out of the data set, or set enable=false."
                ) from None
            self._is_savable = True
        uids = prompts.non_tensor_batch["uid"]
        self.entries.update((uid, self.pool.entries[uid]) for uid in uids)
        self._prompts.append(prompts.select(deepcopy=True))
        return prompts

    def add(self, batch: DataProto, step: int) -> bool:
        """Keep the groups of ``batch``, responses with their rewards, that vary; return True once they are enough.

        Raises:
            ValueError: they are too few, and no more batches may be sampled.
        """
        values = metric_values(batch, self.config.metric)
        uids = batch.non_tensor_batch["uid"].tolist()
        counted = np.flatnonzero(~failed_episodes(batch))
        varies = dict.fromkeys(uids, False)  # a group whose episodes all failed has nothing to compare
        varies |= chosen_groups([uids[row] for row in counted], values[counted], self.config)
        keeps = np.array([varies[uid] for uid in uids], dtype=bool)
        self._num_batches += 1
        self._values.append(values)
        self._dropped.append(values[~keeps])
        self._uids += [uid for uid, does_vary in varies.items() if does_vary]
        if keeps.any():
            self._kept.append(batch.select_idxs(np.flatnonzero(keeps)))
        if len(self._uids) >= self.batch_size:
            return True
        bound = self.config.max_num_gen_batches
        if bound and self._num_batches >= bound:
            raise ValueError(
                f"algorithm.filter_groups.max_num_gen_batches={bound}: no more may be sampled for step {step}, but "
                f"{self._summary()} (data.train_batch_size). Raise it (0: no bound) or data.gen_batch_size, sample "
                "more responses (actor_rollout_ref.rollout.n), or leave out prompts that are too easy or too hard."
            )
        if self._num_batches % _REMIND_AFTER == 0:
            self.say(f"step {step}: {self._summary()}; sampling continues.")
        return False

    def finish(self) -> tuple[DataProto, dict[str, float]]:
        """Return the groups of the step in the order they were sampled, and metrics; give surplus prompts back."""
        chosen, surplus = self._uids[: self.batch_size], self._uids[self.batch_size :]
        batch = _joined(self._kept)
        batch = batch.select_idxs(np.flatnonzero(np.isin(batch.non_tensor_batch["uid"].astype(str), chosen)))
        self.pool.finish(uid for uid in self.entries if uid in self.pool.entries)
        if surplus:
            names = set(surplus)
            rows = [
                prompts.select_idxs(np.flatnonzero([uid in names for uid in prompts.non_tensor_batch["uid"]]))
                for prompts in self._prompts
            ]
            back = DataProto.concat([part for part in rows if len(part)])
            self.pool.return_unused(back, {uid: self.entries[uid] for uid in surplus})
        metrics = self._metrics(len(surplus))
        self._begin()
        return batch, metrics

    def _metrics(self, surplus: int) -> dict[str, float]:
        dropped = np.concatenate(self._dropped)
        metrics = {
            "train/num_gen_batches": self._num_batches,
            "filter_groups/kept": len(self._uids) - surplus,
            "filter_groups/dropped": len(self.entries) - len(self._uids),
            "filter_groups/surplus": surplus,
            "filter_groups/metric/mean": float(np.concatenate(self._values).mean()),
        }
        return metrics | ({"filter_groups/metric/dropped_mean": float(dropped.mean())} if len(dropped) else {})

    def _summary(self) -> str:
        mean = np.concatenate(self._values).mean()
        return (
            f"in {self._num_batches} batches of {self.gen_batch_size} prompts the responses to {len(self._uids)} "
            f"differ in {self.config.metric}, whose mean is {mean:.3g}; the step needs {self.batch_size}"
        )


def _not_a_number(metric: str, why: str) -> str:
    return (
        f"algorithm.filter_groups.metric={metric}: its values must be finite numbers, but {why}. Return a number from "
        "the reward function, or use seq_reward."
    )


def _joined(parts: Sequence[DataProto]) -> DataProto:
    """Return the rows of all; a value that the reward function returned for some parts only is None in the others."""
    names = list(dict.fromkeys(name for part in parts for name in part.meta_info.get("reward_extra_keys", ())))
    for part in parts:
        for name in names:
            if name not in part.non_tensor_batch:
                part.non_tensor_batch[name] = np.full(len(part), None, dtype=object)
    joined = DataProto.concat(list(parts))
    joined.meta_info["reward_extra_keys"] = names
    return joined

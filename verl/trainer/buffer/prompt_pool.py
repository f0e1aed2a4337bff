"""Pool of prompts: rows of the training data in the loader's order, deferred ones first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.checkpoint.rows_file import load_rows, save_rows
from verl.checkpoint.run_state import write_atomic
from verl.protocol import DataProto

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
        back, self._back = self._back[:count], self._back[count:]
        missing = count - len(back)
        while len(self._fresh) < missing:
            self._fresh = joined(self._fresh, self._next_batch())
        fresh, self._fresh = self._fresh[:missing], self._fresh[missing:]
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


def save_pool(folder: Path, pool: PromptPool, **more: Any) -> None:
    """Write into a step's folder what a resumed run needs to continue, and ``more`` JSON values."""
    prompts, entries = pool.state()
    for name, rows in prompts.items():
        (folder / f"rollout_{name}.safetensors").unlink(missing_ok=True)
        if len(rows):
            save_rows(folder / f"rollout_{name}.safetensors", rows, {})
    state = {"tickets": entries, "batches_read": pool.batches_read, **more}
    write_atomic(folder / STATE_FILE, lambda path: path.write_text(json.dumps(state)))


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

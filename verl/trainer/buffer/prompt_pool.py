"""The prompts of a run one by one, in the loader's order; those that were put off come first."""

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
"""In a step's folder: prompts that were handed out and come again, and what is known of their samples."""


@dataclass
class Ticket:
    """A prompt that was handed out and not trained on yet."""

    step: int
    """Step that drew it from the loader; with ``number``, where its samples' seeds come from."""
    number: int
    """Its place among the prompts that step drew."""
    postponed: int = 0
    """How many steps have put it off."""


class PromptPool:
    """Rows of the training data, each handed out until it is trained on.

    Every row of the loader comes once an epoch; one that is put back comes again before any new one.

    Args:
        loader: gives batches, again and again; its own state says which.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.tickets: dict[str, Ticket] = {}
        """By uid, of every prompt that is out or was put back."""
        self.batches_read = 0
        """Batches the loader gave, in all epochs."""
        self._numbered = (0, 0)
        """A step, and how many prompts it drew from the loader."""
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._back = DataProto()
        self._fresh = DataProto()

    @property
    def num_postponed(self) -> int:
        """Prompts put back and not handed out again."""
        return len(self._back)

    def take(self, count: int, step: int) -> DataProto:
        """The next ``count`` prompts, each with a ``uid`` that it keeps; new ones are named after ``step``.

        A step may take several times: its new prompts are numbered on.
        """
        back, self._back = self._back[:count], self._back[count:]
        missing = count - len(back)
        while len(self._fresh) < missing:
            self._fresh = joined(self._fresh, self._next_batch())
        fresh, self._fresh = self._fresh[:missing], self._fresh[missing:]
        first = self._numbered[1] if self._numbered[0] == step else 0
        self._numbered = (step, first + missing)
        tickets = {f"step{step}-{number}": Ticket(step, number) for number in range(first, first + missing)}
        fresh.non_tensor_batch["uid"] = np.array(list(tickets), dtype=object)
        self.tickets.update(tickets)
        return joined(back, fresh).select(deepcopy=True)

    def put_back(self, prompts: DataProto) -> None:
        """Hand these prompts out again before any other, in this order, and count that they were put off."""
        for uid in prompts.non_tensor_batch.get("uid", ()):
            self.tickets[uid].postponed += 1
        self._back = joined(prompts.select(deepcopy=True), self._back)

    def take_back(self, prompts: DataProto, tickets: Mapping[str, Ticket]) -> None:
        """As `put_back`, of prompts that were finished and are not trained on after all; they count as not put off."""
        self.tickets.update(tickets)
        self._back = joined(prompts.select(deepcopy=True), self._back)

    def finish(self, uids: Iterable[str]) -> None:
        """Forget these prompts: they are being trained on."""
        for uid in uids:
            del self.tickets[uid]

    def state(self) -> tuple[dict[str, DataProto], dict[str, tuple[int, int, int]]]:
        """All but the loader's own position: the prompts ``back`` and ``fresh``, and the tickets as JSON values."""
        tickets = {uid: (ticket.step, ticket.number, ticket.postponed) for uid, ticket in self.tickets.items()}
        return {"back": self._back, "fresh": self._fresh}, tickets

    def load_state(self, prompts: Mapping[str, DataProto], tickets: Mapping[str, Sequence[int]]) -> None:
        """Take over what `state` gave; prompts that are not given are none."""
        self._back, self._fresh = (prompts.get(name, DataProto()) for name in ("back", "fresh"))
        self.tickets = {uid: Ticket(*numbers) for uid, numbers in tickets.items()}

    def _next_batch(self) -> DataProto:
        for _ in range(2):
            for batch in self._batches:
                self.batches_read += 1
                return DataProto.from_single_dict(batch)
            self._batches = iter(self.loader)
        raise ValueError("the training data holds no batch of prompts. Lower data.train_batch_size or add prompts.")


def joined(first: DataProto, second: DataProto) -> DataProto:
    """The rows of both; either may be empty."""
    return DataProto.concat([first, second]) if len(first) and len(second) else first if len(first) else second


def save_pool(folder: Path, pool: PromptPool, **more: Any) -> None:
    """Write into a step's folder what a resumed run needs to go on with the same prompts, and ``more`` JSON values."""
    prompts, tickets = pool.state()
    for name, rows in prompts.items():
        (folder / f"rollout_{name}.safetensors").unlink(missing_ok=True)
        if len(rows):
            save_rows(folder / f"rollout_{name}.safetensors", rows, {})
    state = {"tickets": tickets, "batches_read": pool.batches_read, **more}
    write_atomic(folder / STATE_FILE, lambda path: path.write_text(json.dumps(state)))


def load_pool(folder: Path, pool: PromptPool) -> dict[str, Any]:
    """Take over what `save_pool` wrote, if it is there; returns all of its JSON values."""
    if not (folder / STATE_FILE).exists():
        return {}
    state = json.loads((folder / STATE_FILE).read_text())
    files = {name: folder / f"rollout_{name}.safetensors" for name in ("back", "fresh")}
    prompts = {name: load_rows(path)[0] for name, path in files.items() if path.exists()}
    pool.load_state(prompts, state["tickets"])
    pool.batches_read = state.get("batches_read", 0)
    return state

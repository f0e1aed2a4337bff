"""Begin to score the responses of a batch as they end, while others of it are generated.

Workers and agent loops send each response that has ended. A reward function is called with it in its own processes, a
reward model on servers is asked about it. When the batch is whole, the manager or model is called as ever, and finds
the results of the calls it would make. Which response ended first changes no score.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.single_controller.mailbox import Mailbox
from verl.workers.rollout.base import read_ended_message

logger = logging.getLogger(__name__)


def begins_early(config: PPOConfig, manager: Any) -> bool:
    """Whether the reward function or reward model of a run scores responses while others are generated."""
    is_asked = config.asks_reward_function and config.env.reward == "auto" and not config.env.makes_rows
    section = config.reward_model
    return (
        section.use_reward_loop
        and (section.enable or section.sandbox.while_generating)
        and is_asked
        and not config.actor_rollout_ref.rollout.skip_rollout
        and bool(getattr(manager, "begins_early", False))
    )


def early_scoring(config: PPOConfig, manager: Any, host: str | None) -> EarlyScoring | None:
    """Return what scores responses as they end; None: the run does not.

    Args:
        host: address of this machine that the workers reach; None: they reach none.
    """
    return EarlyScoring(manager, host) if host and begins_early(config, manager) else None


class EarlyScoring:
    """The responses that are scored as they end: of batches, by messages of the workers, or one by one.

    Args:
        manager: a reward manager or reward model that `begins_early`.
        host: address of this machine that the workers reach.
    """

    def __init__(self, manager: Any, host: str):
        self.manager, self.host = manager, host
        self._mailbox: Mailbox | None = None
        self._rows: list[tuple[dict[int, int], Any]] = []
        """Of the last two batches: the row of each seed, and the columns."""
        self._round = 0
        self._begun: dict[int, tuple[int, bytes]] = {}
        """Round and tokens of the responses that `begin` has begun, by seed."""

    def open(self, rows: DataProto, seeds: Sequence[int]) -> list[Any] | None:
        """Expect the responses of a batch; returns the address for messages (`ended_message`).

        None: rows lack a column that the manager reads, which it reports.
        """
        self.next_round()
        if (columns := self._columns(rows.non_tensor_batch)) is None:
            return None
        if self._mailbox is None:
            self._mailbox = Mailbox(self.host, self.take)
        self._rows = [*self._rows[-1:], ({seed: row for row, seed in enumerate(seeds)}, columns)]
        return self._mailbox.address

    def take(self, messages: Sequence[Any]) -> None:
        """Begin to score the responses of messages; those of no batch that is expected are left out."""
        ids, rows, turns = [], [], []
        for seed, tokens, num_turns in map(read_ended_message, messages):
            for number, columns in reversed(self._rows):
                if (row := number.get(seed)) is not None:
                    ids.append(tokens)
                    rows.append({name: values[row] for name, values in columns.items()})
                    turns.append(num_turns)
                    break
        if ids:
            self.manager.begin_ids(ids, rows, turns)

    def next_round(self, kept: int = 1) -> None:
        """Another batch begins: forget what was begun more than ``kept`` batches ago and never asked for."""
        self.manager.next_round(kept)
        self._round += 1
        self._begun = {seed: begun for seed, begun in self._begun.items() if begun[0] >= self._round - kept}

    def begin(self, seed: int, row: Mapping[str, Any], ids: Sequence[int], turns: int) -> None:
        """Begin to score one response, once: a sample that went on in a later step may end with the same tokens again.

        Args:
            row: columns of its prompt.
            ids: its tokens.
        """
        columns, tokens = self._columns(row), np.asarray(ids, np.int32)
        known = self._begun.get(seed)
        if columns is None or known is not None and known[1] == tokens.tobytes():
            return
        self._begun[seed] = self._round, tokens.tobytes()
        self.manager.begin_ids([tokens], [columns], [np.int32(turns)])  # of a type with the batch's own column

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns that the manager reads; None: one that it needs is missing."""
        needed, others = self.manager.early_columns
        columns = {name: values for name, values in row.items() if name in {*needed, *others}}
        return columns if {*needed} <= columns.keys() else None

    def close(self) -> None:
        """Take no more messages."""
        if self._mailbox is not None:
            self._mailbox.close()

"""Begin to score the responses of a batch as they end, while others of it are generated.

Workers and agent loops send each response that has ended; its call is made in the processes of the reward function.
When the batch is whole, the reward manager is called as ever, and finds the results of the calls it would make. Which
response ended first changes no score.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.rewards.managers.rule import RuleRewardManager
from verl.single_controller.mailbox import Mailbox

logger = logging.getLogger(__name__)


def begins_early(config: PPOConfig, manager: Any) -> bool:
    """Whether the reward function of a run is called while responses are generated."""
    is_asked = config.asks_reward_function and config.env.reward == "auto" and not config.env.makes_rows
    return (
        config.reward_model.use_reward_loop
        and config.reward_model.sandbox.while_generating
        and is_asked
        and not config.actor_rollout_ref.rollout.skip_rollout
        and isinstance(manager, RuleRewardManager)
        and manager.begins_early
    )


class EarlyScoring:
    """The batches whose responses are scored as they end.

    Args:
        manager: one that `begins_early`.
        host: address of this machine that the workers reach.
    """

    def __init__(self, manager: RuleRewardManager, host: str):
        self.manager, self.host = manager, host
        self._mailbox: Mailbox | None = None
        self._rows: list[tuple[dict[int, int], Any]] = []
        """Of the last two batches: the row of each seed, and the columns."""

    def open(self, rows: DataProto, seeds: Sequence[int]) -> list[Any] | None:
        """Expect the responses of a batch; returns the address for messages ``[seed, token ids, turns]``.

        None: rows lack the columns that reward functions read, which the manager reports.
        """
        self.manager.next_round()
        read = (self.manager.reward_fn_key, "reward_model", "extra_info")
        columns = {name: values for name, values in rows.non_tensor_batch.items() if name in read}
        if not {*read[:2]} <= columns.keys():
            return None
        if self._mailbox is None:
            self._mailbox = Mailbox(self.host, self.take)
        self._rows = [*self._rows[-1:], ({seed: row for row, seed in enumerate(seeds)}, columns)]
        return self._mailbox.address

    def take(self, messages: Sequence[Any]) -> None:
        """Begin to score the responses of messages; those of no batch that is expected are left out."""
        ids, rows, turns = [], [], []
        for seed, tokens, *more in messages:
            for number, columns in reversed(self._rows):
                if (row := number.get(seed)) is not None:
                    ids.append(np.frombuffer(tokens, np.int32))
                    rows.append({name: values[row] for name, values in columns.items()})
                    turns.append(np.int32(more[0]) if more else None)  # as in the batch's own column
                    break
        if ids:
            self.manager.begin_ids(ids, rows, turns)

    def close(self) -> None:
        """Take no more messages."""
        if self._mailbox is not None:
            self._mailbox.close()

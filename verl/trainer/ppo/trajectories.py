"""Trajectories of several rows: joined to one row each where rewards and advantages are computed, and split again.

Where a chat template rewrites the history, each turn of a trajectory is a training row of its own, with the prompt it
was generated from. Rewards, groups and returns are of trajectories: a reward at the end belongs to every turn.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.agents.base import TRAJECTORY_COLUMN
from verl.algorithms.resample import resample_rows
from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.batch.windows import WINDOWS
from verl.config.algorithm import PFPPOConfig
from verl.protocol import DataProto

_BY_TURN = ("turn_rewards", "turn_state_ids")
"""Object columns with an entry a turn, which are joined; of the others the first row's value counts."""


def trajectory_numbers(data: DataProto) -> np.ndarray | None:
    """Return the trajectory of each row, (B,) int64, in the order of their first rows; None: each row is one."""
    column = data.non_tensor_batch.get(TRAJECTORY_COLUMN)
    if column is None or len(set(column)) == len(column):
        return None
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in column])


def trajectory_sums(data: DataProto, sums: Tensor) -> Tensor:
    """Return (B,): for each row the sum of ``sums`` (B,) over the rows of its trajectory."""
    numbers = trajectory_numbers(data)
    if numbers is None:
        return sums
    index = torch.from_numpy(numbers).to(sums.device)
    return sums.new_zeros(int(index.max()) + 1).index_add(0, index, sums)[index]


def resampled_by_score(data: DataProto, options: PFPPOConfig, seed: int) -> tuple[DataProto, dict[str, float]]:
    """As many rows, sampled with replacement by their trajectories' scores (``algorithm.pf_ppo``), and metrics."""
    scores = trajectory_sums(data, data.row_sums("token_level_scores"))
    rows = resample_rows(scores, options.reweight_method, options.weight_pow, seed)
    resampled = data.select_idxs(rows)
    tokens = resampled.ragged("attention_mask").layout.lengths.tolist()
    resampled.meta_info = {**data.meta_info, "global_token_num": tokens}
    return resampled, {
        "pf_ppo/unique_share": len(rows.unique()) / len(rows),
        "pf_ppo/score/mean": scores[rows].mean().item(),
    }


def first_rows(data: DataProto) -> Sequence[int] | None:
    """Return the first row of each trajectory, in order; None: each row is a trajectory."""
    numbers = trajectory_numbers(data)
    return None if numbers is None else np.unique(numbers, return_index=True)[1].tolist()


class JoinedTrajectories:
    """A batch with one row a trajectory, and the way back.

    Between the tokens of two turns stands one masked token, so that estimators which count turns by runs of ones in
    ``response_mask`` see them apart.

    Args:
        data: a batch with response columns. Those and the object columns are joined; ``prompts`` and all columns that
            only models read are left out.
    """

    def __init__(self, data: DataProto):
        self.rows = data
        numbers = trajectory_numbers(data)
        if numbers is None:
            self.batch = data
            return
        lengths = data.ragged("responses").layout.lengths.numpy()
        order = np.argsort(numbers, kind="stable")
        is_first = np.diff(numbers[order], prepend=-1) != 0
        # where the tokens of each row begin among those of all trajectories: a masked token before all but the first
        begins = np.cumsum(lengths[order] + ~is_first) - lengths[order]
        starts = np.empty(len(numbers), dtype=np.int64)
        starts[order] = begins
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._places = torch.from_numpy(np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1]))
        joined = np.bincount(numbers, weights=lengths) + np.bincount(numbers) - 1
        joined_lengths = torch.from_numpy(joined.astype(np.int64))
        self._layout = Layout(torch.zeros_like(joined_lengths), joined_lengths, int(joined_lengths.max()))
        columns = {name: self._join(data.ragged(name)) for name in data.keys() if WINDOWS.get(name) == "response"}
        first = order[is_first]
        objects = {name: values[first] for name, values in data.non_tensor_batch.items()}
        for name in set(_BY_TURN) & set(objects):
            objects[name] = np.empty(len(first), dtype=object)
            objects[name][:] = self._turns(data.non_tensor_batch[name], numbers, order, len(first))
        self.batch = DataProto.from_ragged(columns, non_tensors=objects, meta_info=dict(data.meta_info))
        for name in data.keys():
            if name not in WINDOWS:
                self.batch.put(name, data.column(name)[torch.from_numpy(first)])

    def _join(self, column: Ragged) -> Ragged:
        values = column.values.new_zeros(self._layout.total, *column.values.shape[1:])
        values[self._places.to(values.device)] = column.values
        return Ragged(values, self._layout)

    @staticmethod
    def _turns(values: np.ndarray, numbers: np.ndarray, order: np.ndarray, count: int) -> list[list | None]:
        turns: list[list | None] = [None] * count
        for row in order:
            if values[row] is not None:
                turns[numbers[row]] = [*(turns[numbers[row]] or ()), *values[row]]
        return turns

    def split(self) -> DataProto:
        """Return the rows, with the response columns that `batch` has now."""
        if self.batch is not self.rows:
            layout = self.rows.ragged("responses").layout
            for name in self.batch.keys():
                if WINDOWS.get(name) == "response" and name != "responses":
                    values = self.batch.ragged(name).values
                    self.rows.put(name, Ragged(values[self._places.to(values.device)], layout))
            self.rows.meta_info.update(self.batch.meta_info)
        return self.rows

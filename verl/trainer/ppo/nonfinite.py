"""Guard against NaN and infinity in a step: log-probabilities, values and weights of the loss, and gradients.

Rewards are checked where they are made (`verl.rewards.managers.scoring`), advantages by their estimators, weights when
they are saved. Knows batches, no models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verl.algorithms.advantages.common import NonFiniteError
from verl.batch.ragged import Ragged
from verl.protocol import DataProto

SOURCES = {
    "token_level_scores": "the reward function or the reward model",
    "rollout_log_probs": "the rollout engine",
    "old_log_probs": "the actor's forward pass",
    "ref_log_prob": "the reference's forward pass",
    "values": "the critic's forward pass",
    "rollout_is_weights": "algorithm.rollout_correction",
    "token_level_rewards": "algorithm.reward_shaping or the KL penalty",
    "advantages": "the estimator or algorithm.advantage",
    "returns": "the estimator",
}
"""Columns of response tokens, in the order of the data flow, and where each comes from."""

_MOST_NAMED = 3


class NonFiniteGuard:
    """Finds what is not finite in a step, and leaves it out or ends the run.

    Args:
        tolerance: ``trainer.nonfinite_tolerance``; that many steps in a row without a finite gradient end the run.
        on_nonfinite: ``trainer.on_nonfinite``.
        decode: token ids to text, for messages.
        look_for: what may be behind such gradients, for messages.
    """

    def __init__(
        self,
        tolerance: int,
        on_nonfinite: str = "stop",
        decode: Callable[[list[int]], str] | None = None,
        look_for: str = "extreme rewards",
    ) -> None:
        self.tolerance, self.on_nonfinite, self.decode, self.look_for = tolerance, on_nonfinite, decode, look_for
        self.in_a_row = 0

    def check_columns(self, batch: DataProto, step: int) -> dict[str, float]:
        """Refuse rows with a number that is not finite on a token of the loss, or take their tokens out of it.

        Returns:
            With ``on_nonfinite=skip``, the rows taken out, as ``training/nonfinite_rows``; nothing where all is finite.

        Raises:
            NonFiniteError: names column, sample and token.
        """
        found = {name: bad for name in SOURCES if name in batch.keys() and (bad := _bad_rows(batch, name)) is not None}
        if not found:
            return {}
        text = "; ".join(self._description(batch, name, bad) for name, bad in found.items())
        if self.on_nonfinite == "stop":
            raise NonFiniteError(
                f"Step {step}: {text}. One such number would spoil every weight, so the update was not made. "
                "trainer.on_nonfinite=skip leaves such rows out of the update."
            )
        rows = torch.stack(list(found.values())).any(0)
        _take_out(batch, list(found), rows)
        print(f"step {step}: {int(rows.sum())} rows are left out of the update: {text}", flush=True)
        return {"training/nonfinite_rows": float(rows.sum())}

    def _description(self, batch: DataProto, name: str, bad: Tensor) -> str:
        rows = bad.nonzero().squeeze(-1).tolist()
        named = ", ".join(self._place(batch, name, row) for row in rows[:_MOST_NAMED])
        more = f" and {len(rows) - _MOST_NAMED} more rows" if len(rows) > _MOST_NAMED else ""
        return f"{name}, from {SOURCES[name]}, is not finite in {named}{more}"

    def _place(self, batch: DataProto, name: str, row: int) -> str:
        """Row, sample and first token of a row that is not finite."""
        values, mask, tokens = (batch.ragged(column).rows()[row] for column in (name, "response_mask", "responses"))
        place = int((~values.isfinite() & (mask != 0)).nonzero()[0])
        token = int(tokens[place])
        text = f" {self.decode([token])!r}" if self.decode else ""
        value = float(values[place])
        return f"{sample_name(batch, row)} at response token {place + 1} of {len(values)} (id {token}{text}: {value})"

    @staticmethod
    def roles_without_gradient(metrics: Mapping[str, float]) -> list[str]:
        """The trained roles of which an optimizer step was skipped in a step with these metrics."""
        return [name for name in ("actor", "critic") if metrics.get(f"{name}/nonfinite_steps", 0) > 0]

    def check(self, step: int, skipped: list[str]) -> None:
        """Count a finished step, in which the gradient of the roles ``skipped`` was not finite.

        Raises:
            FloatingPointError: it is one too many.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.tolerance:
            raise FloatingPointError(
                f"{' and '.join(skipped)}: the gradient was not finite in {self.in_a_row} steps in a row, as many as "
                f"trainer.nonfinite_tolerance={self.tolerance} allows (the last is step {step}; those optimizer steps "
                f"were skipped). Lower optim.lr, look for {self.look_for}, or raise the tolerance."
            )


def sample_name(batch: DataProto, row: int) -> str:
    """Row number, uid, data source and index of a row in its file, as far as the batch has them."""
    columns = batch.non_tensor_batch
    parts = [f"{name}={columns[name][row]}" for name in ("uid", "data_source") if name in columns]
    info = columns["extra_info"][row] if "extra_info" in columns else None
    index = info.get("index") if isinstance(info, Mapping) else columns.get("index", [None] * len(batch))[row]
    parts += [f"index={index}"] * (index is not None)
    return f"row {row}" + (f" ({', '.join(parts)})" if parts else "")


def _bad_rows(batch: DataProto, name: str) -> Tensor | None:
    """(B,) bool: rows with NaN or infinity on a token of the loss; None where there are none."""
    column = batch.ragged(name)
    if column.is_finite():  # one reduction in the usual case
        return None
    mask = batch.ragged("response_mask").values
    bad = ~column.values.isfinite() & (mask != 0)
    rows = torch.zeros(len(batch), dtype=torch.bool)
    rows[column.layout.row_numbers[bad]] = True
    return rows if bool(rows.any()) else None


def _take_out(batch: DataProto, columns: list[str], rows: Tensor) -> None:
    """Mask the tokens of ``rows`` (B,), and put 0 in the place of what is not finite there."""
    for name in columns:
        column = batch.ragged(name)
        batch.put(name, Ragged(torch.where(column.values.isfinite(), column.values, 0), column.layout))
    batch.put("response_mask", batch.ragged("response_mask").zero_rows(rows))

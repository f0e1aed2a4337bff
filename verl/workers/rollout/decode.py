"""The rows of one decode: what they have drawn, which of them go on, and what the next forward reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from verl.workers.rollout import logit_rules, stop_text
from verl.workers.rollout.base import Completion, Request
from verl.workers.rollout.sampling import Sampler
from verl.workers.rollout.vision import positions_ahead

_NO_TOKEN = -1


class Decode:
    """Rows that are decoded together, one token a step each, until all have ended.

    Args:
        requests: one a row.
        limits: the most tokens each row may draw.
        stop_token_ids: end every row, besides its request's own, unless its request ignores them.
        device: of the model.
        decode: token ids to text, for requests with stop texts.

    What the next forward reads: ``tokens`` (n,) and ``positions`` (n,), n being the rows left.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        stop_token_ids: Iterable[int],
        device: torch.device,
        decode: stop_text.Decode | None = None,
    ):
        self.requests = requests
        self.sampler = Sampler(requests, device)
        self.tokens: Tensor | None = None
        self.stops = _stop_table(requests, set(stop_token_ids), device)
        self.rules = None
        if logit_rules.are_needed(requests):
            self.rules = logit_rules.LogitRules(requests, max(limits), self.stops, device)
        self.texts = {
            i: stop_text.watch(request, decode) for i, request in enumerate(requests) if request.sampling.stop
        }
        self.limits = torch.tensor(limits, device=device)
        self.prompt_lengths = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        # a prompt with images may end at a lower position than its count of tokens
        self.positions = self.prompt_lengths + torch.tensor(positions_ahead(requests), device=device)
        self.rows = torch.arange(len(requests), device=device)  # row of the batch -> request
        self.live = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.num_live = len(requests)
        # results, by request
        self.drawn = torch.zeros(len(requests), max(limits), dtype=torch.int64, device=device)
        self.log_probs = torch.zeros_like(self.drawn, dtype=torch.float32) if self.sampler.want_log_probs else None
        self.lengths = self.limits.clone()
        self.stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)

    def take(self, logits: Tensor, step: int) -> bool:
        """Draw the ``step``-th token of every row from ``logits`` (n, V); False when no row goes on."""
        if self.rules is not None:
            logits = self.rules.apply(logits, step)
        self.tokens, log_probs = self.sampler.draw(logits, step)
        if self.rules is not None:
            self.rules.note(self.tokens, step)
        self.drawn[self.rows, step] = self.tokens
        if log_probs is not None:
            self.log_probs[self.rows, step] = log_probs
        if step:
            self.positions += self.live  # ended rows stand still: positions never leave the model's context
        stopped = ((self.tokens[:, None] == self.stops).any(1) | self._end_of_text()) & self.live
        if bool(stopped.any()):
            self.lengths[self.rows[stopped]] = step + 1
            self.stopped[self.rows[stopped]] = True
        self.live &= ~stopped & (self.limits > step + 1)
        self.num_live = int(self.live.sum())
        return self.num_live > 0

    def _end_of_text(self) -> Tensor:
        """Rows whose newest token completes a stop text, (n,)."""
        if not self.texts:
            return torch.zeros_like(self.live)
        rows = zip(self.rows.tolist(), self.live.tolist(), self.tokens.tolist(), strict=True)
        ended = [live and row in self.texts and self.texts[row].ends_with(token) for row, live, token in rows]
        return torch.tensor(ended, device=self.live.device)

    def ended(self) -> list[int]:
        """Requests whose rows have ended and are not dropped."""
        return self.rows[~self.live].tolist()

    def end(self, index: int) -> None:
        """End the row of request ``index`` now."""
        self.live &= self.rows != index
        self.num_live = int(self.live.sum())

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        for name in ("rows", "live", "limits", "stops", "positions", "tokens"):
            setattr(self, name, getattr(self, name)[rows])
        self.sampler.keep(rows)
        if self.rules is not None:
            self.rules.keep(rows)

    def completion(self, index: int, drawn: int | None = None) -> Completion:
        """That of request ``index``, which has ended, or of its first ``drawn`` tokens."""
        length = int(self.lengths[index]) if drawn is None else drawn
        wants = self.requests[index].sampling.want_log_probs
        return Completion(
            token_ids=self.drawn[index, :length].tolist(),
            log_probs=self.log_probs[index, :length].tolist() if wants else None,
            finish_reason="abort" if drawn is not None else "stop" if bool(self.stopped[index]) else "length",
        )


def _stop_table(requests: Sequence[Request], stop_token_ids: set[int], device: torch.device) -> Tensor:
    """(n, most stop tokens of a row): the tokens that end each row, filled up with one that is never drawn."""
    rows = [
        [] if request.sampling.ignore_eos else sorted(stop_token_ids.union(request.sampling.stop_token_ids))
        for request in requests
    ]
    width = max(1, *map(len, rows))
    return torch.tensor([row + [_NO_TOKEN] * (width - len(row)) for row in rows], device=device)

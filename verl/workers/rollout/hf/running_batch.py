"""Continuous batching: a running batch that shares a key-value cache, to which new requests are added.

Requests that arrive at once form a group of rows with an equal number of tokens. Groups join the running batch: their
caches are laid side by side, right-aligned, so that one forward pass serves all. A token depends on its own row only,
so the tokens do not depend on which requests joined when. Knows transformers' caches and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from verl.config.rollout import BY_HF
from verl.workers.rollout import sampling as stop_text
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.hf.model import can_be_joined, joined
from verl.workers.rollout.sampling import Sampler
from verl.workers.rollout.vision import position_offsets


# -- Logits processor of a batch: bans, biases and penalties of its requests -------------------------------------------
class BatchLogitsProcessor:
    """Bans, biases and penalties of n requests, with the tokens of their rows so far.

    One object for all rows: transformers' own logits processors take one value for the whole batch.

    Args:
        requests: one a row.
        limit: the most tokens any row generates.
        stops: (n, most stop tokens of a row), filled up with negative numbers: they end a row, so ``min_tokens`` bans
            them until it is reached.
        device: of the logits.

    Raises:
        ValueError: as `check_extra`.
    """

    def __init__(self, requests: Sequence[Request], limit: int, stops: Tensor, device: torch.device):
        sampling = [request.sampling for request in requests]
        for one in sampling:
            check_extra(one)
        longest = max(len(request.prompt_ids) for request in requests)
        # padding repeats the row's first token, which is penalised anyway
        prompts = [list(r.prompt_ids) + [r.prompt_ids[0]] * (longest - len(r.prompt_ids)) for r in requests]
        self.stops = stops
        self.tokens = torch.tensor([prompt + prompt[:1] * limit for prompt in prompts], device=device)
        self.is_new = torch.zeros(len(requests), limit, device=device)  # 1: the first of its kind in the response
        self.is_generated = torch.zeros(len(requests), limit, device=device)  # 1: a token of the response
        self.repetition = _column(sampling, lambda s: s.repetition_penalty, device)
        self.frequency = _column(sampling, lambda s: s.extra.get("frequency_penalty") or 0.0, device)
        self.presence = _column(sampling, lambda s: s.extra.get("presence_penalty") or 0.0, device)
        self.min_tokens = _column(sampling, lambda s: s.extra.get("min_tokens") or 0, device)
        self.sampling = sampling
        self._index_biases()

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        for name, values in vars(self).items():
            if torch.is_tensor(values):
                setattr(self, name, values[rows])
        self.sampling = [self.sampling[row] for row in rows.tolist()]
        self._index_biases()

    def _index_biases(self) -> None:
        biases = [(row, *bias) for row, sampling in enumerate(self.sampling) for bias in _biases(sampling).items()]
        self.biases = list(zip(*biases, strict=True))  # rows, tokens, values
        allowed = (sampling.extra.get("allowed_token_ids") for sampling in self.sampling)
        self.allowed = {row: list(tokens) for row, tokens in enumerate(allowed) if tokens is not None}

    def apply(self, logits: Tensor, step: int) -> Tensor:
        """The processed logits, (n, V) in float32.

        Args:
            step: number of tokens each row has generated before.
        """
        logits = logits.to(torch.float32, copy=True)
        for row, tokens in self.allowed.items():
            kept = logits[row, tokens]
            logits[row] = -torch.inf
            logits[row, tokens] = kept
        banned = (self.stops >= 0) & (self.min_tokens > step)
        if bool(banned.any()):
            rows, columns = banned.nonzero(as_tuple=True)
            logits[rows, self.stops[rows, columns]] = -torch.inf
        if self.biases:
            rows, tokens, values = self.biases
            logits[list(rows), list(tokens)] += torch.tensor(values, device=logits.device)
        if bool((self.repetition != 1).any()):
            old = logits.gather(-1, self.tokens)
            logits.scatter_(-1, self.tokens, torch.where(old > 0, old / self.repetition, old * self.repetition))
        generated = self.tokens[:, -self.is_generated.shape[1] :]
        return logits.scatter_add_(-1, generated, -(self.frequency * self.is_generated + self.presence * self.is_new))

    def append(self, tokens: Tensor, step: int) -> None:
        """Append ``tokens`` (n,), the ``step``-th of every row."""
        first = self.tokens.shape[1] - self.is_generated.shape[1]
        before = self.tokens[:, first : first + step]
        self.is_new[:, step] = (before != tokens[:, None]).all(-1).float()
        self.is_generated[:, step] = 1.0
        self.tokens[:, first + step] = tokens


def needs_logits_processor(requests: Sequence[Request]) -> bool:
    """Whether any of these requests changes logits."""
    return any(
        request.sampling.repetition_penalty != 1 or request.sampling.banned_token_ids or request.sampling.extra
        for request in requests
    )


def check_extra(sampling: SamplingParams) -> None:
    """Refuse further sampling parameters that are not understood here.

    Raises:
        ValueError: names them.
    """
    if unknown := [f"{name}={value!r}" for name, value in sampling.extra.items() if name not in BY_HF]:
        raise ValueError(
            f"rollout.name=hf cannot do {', '.join(unknown)}: of further sampling parameters it knows "
            f"{', '.join(BY_HF)}. Leave the others out, or use an engine that has them (rollout.name=vllm)."
        )


def _biases(sampling: SamplingParams) -> Mapping[int, float]:
    biases = {int(token): float(bias) for token, bias in (sampling.extra.get("logit_bias") or {}).items()}
    return biases | dict.fromkeys(sampling.banned_token_ids, -torch.inf)


def _column(params: Sequence[SamplingParams], read: Callable[[SamplingParams], Any], device: torch.device) -> Tensor:
    return torch.tensor([float(read(sampling)) for sampling in params], device=device)[:, None]


# -- Rows that decode together: sampled tokens, stop conditions, inputs of the next forward pass -----------------------


_NO_TOKEN = -1


class DecodeRows:
    """Rows that are decoded together, one token a step each, until all have ended.

    Args:
        requests: one a row.
        limits: the most tokens each row may generate.
        stop_token_ids: end every row, besides its request's own, unless its request ignores them.
        device: of the model.
        decode: token ids to text, for requests with stop texts.

    Inputs of the next forward pass: ``tokens`` (n,) and ``positions`` (n,), n being the rows left.
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
        self.logits_processor = None
        if needs_logits_processor(requests):
            self.logits_processor = BatchLogitsProcessor(requests, max(limits), self.stops, device)
        self.texts = {
            i: stop_text.stop_text_watcher(request, decode)
            for i, request in enumerate(requests)
            if request.sampling.stop
        }
        self.limits = torch.tensor(limits, device=device)
        self.prompt_lengths = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        # a prompt with images may end at a lower position than its count of tokens
        self.positions = self.prompt_lengths + torch.tensor(position_offsets(requests), device=device)
        self.rows = torch.arange(len(requests), device=device)  # row of the batch -> request
        self.live = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.num_live = len(requests)
        # results, by request
        self.generated = torch.zeros(len(requests), max(limits), dtype=torch.int64, device=device)
        self.log_probs = torch.zeros_like(self.generated, dtype=torch.float32) if self.sampler.want_log_probs else None
        self.lengths = self.limits.clone()
        self.stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)

    def sample(self, logits: Tensor, step: int) -> bool:
        """Sample the ``step``-th token of every row from ``logits`` (n, V); False when all rows have ended."""
        if self.logits_processor is not None:
            logits = self.logits_processor.apply(logits, step)
        self.tokens, log_probs = self.sampler.sample(logits, step)
        if self.logits_processor is not None:
            self.logits_processor.append(self.tokens, step)
        self.generated[self.rows, step] = self.tokens
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
        """Keep these rows only."""
        for name in ("rows", "live", "limits", "stops", "positions", "tokens"):
            setattr(self, name, getattr(self, name)[rows])
        self.sampler.keep(rows)
        if self.logits_processor is not None:
            self.logits_processor.keep(rows)

    def completion(self, index: int, length: int | None = None) -> Completion:
        """The completion of request ``index``, which has ended, or a partial one of its first ``length`` tokens."""
        is_partial = length is not None
        length = length if is_partial else int(self.lengths[index])
        wants = self.requests[index].sampling.want_log_probs
        return Completion(
            token_ids=self.generated[index, :length].tolist(),
            log_probs=self.log_probs[index, :length].tolist() if wants else None,
            finish_reason="abort" if is_partial else "stop" if bool(self.stopped[index]) else "length",
        )


def _stop_table(requests: Sequence[Request], stop_token_ids: set[int], device: torch.device) -> Tensor:
    """(n, most stop tokens of a row): the tokens that end each row, filled up with a number that is no token."""
    rows = [
        [] if request.sampling.ignore_eos else sorted(stop_token_ids.union(request.sampling.stop_token_ids))
        for request in requests
    ]
    width = max(1, *map(len, rows))
    return torch.tensor([row + [_NO_TOKEN] * (width - len(row)) for row in rows], device=device)


Forward = Callable[[Tensor, Tensor, Tensor, Cache], Tensor]
"""(ids (n, 1), mask (n, columns), positions (n, 1), cache) -> logits after the last column, (n, V)."""


class RowGroup:
    """Rows that have generated ``step`` tokens each."""

    def __init__(self, rows: DecodeRows, request_ids: Sequence[int]):
        self.rows, self.request_ids, self.step = rows, list(request_ids), 0
        self.running = {request_id: index for index, request_id in enumerate(request_ids)}

    @property
    def max_remaining(self) -> int:
        """The most tokens one of its rows may still generate."""
        return int(self.rows.limits.max()) - self.step

    def sample(self, logits: Tensor) -> dict[int, Completion]:
        """Sample a token for every row; returns completions of ended rows, by request id."""
        self.rows.sample(logits, self.step)
        self.step += 1
        if self.rows.num_live == len(self.running):
            return {}
        ended = {self.request_ids[index]: index for index in self.rows.ended()}
        return {
            request_id: self.rows.completion(index)
            for request_id, index in ended.items()
            if self.running.pop(request_id, -1) >= 0
        }


class RunningBatch:
    """Groups in the order of their rows in ``cache``.

    Args:
        rows: the first group, whose prompts are in the cache.
        request_ids: a name for each of its requests.
        logits: (n, V) after the prompts.
        width: columns of the cache that are filled, with the prompts right-aligned.
    """

    def __init__(self, cache: Cache, rows: DecodeRows, request_ids: Sequence[int], logits: Tensor, width: int):
        self.cache, self.logits, self.length = cache, logits, width
        self.groups = [RowGroup(rows, request_ids)]
        self.starts = width - rows.prompt_lengths  # first column of each row

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_live(self) -> int:
        return sum(group.rows.num_live for group in self.groups)

    @property
    def longest(self) -> int:
        """Columns the cache will have at most."""
        return self.length + max((group.max_remaining for group in self.groups), default=0)

    def advance(self, forward: Forward) -> dict[int, Completion]:
        """Sample one token for every row and run the forward pass on it; returns the ended ones, by request id."""
        ended: dict[int, Completion] = {}
        sizes = [len(group.rows.live) for group in self.groups]
        for group, logits in zip(self.groups, self.logits.split(sizes), strict=True):
            if group.rows.num_live:
                ended |= group.sample(logits)
        if self.num_live:
            self._read(forward)
        return ended

    def _read(self, forward: Forward) -> None:
        ended = self.num_rows - self.num_live
        if ended * 8 >= self.num_rows or any(not group.rows.num_live for group in self.groups):
            self._drop_ended()
        tokens = torch.cat([group.rows.tokens for group in self.groups])
        positions = torch.cat([group.rows.positions for group in self.groups])
        self.length += 1
        mask = torch.arange(self.length, device=tokens.device) >= self.starts[:, None]
        self.logits = forward(tokens[:, None], mask, positions[:, None], self.cache)

    def _drop_ended(self) -> None:
        """Remove the rows that have ended."""
        live = torch.cat([group.rows.live for group in self.groups])
        survivors = live.nonzero()[:, 0]
        if len(survivors) == len(live):
            return
        self.cache.reorder_cache(survivors)
        self.starts = self.starts[survivors]
        self.groups = [group for group in self.groups if group.rows.num_live]
        for group in self.groups:
            group.rows.keep(group.rows.live.nonzero()[:, 0])

    # -- requests that come and go -------------------------------------------------------------------------------------

    def partial(self, request_id: int) -> Completion | None:
        """The tokens so far of a running request."""
        for group in self.groups:
            if request_id in group.running:
                return group.rows.completion(group.running[request_id], group.step)
        return None

    def abort(self, request_id: int) -> Completion | None:
        """End a running request; returns its tokens so far."""
        completion = self.partial(request_id)
        for group in self.groups:
            if request_id in group.running:
                group.rows.end(group.running.pop(request_id))
        return completion

    def join(self, other: RunningBatch) -> bool:
        """Add another batch that has logits for each row; False if the caches cannot be laid side by side.

        Both lose the columns before their first live row.
        """
        if not can_be_joined(self.cache, other.cache):
            return False
        for batch in (self, other):
            live = torch.cat([group.rows.live for group in batch.groups])
            batch.logits = batch.logits[live]
            batch._drop_ended()
        skipped = [int(batch.starts.min()) for batch in (self, other)]
        self.cache = joined((self.cache, other.cache), skipped)
        lengths = [batch.length - first for batch, first in zip((self, other), skipped, strict=True)]
        self.length = max(lengths)
        self.starts = torch.cat(
            [
                batch.starts - first + (self.length - length)
                for batch, first, length in zip((self, other), skipped, lengths, strict=True)
            ]
        )
        self.logits = torch.cat([self.logits, other.logits])
        self.groups += other.groups
        return True

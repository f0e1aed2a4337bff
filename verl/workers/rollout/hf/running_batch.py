"""Continuous batching: a running batch that shares a key-value cache, to which new requests are added.

Requests that arrive at once form a group of rows with an equal number of tokens. Groups join the running batch: their
caches are laid side by side, right-aligned, so that one forward pass serves all. A token depends on its own row only,
so the tokens do not depend on which requests joined when. Knows transformers' caches and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from verl.config.rollout import BY_HF
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.hf.model import TokenCache, can_be_joined, joined
from verl.workers.rollout.sampling import Decode, Sampler, stop_text_watcher
from verl.workers.rollout.vision import prompt_of


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
        biases: dict[tuple[int, int], float] = {}
        for row, sampling in enumerate(self.sampling):
            biases |= {(row, int(t)): float(b) for t, b in (sampling.extra.get("logit_bias") or {}).items()}
            biases |= {(row, token): -torch.inf for token in sampling.banned_token_ids}
        self.biases = biases
        allowed = (sampling.extra.get("allowed_token_ids") for sampling in self.sampling)
        self.allowed = {row: list(tokens) for row, tokens in enumerate(allowed) if tokens is not None}

    def apply(self, logits: Tensor, step: int) -> Tensor:
        """The processed logits, (n, V) in float32.

        Args:
            step: number of tokens each row has generated before.
        """
        logits = logits.to(torch.float32, copy=True)
        for row, allowed in self.allowed.items():
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept
        banned = (self.stops >= 0) & (self.min_tokens > step)
        if bool(banned.any()):
            rows, columns = banned.nonzero(as_tuple=True)
            logits[rows, self.stops[rows, columns]] = -torch.inf
        if self.biases:
            rows, columns = torch.tensor(list(self.biases), device=logits.device).T
            logits[rows, columns] += torch.tensor(list(self.biases.values()), device=logits.device)
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


def _column(params: Sequence[SamplingParams], read: Callable[[SamplingParams], Any], device: torch.device) -> Tensor:
    return torch.tensor([float(read(sampling)) for sampling in params], device=device)[:, None]


# -- Rows that decode together: sampled tokens, stop conditions, inputs of the next forward pass -----------------------


_NO_TOKEN = -1


class RowGroup:
    """Rows that have generated an equal number of tokens, ``step``, and generate one more each at a time.

    Args:
        requests: one a row.
        request_ids: a name for each of them.
        limits: the most tokens each row may generate.
        stop_token_ids: end every row, besides its request's own, unless its request ignores them.
        device: of the model.
        decode: token ids to text, for requests with stop texts.

    Inputs of the next forward pass: ``tokens`` (n,) and ``positions`` (n,), n being the rows left.
    """

    tokens: Tensor

    def __init__(
        self,
        requests: Sequence[Request],
        request_ids: Sequence[int],
        limits: Sequence[int],
        stop_token_ids: Iterable[int],
        device: torch.device,
        decode: Decode | None = None,
    ):
        self.requests, self.request_ids, self.step = requests, list(request_ids), 0
        self.running = {request_id: index for index, request_id in enumerate(request_ids)}
        self.sampler = Sampler(requests, device)
        # (n, most stop tokens of a row): the tokens that end each row, filled up with a number that is no token
        stops = [
            [] if request.sampling.ignore_eos else sorted({*stop_token_ids, *request.sampling.stop_token_ids})
            for request in requests
        ]
        width = max(1, *map(len, stops))
        self.stops = torch.tensor([row + [_NO_TOKEN] * (width - len(row)) for row in stops], device=device)
        changes_logits = any(
            request.sampling.repetition_penalty != 1 or request.sampling.banned_token_ids or request.sampling.extra
            for request in requests
        )
        self.logits_processor = (
            BatchLogitsProcessor(requests, max(limits), self.stops, device) if changes_logits else None
        )
        self.texts = {
            i: stop_text_watcher(request, decode)
            for i, request in enumerate(requests)
            if request.sampling.stop and decode is not None
        }
        self.limits = torch.tensor(limits, device=device)
        self.prompt_lengths = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        # a prompt with images may end at a lower position than its number of tokens
        media = [prompt_of(request).media for request in requests]
        self.positions = self.prompt_lengths + torch.tensor(
            [0 if one is None else one.position_offset for one in media], device=device
        )
        self.rows = torch.arange(len(requests), device=device)  # row of the batch -> request
        self.live = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.num_live = len(requests)
        # results, by request
        self.generated = torch.zeros(len(requests), max(limits), dtype=torch.int64, device=device)
        self.log_probs = torch.zeros_like(self.generated, dtype=torch.float32) if self.sampler.want_log_probs else None
        self.lengths = self.limits.clone()
        self.stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)

    def sample(self, logits: Tensor) -> dict[int, Completion]:
        """Sample the next token of every row from ``logits`` (n, V); returns the completions of ended rows."""
        if self.logits_processor is not None:
            logits = self.logits_processor.apply(logits, self.step)
        self.tokens, log_probs = self.sampler.sample(logits, self.step)
        if self.logits_processor is not None:
            self.logits_processor.append(self.tokens, self.step)
        self.generated[self.rows, self.step] = self.tokens
        if self.log_probs is not None and log_probs is not None:
            self.log_probs[self.rows, self.step] = log_probs
        if self.step:
            self.positions += self.live  # ended rows stand still: positions never leave the model's context
        self.step += 1
        stopped = (self.tokens[:, None] == self.stops).any(1)
        if self.texts:
            rows = zip(self.rows.tolist(), self.live.tolist(), self.tokens.tolist(), strict=True)
            ends = [live and row in self.texts and self.texts[row].ends_with(token) for row, live, token in rows]
            stopped |= torch.tensor(ends, device=stopped.device)
        stopped &= self.live
        if bool(stopped.any()):
            self.lengths[self.rows[stopped]] = self.step
            self.stopped[self.rows[stopped]] = True
        self.live &= ~stopped & (self.limits > self.step)
        self.num_live = int(self.live.sum())
        if self.num_live == len(self.running):
            return {}
        ended = {self.request_ids[index]: index for index in self.rows[~self.live].tolist()}
        return {
            request_id: self.completion(index)
            for request_id, index in ended.items()
            if self.running.pop(request_id, -1) >= 0
        }

    def end(self, request_id: int) -> Completion:
        """End a running row now; returns its tokens so far."""
        index = self.running.pop(request_id)
        self.live &= self.rows != index
        self.num_live = int(self.live.sum())
        return self.completion(index, self.step)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        for name in ("rows", "live", "limits", "stops", "positions", "tokens"):
            setattr(self, name, getattr(self, name)[rows])
        self.sampler.keep(rows)
        if self.logits_processor is not None:
            self.logits_processor.keep(rows)

    def completion(self, index: int, length: int | None = None) -> Completion:
        """The completion of request ``index``, which has ended, or a partial one of its first ``length`` tokens."""
        reason: Literal["stop", "length", "abort"] = "abort"
        if length is None:
            length, reason = int(self.lengths[index]), "stop" if bool(self.stopped[index]) else "length"
        log_probs = None
        if self.log_probs is not None and self.requests[index].sampling.want_log_probs:
            log_probs = self.log_probs[index, :length].tolist()
        return Completion(self.generated[index, :length].tolist(), log_probs, reason)


Forward = Callable[[Tensor, Tensor, Tensor, Cache | TokenCache], Tensor]
"""(ids (n, 1), mask (n, columns), positions (n, 1), cache) -> logits after the last column, (n, V)."""


class RunningBatch:
    """Groups in the order of their rows in ``cache``.

    Args:
        group: the first one, whose prompts are in the cache.
        logits: (n, V) after the prompts.
        width: columns of the cache that are filled, with the prompts right-aligned.
    """

    def __init__(self, cache: Cache | TokenCache, group: RowGroup, logits: Tensor, width: int):
        self.cache, self.logits, self.length = cache, logits, width
        self.groups = [group]
        self.starts = width - group.prompt_lengths  # first column of each row

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_live(self) -> int:
        return sum(group.num_live for group in self.groups)

    @property
    def longest(self) -> int:
        """Columns the cache will have at most."""
        return self.length + max((int(group.limits.max()) - group.step for group in self.groups), default=0)

    def advance(self, forward: Forward) -> dict[int, Completion]:
        """Sample one token for every row and run the forward pass on it; returns the ended ones, by request id."""
        ended: dict[int, Completion] = {}
        sizes = [len(group.live) for group in self.groups]
        for group, logits in zip(self.groups, self.logits.split(sizes), strict=True):
            if group.num_live:
                ended |= group.sample(logits)
        if not self.num_live:
            return ended
        # dropping rows copies the cache: worth it when an eighth of them has ended
        num_ended = self.num_rows - self.num_live
        if num_ended * 8 >= self.num_rows or any(not group.num_live for group in self.groups):
            self._drop_ended()
        tokens = torch.cat([group.tokens for group in self.groups])
        positions = torch.cat([group.positions for group in self.groups])
        self.length += 1
        mask = torch.arange(self.length, device=tokens.device) >= self.starts[:, None]
        self.logits = forward(tokens[:, None], mask, positions[:, None], self.cache)
        return ended

    def _drop_ended(self) -> None:
        """Remove the rows that have ended."""
        live = torch.cat([group.live for group in self.groups])
        survivors = live.nonzero()[:, 0]
        if len(survivors) == len(live):
            return
        self.cache.reorder_cache(survivors)
        self.starts = self.starts[survivors]
        self.groups = [group for group in self.groups if group.num_live]
        for group in self.groups:
            group.keep(group.live.nonzero()[:, 0])

    # -- requests that come and go -------------------------------------------------------------------------------------

    def partial(self, request_id: int) -> Completion | None:
        """The tokens so far of a running request."""
        group = self._group_of(request_id)
        return None if group is None else group.completion(group.running[request_id], group.step)

    def abort(self, request_id: int) -> Completion | None:
        """End a running request; returns its tokens so far."""
        group = self._group_of(request_id)
        return None if group is None else group.end(request_id)

    def _group_of(self, request_id: int) -> RowGroup | None:
        return next((group for group in self.groups if request_id in group.running), None)

    def join(self, other: RunningBatch) -> bool:
        """Add another batch that has logits for each row; False if the caches cannot be laid side by side.

        Both lose the columns before their first live row.
        """
        batches = (self, other)
        if not can_be_joined(self.cache, other.cache):
            return False
        for batch in batches:
            live = torch.cat([group.live for group in batch.groups])
            batch.logits = batch.logits[live]
            batch._drop_ended()
        skipped = [int(batch.starts.min()) for batch in batches]
        self.cache = joined((self.cache, other.cache), skipped)
        lengths = [batch.length - first for batch, first in zip(batches, skipped, strict=True)]
        self.length = max(lengths)
        moved = [self.length - length - first for length, first in zip(lengths, skipped, strict=True)]
        self.starts = torch.cat([batch.starts + columns for batch, columns in zip(batches, moved, strict=True)])
        self.logits = torch.cat([self.logits, other.logits])
        self.groups += other.groups
        return True

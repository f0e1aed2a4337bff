"""From logits to tokens: inverse-CDF sampling where every response has its own stream of uniforms.

A token depends on its row's logits, its request's sampling parameters and its request's seed, on nothing else: not on
the other rows, their order or their number. Knows no model and no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.base import Request

_LOGITS_AT_ONCE = 1 << 19  # logits handled at once: small enough for a core's cache, large enough to hide call overhead
_DEVICE_LOGITS_AT_ONCE = 1 << 27
_BLOCK = 256


class Sampler:
    """Samples one token a step for each of n rows, every row by the sampling parameters of its own request."""

    def __init__(self, requests: Sequence[Request], device: torch.device):
        sampling = [request.sampling for request in requests]

        def column(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)[:, None]

        self.want_log_probs = any(s.want_log_probs for s in sampling)
        self.seeds = np.array([request.seed & (1 << 64) - 1 for request in requests], dtype=np.uint64)
        self.greedy = column((s.is_greedy for s in sampling), torch.bool)
        # parameters that change nothing where a row is greedy
        temperatures = [1.0 if s.is_greedy else s.temperature for s in sampling]
        top_k = [0 if s.is_greedy else max(s.top_k, 0) for s in sampling]
        is_hot = [not s.is_greedy and s.first_token_temperature is not None for s in sampling]
        self.inverse_temperature = column(1.0 / temperature for temperature in temperatures)
        self.top_k = column(top_k, torch.int64)
        self.top_p = column(1.0 if s.is_greedy else s.top_p for s in sampling)
        self.min_p = column(0.0 if s.is_greedy else s.min_p for s in sampling)
        self.first_inverse_temperature = column(
            1.0 / (s.first_token_temperature or 1.0) if hot else 1.0 / temperature
            for s, hot, temperature in zip(sampling, is_hot, temperatures, strict=True)
        )
        self.first_top_k = column(
            (s.first_token_top_k if hot and s.first_token_top_k > 0 else k)
            for s, hot, k in zip(sampling, is_hot, top_k, strict=True)
        ).long()
        self._find_active_settings()

    def _find_active_settings(self) -> None:
        self.any_greedy, self.all_greedy = bool(self.greedy.any()), bool(self.greedy.all())
        self.any_tempered = bool((self.inverse_temperature != 1).any())
        self.any_top_k, self.any_top_p = bool((self.top_k > 0).any()), bool((self.top_p < 1).any())
        self.any_min_p = bool((self.min_p > 0).any())

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self.seeds = self.seeds[rows.cpu().numpy()]
        for name, values in vars(self).items():
            if torch.is_tensor(values):
                setattr(self, name, values[rows])
        self._find_active_settings()

    def sample(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """The next token of every row.

        Args:
            logits: (n, V), any float type; may be overwritten.
            step: number of tokens each row has generated before.

        Returns:
            tokens (n,) int64, and their log-probabilities (n,) float32 if any request wants them.

        Raises:
            FloatingPointError: a row's logits are not finite.
        """
        uniform = torch.from_numpy(uniforms(self.seeds, step)[:, None]).to(logits.device)
        num_logits = _LOGITS_AT_ONCE if logits.device.type == "cpu" else _DEVICE_LOGITS_AT_ONCE
        size = max(1, num_logits // logits.shape[1])
        slices = [slice(start, start + size) for start in range(0, len(logits), size)]
        parts = [self._sample(logits[rows], uniform[rows], rows, is_first=step == 0) for rows in slices]
        if len(parts) == 1:
            return parts[0]
        tokens, log_probs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(log_probs) if self.want_log_probs else None

    def _sample(self, logits: Tensor, uniform: Tensor, rows: slice, is_first: bool) -> tuple[Tensor, Tensor | None]:
        logits = logits.float()
        largest = logits.amax(-1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            raise FloatingPointError(
                "The model's logits are not finite: its weights or activations hold NaN or infinity. Look at "
                "actor/grad_norm of the last steps; a lower actor.optim.lr or rollout.dtype=float32 may help."
            )
        if self.all_greedy and not self.want_log_probs:
            return logits.argmax(-1), None
        scaled = logits - largest
        if is_first:
            scaled *= self.first_inverse_temperature[rows]
        elif self.any_tempered:
            scaled *= self.inverse_temperature[rows]
        likely = logits.argmax(-1, keepdim=True) if self.any_greedy else None
        weights = scaled.exp()
        if self.any_min_p:  # the likeliest token weighs 1
            weights.masked_fill_(weights < self.min_p[rows], 0.0)
        if is_first or self.any_top_k:
            cut_to_top_k(weights, (self.first_top_k if is_first else self.top_k)[rows])
        if self.any_top_p:
            cut_to_top_p(weights, self.top_p[rows])
        tokens, total = pick(weights, uniform)
        if likely is not None:
            tokens = torch.where(self.greedy[rows], likely, tokens)
        log_probs = scaled.gather(-1, tokens) - total.log() if self.want_log_probs else None
        return tokens[:, 0], log_probs[:, 0].float() if log_probs is not None else None


def uniforms(seeds: np.ndarray, step: int) -> np.ndarray:
    """The ``step``-th number of each seed's stream: (n,) uint64 -> (n,) float64 in [0, 1).

    Counter-based (splitmix64), so there is no state and no order of sampling.
    Source: Steele et al. 2014, Fast splittable pseudorandom number generators.
    """
    mixed = _mix(_mix(seeds) + np.uint64((step + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1))
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def pick(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution: the first token whose running sum exceeds ``uniform`` of the total.

    In two stages, over blocks of the vocabulary and inside one block, so that one pass over all weights is enough. A
    token of weight zero is never picked.

    Args:
        weights: (n, V) float32, finite, not normalised.
        uniform: (n, 1) float64 in [0, 1).

    Returns:
        tokens (n, 1) int64 and totals (n, 1) float64.
    """
    rows, vocab = weights.shape
    size = math.gcd(vocab, _BLOCK)
    if size < 16:
        size = _BLOCK
        weights = torch.nn.functional.pad(weights, (0, -vocab % size))
    blocks = weights.view(rows, -1, size)
    block_ends = blocks.sum(-1).double().cumsum(-1)
    total = block_ends[:, -1:]
    target = uniform * total
    block = torch.searchsorted(block_ends, target, right=True)
    before = torch.where(block > 0, block_ends.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    ends = blocks[torch.arange(rows, device=weights.device), block[:, 0]].double().cumsum(-1)
    # the block's sum in float32 and its running sum in float64 differ in the last digits: stay below the latter
    inside = torch.minimum(target - before, ends[:, -1:] * (1 - 2.0**-52)).clamp_(min=0)
    return block * size + torch.searchsorted(ends, inside, right=True), total


def cut_to_top_k(weights: Tensor, top_k: Tensor) -> None:
    """Zero, in place, all but each row's ``top_k`` (n, 1) largest weights; ties of the last one stay. 0 keeps all."""
    vocab = weights.shape[1]
    most = min(int(top_k.max()), vocab)
    if most == 0:
        return
    largest = weights.topk(most, dim=-1).values
    threshold = largest.gather(-1, (top_k.clamp(max=vocab) - 1).clamp_(min=0))
    weights.masked_fill_((weights < threshold) & (top_k > 0), 0.0)


def cut_to_top_p(weights: Tensor, top_p: Tensor) -> None:
    """Zero, in place, what lies outside each row's nucleus of mass ``top_p`` (n, 1); ties of its last token stay.

    Only candidates are sorted: all tokens lighter than (1 - top_p) / V of the mass together weigh less than 1 - top_p,
    so the nucleus needs none of them.

    Source: Holtzman et al. 2019, The curious case of neural text degeneration (arXiv:1904.09751).
    """
    total = weights.sum(-1, keepdim=True)
    candidates = int((weights > (1 - top_p) * total / weights.shape[1]).sum(-1).max())
    largest = weights.topk(candidates, dim=-1).values
    missing = (largest.double().cumsum(-1) < top_p * total.double()).sum(-1, keepdim=True)
    threshold = largest.gather(-1, missing.clamp_(max=candidates - 1))
    weights.masked_fill_((weights < threshold) & (top_p < 1), 0.0)


# -- Stop texts: tokens are decoded as they come, and every new piece of text is searched for them ---------------------


Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""

_CONTEXT = 6  # tokens before a piece that may change how it reads
_UNFINISHED = "\ufffd"  # what an incomplete character decodes to


class StopText:
    """One response, watched for stop texts.

    Args:
        decode: token ids -> text.
        stop: the texts; the response ends with the token that completes one of them.
        prompt_ids: tokens before the response.
        min_tokens: texts completed within so many tokens do not count.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], prompt_ids: Sequence[int], min_tokens: int = 0):
        self.decode = decode
        self.stop = tuple(stop)
        self.min_tokens = min_tokens
        self.num_tokens = 0
        self.tail = ""
        """The last characters, too few to hold a whole stop text."""
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._read = len(self._ids)  # tokens of _ids whose text was taken

    def ends_with(self, token: int) -> bool:
        """Append the next token; returns whether a stop text is complete now."""
        self._ids.append(token)
        self.num_tokens += 1
        new = self._new_text()
        text = self.tail + new
        # of a stop text at least one character must be new
        found = new and any(stop in text[max(0, len(self.tail) - len(stop) + 1) :] for stop in self.stop)
        longest = max(map(len, self.stop))
        self.tail = text[max(0, len(text) - longest + 1) :]
        return bool(found) and self.num_tokens > self.min_tokens

    def _new_text(self) -> str:
        before = self.decode(self._ids[: self._read]) if self._read else ""
        whole = self.decode(self._ids)
        if len(whole) <= len(before) or whole.endswith(_UNFINISHED):
            return ""
        self._ids = self._ids[-_CONTEXT:]
        self._read = len(self._ids)
        return whole[len(before) :]


def stop_text_watcher(request: Request, decode: Decode) -> StopText:
    """The `StopText` of a request with stop texts."""
    sampling = request.sampling
    return StopText(decode, sampling.stop, request.prompt_ids, sampling.extra.get("min_tokens") or 0)

"""What changes a row's logits before they become a distribution: bans, biases and penalties of its request.

In vLLM's order: allowed tokens, the least number of tokens, biases, bans, then the penalties for repetition, frequency
and presence. A row depends on its own request and tokens only. Knows no distribution and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.config.sampling_names import BY_HF
from verl.workers.rollout.base import Request, SamplingParams


class LogitRules:
    """The rules of n requests, and the tokens of their rows so far.

    Args:
        requests: one a row.
        limit: the most tokens any row draws.
        stops: (n, most stop tokens of a row), filled up with negative numbers: they end a row, so ``min_tokens`` bans
            them until it is reached.
        device: of the logits.

    Raises:
        ValueError: as `check_extra`.
    """

    def __init__(self, requests: Sequence[Request], limit: int, stops: Tensor, device: torch.device):
        rules = [request.sampling for request in requests]
        for sampling in rules:
            check_extra(sampling)
        longest = max(len(request.prompt_ids) for request in requests)
        # a cell that holds no token repeats the row's first one, which is penalised anyway
        prompts = [list(r.prompt_ids) + [r.prompt_ids[0]] * (longest - len(r.prompt_ids)) for r in requests]
        self.stops = stops
        self.tokens = torch.tensor([prompt + prompt[:1] * limit for prompt in prompts], device=device)
        self.is_new = torch.zeros(len(requests), limit, device=device)  # 1: the first of its kind in the response
        self.drawn = torch.zeros(len(requests), limit, device=device)  # 1: a token of the response
        self.repetition = _column(rules, lambda s: s.repetition_penalty, device)
        self.frequency = _column(rules, lambda s: s.extra.get("frequency_penalty") or 0.0, device)
        self.presence = _column(rules, lambda s: s.extra.get("presence_penalty") or 0.0, device)
        self.min_tokens = _column(rules, lambda s: s.extra.get("min_tokens") or 0, device)
        self.rules = rules
        self._lay_out_biases()

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        for name, values in vars(self).items():
            if torch.is_tensor(values):
                setattr(self, name, values[rows])
        self.rules = [self.rules[row] for row in rows.tolist()]
        self._lay_out_biases()

    def _lay_out_biases(self) -> None:
        found = [(row, *bias) for row, sampling in enumerate(self.rules) for bias in _biases(sampling).items()]
        self.biases = list(zip(*found, strict=True))  # rows, tokens, values
        allowed = (sampling.extra.get("allowed_token_ids") for sampling in self.rules)
        self.allowed = {row: list(tokens) for row, tokens in enumerate(allowed) if tokens is not None}

    def apply(self, logits: Tensor, step: int) -> Tensor:
        """The logits (n, V), in float32, that the rules make of these.

        Args:
            step: how many tokens each row has drawn before.
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
            seen = logits.gather(-1, self.tokens)
            logits.scatter_(-1, self.tokens, torch.where(seen > 0, seen / self.repetition, seen * self.repetition))
        drawn = self.tokens[:, -self.drawn.shape[1] :]
        return logits.scatter_add_(-1, drawn, -(self.frequency * self.drawn + self.presence * self.is_new))

    def note(self, tokens: Tensor, step: int) -> None:
        """Every row drew one of ``tokens`` (n,) as its ``step``-th."""
        first = self.tokens.shape[1] - self.drawn.shape[1]
        before = self.tokens[:, first : first + step]
        self.is_new[:, step] = (before != tokens[:, None]).all(-1).float()
        self.drawn[:, step] = 1.0
        self.tokens[:, first + step] = tokens


def are_needed(requests: Sequence[Request]) -> bool:
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
    given = {int(token): float(bias) for token, bias in (sampling.extra.get("logit_bias") or {}).items()}
    return given | dict.fromkeys(sampling.banned_token_ids, -torch.inf)


def _column(rules: Sequence[SamplingParams], read: Callable[[SamplingParams], Any], device: torch.device) -> Tensor:
    return torch.tensor([float(read(sampling)) for sampling in rules], device=device)[:, None]

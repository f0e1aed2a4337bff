"""Tiny models and batches for tests; nothing is downloaded."""

from __future__ import annotations

import torch

from verl.batch.ragged import Ragged
from verl.batch.windows import join_windows
from verl.protocol import DataProto
from verl.utils.tiny_model import make_tiny_model, make_tokenizer

__all__ = ["make_batch", "make_siblings", "make_tiny_model", "make_tokenizer"]


def make_batch(
    rows: int = 8, prompt_width: int = 12, response_width: int = 16, vocab: int = 100, seed: int = 0
) -> DataProto:
    """A packed batch as it reaches an update: random tokens of unequal length, and the columns PPO losses read."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, vocab, (int(n),), generator=draw) for n in _lengths(rows, prompt_width, draw)]
    responses = [torch.randint(4, vocab, (int(n),), generator=draw) for n in _lengths(rows, response_width, draw)]
    return join_batch(prompts, responses, prompt_width, response_width, draw)


def make_siblings(
    prompts: tuple[tuple[int, int], ...] = ((5, 3), (9, 4), (1, 1)),
    response_width: int = 16,
    vocab: int = 100,
    seed: int = 0,
) -> DataProto:
    """The same where rows share prompts: (tokens of a prompt, its responses)."""
    draw = torch.Generator().manual_seed(seed)
    shared = [(torch.randint(4, vocab, (length,), generator=draw), n) for length, n in prompts]
    rows = [prompt for prompt, n in shared for _ in range(n)]
    responses = [torch.randint(4, vocab, (int(n),), generator=draw) for n in _lengths(len(rows), response_width, draw)]
    return join_batch(rows, responses, max(length for length, _ in prompts), response_width, draw)


def join_batch(
    prompts: list[torch.Tensor],
    responses: list[torch.Tensor],
    prompt_width: int,
    response_width: int,
    draw: torch.Generator,
) -> DataProto:
    """A packed batch of these rows, with random columns for the loss."""
    prompt = Ragged.from_rows(prompts, prompt_width, side="left")
    response = Ragged.from_rows(responses, response_width, side="right")
    mask = response.like(torch.ones_like(response.values))
    columns = {"prompts": prompt, "responses": response, "response_mask": mask, **join_windows(prompt, response)}
    for name in ("old_log_probs", "ref_log_prob", "advantages", "returns", "values"):
        columns[name] = response.like(torch.randn(response.layout.total, generator=draw))
    columns["old_log_probs"] = response.like(columns["old_log_probs"].values * 0.1 - 4.6)
    return DataProto.from_ragged(columns)


def _lengths(rows: int, longest: int, draw: torch.Generator) -> torch.Tensor:
    lengths = torch.randint(1, longest + 1, (rows,), generator=draw)
    lengths[0] = longest
    return lengths

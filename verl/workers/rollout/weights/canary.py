"""Canary: short prompts whose next token a rollout generates after a sync and the trainer scores under its own weights.

A receipt (`weights.sync`) proves what lies in the rollout's memory when a sync ends. A canary proves what the rollout
computes with it: it finds weights that changed afterwards, a copy that no sync reaches, an adapter left out, and a
model that both sides were given in different forms. Knows tokens and log-probabilities, no training engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from verl.batch.ragged import Ragged
from verl.protocol import DataProto
from verl.workers.rollout.base import Request, RolloutEngine, SamplingParams, WeightSyncError

_TEXTS = (
    "The capital of France is",
    "1 + 2 + 3 + 4 =",
    "def add(a, b):\n    return",
    "Question: which day comes after Monday? Answer:",
    "Once upon a time there was a",
    "x, y, z, a, b,",
    "HTTP/1.1 200",
    "To be, or not to be, that is the",
)
MAX_PROMPTS = len(_TEXTS)
_MAX_LENGTH = 8  # tokens of a prompt: they cost a forward pass on both sides
_KEY = "actor_rollout_ref.rollout.canary_prompts"


class Canary(NamedTuple):
    """What one rollout generated after a sync: the likeliest next token of every prompt, and its log-probability."""

    version: int
    """Of the weights."""
    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    dtype: torch.dtype
    """In which the rollout computes."""


def canary_prompts(
    encode: Callable[[str], Sequence[int]], count: int, max_length: int, excluded: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """The first ``count`` prompts as token ids.

    Args:
        encode: text to token ids, without special tokens.
        max_length: tokens that a prompt of this run may have.
        excluded: ids that are no text, such as placeholders of images.
    """
    length, found = min(max_length, _MAX_LENGTH), []
    for text in _TEXTS[:count]:
        ids = tuple(int(i) for i in encode(text) if i not in excluded)[:length]
        found.append(ids or (0,))
    return tuple(dict.fromkeys(found))


def generate_canary(rollout: RolloutEngine, prompts: tuple[tuple[int, ...], ...], version: int) -> Canary:
    """Generate the next token of every prompt; ``rollout`` is awake and was synced with weights of this version.

    Raises:
        StaleWeightsError: it does not hold them.
    """
    greedy = SamplingParams(1, do_sample=False, ignore_eos=True, want_log_probs=True)
    with rollout.monitor.uncounted():
        completions = rollout.generate([Request(ids, greedy) for ids in prompts], expect_version=version)
    tokens = tuple(completion.token_ids[0] for completion in completions)
    log_probs = tuple((c.log_probs or [math.nan])[0] for c in completions)
    return Canary(version, prompts, tokens, log_probs, rollout.weights_dtype)


def canary_rows(canaries: Sequence[Canary]) -> tuple[DataProto, dict[tuple[tuple[int, ...], int], int]]:
    """The distinct rows of several canaries as a batch to score, and the row of each (prompt, token)."""
    pairs = [pair for canary in canaries for pair in zip(canary.prompts, canary.tokens, strict=True)]
    rows = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    width = max(len(prompt) for prompt, _ in rows)
    prompt = Ragged.from_rows([torch.tensor(ids) for ids, _ in rows], width, side="left")
    response = Ragged.from_rows([torch.tensor([token]) for _, token in rows], 1)
    whole = Ragged.from_rows([torch.tensor([*ids, token]) for ids, token in rows], width + 1)
    whole = Ragged(whole.values, type(whole.layout)(prompt.layout.starts, whole.layout.lengths, width + 1))
    positions = torch.cat([torch.arange(len(ids) + 1) for ids, _ in rows])
    columns = {
        "prompts": prompt,
        "responses": response,
        "input_ids": whole,
        "attention_mask": whole.like(torch.ones_like(whole.values)),
        "position_ids": Ragged(positions, whole.layout, "position"),
        "response_mask": response.like(torch.ones_like(response.values)),
    }
    return DataProto.from_ragged(columns), rows


def compare_canaries(
    canaries: Sequence[Canary], score: Callable[[DataProto], Ragged], dtype: torch.dtype, tolerance: float | None = None
) -> float:
    """Compare every rollout's log-probabilities with the trainer's under the same weights.

    Args:
        canaries: of every rollout rank, in the order of their ranks.
        score: the trainer's ``log_probs`` of the batch of `canary_rows`; at temperature 1.
        dtype: in which the trainer computes.
        tolerance: largest mean difference of a rollout; None: as rounding explains, with a margin of about 10.

    Returns:
        The largest mean difference.

    Raises:
        WeightSyncError: a rollout differs by more, or a number is not finite.
    """
    if tolerance is None:
        is_exact = {dtype, *(canary.dtype for canary in canaries)} <= {torch.float32, torch.float64}
        tolerance = 0.002 if is_exact else 0.3
    batch, rows = canary_rows(canaries)
    scored = score(batch).values.tolist()
    worst = 0.0
    for rank, canary in enumerate(canaries):
        expected = [scored[rows[pair]] for pair in zip(canary.prompts, canary.tokens, strict=True)]
        differences = [abs(a - b) for a, b in zip(canary.log_probs, expected, strict=True)]
        mean = sum(differences) / len(differences)
        if not mean <= tolerance:  # NaN is larger too
            place = max(range(len(differences)), key=lambda i: differences[i] if math.isfinite(differences[i]) else 1e9)
            raise WeightSyncError(
                f"The rollout of rank {rank} does not compute with the weights of version {canary.version} that were "
                f"synced to it: the log-probabilities of its canary's {len(differences)} tokens differ from the "
                f"trainer's by {mean:.3g} on average, at most {tolerance:g} is allowed (worst: token "
                f"{canary.tokens[place]} after {list(canary.prompts[place])}, rollout {canary.log_probs[place]:.4g}, "
                f"trainer {expected[place]:.4g}). {_causes(tolerance)}"
            )
        worst = max(worst, mean)
    return worst


def _causes(tolerance: float) -> str:
    return (
        "Either weights changed in the engine's memory after the sync, or it computes with a copy or an adapter that "
        "the sync does not reach, or model.path, override_config, dtype or quantization differ between the two sides. "
        "Compare a step with actor_rollout_ref.rollout.name=hf; if the two sides are meant to differ by this much, "
        f"raise actor_rollout_ref.rollout.canary_tolerance (now {tolerance:g}), or set {_KEY}=0."
    )

"""Canary: short prompts whose next token a rollout generates after a sync and the trainer scores under its own weights.

A receipt (`weights.sync`) proves what lies in the rollout's memory when a sync ends. A canary proves what the rollout
computes with it: it finds weights that changed afterwards, a copy that no sync reaches, an adapter left out, and a
model that both sides were given in different forms. Knows tokens and log-probabilities, no training engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from verl.batch.ragged import Ragged
from verl.batch.windows import join_windows
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
    columns = {
        "prompts": prompt,
        "responses": response,
        **join_windows(prompt, response),
        "response_mask": response.like(torch.ones_like(response.values)),
    }
    return DataProto.from_ragged(columns), rows


class CanaryError(WeightSyncError):
    """A rollout computes with other weights than the trainer has."""


def rounding_tolerance(dtypes: Iterable[torch.dtype], num_layers: int, vocab_size: int) -> float:
    """Mean difference of the log-probabilities of likely tokens that rounding explains, three times over.

    Rounding to a type of spacing eps changes a number by eps / sqrt(12) of itself at most on average (root mean
    square). A residual stream of n layers is rounded at the 2 n branches that are added to it and at its end, on both
    sides, which adds up to

        eps / sqrt(12) * sqrt(2 * (2 n + 1))

    of its size, and logits move by as much of their spread. That spread is at most sqrt(2 ln V): with more, a Gaussian
    one would give its largest logit all of the probability, which no rounding moves.

    Measured, SmolLM2-135M in bfloat16 (n=30, V=49152, tolerance 0.35): 0.05 between vLLM and transformers. Sums of
    float32 differ by more than their rounding between kernels: no tolerance is below 0.002.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    error = eps * math.sqrt((2 * num_layers + 1) / 6) * math.sqrt(2 * math.log(max(vocab_size, 2)))
    return max(0.002, 3 * error)


def compare_canaries(canaries: Sequence[Canary], score: Callable[[DataProto], list[float]], tolerance: float) -> float:
    """Compare every rollout's log-probabilities with the trainer's under the same weights.

    Args:
        canaries: of every rollout rank, in the order of their ranks.
        score: the trainer's log-probabilities of the tokens of `canary_rows`; at temperature 1.
        tolerance: largest mean difference of a rollout.

    Returns:
        The largest mean difference.

    Raises:
        CanaryError: a rollout differs by more, or a number is not finite.
    """
    batch, rows = canary_rows(canaries)
    scored = score(batch)
    worst = 0.0
    for rank, canary in enumerate(canaries):
        expected = [scored[rows[pair]] for pair in zip(canary.prompts, canary.tokens, strict=True)]
        differences = [abs(a - b) for a, b in zip(canary.log_probs, expected, strict=True)]
        mean = sum(differences) / len(differences)
        if not mean <= tolerance:  # NaN is larger too
            place = max(range(len(differences)), key=lambda i: differences[i] if math.isfinite(differences[i]) else 1e9)
            raise CanaryError(
                f"The rollout of rank {rank} does not compute with the weights of version {canary.version} that were "
                f"synced to it: the log-probabilities of its canary's {len(differences)} tokens differ from the "
                f"trainer's by {mean:.3g} on average, at most {tolerance:g} is allowed (worst: token "
                f"{canary.tokens[place]} after {list(canary.prompts[place])}, rollout {canary.log_probs[place]:.4g}, "
                f"trainer {expected[place]:.4g})."
            )
        worst = max(worst, mean)
    return worst


def explanation(changed: str, is_read: bool, retry: str, tolerance: float) -> str:
    """The meaning of a difference, given what was read back of the rollouts' memory.

    Args:
        changed: `sync.compare_memory` of it.
        is_read: whether the engine can be read back.
        retry: ``""``, or the outcome of a second sync where the memory of the first was given back meanwhile:
            ``equal``, or the error of its canary.
        tolerance: of the comparison.
    """
    first = ""
    if retry:
        outcome = "agrees" if retry == "equal" else f"differs too ({retry})"
        first = f"The rollout slept since; after a second sync of the same weights its canary {outcome}. "
    if changed:
        return f"{first}Read back now, these are not the trainer's: {changed}: they changed after their sync."
    if retry == "equal":
        return f"{first}So the first sync did not reach the weights it computed with, or they changed after it."
    read = "All tensors were read back and are the trainer's, so it" if is_read else "It cannot be read back; it"
    return (
        f"{first}{read} computes with a copy or an adapter that the sync does not reach, or model.path, "
        "override_config, dtype or quantization differ between the two sides. Compare a step with "
        "actor_rollout_ref.rollout.name=hf; if the two sides are meant to differ by this much, raise "
        f"actor_rollout_ref.rollout.canary_tolerance (now {tolerance:.3g}), or set {_KEY}=0."
    )

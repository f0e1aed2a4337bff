"""What a rollout engine is: token ids in, token ids out.

It knows no tokenizer, no DataProto, no reward and no training engine; it knows which version of the weights it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Bucket = list[tuple[str, "Tensor"]]
"""Some (checkpoint name, full tensor) pairs that travel together."""


class StaleWeightsError(RuntimeError):
    """The rollout was asked for text under weights it does not hold."""


class WeightSyncError(RuntimeError):
    """A rollout does not hold what was sent to it; the message names the tensors."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one response are drawn.

    The distribution is softmax(logits / temperature), cut first to the ``top_k`` likeliest tokens and then to the
    smallest set of likeliest tokens that holds ``top_p`` of what is left; tokens as likely as the last one kept
    stay too. ``do_sample=False`` and ``temperature=0`` both mean: always the likeliest token.
    """

    max_tokens: int
    """Longest response, in tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    """1 cuts nothing."""
    top_k: int = -1
    """-1 and 0 cut nothing."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token until ``max_tokens``."""
    do_sample: bool = True
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response besides the end-of-sequence tokens the engine knows; ``ignore_eos`` covers both."""
    want_log_probs: bool = False
    """Return the log-probability of every token under the distribution it was drawn from (greedy: under softmax)."""

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: a response has at least one token. Set it to 1 or more.")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative. Use 0 for the likeliest token.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]. Use 1 to keep every token.")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be positive. Use -1 to keep every token.")

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class Request:
    """One response to draw. Equal requests with equal weights give equal responses, whatever stands beside them."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    """Any int. Give every response of a run its own."""


@dataclass(frozen=True)
class Completion:
    """One response: its tokens, the end-of-sequence token included, and why it ended there."""

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Receipt:
    """What an engine says it holds after a sync: read back from its own memory, not copied from the sender."""

    version: int
    checksums: dict[str, int] = field(repr=False)
    """Name as it was sent -> checksum of what the engine holds under that name."""
    num_bytes: int = 0


class RolloutEngine(ABC):
    """Draws responses with the weights of one known version.

    Life of a step: ``wake(("weights",))`` -> ``update_weights`` (through `weight_sync.sync_weights`) ->
    ``wake(("kv_cache",))`` -> ``generate`` -> ``sleep``. Any other order is legal too, except generating with weights
    that are asleep, unconfirmed or of another version, which is a StaleWeightsError.
    """

    version: int | None = None
    """Version of the weights held; None while they cannot be trusted."""

    tensor_parallel_size: int = 1
    """Neighbouring ranks that share one copy of the engine: they make every call together, with equal arguments."""

    def generate(self, requests: Sequence[Request], expect_version: int) -> list[Completion]:
        """One completion per request, in the order of the requests.

        Args:
            requests: prompts with their sampling and seed.
            expect_version: what the caller's training engine calls its weights.

        Raises:
            StaleWeightsError: the weights held are asleep, unconfirmed or of another version.
        """
        if self.is_asleep:
            raise StaleWeightsError(
                f"generate() wants weights of version {expect_version}, but the rollout is asleep. "
                "Wake it and sync weights first."
            )
        if self.version is None or self.version != expect_version:
            held = "no confirmed weights" if self.version is None else f"version {self.version}"
            raise StaleWeightsError(
                f"generate() wants weights of version {expect_version}, but the rollout holds {held}. "
                "Sync weights (verl.workers.rollout.weight_sync.sync_weights) before generating."
            )
        return self._generate(list(requests)) if requests else []

    def invalidate(self) -> None:
        """Declare the weights untrusted: `generate` refuses until the next good sync."""
        self.version = None

    @abstractmethod
    def _generate(self, requests: list[Request]) -> list[Completion]:
        """`generate` after its checks."""

    @abstractmethod
    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Take a full set of weights and say what is held afterwards.

        Raises:
            WeightSyncError: an unknown name, a wrong shape, a name given twice or a name missing at the end.
        """

    @property
    @abstractmethod
    def weights_dtype(self) -> torch.dtype:
        """The type weights are held in; senders cast to it before they compute checksums."""

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and KV cache.

        Args:
            level: 1 lets an engine keep a copy of the weights elsewhere, 2 makes it forget them.
        """

    @abstractmethod
    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory of the named parts again. Woken weights are worth nothing before a sync."""

    @property
    @abstractmethod
    def is_asleep(self) -> bool:
        """Whether weights or KV cache have no memory."""

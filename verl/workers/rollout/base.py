"""The interface of a rollout engine: token ids in, token ids out.

An engine knows no tokenizer, no DataProto, no reward and no training engine; it knows the version of the weights it
holds.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig

from verl.utils.exit_codes import ExitCode
from verl.utils.torch_functional import PrecisionType
from verl.workers.rollout.monitor import EngineMonitor

if TYPE_CHECKING:
    from torch import Tensor

    from verl.config.rollout import RolloutConfig
    from verl.models.loader import LoRASpec

Bucket = list[tuple[str, "Tensor"]]
"""Some (checkpoint name, full tensor) pairs sent together."""


class StaleWeightsError(RuntimeError):
    """A generation was requested under weights that the rollout does not hold."""

    exit_class = ExitCode.UNHEALTHY


class WeightSyncError(RuntimeError):
    """A rollout does not hold what was sent to it; the message names the tensors."""

    exit_class = ExitCode.UNHEALTHY


class RequestsRunningError(RuntimeError):
    """Weights or memory were to change while requests are running."""


_TEMPERATURES = " must be 0, for the likeliest token, or a number from 1e-05 on: logits divided by less overflow."


def _is_temperature(value: float) -> bool:
    return value == 0 or 1e-5 <= value < math.inf


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one response.

    Bans, biases and penalties change the logits. The distribution is softmax(logits / temperature), cut first by
    ``min_p``, then to the ``top_k`` likeliest tokens, and then to the smallest set of likeliest tokens that holds
    ``top_p`` of what is left; tokens as likely as the last one kept stay too. ``do_sample=False`` and
    ``temperature=0`` both mean: always the likeliest token, after bans, biases and penalties.
    """

    max_tokens: int
    """Longest response, in tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    """1 cuts nothing."""
    top_k: int = -1
    """-1 and 0 cut nothing."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token until ``max_tokens``."""
    do_sample: bool = True
    min_p: float = 0.0
    """Cut tokens less likely than this share of the likeliest one's probability, after temperature. 0 cuts nothing."""
    repetition_penalty: float = 1.0
    """Logits of tokens that are in the prompt or response already: divided by it if positive, else multiplied."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response besides the end-of-sequence tokens the engine knows; ``ignore_eos`` covers both."""
    stop: tuple[str, ...] = ()
    """Texts that end a response as soon as it holds one of them; the tokens that complete the text are kept."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never generated, such as the placeholders of images."""
    first_token_temperature: float | None = None
    """Temperature of the first token; None: ``temperature``. Source: FIRE, Chen et al. 2024 (arXiv:2410.21236)."""
    first_token_top_k: int = -1
    """``top_k`` of the first token where its temperature is its own; -1 and 0: ``top_k``."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Sampling parameters by the engine's own names, handed to it untouched; an engine refuses one it lacks."""
    want_log_probs: bool = False
    """Return the log-probability of every token under the distribution it was sampled from (greedy: under softmax)."""
    prompt_log_probs: int | None = None
    """Return also the log-probabilities of the prompt's tokens under softmax(logits), and so many likeliest tokens of
    each place. None: neither."""

    def __post_init__(self):
        hot = self.first_token_temperature
        for name, is_valid, rule in (
            ("max_tokens", self.max_tokens >= 1, ": a response has at least one token. Set it to 1 or more."),
            ("temperature", self.temperature >= 0, " must not be negative. Use 0 for the likeliest token."),
            ("temperature", _is_temperature(self.temperature), _TEMPERATURES),
            ("top_p", 0 < self.top_p <= 1, " must lie in (0, 1]. Use 1 to keep every token."),
            ("top_k", self.top_k >= -1, " must be positive. Use -1 to keep every token."),
            ("top_k", self.top_k < 1 << 31, " is more than any vocabulary. Use -1 to keep every token."),
            ("first_token_top_k", -1 <= self.first_token_top_k < 1 << 31, " must be positive. Use -1 for top_k."),
            ("min_p", 0 <= self.min_p <= 1, " must lie in [0, 1]. Use 0 to keep every token."),
            ("repetition_penalty", self.repetition_penalty > 0, " must be positive. Use 1 for none."),
            (
                "repetition_penalty",
                1e-3 <= self.repetition_penalty <= 1e3,
                " must lie in [0.001, 1000]: logits overflow.",
            ),
            ("first_token_temperature", hot is None or hot > 0, " must be positive. Use None for temperature."),
            ("first_token_temperature", hot is None or _is_temperature(hot), _TEMPERATURES),
            ("stop", all(self.stop), ": an empty text would end every response. Leave it out."),
            ("prompt_log_probs", (self.prompt_log_probs or 0) >= 0, " must be a number of tokens, or None."),
        ):
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)}{rule}")

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class Request:
    """One response to generate. Equal requests and weights give equal responses, whatever else runs with them."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    """Any int. Give every response of a run its own."""
    media: Mapping[str, Sequence[Any]] | None = field(default=None, hash=False)
    """Images and videos of the prompt, in the order of its placeholders: ``{"image": [PIL images]}``, and under
    ``video`` the ``Video`` objects of ``verl.data.vision``."""


@dataclass(frozen=True)
class PromptLogProbs:
    """Log-probabilities of the tokens of a prompt from the second one on: n entries for n + 1 tokens."""

    log_probs: list[float]
    top_ids: list[list[int]]
    """The likeliest tokens of each place, the likeliest first."""
    top_log_probs: list[list[float]]

    def __post_init__(self) -> None:
        check_log_probs(self.log_probs)


@dataclass(frozen=True)
class Completion:
    """One response: its tokens, the end-of-sequence token included, and why it ended there.

    ``abort`` means the request was ended early; its tokens are a partial response that can be continued.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: Literal["stop", "length", "abort"]
    version: int | None = None
    """Version of the weights that generated the tokens; None: the version that was requested."""
    prompt_log_probs: PromptLogProbs | None = None
    """Those of the prompt, where the request asks for them; an aborted one may lack them."""
    score: float | None = None
    """A classifier's output for the prompt; its completions have no tokens."""


def empty_completion(request: Request) -> Completion:
    """The completion of a request that was aborted before its first token."""
    return Completion([], [] if request.sampling.want_log_probs else None, "abort")


TokenOutput = Completion
"""Its name for agent loops of verl."""


def ended_message(seed: int, token_ids: Sequence[int], num_turns: int | None = None) -> list[Any]:
    """Return the message about a response that has ended: its seed, which no other of a batch has, and its tokens.

    Args:
        num_turns: of a conversation.
    """
    return [seed, array("i", token_ids).tobytes(), *([] if num_turns is None else [num_turns])]


def read_ended_message(message: Sequence[Any]) -> tuple[int, np.ndarray, np.int32 | None]:
    """Return seed, tokens (int32) and number of turns, which is None of no conversation, of an `ended_message`."""
    seed, tokens, *turns = message
    return seed, np.frombuffer(tokens, np.int32), np.int32(turns[0]) if turns else None


@dataclass(frozen=True)
class Receipt:
    """The weights an engine holds after a sync: read back from its own memory, not copied from the sender."""

    version: int
    checksums: dict[str, int] = field(repr=False)
    """Name as it was sent -> checksum of what the engine holds under that name."""
    num_bytes: int = 0


class RolloutEngine(ABC):
    """Generates responses with the weights of one known version.

    Life of a step: ``wake(("weights",))`` -> ``update_weights`` (through `weights.sync.sync_weights`) ->
    ``wake(("kv_cache",))`` -> ``generate`` -> ``sleep``. Any other order is legal too, except generating with weights
    that are asleep, unconfirmed or of another version, which is a StaleWeightsError.
    """

    version: int | None = None
    """Version of the weights held; None while they cannot be trusted."""

    config: RolloutConfig
    """``actor_rollout_ref.rollout``."""

    tensor_parallel_size: int = 1
    """Neighbouring ranks that share one copy of the engine, stages of its pipeline included: they make every call
    together, with equal arguments."""

    vocab_size: int | None = None
    """Token ids are below it; None: unknown."""

    never_generated: tuple[int, ...] = ()
    """Tokens no response may hold, whatever its sampling says: a model's placeholders of images."""

    on_ended: Callable[[int, Completion], None] | None = None
    """Called by ``_generate`` with the place of a request and its completion as soon as that has ended, while others
    go on; an engine that cannot tell leaves it out. None: nobody asks."""

    holds_base: bool = False
    """Whether the weights below the adapter are here, so that a sync need bring the adapter only."""

    @classmethod
    def adapter_unsupported_reason(cls, model_config: Any) -> str | None:
        """Reason why this engine cannot hold an adapter apart from the weights of a model.

        None: it can, and the constructor takes ``lora``, a LoRASpec.

        Args:
            model_config: the model's Hugging Face config.
        """
        return "holds no adapter apart from its weights"

    def __init__(self) -> None:
        self._request_ids = count()
        self._waiting: dict[int, Request] = {}
        self.monitor = EngineMonitor()

    def generate(
        self,
        requests: Sequence[Request],
        expect_version: int,
        on_ended: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """One completion per request, in the order of the requests.

        Args:
            requests: prompts with their sampling and seed.
            expect_version: what the caller's training engine calls its weights.
            on_ended: called with the place and completion of each request that ends before the others, if the engine
                can tell.

        Raises:
            StaleWeightsError: the weights held are asleep, unconfirmed or of another version.
            RequestsRunningError: submitted requests have not ended.
        """
        # before the empty case, so that a wrong version is found even where there is nothing to generate
        self.check_version(expect_version)
        self.check_nothing_runs("generate()")
        if not requests:
            return []
        self.on_ended = on_ended
        try:
            with self.monitor.generating(requests):
                completions = self._generate(list(requests))
        finally:
            self.on_ended = None
        self.monitor.count(requests, completions)
        return completions

    def check_version(self, expect_version: int) -> None:
        """Raise StaleWeightsError unless awake, with confirmed weights of this version."""
        if self.is_asleep:
            raise StaleWeightsError(
                f"generate() wants weights of version {expect_version}, but the rollout is asleep. "
                "Wake it and sync weights first."
            )
        if self.version is None or self.version != expect_version:
            held = "no confirmed weights" if self.version is None else f"version {self.version}"
            raise StaleWeightsError(
                f"generate() wants weights of version {expect_version}, but the rollout holds {held}. "
                "Sync weights (verl.workers.rollout.weights.sync.sync_weights) before generating."
            )

    def check_nothing_runs(self, what: str) -> None:
        """Raise RequestsRunningError if submitted requests have not ended; ``what`` must not happen while they run."""
        if self.num_running:
            raise RequestsRunningError(
                f"{what} was called while {self.num_running} submitted requests are running. "
                "End them first: step() until num_running is 0, or abort() them and keep what they had generated."
            )

    # -- requests that come and go one by one --------------------------------------------------------------------------

    def submit(self, request: Request, expect_version: int) -> int:
        """Take a request in while others run; returns the request id by which `step` and `abort` call it.

        Ranks that share one engine make the same calls of `submit`, `step` and `abort` in the same order.

        Raises:
            StaleWeightsError: as `generate`.
        """
        self.check_version(expect_version)
        request_id = next(self._request_ids)
        self._waiting[request_id] = request
        return request_id

    def step(self) -> dict[int, Completion]:
        """Generate a token or more for every submitted request; returns what ended, by request id.

        This default, for an engine that cannot be interrupted, generates all waiting requests to their end.
        """
        waiting, self._waiting = self._waiting, {}
        return dict(zip(waiting, self._generate(list(waiting.values())), strict=True)) if waiting else {}

    def abort(self, request_ids: Sequence[int]) -> dict[int, Completion]:
        """End these requests now; returns their tokens so far, by request id. Unknown ids are left out."""
        known = [request_id for request_id in request_ids if request_id in self._waiting]
        return {request_id: empty_completion(self._waiting.pop(request_id)) for request_id in known}

    def partial(self, request_id: int) -> Completion | None:
        """The tokens so far of a running request; None if the engine does not report them or the id is unknown."""
        return None

    @property
    def num_running(self) -> int:
        """Requests submitted and not ended."""
        return len(self._waiting)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse, at the start of a run, sampling that this engine cannot do exactly as asked.

        Raises:
            ValueError: names the setting.
        """
        del sampling  # anything goes, unless an engine says otherwise

    def invalidate(self) -> None:
        """Declare the weights untrusted: `generate` refuses until the next good sync."""
        self.version = None

    # -- metrics and memory --------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, float]:
        """Counters of the engine's own since it was built, by the names of the metrics below ``rollout/engine``."""
        return {}

    def memory_parts(self) -> dict[str, int]:
        """Bytes held now for ``rollout weights`` and ``rollout cache``, as far as known."""
        return {}

    def prometheus(self) -> str:
        """The engine's own metrics in Prometheus' text format; empty if it keeps none."""
        return ""

    @abstractmethod
    def _generate(self, requests: list[Request]) -> list[Completion]:
        """`generate` after its checks."""

    @abstractmethod
    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Take a full set of weights; returns checksums of what is held afterwards.

        Raises:
            WeightSyncError: an unknown name, a wrong shape, a name given twice or a name missing at the end.
        """

    def update_adapter(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Take an adapter, on top of the weights that ``update_weights`` brought and ``sleep(1)`` kept.

        Args:
            buckets: ``P.lora_A.weight`` (r, in) and ``P.lora_B.weight`` (out, r) of every adapted layer P; it computes
                W x + B A x.

        Raises:
            WeightSyncError: as `update_weights`, or the weights below are not what they were.
        """
        raise WeightSyncError(f"{type(self).__name__} holds no adapter apart from its weights: send them merged.")

    def memory_of_weights(self) -> Mapping[str, Tensor]:
        """Name -> memory that holds the whole tensor of that name after ``update_weights``; not while asleep.

        While ``update_weights`` takes the buckets, a sender in this process may write a tensor there itself and hand
        over that memory.
        """
        return {}

    def rows_held(self) -> dict[str, tuple[int, int]]:
        """Name -> (first row, number of rows) of tensors of the last sync of which ``update_shards`` takes those rows
        alone; not while asleep.
        """
        return {}

    def update_shards(self, version: int, buckets: Iterable[Bucket], sharded: Collection[str]) -> Receipt:
        """As `update_weights`, with just the rows of ``rows_held`` of the tensors named in ``sharded``."""
        raise NotImplementedError(f"{type(self).__name__} takes whole tensors only")

    def read_back(self) -> dict[str, int]:
        """Checksums of what memory holds now, by the names of the last sync; empty where an engine cannot tell.

        Tensors that it computes with and no sync writes are among them, by the engine's own names. Not while asleep.
        """
        return {}

    @property
    @abstractmethod
    def weights_dtype(self) -> torch.dtype:
        """The type of the weights held; senders cast to it before they compute checksums."""

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and KV cache.

        Args:
            level: 1 lets an engine keep a copy of the weights elsewhere, and makes it keep those below an adapter; 2
                makes it forget them.
        """

    @abstractmethod
    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory of the named parts again. Woken weights are not usable before a sync."""

    @property
    @abstractmethod
    def is_asleep(self) -> bool:
        """Whether weights or KV cache have no memory."""


class ModelRollout(RolloutEngine):
    """A rollout engine for the model of a Hugging Face folder.

    Args:
        model_path: Hugging Face folder; its weights are read only if ``config.load_format`` does not start with
            "dummy" (they are then version 0).
        config: ``actor_rollout_ref.rollout``.
        device: ``cpu`` or ``cuda``.
        trust_remote_code: run model code that comes with the folder.
        override_config: replaces entries of the model's config.
        tokenizer_path: folder of the tokenizer, for stop texts. None: the model's.
        lora: hold an adapter on these layers apart from the weights (``update_adapter``).
    """

    def __init__(
        self,
        model_path: str,
        config: RolloutConfig,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        override_config: Mapping[str, Any] | None = None,
        tokenizer_path: str | None = None,
        lora: LoRASpec | None = None,
    ):
        # imported here: clients and servers need requests, not the model library
        from verl.models.loader import ModelSpec, load_config

        super().__init__()
        self.config, self.device, self.dtype = config, torch.device(device), PrecisionType.to_dtype(config.dtype)
        self.trust_remote_code, self.lora = trust_remote_code, lora
        self.spec = ModelSpec(
            model_path,
            override_config=override_config or {},
            trust_remote_code=trust_remote_code,
            gradient_checkpointing=False,
        )
        self.tokenizer_path = tokenizer_path or self.spec.folder
        self.model_config = load_config(self.spec)
        self.vocab_size = getattr(self.model_config.get_text_config(decoder=True), "vocab_size", None)
        self.max_model_len = longest_sequence(config, self.model_config)
        self.stop_token_ids = stop_tokens(self.spec.folder, self.model_config)
        # an adapter's base weights come by a sync
        self.reads_weights = not config.load_format.startswith("dummy") and lora is None
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """Start the engine; it then has version 0 if ``reads_weights``."""

    @property
    def weights_dtype(self) -> torch.dtype:
        return self.dtype


def weights_asleep_error(version: int) -> WeightSyncError:
    """The error of an engine whose weights are to change while they have no memory."""
    return WeightSyncError(f"Weights of version {version} arrived while the rollout was asleep. Wake it first.")


# -- Generation limits from a model's folder: longest sequence, end-of-sequence tokens, size of a cached token ---------


logger = logging.getLogger(__name__)


def longest_sequence(config: RolloutConfig, model_config: Any) -> int:
    """Tokens a prompt and its response may have together.

    Args:
        model_config: the model's Hugging Face config.

    Raises:
        ValueError: more than the model's context was requested.
    """
    context = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    named = config.max_model_len
    # vLLM and SGLang reserve memory by this, so it is not the context of the model
    longest = named or config.prompt_length + config.response_length
    if context is not None and longest > context:
        key = "rollout.max_model_len" if named else "data.max_prompt_length + data.max_response_length"
        raise ValueError(
            f"{key}={longest} is more than the model's context of {context} tokens. Lower it, or raise "
            "model.override_config.max_position_embeddings if the model can do more."
        )
    return longest


def longest_response(request: Request, max_model_len: int) -> int:
    """Tokens a response may have: its ``max_tokens``, or what the prompt leaves of ``max_model_len``."""
    # a partial response that continues has its tokens in the prompt already
    return min(request.sampling.max_tokens, max_model_len - len(request.prompt_ids))


def check_log_probs(log_probs: Sequence[float]) -> None:
    """Raise FloatingPointError if a log-probability is NaN."""
    if any(math.isnan(log_prob) for log_prob in log_probs):
        raise FloatingPointError(
            "The rollout's log-probs are not finite: its weights are not, or overflow in rollout.dtype. "
            "Look at actor/grad_norm of the last steps and lower actor.optim.lr, or use rollout.dtype=float32."
        )


def check_prompt(length: int, max_model_len: int) -> None:
    """Refuse a prompt that leaves no room for a response."""
    if not 0 < length < max_model_len:
        raise ValueError(
            f"A prompt of {length} tokens does not fit: it must have at least one and leave room "
            f"for one more within max_model_len={max_model_len}. Check data.max_prompt_length, "
            "data.filter_overlong_prompts and rollout.max_model_len."
        )


def stop_tokens(folder: str, model_config: Any) -> set[int]:
    """End-of-sequence tokens of the folder's generation config, or of its model config."""
    try:
        # chat models often name more end tokens there than in their config
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        found = None
    if found is None:
        found = getattr(model_config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        logger.warning("%s names no end-of-sequence token: responses end at stop_token_ids or max_tokens.", folder)
        return set()
    return {found} if isinstance(found, int) else set(found)


def cached_bytes_per_token(model_config: Any, dtype: torch.dtype) -> int:
    """Bytes that keys and values of one token take in all layers."""
    text = model_config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if not heads:
        # a state of fixed size in place of keys and values: counted as the hidden states, so that it is not zero
        return 2 * text.num_hidden_layers * text.hidden_size * dtype.itemsize
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * size * dtype.itemsize

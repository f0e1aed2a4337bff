"""vLLM's continuous batching, one request at a time: what came of each is kept here, so an abort loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.base import Completion, Request
from verl.workers.rollout.vllm_requests import drawn_log_probs


@dataclass
class Running:
    """A request and the tokens vLLM has reported for it."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def completion(self, finish_reason: str) -> Completion:
        log_probs = list(self.log_probs) if self.request.sampling.want_log_probs else None
        return Completion(list(self.token_ids), log_probs, finish_reason)


class VLLMStream:
    """Requests in flight of one ``vllm.LLMEngine``, by ticket.

    Args:
        lora_request: of the adapter that answers them, a ``LoRARequest``; None: the model has none.
    """

    def __init__(self, engine: Any, lora_request: Any = None):
        self._engine, self._lora_request = engine, lora_request
        self._running: dict[int, Running] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, ticket: int, request: Request, prompt: Any, params: Any) -> None:
        """Hand a request to vLLM. ``params``: a ``vllm.SamplingParams``; what it reports is changed to news only."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.DELTA
        self._engine.add_request(str(ticket), prompt, params, lora_request=self._lora_request)
        self._running[ticket] = Running(request)

    def step(self) -> dict[int, Completion]:
        """One forward for all that run; returns what ended."""
        ended: dict[int, Completion] = {}
        for output in self._engine.step() if self._running else ():
            ticket = int(output.request_id)
            if ticket not in self._running:
                continue  # aborted while its last token was on the way
            running, (sample,) = self._running[ticket], output.outputs
            tokens = list(sample.token_ids)
            running.log_probs += drawn_log_probs(running.request, tokens, sample.logprobs) or []
            running.token_ids += tokens
            if output.finished:
                if sample.finish_reason not in ("stop", "length"):
                    raise RuntimeError(
                        f"vLLM ended a request with finish_reason={sample.finish_reason!r}; see its log."
                    )
                ended[ticket] = self._running.pop(ticket).completion(sample.finish_reason)
        return ended

    def abort(self, tickets: Sequence[int]) -> dict[int, Completion]:
        """End these requests; returns what they had drawn."""
        found = {ticket: self._running.pop(ticket) for ticket in tickets if ticket in self._running}
        self._engine.abort_request([str(ticket) for ticket in found])
        return {ticket: running.completion("abort") for ticket, running in found.items()}

    def partial(self, ticket: int) -> Completion | None:
        running = self._running.get(ticket)
        return running and running.completion("abort")

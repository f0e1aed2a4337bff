"""Client of a teacher that a server runs: vLLM's, SGLang's or verl's own, asked for the log-probs of given texts.

Token ids in, log-probs out; a text goes to the server as token ids and is never decoded on the way. Knows no batch.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import aiohttp
import numpy as np

from verl.config.distillation import TeacherModelConfig
from verl.rewards.scorers import http_json
from verl.utils.exit_codes import ExitCode
from verl.utils.py_functional import excerpt

_PROBES, _PROBES_AT_ONCE = 256, 64
_BROKEN = "\ufffd"  # a token that is a part of a character
_T = TypeVar("_T")


class TeacherServerError(RuntimeError):
    """A teacher's server did not answer, or not as its kind does; names it, its teacher and the request."""

    exit_class = ExitCode.WORKER


class TokenLogProbs(NamedTuple):
    """Log-probs of the last n tokens of a text."""

    own: np.ndarray
    """(n,) float32."""
    top_ids: np.ndarray
    """The likeliest tokens of each place, the likeliest first; (n, k) int32."""
    top: np.ndarray
    """(n, k) float32."""


class _Refused(ValueError):
    """The server answered that it does not serve this request."""


class _Busy(aiohttp.ClientError):
    """The server may serve this request later; ``retry_after``: seconds from now, as it says."""

    def __init__(self, message: str, retry_after: str | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Api(NamedTuple):
    """What a server is asked, by its kind."""

    kind: str
    model: str

    @property
    def path(self) -> str:
        return "/generate" if self.kind == "sglang" else "/v1/completions"

    def request(self, ids: Sequence[int], count: int, k: int, with_text: bool) -> dict[str, Any]:
        """The body that asks for the last ``count`` tokens of ``ids``, and for ``k`` likeliest ones of each place."""
        if self.kind == "sglang":
            return {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": len(ids) - count - 1,
                "top_logprobs_num": k,
                "return_text_in_logprobs": with_text,
            }
        greedy = {"max_tokens": 1, "temperature": 0}
        return {"model": self.model, "prompt": list(ids), "prompt_logprobs": k, **greedy}

    def places(self, answer: Any, ids: Sequence[int], count: int) -> list[dict[int, tuple[float, str | None]]]:
        """Of each of the last ``count`` tokens: token -> (log-prob, text), of itself, then of the likeliest ones.

        Raises:
            LookupError, TypeError, ValueError: it is no such answer.
        """
        found = []
        if self.kind == "sglang":
            info = answer["meta_info"]
            own, top = info["input_token_logprobs"][-count:], (info.get("input_top_logprobs") or [])[-count:]
            for place, (token, (value, named, text)) in enumerate(zip(ids[-count:], own, strict=True)):
                if named not in (token, 0):  # what it calls the last token of the vocabulary
                    raise ValueError(f"it scored the token {named} in place of {token}")
                found.append({token: (value, text)} | {i: (v, t) for v, i, t in (top[place] if top else ())})
        else:
            for token, place in zip(ids[-count:], answer["choices"][0]["prompt_logprobs"][-count:], strict=True):
                entries = {int(i): (entry["logprob"], entry.get("decoded_token")) for i, entry in place.items()}
                found.append({token: entries.pop(token)} | entries)
        return found


class ServedTeacher:
    """One teacher behind the servers of ``server_urls``, each of which has all of it.

    Args:
        name: its name in ``distillation.teacher_models``.
        options: that entry.
    """

    def __init__(self, name: str, options: TeacherModelConfig) -> None:
        self.key, self.options = f"distillation.teacher_models.{name}", options
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in options.urls]
        self._apis: dict[str, _Api] = {}

    def score(self, texts: Sequence[Sequence[int]], counts: Sequence[int], k: int, vocab: int) -> list[TokenLogProbs]:
        """Log-probs of the last ``counts[i]`` tokens of each text, and of the likeliest ``k`` tokens below ``vocab``.

        Raises:
            TeacherServerError: no server answered, however often it was tried.
            ValueError: a server refuses a text; says why.
        """

        async def score_one(session: aiohttp.ClientSession, number: int) -> TokenLogProbs:
            ids, count = texts[number], int(counts[number])
            if not count:
                return TokenLogProbs(np.zeros(0, np.float32), np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
            # a padded vocabulary ends later than the policy's: its tokens are left out, and others take their place
            for more in (0, 8, 128):
                places = await self._ask(session, number, ids, count, k + more if k else 0)
                if (found := token_log_probs(places, k, vocab)) is not None:
                    return found
            raise TeacherServerError(
                f"{self.key}.server_urls: of a text of {len(ids)} tokens the server named fewer than {k} likeliest "
                f"tokens below {vocab}, where the policy's vocabulary ends. Lower "
                "distillation.distillation_loss.topk, or name a teacher with the policy's tokenizer."
            )

        return self._run(score_one, len(texts))

    def check(self, tokenizer: Any) -> None:
        """Find out that each server answers, and that its tokens have the numbers of ``tokenizer``.

        Raises:
            TeacherServerError: one does not answer.
            ValueError: one refuses, or a token has another text there.
        """
        ids = _probe_ids(tokenizer)
        parts = [ids[first : first + _PROBES_AT_ONCE] for first in range(0, len(ids), _PROBES_AT_ONCE)]

        async def texts_of(session: aiohttp.ClientSession, number: int) -> list[tuple[int, str | None]]:
            part = parts[number % len(parts)]
            first = number // len(parts)  # every server is asked
            # the first token of a text has no log-prob, and so no text
            places = await self._ask(session, first, [part[0], *part], len(part), 0, with_text=True, only=True)
            return [(token, place[token][1]) for token, place in zip(part, places, strict=True)]

        answers = [pair for part in self._run(texts_of, len(parts) * len(self.urls)) for pair in part]
        for token, theirs in answers:
            own = tokenizer.decode([token])
            # parts of characters are written in several ways, and spaces at the ends, too
            if theirs is not None and _BROKEN not in own + theirs and own.strip() != theirs.strip():
                raise ValueError(
                    f"{self.key}.server_urls={', '.join(self.urls)}: the token {token} is {theirs!r} there and {own!r} "
                    "in the policy's tokenizer. Distributions over tokens cannot be compared. Serve a teacher with "
                    "the policy's tokenizer, of the same family for example."
                )

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _run(self, work: Any, count: int) -> list[Any]:
        """``work(session, i)`` for each i below ``count``; in a thread of its own, since this one may have a loop."""

        async def run() -> list[Any]:
            key = os.environ.get(self.options.api_key_env)
            turns = asyncio.Semaphore(self.options.max_concurrent)

            async def in_turn(session: aiohttp.ClientSession, number: int) -> Any:
                async with turns:
                    return await work(session, number)

            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=self.options.timeout_s),
            ) as session:
                tasks = [asyncio.ensure_future(in_turn(session, number)) for number in range(count)]
                try:
                    return await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()

        with ThreadPoolExecutor(1, "verl-teacher") as thread:
            return thread.submit(asyncio.run, run()).result()

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        number: int,
        ids: Sequence[int],
        count: int,
        k: int,
        with_text: bool = False,
        only: bool = False,
    ) -> list[dict[int, tuple[float, str | None]]]:
        """Ask the server of this number, and the next one where it does not answer, unless it is to be the ``only``."""
        causes: list[str] = []
        wanted: str | None = None
        for attempt in range(self.options.tries):
            if attempt:
                await asyncio.sleep(http_json.pause_s(attempt + 1, wanted if only or len(self.urls) == 1 else None))
            wanted = None
            url = self.urls[(number + (0 if only else attempt)) % len(self.urls)]
            try:
                api = await self._api(session, url)
                answer = await self._json(session, url + api.path, api.request(ids, count, k, with_text))
                try:
                    return api.places(answer, ids, count)
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    shown = f"{type(error).__name__}: {error}; it begins {excerpt(json.dumps(answer), 200)}"
                    raise TeacherServerError(
                        f"{self.key}.server_urls: {url} answered as no server of kind {api.kind!r} does ({shown}). Set "
                        f"{self.key}.server to vllm or sglang."
                    ) from error
            except _Refused as error:
                raise ValueError(
                    f"{self.key}.server_urls: {url} refuses a text of {len(ids)} tokens with {k} likeliest ones a "
                    f"place: {error} Its context must hold one token more than prompt and response; vLLM's server "
                    "gives as many likeliest tokens as its --max-logprobs says; a key is read from the environment "
                    f"variable {self.options.api_key_env}."
                ) from error
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                wanted = getattr(error, "retry_after", None)
                causes.append(f"{url}: {f'no answer in {self.options.timeout_s:g} s' if _is_late(error) else error!r}")
        raise TeacherServerError(
            f"{self.key}.server_urls: a text of {len(ids)} tokens was not scored, in {len(causes)} tries; the last: "
            f"{causes[-1]}. Look at the server's log, and raise {self.key}.timeout_s or .tries if it is slow."
        )

    async def _api(self, session: aiohttp.ClientSession, url: str) -> _Api:
        """The kind of a server, and its name of the model; asked once."""
        if url not in self._apis:
            listed = await self._json(session, f"{url}/v1/models")
            entries = listed.get("data") if isinstance(listed, Mapping) else None
            model = dict(entries[0]) if entries else {}
            kind = self.options.server
            if kind == "auto":
                kind = "sglang" if model.get("owned_by") == "sglang" else "vllm"
            self._apis[url] = _Api(kind, self.options.server_model or str(model.get("id", "")))
        return self._apis[url]

    @staticmethod
    async def _json(session: aiohttp.ClientSession, url: str, body: Any = None) -> Any:
        """POST a body, or GET without one.

        Raises:
            _Refused: with what the server says.
            aiohttp.ClientError: it did not answer, or may answer later.
        """
        async with session.request("GET" if body is None else "POST", url, json=body) as answer:
            content = await answer.read()
            if answer.status in http_json.RETRIED:
                raise _Busy(f"status {answer.status}: {_message(content)}", answer.headers.get("Retry-After"))
            if answer.status >= 400:
                raise _Refused(f"status {answer.status}: {_message(content).rstrip('.')}.")
            try:
                return json.loads(content)
            except ValueError as error:
                raise aiohttp.ClientError(f"no JSON: {excerpt(content.decode(errors='replace'), 200)}") from error


def _is_late(error: BaseException) -> bool:
    return isinstance(error, asyncio.TimeoutError)


def _message(content: bytes) -> str:
    """What an answer says of an error, in the forms of the servers."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        return excerpt(text, 300)
    while isinstance(found, Mapping):
        found = next((found[name] for name in ("error", "message", "detail") if name in found), text)
    return excerpt(str(found), 300)


def token_log_probs(places: Sequence[Mapping[int, tuple[float, Any]]], k: int, vocab: int) -> TokenLogProbs | None:
    """Join mappings of a text's token, and then of the likeliest ones, to (log-prob, ...).

    None: a place has fewer than ``k`` tokens below ``vocab``.
    """
    own = np.array([next(iter(place.values()))[0] for place in places], np.float32)
    ids, values = np.zeros((len(places), k), np.int32), np.zeros((len(places), k), np.float32)
    for number, place in enumerate(places if k else ()):
        top = sorted(((value, token) for token, (value, _) in place.items() if token < vocab), reverse=True)[:k]
        if len(top) < k:
            return None
        ids[number], values[number] = [token for _, token in top], [value for value, _ in top]
    return TokenLogProbs(own, ids, values)


def _probe_ids(tokenizer: Any) -> list[int]:
    """Tokens of all parts of the vocabulary, the special ones among them."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    special = sorted(tokenizer.all_special_ids)[: _PROBES // 4]
    step = max(1, len(ids) // (_PROBES - len(special)))
    # without the last one, of which SGLang gives the text of token 0
    return [token for token in dict.fromkeys([*special, *ids[::step], *ids[-2:]]) if token != ids[-1]]

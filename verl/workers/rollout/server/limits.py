"""Limits of requests to the servers of a run: who may send one, how long it may be, and what it may hold.

What passes here can neither end nor stall the engine that all requests share. Knows no engine and no tokenizer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from verl.utils.py_functional import excerpt, is_loopback
from verl.workers.rollout.base import Request
from verl.workers.rollout.server.messages import token_ids, unpack

MOST_BYTES = 1 << 28
"""Longest body of ``POST /generate``: a prompt with its images."""
MOST_TEXT_BYTES = 1 << 24
"""Longest body of the routes that speak text."""
_BODY_TIMEOUT_S = 60.0
_MOST_STOP_TEXTS, _MOST_STOP_CHARACTERS = 256, 1 << 14
_LARGEST_BIAS, _MOST_TOKENS = 100.0, 1 << 30


class RequestRefused(ValueError):
    """A request that is answered with ``status`` and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


# -- Who may ask -------------------------------------------------------------------------------------------------------


class Guard:
    """Refuses requests of web pages, under foreign names of this machine, and without the key.

    A page in a browser of this machine can send requests to loopback: its ``Origin`` tells it. A name of the page's
    owner that resolves to 127.0.0.1 (DNS rebinding) stands in ``Host``.

    Args:
        host: address the server listens on.
        key: to be sent as ``Authorization: Bearer KEY``; None asks for nothing.
        name: of the key in messages.
    """

    def __init__(self, host: str, key: str | None, name: str = "TOKEN"):
        self._is_local, self._key, self._name = is_loopback(host), key, name

    def check(self, request: web.Request) -> None:
        """Raise RequestRefused with 401 (no key, or a wrong one) or 403 (a web page, a foreign name)."""
        origin, named = request.headers.get("Origin"), _host_name(request.headers.get("Host", ""))
        if origin is not None:
            raise RequestRefused(
                403, f"Requests of web pages are refused: this one has the header Origin: {origin!a}. Leave it out."
            )
        if self._is_local and not is_loopback(named):
            raise RequestRefused(
                403, f"The header Host names {named!a}, and this server listens on loopback only. Use 127.0.0.1."
            )
        # as bytes: headers may hold what no encoding has. In constant time: how long a comparison takes must not tell
        # how much of a key is right
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._key is not None and not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            raise RequestRefused(401, f"The header 'Authorization: Bearer {self._name}' is missing or wrong.")


def _host_name(header: str) -> str:
    """The name in a Host header, without its port; empty where it is malformed."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


# -- Bodies ------------------------------------------------------------------------------------------------------------


async def json_body(request: web.Request, most_bytes: int = MOST_TEXT_BYTES, packed_type: str | None = None) -> Any:
    """The body of a request, parsed.

    Args:
        packed_type: content type of a packed body, if one may come.

    Raises:
        RequestRefused: it is no application/json (415), longer than ``most_bytes`` (413), slow to come (408) or
            malformed (400).
    """
    # a page can send other types to any address without asking its browser for leave
    if request.content_type not in ("application/json", packed_type):
        raise RequestRefused(
            415, f"The content type is {request.content_type!a}. Send JSON with Content-Type: application/json."
        )
    try:
        body = await asyncio.wait_for(_read(request, most_bytes), _BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise RequestRefused(408, f"The body did not come within {_BODY_TIMEOUT_S:g} s.") from None
    try:
        is_packed = request.content_type == packed_type
        return unpack(body) if is_packed else json.loads(body)
    except RecursionError:
        raise RequestRefused(400, "The body is nested too deeply.") from None
    except ValueError as error:  # not UTF-8, too
        kind = "not packed as it should be" if is_packed else "no JSON"
        raise RequestRefused(400, f"The body is {kind}: {error}.") from None


async def _read(request: web.Request, most_bytes: int) -> bytearray:
    body = bytearray()
    # of a compressed body, what it unpacks to
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            raise RequestRefused(413, f"The body has more than {most_bytes} bytes, the most taken here.")
    return body


# -- What a request holds ----------------------------------------------------------------------------------------------


def check_request(request: Request, engine: Any) -> None:
    """Refuse what no engine survives: tokens beyond the vocabulary, biases of no size, sampling that leaves no token.

    Args:
        engine: a RolloutEngine; of one without ``vocab_size`` the tokens are not checked.

    Raises:
        ValueError: names the field and its value.
    """
    sampling, vocab, extra = request.sampling, engine.vocab_size, request.sampling.extra
    allowed = extra.get("allowed_token_ids")
    allowed = None if allowed is None else token_ids(allowed, "allowed_token_ids")
    biases = _biases(extra.get("logit_bias"))
    if vocab is not None:
        for name, ids in (
            ("prompt_ids", request.prompt_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("banned_token_ids", sampling.banned_token_ids),
            ("logit_bias", biases),
            ("allowed_token_ids", allowed or ()),
        ):
            if ids and max(ids) >= vocab:
                raise ValueError(f"{name} has the token id {max(ids)}; the model's vocabulary ends at {vocab - 1}.")
    if vocab is not None and (sampling.prompt_log_probs or 0) > vocab:
        raise ValueError(f"prompt_log_probs={sampling.prompt_log_probs} is more than the {vocab} tokens there are.")
    for name in ("frequency_penalty", "presence_penalty"):
        _check_size(name, extra.get(name))
    least = extra.get("min_tokens")
    if least is not None and (type(least) is not int or not 0 <= least <= _MOST_TOKENS):
        raise ValueError(f"min_tokens={excerpt(least, 60)} must be an integer from 0 to {_MOST_TOKENS}.")
    if len(sampling.stop) > _MOST_STOP_TEXTS or sum(map(len, sampling.stop)) > _MOST_STOP_CHARACTERS:
        raise ValueError(
            f"stop has {len(sampling.stop)} texts of {sum(map(len, sampling.stop))} characters, and all are searched "
            f"for at every token. Give at most {_MOST_STOP_TEXTS} texts of {_MOST_STOP_CHARACTERS} characters together."
        )
    banned = {*sampling.banned_token_ids, *engine.never_generated, *(t for t, b in biases.items() if b == -math.inf)}
    if least:
        banned |= {*sampling.stop_token_ids, *getattr(engine, "stop_token_ids", ())}
    is_empty = not set(allowed) - banned if allowed is not None else vocab is not None and len(banned) >= vocab
    if is_empty:
        raise ValueError(
            "allowed_token_ids, banned_token_ids, logit_bias and min_tokens together leave no token to generate. "
            "Allow at least one that is neither banned nor a stop token."
        )


def _biases(given: Any) -> dict[int, float]:
    """``logit_bias`` by token id, whose keys are texts in JSON.

    Raises:
        ValueError: it is no mapping of token ids to numbers of a size a logit can have.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f'logit_bias={excerpt(given, 60)} must be an object of token ids and numbers, such as {{"50256": -100}}.'
        )
    found = {}
    for token, bias in (given or {}).items():
        number = int(token) if isinstance(token, int) or (str(token).isascii() and str(token).isdigit()) else -1
        if number < 0:
            raise ValueError(f"logit_bias has the key {excerpt(token, 60)}: give token ids.")
        if bias != -math.inf:  # a ban
            _check_size(f"logit_bias[{token}]", bias)
        found[number] = bias
    return found


def _check_size(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_BIAS:
        raise ValueError(f"{name}={excerpt(value, 60)} must be a number from -{_LARGEST_BIAS:g} to {_LARGEST_BIAS:g}.")

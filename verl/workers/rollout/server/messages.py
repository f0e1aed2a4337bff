"""Requests and completions as JSON: what travels between a rollout client and a rollout server.

Numbers survive exactly: Python writes floats so that they read back as the same bits.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from verl.workers.rollout.base import Completion, Request, SamplingParams

_SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
_TUPLES = ("stop_token_ids", "stop", "banned_token_ids")
REQUEST_FIELDS = ("prompt_ids", "sampling", "seed", "media", "request_id", "priority")


def request_to_json(request: Request, request_id: str, priority: int = 0) -> dict[str, Any]:
    """The body of ``POST /generate``; sampling fields at their default are left out."""
    # defaults are left out: they would be most of a body
    given, default = vars(request.sampling), vars(SamplingParams(max_tokens=1))
    sampling = {name: value for name, value in given.items() if name == "max_tokens" or value != default[name]}
    if "extra" in sampling:
        sampling["extra"] = dict(sampling["extra"])
    body = {"prompt_ids": list(request.prompt_ids), "sampling": sampling, "seed": request.seed}
    if request.media:
        body["media"] = media_to_json(request.media)
    return body | {"request_id": request_id, "priority": priority}


def request_from_json(body: Any) -> tuple[Request, str | None, int]:
    """(request, request id, priority) from the body of ``POST /generate``.

    Raises:
        ValueError: names the field that is missing, unknown or of the wrong kind.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"The body is a JSON {type(body).__name__}; it must be an object with prompt_ids.")
    refuse_unknown(body, REQUEST_FIELDS, "The request")
    prompt = token_ids(body.get("prompt_ids"), "prompt_ids")
    seed, priority = body.get("seed", 0), body.get("priority", 0)
    for name, value in (("seed", seed), ("priority", priority)):
        if not isinstance(value, int):
            raise ValueError(f"{name}={value!r} must be an integer.")
    media = body.get("media")
    if media:
        from PIL import Image

        refuse_unknown(media, ("image",), "media")
        media = {"image": [Image.open(io.BytesIO(base64.b64decode(text))) for text in media.get("image", ())]}
    request = Request(tuple(prompt), sampling_from_json(body.get("sampling", {})), seed, media or None)
    request_id = body.get("request_id")
    if request_id is not None and not isinstance(request_id, str):
        raise ValueError(f"request_id={request_id!r} must be a string.")
    return request, request_id, priority


def sampling_from_json(fields: Any) -> SamplingParams:
    """`SamplingParams` from a JSON object of its fields; ``max_tokens`` must be there."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"sampling={fields!r} must be an object with the fields {', '.join(_SAMPLING)}.")
    refuse_unknown(fields, _SAMPLING, "sampling")
    if "max_tokens" not in fields:
        raise ValueError("sampling.max_tokens is missing: say how many tokens a response may have at most.")
    fields = {name: tuple(value) if name in _TUPLES else value for name, value in fields.items()}
    try:
        return SamplingParams(**fields)
    except TypeError as error:
        raise ValueError(f"sampling: a field has a value of the wrong kind ({error}).") from None


def completion_to_json(completion: Completion, version: int | None) -> dict[str, Any]:
    """The answer of ``POST /generate``. ``version``: of the weights, where the completion does not say."""
    return {
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "finish_reason": completion.finish_reason,
        "version": version if completion.version is None else completion.version,
    }


def completion_from_json(body: Mapping[str, Any]) -> Completion:
    return Completion(body["token_ids"], body["log_probs"], body["finish_reason"], body["version"])


def token_ids(value: Any, name: str) -> list[int]:
    """``value`` if it is a list of at least one token id."""
    # `type(token) is int` below: JSON's true is an int to isinstance
    is_ids = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_ids or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError(f"{name} must be a list of token ids, at least one.")
    return list(value)


def refuse_unknown(body: Mapping[str, Any], known: Any, what: str) -> None:
    """Raise ValueError if ``body`` has a field that is not in ``known``."""
    for name in body:
        if name not in known:
            raise ValueError(f"{what} has an unknown field {name!r}; known are {', '.join(known)}.")


def media_to_json(media: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """``{"image": [PIL images]}`` with every image as PNG in base64, which loses nothing.

    Raises:
        ValueError: media of another kind.
    """
    if unknown := sorted(set(media) - {"image"}):
        raise ValueError(f"media of the kinds {', '.join(unknown)} cannot be sent to a rollout server; images can.")
    found = []
    for image in media.get("image", ()):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        found.append(base64.b64encode(buffer.getvalue()).decode())
    return {"image": found}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allow_many_connections() -> None:
    """Raise this process's limit of open files to what the system grants: a request under way is a connection."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit, a container may forbid the change
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard))

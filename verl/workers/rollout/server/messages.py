"""Requests and completions as JSON or packed: what travels between a rollout client and a rollout server.

Numbers survive exactly: Python writes floats so that they read back as the same bits; packed they are these bits.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.exit_codes import ExitCode
from verl.utils.fs import write_atomic
from verl.utils.py_functional import excerpt
from verl.workers.rollout.base import Completion, PromptLogProbs, Request, SamplingParams

_SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
_RULES = {
    "texts": "a list of texts",
    "ids": "a list of token ids",
    "number": "a number",
    "integer": "an integer",
    "flag": "true or false",
    "object": "an object",
}
_KIND_OF = {
    **dict.fromkeys(("max_tokens", "top_k", "first_token_top_k", "prompt_log_probs"), "integer"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "first_token_temperature"), "number"),
    **dict.fromkeys(("ignore_eos", "do_sample", "want_log_probs"), "flag"),
    **{"stop_token_ids": "ids", "banned_token_ids": "ids", "stop": "texts", "extra": "object"},
}
_LONGEST_ID = 256
_MOST_PIXELS = 1 << 26
_LARGEST = 1e300
REQUEST_FIELDS = ("prompt_ids", "sampling", "seed", "media", "request_id", "priority")


class RolloutServerError(RuntimeError):
    """A rollout server died, did not answer, or its engine failed; names it and its last requests."""

    exit_class = ExitCode.WORKER


def write_servers_file(path: Path, addresses: Sequence[str], token: str) -> None:
    """Write the servers' addresses and key for clients of the same user, who alone can read the file."""
    content = {"base_urls": [f"{address}/v1" for address in addresses], "api_key": token, "model": "policy"}
    write_atomic(path, lambda part: part.write_text(json.dumps(content) + "\n", encoding="utf-8"), is_private=True)


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
        if type(value) is not int:
            raise ValueError(f"{name}={value!r} must be an integer.")
    request_id = body.get("request_id")
    if request_id is not None and (not isinstance(request_id, str) or len(request_id) > _LONGEST_ID):
        raise ValueError(f"request_id={excerpt(request_id, 60)} must be a string of at most {_LONGEST_ID} characters.")
    sampling, media = sampling_from_json(body.get("sampling", {})), body.get("media")
    return Request(tuple(prompt), sampling, seed, media_from_json(media) if media else None), request_id, priority


def sampling_from_json(fields: Any) -> SamplingParams:
    """`SamplingParams` from a JSON object of its fields; ``max_tokens`` must be there."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"sampling={fields!r} must be an object with the fields {', '.join(_SAMPLING)}.")
    refuse_unknown(fields, _SAMPLING, "sampling")
    if "max_tokens" not in fields:
        raise ValueError("sampling.max_tokens is missing: say how many tokens a response may have at most.")
    return SamplingParams(**{name: _sampling_value(name, value) for name, value in fields.items()})


def _sampling_value(name: str, value: Any) -> Any:
    """``value`` of the field ``name`` of `SamplingParams`, in its kind. Raises ValueError if it is of another."""
    kind = _KIND_OF[name]
    if kind in ("texts", "ids"):
        value = (value,) if isinstance(value, str) else value
        is_valid = isinstance(value, Iterable) and not isinstance(value, bytes | Mapping)
        value = tuple(value) if is_valid else value
        is_valid &= is_valid and all(isinstance(v, str) if kind == "texts" else _is_number(v) and v >= 0 for v in value)
    elif kind == "number":
        is_optional = name == "first_token_temperature"
        is_valid = _is_number(value, Real) or (value is None and is_optional)
        # JSON has integers that no float holds
        is_valid = is_valid and (value is None or not abs(value) > _LARGEST)
    elif kind == "integer":
        is_valid = _is_number(value) or (value is None and name == "prompt_log_probs")
    else:
        is_valid = isinstance(value, Mapping) if kind == "object" else value in (0, 1)
    if not is_valid:
        raise ValueError(f"{name}={excerpt(value, 60)} must be {_RULES[kind]}.")
    return value


def _is_number(value: Any, kind: type = Integral) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def completion_to_json(completion: Completion, version: int | None) -> dict[str, Any]:
    """The answer of ``POST /generate``. ``version``: of the weights, where the completion does not say."""
    return {
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "finish_reason": completion.finish_reason,
        "version": version if completion.version is None else completion.version,
        **({"prompt_log_probs": vars(scored)} if (scored := completion.prompt_log_probs) is not None else {}),
    }


def completion_from_json(body: Mapping[str, Any]) -> Completion:
    scored = body.get("prompt_log_probs")
    prompt = None if scored is None else PromptLogProbs(**scored)
    return Completion(body["token_ids"], body["log_probs"], body["finish_reason"], body["version"], prompt)


BINARY = "application/x-verl-tokens"
"""Content type of `pack`."""
_ARRAYS = {"prompt_ids": "<i4", "token_ids": "<i4", "log_probs": "<f8"}
_ALIGNMENT = 8


def pack(body: Mapping[str, Any]) -> bytes:
    """Return the body of a request or an answer with its tokens and log-probs as arrays, which is many times as fast.

    A header's length in 8 bytes, the header (JSON, with each array's length) padded with spaces, then the arrays.

    Raises:
        ValueError: a token id has more than 32 bits.
    """
    try:
        arrays = {name: np.asarray(body[name], kind) for name, kind in _ARRAYS.items() if body.get(name) is not None}
    except OverflowError as error:
        raise ValueError(f"a token id does not fit: {error}") from None
    lengths = {name: len(array) for name, array in arrays.items()}
    header = json.dumps({**{name: value for name, value in body.items() if name not in arrays}, "arrays": lengths})
    text = header.encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    padded = [array.tobytes() + bytes(-array.nbytes % _ALIGNMENT) for array in arrays.values()]
    return b"".join([len(text).to_bytes(_ALIGNMENT, "little"), text, *padded])


def unpack(data: bytes | bytearray) -> dict[str, Any]:
    """Return the body that `pack` was given, with lists for its arrays.

    Raises:
        ValueError: it is of another form.
    """
    begin = _ALIGNMENT + int.from_bytes(data[:_ALIGNMENT], "little")
    body = json.loads(bytes(data[_ALIGNMENT:begin]))
    lengths = body.pop("arrays", None) if isinstance(body, dict) else None
    if not isinstance(lengths, dict):
        raise ValueError("the header names no arrays")
    for name, length in lengths.items():
        if name not in _ARRAYS or type(length) is not int or length < 0:
            raise ValueError(f"the header has an array {excerpt(name, 60)} of length {excerpt(length, 60)}")
        kind = np.dtype(_ARRAYS[name])
        end = begin + length * kind.itemsize
        if end > len(data):
            raise ValueError(f"the array {name} ends after the body")
        body[name] = np.frombuffer(data, kind, length, begin).tolist()
        begin = end + -end % _ALIGNMENT
    return body


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


def media_from_json(media: Any) -> dict[str, list[Any]]:
    """The inverse of `media_to_json`, with the images decoded.

    Raises:
        ValueError: it is of another form, or an image cannot be decoded.
    """
    from PIL import Image

    if not isinstance(media, Mapping) or not isinstance(media.get("image", []), list):
        raise ValueError('media must be an object such as {"image": ["...", "..."]}, each image in base64.')
    refuse_unknown(media, ("image",), "media")
    images = []
    for place, text in enumerate(media.get("image", [])):
        try:
            image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
            if image.width * image.height > _MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels; {_MOST_PIXELS} are the most taken here")
            image.load()  # now: a broken image must fail here and not in the engine
        except (OSError, ValueError, TypeError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise ValueError(f"media.image[{place}] cannot be read: {error}.") from None
        images.append(image)
    return {"image": images}


def allow_many_connections() -> None:
    """Raise this process's limit of open files to what the system grants: a request under way is a connection."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit, a container may forbid the change
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard))

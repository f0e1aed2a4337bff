"""POST JSON, get JSON: with a limit of requests under way on this machine, retries, and errors with names."""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.utils.exit_codes import ExitCode

RETRIED = frozenset({408, 425, 429, *range(500, 600)})
"""HTTP statuses after which a request is tried again, here and by all other clients of verl."""

FIRST_PAUSE_S = 0.5
"""Before the second try; doubled before each further one."""

LONGEST_PAUSE_S = 30.0


class ServiceError(RuntimeError):
    """A service gave no usable answer: ``reason`` is ``timeout``, ``unreachable``, ``refused`` or ``malformed``."""

    exit_class = ExitCode.DATA

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


def post(
    url: str, body: Mapping[str, Any], timeout_s: float, tries: int = 3, headers: Mapping[str, str] | None = None
) -> Any:
    """Post a body as JSON, and return the JSON that a service answers with.

    A request that times out, cannot be delivered, or is answered with one of ``RETRIED`` is tried again, after a pause
    that doubles, with a random part, or that the answer's ``Retry-After`` names.

    Raises:
        ServiceError: the last try failed, or the answer is no JSON.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    for number in range(1, tries + 1):
        pause = pause_s(number)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        # the order matters: HTTPError is a URLError, and both that and TimeoutError are OSErrors
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            failure = ServiceError("refused", f"{url} answered {error.code} {error.reason}: {text}")
            if error.code not in RETRIED:
                raise failure from None
            pause = pause_s(number, error.headers.get("Retry-After"))
        except TimeoutError:
            failure = ServiceError("timeout", f"{url} did not answer within {timeout_s:g} s")
        except urllib.error.URLError as error:
            is_late = isinstance(error.reason, TimeoutError)
            reason, words = ("timeout", "in time") if is_late else ("unreachable", f"({error.reason})")
            failure = ServiceError(reason, f"{url} cannot be reached {words}")
        except OSError as error:  # the connection broke while the answer was read
            failure = ServiceError("unreachable", f"{url} broke off: {error}")
        except ValueError as error:
            raise ServiceError("malformed", f"{url} answered with no JSON: {error}") from None
        if number < tries:
            time.sleep(pause)
    raise ServiceError(failure.reason, f"{failure} ({tries} tries)")


def pause_s(tries: int, retry_after: str | None = None) -> float:
    """Seconds to wait after so many tries: doubled each time, with a random part, and no less than the server says.

    Args:
        tries: 1 after the first.
        retry_after: the answer's header of that name; a date counts as none.
    """
    # not the same for all: processes that failed together must not come back together
    pause = min(FIRST_PAUSE_S * 2.0 ** (tries - 1), LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
    if retry_after and retry_after.replace(".", "", 1).isdigit():
        pause = max(pause, min(float(retry_after), LONGEST_PAUSE_S))
    return pause


@contextlib.contextmanager
def slot(name: str, count: int) -> Iterator[None]:
    """One of ``count`` places that all processes of this user on this machine share; waits for a free one.

    Held by a file lock, so that the place of a process that was killed is free again.
    """
    while True:
        # in random order: from 0 on, all processes would try the same locks one after the other
        for number in random.sample(range(count), count):
            file = open(_lock_file(f"{name} {number}"), "a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process holds this place
                file.close()
                continue
            with file:
                yield
            return
        time.sleep(random.uniform(0.005, 0.02))


def pace(name: str, per_minute: float) -> None:
    """Wait until it is this caller's turn, turns being given to all processes of this machine at an even pace."""
    # the next free turn stands in a file that all processes lock, so that the pace is that of the machine
    # "a+" and not "w+", which would empty the file before the lock is held
    with open(_lock_file(f"{name} turns"), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        now, text = time.time(), file.read()
        turn = max(now, float(text or 0))
        turn = min(turn, now + 3600)  # a clock that was set back must not stop everything
        file.truncate(0)
        file.write(repr(turn + 60 / per_minute))
    time.sleep(max(0.0, turn - now))


def _lock_file(name: str) -> Path:
    # a folder for each user: lock files of another could not be opened
    folder = Path(tempfile.gettempdir()) / f"verl-slots-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / hashlib.sha256(name.encode()).hexdigest()[:24]

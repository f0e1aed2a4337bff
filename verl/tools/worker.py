"""The process in which functions of ``multi_turn.function_tool_path`` run, one call at a time."""

import faulthandler
import os
import pickle
import socket
import sys
from contextlib import suppress
from typing import Any

from verl.sandbox.messages import LONGEST, encode, framed, receive
from verl.sandbox.supervisor import Limits, enter
from verl.tools.calls import CallFailed, CallOutcome, described, text_of
from verl.tools.function_tool import typed_arguments
from verl.utils.import_utils import load_module_from_file


def main() -> None:
    """Load the file, then answer calls until the channel is closed."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    payload = receive(channel)
    if payload is None:
        return
    setup = pickle.loads(payload)
    limits: Limits = setup["limits"]
    enter(limits)
    faulthandler.enable()
    sys.path[:] = setup["sys_path"]
    try:
        module = load_module_from_file(setup["path"])
    except BaseException as error:
        channel.sendall(framed(encode({"failed": described(error)})))
        return
    channel.sendall(framed(encode({"ready": True})))
    folder = os.getcwd()
    while (payload := receive(channel)) is not None:
        number, attribute, arguments = pickle.loads(payload)
        message = {"number": number, **_answer(getattr(module, attribute), arguments)}
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the function may have closed it
                stream.flush()
        with suppress(OSError):
            os.chdir(folder)
        channel.sendall(framed(encode(message)))


def _answer(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        text = text_of(function(**typed_arguments(function, arguments)))
    except CallFailed as failed:
        return {"outcome": failed.outcome.value, "cause": failed.cause}
    except SystemExit as error:
        return {"outcome": CallOutcome.EXIT.value, "cause": f"it called sys.exit({error.code!r})"[:500]}
    except MemoryError as error:
        return {"outcome": CallOutcome.MEMORY.value, "cause": described(error)}
    except BaseException as error:
        return {"outcome": CallOutcome.ERROR.value, "cause": described(error)}
    if len(text) * 4 > LONGEST:
        cause = f"it returned {len(text)} characters, more than can be handed over"
        return {"outcome": CallOutcome.ERROR.value, "cause": cause}
    return {"outcome": CallOutcome.OK.value, "text": text}

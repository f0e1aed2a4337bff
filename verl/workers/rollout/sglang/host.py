"""The main process of an SGLang engine: ``python -m verl.workers.rollout.sglang.host FD``, started by `EngineProcess`.

Serves the worker's commands over one socket while requests run. Ends, with every process below it, when the worker
has ended, in whatever way.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from verl.workers.rollout.sglang.setup import EngineRequest

# -- Stubs of packages that SGLang imports on every machine and does not use on a CPU ----------------------------------


IF_MISSING = ("triton", "IPython")
ALWAYS = ("vllm", "vllm._custom_ops")
HIDDEN = "megatron"
"""Installed for training; SGLang imports it for a debugging aid, which takes seconds and has no use here."""


def install_stubs() -> None:
    """Make ``import`` work for packages of ``IF_MISSING`` with all below them, and for the modules ``ALWAYS``; and fail
    for ``HIDDEN``."""
    missing = [name for name in IF_MISSING if name not in sys.modules and importlib.util.find_spec(name) is None]
    if "triton" in missing:
        # torch asks for Triton too, and must still find that there is none
        import torch._inductor.runtime.triton_compat  # noqa: F401
        import torch.utils._triton

        torch.utils._triton.has_triton_package()  # remembers its answer
    sys.meta_path.insert(0, _Finder(missing, ALWAYS))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str], modules: Sequence[str]):
        self.packages = frozenset(packages)
        self.modules = frozenset(modules)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname == HIDDEN:
            raise ModuleNotFoundError(f"{fullname} is not for rollout engines", name=fullname)
        if fullname.partition(".")[0] not in self.packages and fullname not in self.modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Module(types.ModuleType):
    """A module of which every name can be imported: names in capitals as classes, others as decorators."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_ipython":
            return lambda: None  # what IPython answers outside a notebook
        return _StubMeta(name, (_Stub,), {}) if name[0].isupper() else _Stub()


class _StubMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubMeta(name, (_Stub,), {})


class _Stub(metaclass=_StubMeta):
    """A class to inherit from, or a decorator that leaves what it decorates as it was; never a kernel."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            raise NotImplementedError("SGLang called a GPU kernel on a CPU: this model needs one. Use rollout.name=hf.")
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda decorated: decorated


_ABORT_AGAIN_S = 0.01
_SETTLE_S = 30.0  # longest wait for a scheduler to notice that it has nothing to do
_MANAGEMENT = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Functions of SGLang's tokenizer manager, and the classes of their requests."""
_CALLS = "verl_call"
"""Name under which `scheduler.SchedulerExtension` answers to SGLang's remote calls."""


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    _, parent, arguments, given = pickle.loads(connection.recv_bytes())
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        engine = start_engine(arguments, given)
    except Exception as error:
        traceback.print_exc()
        unname_shared_memory()
        known = isinstance(error, ValueError) and str(error).startswith("actor_rollout_ref")
        _send(connection, "answer", None, False, error if known else RuntimeError(f"SGLang did not start: {error}"))
        os._exit(1)
    Host(engine, connection).serve()


def _end_with(parent: int) -> None:
    """Wait for the worker's process to end, and end all of this tree. A lost socket is no sign: forks share it."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        watched = None
    if watched is not None and os.getppid() == parent:
        select.select([watched], [], [])
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def start_engine(arguments: dict[str, Any], given: Sequence[str]) -> Any:
    """SGLang's engine whose schedulers have `scheduler.SchedulerExtension`.

    Raises:
        ValueError: the installed SGLang lacks an argument.
    """
    if arguments["device"] == "cpu":
        install_stubs()
    import sglang
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    for name in arguments:
        if name not in known:
            key = "actor_rollout_ref.rollout.engine_kwargs.sglang"
            key = f"{key}.{name}" if name in given else f"actor_rollout_ref.rollout.name=sglang's argument {name}"
            raise ValueError(
                f"{key}={arguments[name]!r}: the installed SGLang {sglang.__version__} has no such argument. "
                "Leave it out, or install a version that has it (docs/rollout.md names those tested)."
            )
    from verl.workers.rollout.sglang.scheduler import HostedEngine

    return HostedEngine(**arguments)


def _send(connection: Connection, *message: Any) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


class Host:
    """Answers the worker from SGLang's event loop."""

    def __init__(self, engine: Any, connection: Connection):
        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.connection = connection
        self.replies = Path(tempfile.mkdtemp())
        self.tasks: set[asyncio.Task] = set()
        self.generating: dict[int, tuple[list[int], list[float]]] = {}
        """Request id -> tokens and log-probs of the phases that ended."""
        self.aborted: set[int] = set()
        self.turn = asyncio.Lock()
        self.outgoing = ThreadPoolExecutor(1)  # a worker that is busy training reads nothing

    def serve(self) -> None:
        import sglang
        from sglang.srt.sampling.sampling_params import SamplingParams

        unname_shared_memory()
        self.engine.loop.run_until_complete(self.call_schedulers("ping", {}))
        fields = list(inspect.signature(SamplingParams).parameters)
        info = {"version": sglang.__version__, "pids": process_tree(), "sampling": fields}
        _send(self.connection, "answer", None, True, info)
        threading.Thread(target=self._read, daemon=True).start()
        self.engine.loop.run_forever()

    def _read(self) -> None:
        """Pass messages on to the event loop; on a thread, since the loop would make the socket non-blocking."""
        try:
            while True:
                message = pickle.loads(self.connection.recv_bytes())
                self.engine.loop.call_soon_threadsafe(self._take, *message)
        except (EOFError, OSError):
            pass  # the worker has closed this engine, and ends it

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "submit":
            for request_id, request in rest[0]:
                self.generating[request_id] = [], []
                self._start(self._generate(request_id, request))
        elif kind == "abort":
            for request_id in self.generating.keys() & rest[0]:
                self._start(self._abort(request_id))
        else:
            self._start(self._answer(*rest))

    def _start(self, work: Any) -> None:
        task = self.engine.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _generate(self, request_id: int, request: EngineRequest) -> None:
        """Generate a response in phases; each continues where the one before reached its length."""
        tokens, log_probs = self.generating[request_id]
        reason, prompt = "length", None
        try:
            for params in request.phases:
                if request_id in self.aborted:
                    reason = "abort"
                if reason != "length":
                    break
                output = await self.engine.async_generate(
                    input_ids=request.ids + tokens,
                    image_data=request.image_data,
                    sampling_params=params,
                    return_logprob=True,
                    rid=_name(request_id),
                    **self._of_prompt(request, prompt),
                )
                info = output["meta_info"]
                if request.prompt_log_probs is not None and prompt is None:
                    prompt = info["input_token_logprobs"], info.get("input_top_logprobs") or []
                tokens += output["output_ids"]
                log_probs += [log_prob for log_prob, *_ in info["output_token_logprobs"]]
                reason = info["finish_reason"]["type"]
                if reason == "abort" and info["finish_reason"].get("status_code"):
                    reason = f"{info['finish_reason'].get('message')}"
        except Exception as error:  # delivered with the request
            reason = f"{type(error).__name__}: {error}"
        del self.generating[request_id]
        self.aborted.discard(request_id)
        self.outgoing.submit(_send, self.connection, "ended", [(request_id, (tokens, log_probs, reason, prompt))])

    @staticmethod
    def _of_prompt(request: EngineRequest, known: Any) -> dict[str, int]:
        """Arguments that ask for the prompt's log-probs, once."""
        if request.prompt_log_probs is None or known is not None:
            return {}
        return {"logprob_start_len": 0, "top_logprobs_num": request.prompt_log_probs}

    async def _abort(self, request_id: int) -> None:
        """Abort a request until it has ended: SGLang ignores an abort of a request it has not received yet."""
        self.aborted.add(request_id)
        while request_id in self.generating:
            self.manager.abort_request(rid=_name(request_id))
            await asyncio.sleep(_ABORT_AGAIN_S)
        self.aborted.discard(request_id)

    # -- commands ------------------------------------------------------------------------------------------------------

    async def _answer(self, number: int, name: str, args: tuple) -> None:
        try:
            async with self.turn:
                answer = (True, await getattr(self, name)(*args))
        except Exception as error:
            answer = (False, RuntimeError(f"SGLang's {name} failed: {type(error).__name__}: {error}"))
        self.outgoing.submit(_send, self.connection, "answer", number, *answer)

    async def call_schedulers(self, function: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call a method of `scheduler.SchedulerExtension`, or ``module:function``, in every scheduler."""
        reply = self.replies / "reply"
        parameters = {"function": function, "arguments": json.dumps(arguments), "reply": str(reply)}
        call = self.engine.collective_rpc
        await self.engine.loop.run_in_executor(None, lambda: call(_CALLS, **parameters))
        found = []
        for path in sorted(self.replies.iterdir()):
            found.append(pickle.loads(path.read_bytes()))
            path.unlink()
        for good, value in found:
            if not good:
                raise RuntimeError(value)
        return [value for _, value in found]

    async def partial_output(self, request_id: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a running request so far; the rest of one that just ended is being sent."""
        tokens, log_probs = self.generating.get(request_id, ([], []))
        known = len(tokens)
        now = (await self.call_schedulers("partial_output", {"name": _name(request_id)}))[0]
        if len(tokens) > known:  # a phase ended meanwhile, and is there in full
            now = [], []
        return tokens + now[0], log_probs + now[1]

    async def manage(self, name: str, tags: list[str] | None = None) -> None:
        """Call one of SGLang's management functions, those of ``_MANAGEMENT``.

        Without a session (``begin_weight_update``) SGLang takes no weights, and reports so in a return value only.
        """
        from sglang.srt.managers import io_struct

        if not hasattr(self.manager, name):
            return  # a version without sessions takes weights at any time
        request_class = getattr(io_struct, _MANAGEMENT[name])
        request = request_class() if tags is None else request_class(tags=tags)
        answer = await getattr(self.manager, name)(request, None)
        if answer is None:
            return
        success, message = answer if isinstance(answer, tuple) else (answer.success, getattr(answer, "message", ""))
        if not success:
            raise RuntimeError(f"SGLang refused: {message or answer}")

    async def flush_cache(self) -> None:
        """Forget cached prefixes; an error while requests run.

        SGLang hands a response out before it has put the batch away, and refuses until then.
        """
        deadline = time.monotonic() + _SETTLE_S
        while not (answer := await self.manager.flush_cache()).success:
            if self.generating or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang keeps its cache: {len(self.generating)} requests run. {answer}")
            await asyncio.sleep(0.005)

    async def classify(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """The outputs of a classifier for texts."""
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        request = EmbeddingReqInput(input_ids=[list(row) for row in rows])
        answers = await anext(aiter(self.manager.generate_request(request, None)))
        return [answer["embedding"] for answer in answers]

    async def sampling_problem(self, params: Mapping[str, Any]) -> str | None:
        """Why SGLang refuses ``sampling_params``; None: it takes them."""
        try:
            sampling = self.manager.sampling_params_class(**params)
            sampling.normalize(self.manager.tokenizer)
            sampling.verify(self.manager.model_config.vocab_size)
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    async def arguments(self) -> dict[str, Any]:
        """SGLang's resolved arguments, as far as they are plain values."""
        record = self.manager.server_args
        resolved = record.resolved_dict() if hasattr(record, "resolved_dict") else vars(record)
        return {name: value for name, value in resolved.items() if isinstance(value, int | float | str | None)}


def process_tree() -> list[int]:
    """This process and all below it."""
    import psutil

    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


def unname_shared_memory() -> None:
    """Unlink the shared memory that this tree has mapped: after a kill nothing else would remove it."""
    for pid in process_tree():
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line and "(deleted)" not in line:
                    Path(line[line.index("/dev/shm/") :]).unlink(missing_ok=True)


def _name(request_id: int) -> str:
    """A request's name in SGLang, which ends every request whose name begins with an aborted one's."""
    return f"{request_id:020d}"


if __name__ == "__main__":
    main(int(sys.argv[1]))

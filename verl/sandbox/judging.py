"""Assertions about a generated program, run in another process than the program.

The test and its expected values are in the judge's process alone. A name that the test takes from the program stands
for an object over there (:class:`Remote`): calling it sends the arguments and brings back data, which is compared here.
Objects of the program are not asked whether they equal the expected value.
"""

import ast
import builtins
import itertools
import json
import os
import socket
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.sandbox.program import decode, encode, names_of, receive, send
from verl.utils.exit_codes import ExitCode

_MODULES = {"np": "numpy", "numpy": "numpy"}
"""Modules beyond the standard library that a test may use without an import of its own."""

_LONGEST_ITERATOR = 1_000_000


class ProgramEnded(BaseException):
    """The program ended, or wrote what is no message. Not an Exception: a test's ``except`` must not hide it."""


class Unjudgeable(ValueError):
    """A test that cannot be judged from another process than the program's; no failure of the program."""

    exit_class = ExitCode.DATA


@dataclass(frozen=True)
class Check:
    """Assertions about a program, which must not raise."""

    source: str
    entry: str | None = None
    """The only function taken from the program; None: every name that neither Python nor the test defines."""
    given: str = ""
    """Source of the task, run before the assertions: imports and helpers that are not the program's."""


def judge_program(check: Check, code: str, channel: socket.socket) -> dict[str, str]:
    """Run assertions about a program that waits at the other end of a channel.

    Returns:
        ``outcome``: ``done`` if they hold, ``wrong`` if one does not, ``crash`` if the program or the test raised,
        ``ended`` if the program ended before its test did; and ``detail``.

    Raises:
        Unjudgeable: the test hands over objects that are not data.
    """
    link = _Link(channel)
    try:
        link.tell({"code": code})
        link.hear()
        _run(check, link)
    except ProgramEnded as error:
        return {"outcome": "ended", "detail": str(error)}
    except AssertionError as error:
        return {"outcome": "crash" if link.raised is error else "wrong", "detail": f"AssertionError: {error}"[:2000]}
    except Unjudgeable:
        raise
    except (Exception, SystemExit) as error:
        return {"outcome": "crash", "detail": f"{type(error).__name__}: {error}"[:2000]}
    return {"outcome": "done", "detail": ""}


def _run(check: Check, link: "_Link") -> None:
    tree = ast.parse(check.source, "test.py")
    space: dict[str, Any] = {"__name__": "test"}
    if check.given:
        exec(compile(check.given, "task.py", "exec"), space)
        space.pop(check.entry or "", None)
    bases = {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for name in sorted(bases - _bound(tree) - set(space)):
        # the module itself, whatever the program calls by its name
        if name in _MODULES or name in sys.stdlib_module_names:
            space[name] = __import__(_MODULES.get(name, name))
    # an expression that is a call with a name among its arguments: its effect on that argument is what is tested
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    link.wants_effects = any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", None) not in own
        and any(isinstance(one, ast.Name) for one in node.value.args)
        for node in ast.walk(tree)
    )
    space.update(link.names(sorted(_taken(check, tree, set(space)))))
    exec(compile(tree, "test.py", "exec"), space)


def _taken(check: Check, tree: ast.AST, known: set[str]) -> set[str]:
    """Return the names that a test takes from the program."""
    if check.entry is not None and check.given:
        return {check.entry}
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = loaded - _bound(tree) - known
    taken = {name for name in free if not hasattr(builtins, name)} | ({check.entry} if check.entry else set())
    if taken:
        return taken
    # tasks whose function is called `sum`; not more than one, or `set` in `set(sum(x)) == ...` could be the program's
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return called if len(called) == 1 else set()


def _bound(tree: ast.AST) -> set[str]:
    """Return the names that a source defines anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


class _Link:
    """Requests to the program, one at a time."""

    def __init__(self, channel: socket.socket):
        self.reader, self.writer = channel.makefile("rb"), channel.makefile("wb")
        self.raised: BaseException | None = None
        self.functions: list[Callable[..., Any]] = []
        self.wants_effects = False

    def tell(self, message: dict[str, Any]) -> None:
        try:
            send(self.writer, message)
        except OSError:
            raise ProgramEnded("the program ended before its test did") from None

    def hear(self) -> dict[str, Any]:
        """Return the program's reply; calls of functions that the test handed over are made before."""
        while "callback" in (reply := self._receive()):
            self.tell(self._called(reply))
        return reply

    def _called(self, message: dict[str, Any]) -> dict[str, Any]:
        number, arguments = message["callback"], message.get("arguments")
        if not isinstance(number, int) or not 0 <= number < len(self.functions) or not isinstance(arguments, list):
            raise ProgramEnded("the program called what is no function of the test")
        try:
            return {"value": encode(self.functions[number](*map(self._read, arguments)), self._hand_over)}
        except Unjudgeable:
            raise
        except Exception as error:
            return {"raised": next(iter(names_of(error)), "RuntimeError"), "text": str(error)[:1000]}

    def _receive(self) -> dict[str, Any]:
        try:
            reply = receive(self.reader)
        except (OSError, ValueError, RecursionError) as error:
            raise ProgramEnded(f"the program wrote what is no message: {type(error).__name__}") from None
        if reply is None:
            raise ProgramEnded("the program ended before its test did")
        if not isinstance(reply, dict) or not {"value", "raised", "callback"} & reply.keys():
            raise ProgramEnded("the program wrote what is no message")
        return reply

    def names(self, names: list[str]) -> dict[str, Any]:
        """Return the program's objects of these names, without those that it lacks."""
        self.tell({"do": "names", "names": names})
        found = self.hear().get("value")
        if not isinstance(found, dict):
            raise ProgramEnded("the program wrote what is no message")
        return {name: self._read(found[name]) for name in names if name in found}

    def ask(self, do: str, on: "Remote", *arguments: Any, **keywords: Any) -> Any:
        request = {
            "do": do,
            "on": on._handle,
            "arguments": [encode(one, self._hand_over) for one in arguments],
            "keywords": {name: encode(one, self._hand_over) for name, one in keywords.items()},
            "after": self.wants_effects and do == "call",
        }
        self.tell(request)
        reply = self.hear()
        if "raised" in reply:
            raise self._error(reply)
        for one, after in zip(arguments, reply.get("after") or (), strict=False):
            self._put_back(one, after)
        return self._read(reply["value"])

    def _hand_over(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"handle": [value._handle]}
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            self.functions.append(value)
            return {"function": len(self.functions) - 1}
        if isinstance(value, Iterator):
            return {"iterator": [encode(item, self._hand_over) for item in itertools.islice(value, _LONGEST_ITERATOR)]}
        raise Unjudgeable(
            f"A test hands the program an object of type {type(value).__name__!r}. The program runs in another process "
            "than its test and takes numbers, text, lists, tuples, sets, dicts, functions and objects of its own. "
            "Build this one with a function of the program, or write the test as inputs and outputs."
        )

    def _error(self, reply: dict[str, Any]) -> BaseException:
        known = [getattr(builtins, str(name), None) for name in reply["raised"]]
        kinds = (one for one in known if isinstance(one, type) and issubclass(one, Exception))
        kind = next(kinds, RuntimeError)
        try:
            self.raised = kind(str(reply.get("text")))
        except TypeError:  # UnicodeDecodeError and its like take more than a text
            self.raised = RuntimeError(str(reply.get("text")))
        return self.raised

    def _put_back(self, mine: Any, after: Any) -> None:
        """Give a list, set or dict that was handed over the content that it has there now."""
        if after is None or type(mine) not in (list, dict, set, bytearray):
            return
        content = self._read(after)
        if type(content) is not type(mine):
            return
        mine.clear()
        mine.extend(content) if isinstance(mine, (list, bytearray)) else mine.update(content)

    def _read(self, value: Any) -> Any:
        """Return the value that the program sent, of types of Python's own, with a `Remote` for each handle."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        try:
            [(kind, content)] = value.items()
            if kind == "handle":
                number, is_callable, name = content
                return (RemoteFunction if is_callable else Remote)(self, int(number), str(name))
            return decode(kind, content, self._read)
        except (ProgramEnded, MemoryError):
            raise
        except Exception as error:
            raise ProgramEnded(f"the program wrote what is no value: {type(error).__name__}") from None


class Remote:
    """An object of the program, in the judge's process.

    Equal to another object of the program if the program says so; never to data, about which it is not asked.
    """

    def __init__(self, link: _Link, handle: int, kind: str):
        vars(self).update(_link=link, _handle=handle, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self._kind!r} object has no attribute {name!r} here")
        return self._link.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.ask("put", self, key, value)

    def __len__(self) -> int:
        return self._link.ask("length", self)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._link.ask("iterate", self)
        if not isinstance(iterator, Remote):
            raise TypeError(f"{self._kind!r} object gave no iterator")
        while True:
            try:
                item = iterator._link.ask("next", iterator)
            except StopIteration:
                return
            yield item

    def __next__(self) -> Any:
        return self._link.ask("next", self)

    def __str__(self) -> str:
        return str(self._link.ask("text", self))

    def __repr__(self) -> str:
        return f"<{self._kind} object of the program>"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Remote) and self._link.ask("equal", self, other) is True

    def __hash__(self) -> int:
        return hash((Remote, self._handle))


class RemoteFunction(Remote):
    """A function, class or other callable of the program."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._link.ask("call", self, *arguments, **keywords)


def report(check: Check, code: str, channel: socket.socket, verdict: int) -> None:
    """Judge a program, and write what `judge_program` returns into ``verdict``, a file number, as JSON."""
    try:
        found = judge_program(check, code, channel)
    except Unjudgeable as error:
        found = {"outcome": "unjudgeable", "detail": str(error)}
    except (MemoryError, RecursionError) as error:
        found = {"outcome": "memory", "detail": type(error).__name__}
    with os.fdopen(verdict, "w") as file:
        json.dump(found, file)

"""A generated program in a process of its own, which answers the requests of its judge with data.

Run as a file by a fresh interpreter (``python -I -S program.py FD PATHS``), so that nothing of the process that started
it is in its memory: no test, no expected value, no open file. Standard library alone, nothing of verl.

    judge  ->  {"do": "call", "on": 3, "arguments": [...], "keywords": {...}}
    here   ->  {"value": ...}  or  {"raised": ["ValueError", ...], "text": ...}

A message is a length of four bytes, then JSON. Values of Python's own types travel by `encode`; any other object stays
here, and travels as a number, its handle. The other side is ``judging.py``.
"""

import json
import struct
import sys
import traceback

LONGEST = 64 * 1024 * 1024
"""Bytes of one message."""

DEPTH = 200
"""Levels of lists in lists that travel."""

OUT_OF_MEMORY = 99
"""Exit status of a program that raised MemoryError."""

_HEAD = struct.Struct("=I")


class NotData(TypeError):
    """An object of a type that does not travel."""


def encode(value, stay, depth=0):
    """Return a value as JSON has it: numbers, text and None as they are, others as ``{type: content}``.

    Args:
        stay: called with an object of any other type; returns what travels in its place, or raises `NotData`.
    """
    if depth > DEPTH:
        raise NotData(f"a value of more than {DEPTH} levels")
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is int:
        # JSON's digits are read in a time that grows with their square, and no more than 4300 of them
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    # a subclass travels as the type below it: what arrives has no methods of the program's
    for name, cls in _SEQUENCES.items():
        if isinstance(value, cls):
            return {name: [encode(item, stay, depth + 1) for item in cls.__iter__(value)]}
    if isinstance(value, dict):
        pairs = list(dict.items(value))
        return {"dict": [[encode(key, stay, depth + 1), encode(item, stay, depth + 1)] for key, item in pairs]}
    # without methods of the subclass, which could return another of its kind
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, int):
        return encode(int.__pos__(value), stay, depth)
    if isinstance(value, (bytes, bytearray)):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": bytes(value).hex()}
    if isinstance(value, type) and getattr(_BUILTINS, value.__name__, None) is value:
        return {"type": value.__name__}
    return _of_library(value, stay, depth) or stay(value)


def _of_library(value, stay, depth):
    """Return the JSON of a value of a type of the standard library or numpy that travels; None for others."""
    module, name = type(value).__module__, type(value).__name__
    if name == "complex":
        return {"complex": [value.real, value.imag]}
    if name == "range":
        return {"range": [{"int": hex(part)} for part in (value.start, value.stop, value.step)]}
    if module == "collections" and name == "deque":
        return {"deque": [encode(item, stay, depth + 1) for item in value]}
    if module == "fractions" and name == "Fraction":
        return {"Fraction": [hex(value.numerator), hex(value.denominator)]}
    if module == "decimal" and name == "Decimal":
        return {"Decimal": str(value)}
    if module == "datetime" and name in ("date", "datetime", "time"):
        return {name: value.isoformat()}
    if module == "datetime" and name == "timedelta":
        return {name: [value.days, value.seconds, value.microseconds]}
    if module == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufcSU":
        if value.shape == ():
            return {"scalar": encode(value.item(), stay, depth + 1)}
        return {"array": [value.dtype.str, encode(value.tolist(), stay, depth + 1)]}
    return None


_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_BUILTINS = sys.modules["builtins"]


def send(channel, message):
    payload = json.dumps(message).encode()
    if len(payload) > LONGEST:
        raise NotData(f"a value of {len(payload) >> 20} MiB; {LONGEST >> 20} are the most")
    channel.write(_HEAD.pack(len(payload)) + payload)
    channel.flush()


def receive(channel):
    """Return the next message; None: the other side has closed.

    Raises:
        ValueError: it is no message.
    """
    head = channel.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size = _HEAD.unpack(head)[0]
    if size > LONGEST:
        raise ValueError(f"a message of {size} bytes")
    payload = channel.read(size)
    return json.loads(payload) if len(payload) == size else None


class Answers:
    """Answers requests about the objects of a program.

    Args:
        space: the program's module.
        reader, writer: of the channel to the judge.
    """

    def __init__(self, space, reader, writer):
        self.space, self.objects, self.numbers = space, [], {}
        self.reader, self.writer = reader, writer

    def serve(self):
        """Answer requests until a message that is none; returns that, None at the end of the channel."""
        while (request := receive(self.reader)) is not None and "do" in request:
            try:
                reply = self.answer(request)
            except Exception as error:
                if isinstance(error, MemoryError):
                    raise
                traceback.print_exc()
                reply = {"raised": names_of(error), "text": str(error)[:1000]}
            send(self.writer, reply)
        return request

    def call_back(self, number, arguments):
        """Call a function that the test handed over."""
        send(self.writer, {"callback": number, "arguments": [encode(one, self.stay) for one in arguments]})
        reply = self.serve()
        if reply is None:
            raise SystemExit(1)
        if "raised" in reply:
            raise getattr(_BUILTINS, reply["raised"])(reply["text"])
        return self.read(reply["value"])

    def stay(self, value):
        """Keep an object here; returns its handle."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)  # kept, so that no other object can have its id
        return {"handle": [number, callable(value), type(value).__name__]}

    def read(self, value):
        """Return the object that the judge means."""
        if isinstance(value, list):
            return [self.read(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(kind, content)] = value.items()
        if kind == "handle":
            return self.objects[content[0]]
        if kind == "function":
            return lambda *arguments: self.call_back(content, arguments)
        if kind == "iterator":
            return iter([self.read(item) for item in content])
        return decode(kind, content, self.read)

    def answer(self, request):
        do = request["do"]
        if do == "names":
            names = [name for name in request["names"] if name in self.space]
            return {"value": {name: encode(self.space[name], self.stay) for name in names}}
        given = [self.read(value) for value in request["arguments"]]
        on = self.objects[request["on"]]
        if do == "call":
            keywords = {name: self.read(value) for name, value in request["keywords"].items()}
            value = on(*given, **keywords)
        else:
            value = _DEEDS[do](on, *given)
        # what a function did to the lists it was given, for tests that look at them afterwards
        after = [encode(one, self.stay) if request.get("after") else None for one in given]
        return {"value": encode(value, self.stay), "after": after}


_DEEDS: dict = {
    "get": getattr,
    "set": setattr,
    "item": lambda on, key: on[key],
    "put": lambda on, key, value: on.__setitem__(key, value),
    "length": len,
    "iterate": iter,
    "next": next,
    "text": str,
    "equal": lambda on, other: bool(on == other),
}


def decode(kind, content, read):
    """Return the value of a type of Python's own that `encode` wrote as ``{kind: content}``.

    Args:
        read: called with each part.
    """
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([read(item) for item in content])
    if kind == "dict":
        return {read(key): read(item) for key, item in content}
    if kind in ("bytes", "bytearray"):
        return getattr(_BUILTINS, kind).fromhex(content)
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "type":
        found = getattr(_BUILTINS, content)
        if not isinstance(found, type):
            raise ValueError(f"{content} is no type")
        return found
    if kind == "range":
        return range(*[read(part) for part in content])
    if kind == "scalar":
        return read(content)
    if kind == "array":
        import numpy

        return numpy.array(read(content[1]), dtype=content[0])
    if kind == "Fraction":
        import fractions

        return fractions.Fraction(*[int(part, 16) for part in content])
    if kind == "Decimal":
        import decimal

        return decimal.Decimal(content)
    if kind == "deque":
        import collections

        return collections.deque(read(item) for item in content)
    import datetime

    cls = {name: getattr(datetime, name) for name in ("date", "datetime", "time", "timedelta")}[kind]
    return cls(*content) if kind == "timedelta" else cls.fromisoformat(content)


def names_of(error):
    """Return the names of the exception's built-in classes, the most particular first."""
    return [cls.__name__ for cls in type(error).__mro__ if getattr(_BUILTINS, cls.__name__, None) is cls]


def main():
    """Read the program from the channel, run it, and answer requests until the channel closes."""
    reader = open(int(sys.argv[1]), "rb", closefd=False)
    channel = open(int(sys.argv[1]), "wb", closefd=False)
    sys.path[:] = sys.argv[2].split(":")
    sys.argv = ["solution.py"]
    vars(_BUILTINS).update(exit=sys.exit, quit=sys.exit)  # which `site` would bring
    source = receive(reader)["code"]
    module = type(sys)("solution")
    sys.modules["solution"] = module
    answers = Answers(vars(module), reader, channel)
    try:
        exec(compile(source, "solution.py", "exec"), answers.space)
        send(channel, {"value": "ready"})
        answers.serve()
    except MemoryError:
        return OUT_OF_MEMORY
    except SystemExit:
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    import os

    _status = main()
    for _stream in (sys.stdout, sys.stderr):
        try:
            _stream.flush()
        except (ValueError, OSError):  # closed by the program
            pass
    os._exit(_status)

"""Environments that do what the action says. Imported by the processes under test."""

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import signal
import time


class Hostile:
    def __init__(self, slow_s=0.0, folder="", meeting=0):
        self.slow_s, self.folder, self.meeting, self.count = slow_s, folder, meeting, 0

    def reset(self, *, seed, how="", **task):
        self.seed = self.state_id = seed
        if how == "hang":
            time.sleep(1000)
        if how == "raise":
            raise ValueError(f"no such task {sorted(task)}")
        return f"seed {seed}", {"task": len(task)}

    def step(self, action):
        self.count += 1
        time.sleep(self.slow_s)
        result = getattr(self, action, lambda: None)()
        return result or (f"{action} {self.count}", 1.0, False, False, {"success": True, "count": self.count})

    def frame(self):
        return f"frame {self.count}"

    def sleep(self):
        time.sleep(1000)

    def spin(self):
        while True:
            pass

    def spin_in_c(self):
        re.match(r"(a+)+$", "a" * 60 + "b")

    def block_all_signals(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(1000)

    def meet(self):
        """Wait until ``meeting`` steps have begun in the folder; the text is how many ran when this one began."""
        with self.alone():
            open(os.path.join(self.folder, f"come-{self.seed}"), "w").close()
            there = self.number("come") - self.number("left")
        while self.number("come") < self.meeting:
            time.sleep(0.01)
        with self.alone():
            open(os.path.join(self.folder, f"left-{self.seed}"), "w").close()
        return str(there), 0.0, False, False, {}

    def number(self, word):
        return sum(name.startswith(word) for name in os.listdir(self.folder))

    @contextlib.contextmanager
    def alone(self):
        """No other step of the folder comes, is counted or leaves meanwhile."""
        with open(os.path.join(self.folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def raises(self):
        raise KeyError("no such cell")

    def leave(self):
        raise SystemExit(2)

    def exit(self):
        os._exit(3)

    def exit_in_c(self):
        ctypes.CDLL(None)._exit(3)

    def crash(self):
        ctypes.string_at(0)

    def kill_group(self):
        # of a process namespace of its own, or the tests themselves would end
        assert os.getpid() < 10, "not in a namespace of its own"
        os.killpg(0, signal.SIGKILL)

    def allocate(self):
        self.kept = bytearray(1 << 31)

    def map_memory(self):
        self.kept = mmap.mmap(-1, 1 << 30)
        for place in range(0, 1 << 30, 1 << 16):
            self.kept[place : place + (1 << 16)] = b"x" * (1 << 16)
        time.sleep(1000)

    def fork(self):
        if not os.fork():
            time.sleep(1000)

    def fork_and_return(self):
        os.fork()

    def shout(self):
        print("x" * (1 << 20))

    def megabyte(self):
        return "x" * 10**6, 0.0, False, False, {}

    def as_bytes(self):
        return b"x", 0.0, False, False, {}

    def wrong_messages(self):
        return [{"role": "user", "content": ["a"]}], 0.0, False, False, {}

    def not_a_number(self):
        return "x", float("nan"), False, False, {}

    def text_reward(self):
        return "x", "1", False, False, {}

    def no_flag(self):
        return "x", 1.0, "no", False, {}

    def four(self):
        return "x", 1.0, False, {}

    def messages_in_info(self):
        return "x", 1.0, False, False, {"messages": []}

    def odd_info(self):
        return "x", 1, True, False, {"ok": 1, "list": [1], "nan": float("nan"), 3: 4, "none": None, "name": "a"}

    def odd_state(self):
        self.state_id = object()


class Awaited:
    async def reset(self, *, seed, **task):
        await asyncio.sleep(0)
        return [{"role": "system", "content": "s"}, {"role": "user", "content": str(seed)}], {}

    async def step(self, action):
        if action == "sleep":
            await asyncio.sleep(1000)
        if action == "block":
            time.sleep(1000)
        if action == "raises":
            raise KeyError("no such cell")
        return "a", 0, True, False, {}

"""Hostile reward functions, one a case; the response names the case. The right thing to do is to return 1."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

BEFORE = os.getcwd()
seen = []


class Odd:
    def __repr__(self):
        return "an odd thing"


def recurse():
    return recurse()


def nest(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def leave_thread():
    threading.Thread(target=time.sleep, args=(60,)).start()
    return 1.0


def leave_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "verl-left-behind"], start_new_session=True)
    return 1.0


def die_later():
    threading.Thread(target=lambda: (time.sleep(0.2), os._exit(7)), daemon=True).start()
    return 1.0


def bomb():
    while True:
        os.fork()


def hog():
    blocks = []
    while True:
        blocks.append(bytearray(64 * 2**20))


def hog_shared():
    import mmap

    shared = mmap.mmap(-1, 2**29)
    shared.write(b"x" * 2**20 * 128)
    for _ in range(3):
        shared.write(shared[: 2**27])
    time.sleep(60)


def hang_deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def print_protocol():
    os.write(1, b"\x05\x00\x00\x00hello")
    print({"number": 0, "outcomes": [[99.0, None]]})
    return 1.0


def write_channel():
    for fd in range(3, 4096):
        try:
            os.write(fd, b"\xff\xff\xff\xff not a frame")
        except OSError:
            continue
    return 1.0


def forge_answer():
    import msgpack

    answer = msgpack.packb({"number": 987654, "outcomes": [[99.0, None]]})
    for fd in range(3, 4096):
        try:
            os.write(fd, len(answer).to_bytes(4, "little") + answer)
        except OSError:
            continue
    return 1.0


def move_away():
    os.chdir("/")
    return 1.0


def where_am_i():
    return {"score": 1.0, "moved": os.getcwd() != BEFORE}


def shut_everything():
    os.closerange(0, 4096)
    return 1.0


def assert_own_pid_namespace():
    """Signals to groups and parents are sent from inside a sandbox only."""
    assert os.readlink("/proc/self/ns/pid") != os.environ["VERL_TEST_PID_NAMESPACE"], "no pid namespace of its own"


def kill_the_group():
    assert_own_pid_namespace()
    os.killpg(0, signal.SIGKILL)
    return 1.0


def kill_the_parent():
    assert_own_pid_namespace()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.05)
    return 1.0


def take_stdout():
    sys.stdout = sys.stderr = None
    return 1.0


CASES = {
    "right": lambda: 1.0,
    "raise": lambda: 1 / 0,
    "raise_base": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "raise_group": lambda: (_ for _ in ()).throw(asyncio.CancelledError),
    "sleep": lambda: time.sleep(60),
    "hang_deaf": hang_deaf,
    "sys_exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(3),
    "os_exit_0": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill_self": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_group": kill_the_group,
    "kill_parent": kill_the_parent,
    "recurse": recurse,
    "print_much": lambda: print("x" * (8 << 20)),
    "print_protocol": print_protocol,
    "write_channel": write_channel,
    "forge_answer": forge_answer,
    "none": lambda: None,
    "text": lambda: "1.0",
    "list": lambda: [1.0],
    "complex": lambda: 1j,
    "odd": Odd,
    "nested": lambda: nest(100_000),
    "no_score": lambda: {"reward": 1.0},
    "score_none": lambda: {"score": None},
    "odd_column": lambda: {"score": 1.0, "odd": Odd()},
    "huge_dict": lambda: {"score": 1.0, "blob": "x" * (40 << 20)},
    "huge_int": lambda: 10**400,
    "nan": lambda: float("nan"),
    "inf": lambda: {"score": float("inf")},
    "allocate": lambda: bytearray(10 * 2**30),
    "hog": hog,
    "hog_shared": hog_shared,
    "bomb": bomb,
    "leave_thread": leave_thread,
    "leave_child": leave_child,
    "die_later": die_later,
    "move_away": move_away,
    "where_am_i": where_am_i,
    "shut_everything": shut_everything,
    "take_stdout": take_stdout,
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return CASES[solution_str]()


async def compute_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(60 if solution_str == "sleep" else 0.01)
    return 1.0 if solution_str == "sleep" else CASES[solution_str]()


def in_batch(data_sources, solution_strs, ground_truths, extra_infos):
    case = solution_strs[0]
    if case == "too_few":
        return [1.0] * (len(solution_strs) - 1)
    if case == "too_many":
        return [1.0] * (len(solution_strs) + 1)
    if case == "one_bad":
        return [float("nan"), *[1.0] * (len(solution_strs) - 1)]
    if case == "dict":
        return {"score": [1.0] * len(solution_strs)}
    if case == "generator":
        return (1.0 for _ in solution_strs)
    return CASES[case]()

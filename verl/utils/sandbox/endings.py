"""How programs under limits come to their ends."""

import enum
import signal


class Ending(str, enum.Enum):
    """How a program under limits came to its end."""

    DONE = "done"
    EXIT = "exit"
    CRASH = "crash"
    WALL = "wall"
    CPU = "cpu"
    MEMORY = "memory"
    PROCESSES = "processes"


CODES = {Ending.WALL: 121, Ending.MEMORY: 122, Ending.PROCESSES: 123}


def how_ended(returncode: int) -> Ending:
    """The ending that a return code as of ``subprocess`` tells, of a process that called :func:`enter`."""
    for ending, code in CODES.items():
        if returncode == code:
            return ending
    if returncode >= 0:
        return Ending.EXIT if returncode else Ending.DONE
    return Ending.CPU if -returncode == signal.SIGXCPU else Ending.CRASH

"""Keeping Python's garbage collector away from what is made once and stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage in this block, and never look again at what is alive at its end.

    For imports and loading: a process that starts up makes millions of objects that all stay, and searching them for
    garbage takes a quarter of its CPU time. Later collections, and the end of the process, are quicker too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()

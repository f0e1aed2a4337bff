"""Numbers of the kernel, as it gives them."""

import os

import psutil

from verl.telemetry.memory import host_memory, oom_kills, process_state, rss_bytes, shown_GiB


def test_resident_memory_is_what_psutil_says():
    assert abs(rss_bytes() - psutil.Process().memory_info().rss) < 8 << 20
    assert rss_bytes(os.getpid()) > 0 and rss_bytes(2**30) == 0


def test_a_machine_has_memory_and_a_count_of_kills():
    assert 1 << 28 < host_memory() <= psutil.virtual_memory().total
    assert oom_kills() >= 0 and shown_GiB(3 * 2**29) == "1.5 GiB"


def test_a_process_has_a_state_while_it_is_there():
    assert process_state(os.getpid()) == "R" and process_state(2**30) is None

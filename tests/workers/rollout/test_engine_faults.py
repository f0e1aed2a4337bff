"""An engine that dies, hangs or finds no memory names itself, what it was generating and what it wrote: real faults.

Tests without Ray come first: a driver in which Ray runs is not to be forked.
"""

import os
import signal
import threading
import time

import pytest

from tests.support.waiting import wait_for
from tests.workers.rollout.generating_worker import GeneratingWorker
from verl.single_controller import get_controller
from verl.single_controller.errors import WorkerDied, WorkerError, WorkerTimeout
from verl.telemetry.flight_recorder import STALLED


@pytest.fixture(scope="module")
def controller():
    controller = get_controller("local")
    controller.start({"num_cpus": 8, "object_store_memory_mb": 100}, {"OMP_NUM_THREADS": "1"})
    yield controller
    controller.stop()


def starter(controller, folder):
    groups = []

    def build(**options):
        classes = controller.ClassWithInitArgs(GeneratingWorker, folder, **options)
        groups.append(controller.WorkerGroup(controller.ResourcePool([2]), classes))
        return groups[-1]

    yield build
    for group in groups:
        group.stop()


@pytest.fixture
def start(controller, model_folder):
    yield from starter(controller, model_folder("qwen2"))


def signal_while_generating(group, number, rank=1):
    """Send a signal to one rank as soon as it generates."""

    def send():
        box = group._hosts._diagnostics._boxes[rank]
        wait_for(lambda: box.read().notes.get("phase") == "generate", "the rank to generate")
        time.sleep(0.2)
        os.kill(group.pids[rank], number)

    threading.Thread(target=send, daemon=True).start()


def test_a_stopped_process_is_distinguished_from_a_slow_one_when_the_deadline_passes(start):
    group = start()
    signal_while_generating(group, signal.SIGSTOP)
    group.timeout = 3
    with pytest.raises(WorkerTimeout) as caught:
        group.generate(6, 50000)
    text = str(caught.value)
    assert "is stopped by a signal (SIGSTOP)" in text and "Rank 1:\nWhat it was doing: rollout engine hf" in text


def test_a_hang_that_stops_all_of_python_is_ended_with_its_stack_too(start):
    with pytest.raises(WorkerDied) as caught:
        start(stall_timeout_s=1).generate_and_hang(1, 5, keep_lock=True)
    assert "rollout engine hf, phase generate, 6 requests" in str(caught.value)
    assert "in hang" in caught.value.stderr_end


def test_an_allocation_that_fails_names_the_keys_that_help(start):
    group = start()
    with pytest.raises(WorkerError) as caught:
        group.generate_with_little_memory(8 << 20)
    assert caught.value.cause.startswith("verl.workers.rollout.memory.RolloutOutOfMemory")
    message = caught.value.explanation
    assert "rollout.name=hf: no memory left in phase generate" in message and "allocate memory" in message
    assert "Lower actor_rollout_ref.rollout.max_num_seqs=1024" in message
    assert "rollout engine hf, phase generate, 256 requests, longest prompts of 260" in message


def test_a_killed_engine_is_named_with_its_requests_its_memory_and_its_stderr(start):
    group = start()
    signal_while_generating(group, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        group.generate(6, 50000)
    text = str(caught.value)
    assert "Rank 1 of 2 died while running GeneratingWorker.generate" in text and "likely out of memory" in text
    assert "rollout engine hf, phase generate, 6 requests, longest prompts of 10, 9, 8, 7 tokens" in text
    assert "the first of them step1-0, step1-1, step1-2, step1-3, since" in text and "the last step finished" in text
    assert "GiB of the machine's" in text
    assert "generating now" in caught.value.stderr_end


def test_an_engine_that_finishes_no_step_is_ended_with_its_stacks(start):
    group = start(stall_timeout_s=2)
    with pytest.raises(WorkerDied) as caught:
        group.generate_and_hang(1, 5)
    text = str(caught.value)
    assert caught.value.exit_code in (STALLED, None)  # None: before Linux 6.15 under Ray
    assert "It was ended by its watchdog: the rollout engine hf has finished no step for 2 s" in text
    assert "rollout.stall_timeout_s=2 allows" in text and "the first step1-0, step1-1" in text
    assert "rollout engine hf, phase generate, 6 requests" in text and "in hang" in caught.value.stderr_end

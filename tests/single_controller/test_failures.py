"""A worker that raises, dies or hangs ends the call with an error that says where and why, also if others hang."""

import os
import pickle
import re
import signal

import pytest

from tests.single_controller.fragile import Fragile
from tests.single_controller.roles import Counter
from tests.support.waiting import wait_for
from verl.protocol import DataProto
from verl.single_controller import deadlines
from verl.single_controller.errors import (
    WorkerDied,
    WorkerError,
    WorkerGroupError,
    WorkerGroupStopped,
    WorkerTimeout,
)
from verl.single_controller.processes import Child, open_pidfd, outcome_by_pidfd


@pytest.fixture
def fragile(start):
    return start(Fragile, fresh=True)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_exception_comes_with_its_place_and_its_traceback_while_the_others_hang(fragile):
    pids = fragile.pids
    with pytest.raises(WorkerError) as caught:
        fragile.raise_on(1)
    error = caught.value
    assert (error.role, error.rank, error.world_size, error.method) == ("Fragile", 1, 2, "raise_on")
    assert error.cause == "ValueError: rank 1 found no rows"
    assert "in raise_on" in error.traceback and "fragile.py" in error.traceback
    assert "Fragile.raise_on failed on rank 1 of 2: ValueError" in str(error) and "second line" in str(error)
    wait_for(lambda: not any(map(is_alive, pids)), "the workers to be gone")
    with pytest.raises(WorkerGroupStopped, match="Fragile.pid.*stopped after.*raise_on failed on rank 1") as stopped:
        fragile.pid()
    assert stopped.value.__cause__ is error


def test_a_killed_worker_is_named_with_its_signal_while_the_others_hang(fragile):
    pids = fragile.pids
    with pytest.raises(WorkerDied) as caught:
        fragile.die(1, 9)
    died = caught.value
    assert (died.role, died.rank, died.method, died.pid) == ("Fragile", 1, "die", pids[1])
    assert "Rank 1 of 2 died while running Fragile.die" in str(died) and "SIGKILL" in str(died)
    wait_for(lambda: not any(map(is_alive, pids)), "the workers to be gone")


def test_the_death_is_the_failure_and_not_the_broken_connection_others_see(fragile):
    with pytest.raises(WorkerDied) as caught:
        fragile.die_in_collective(1)
    assert (caught.value.rank, caught.value.method) == (1, "die_in_collective")


def test_a_worker_that_died_between_calls_is_named_by_the_next_call(fragile):
    os.kill(fragile.pids[0], 9)
    wait_for(lambda: not is_alive(fragile.pids[0]), "the process to be gone")
    with pytest.raises(WorkerDied, match="Rank 0 of 2 died"):
        fragile.pid()


def test_a_deadline_names_the_ranks_that_did_not_answer(fragile):
    fragile.timeout = 1.5
    with pytest.raises(WorkerTimeout, match=r"Fragile.sleep_on: rank 1 of 2 did not answer within 1.5 s") as caught:
        fragile.sleep_on(1, 1000)
    assert caught.value.ranks == [1] and isinstance(caught.value, TimeoutError)
    place = r"The driver, at test_a_deadline\w+ \(single_controller/test_failures.py:\d+\), waits in Fragile.sleep_on"
    assert re.search(rf"{place} for rank 1 of 2.\nRank 1:\n", str(caught.value))
    assert re.search(r"Its main thread was at sleep_on \(single_controller/fragile.py:\d+\)\.", str(caught.value))


def test_a_stopped_worker_is_named_at_once_and_ends_the_call_with_nothing_configured(fragile, monkeypatch, capfd):
    monkeypatch.setattr(deadlines, "_SLICE_S", 0.2)
    monkeypatch.setattr(deadlines, "STOPPED_S", 0.5)
    pid = fragile.pids[1]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match="has been stopped by a signal for") as caught:
        fragile.pid()
    assert caught.value.ranks == [1] and f"`kill -CONT {pid}` resumes it" in str(caught.value)
    warning = f"warning: Fragile.pid waits for rank 1 of 2, whose process {pid} is stopped by a signal (SIGSTOP)"
    assert warning in capfd.readouterr().err
    wait_for(lambda: not is_alive(pid), "the process to be gone")


def test_a_call_is_late_when_it_makes_no_progress_and_not_while_it_does(start_local):
    fragile = start_local(Fragile, fresh=True)
    fragile.set_deadlines({"other": 0.8})
    assert fragile.report_progress(2.0) == [None, None]
    with pytest.raises(WorkerTimeout, match=r"made no progress for 0.8 s, which is more than trainer.deadlines.other"):
        fragile.sleep_on(0, 1000)


def test_a_constructor_that_fails_ends_the_start(start):
    with pytest.raises(WorkerError, match=r"Fragile.__init__ failed on rank 1 of 2: KeyError: 'no weights'"):
        start(Fragile, 2, fresh=True, fail_at_start=True)


def test_promised_batches_raise_when_they_are_asked_for(start_local):
    import torch

    fragile = start_local(Fragile, fresh=True)
    future = fragile.raise_later_on_rows(DataProto.from_dict({"x": torch.zeros(2, 1)}))
    with pytest.raises(
        WorkerError, match="Fragile.raise_later_on_rows failed on rank [01] of 2: ValueError: found no rows"
    ):
        future.get()


def test_futures_by_rank_raise_when_they_are_waited_for(start_local):
    group = start_local(Fragile, fresh=True)
    with pytest.raises(WorkerError, match="Fragile.raise_later failed"):
        group.wait(group.raise_later())


@pytest.mark.ray
def test_ray_get_on_a_future_raises_the_same_error(ray_controller):
    import ray

    classes = ray_controller.ClassWithInitArgs(Fragile)
    group = ray_controller.WorkerGroup(ray_controller.ResourcePool([1]), classes)
    with pytest.raises(WorkerError, match="Fragile.raise_later failed on rank 0 of 1"):
        ray.get(group.raise_later())
    group.stop()


def test_exit_of_a_worker_is_an_error_and_not_the_end_of_the_driver(start_local):
    with pytest.raises(WorkerError, match="rank 1 of 2: SystemExit: had enough"):
        start_local(Fragile, fresh=True).exit()


def test_a_worker_that_leaves_without_a_word_is_named_with_its_exit_code_and_its_children_end(start_local, capfd):
    group = start_local(Fragile, fresh=True)
    with pytest.raises(WorkerDied, match="Rank 1 of 2 died while running.*exit code 7") as caught:
        group.die_with_grandchild()
    assert caught.value.exit_code == 7 and caught.value.signal is None
    grandchild = int(capfd.readouterr().out.split("grandchild")[1].split()[0])
    wait_for(lambda: not is_alive(grandchild), "the process to be gone")


def test_a_single_local_rank_raises_the_same_error_from_its_cause(start_local):
    with pytest.raises(WorkerError, match="Fragile.raise_on failed on rank 0 of 1") as caught:
        start_local(Fragile, 1, fresh=True).raise_on(0)
    assert isinstance(caught.value.__cause__, ValueError)


def test_ctrl_c_in_a_single_local_rank_stays_ctrl_c(local_controller):
    class Interrupted:
        def work(self):
            raise KeyboardInterrupt

    group = local_controller.WorkerGroup(
        local_controller.ResourcePool([1]), local_controller.ClassWithInitArgs(Interrupted)
    )
    with pytest.raises(KeyboardInterrupt):
        group.execute_all_sync("work")


def test_arguments_and_outputs_that_cannot_travel_are_named(start_local):
    with pytest.raises(TypeError, match=r"Fragile.take: its arguments cannot be sent.*importable by name"):
        start_local(Fragile).take(lambda: None)
    assert start_local(Fragile).take(1) == [0, 1]  # nothing was sent: the group lives
    with pytest.raises(
        WorkerError, match="Counter.unsendable failed on rank . of 2: cannot send the output, a generator: "
    ):
        start_local(Counter, fresh=True).unsendable()


@pytest.mark.ray
def test_a_pool_larger_than_the_cluster_says_what_is_missing(ray_controller):
    classes = ray_controller.ClassWithInitArgs(Counter)
    with pytest.raises(ValueError, match=r"pool \[1000\].*CPU: 1000.*CPU: 32 on 1 node.*ray_init.num_cpus"):
        ray_controller.WorkerGroup(ray_controller.ResourcePool([1000]), classes)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("actor", 1, 2, "update", "ValueError: x", "Traceback ..."),
        WorkerDied("actor", 1, 2, "update", 77, 11, None, "last words"),
        WorkerDied("actor", 1, 2, None, None, lost_node="10.0.0.2 (Ray has given it up)"),
        WorkerTimeout("actor", "update", [0, 3], 4, 1.5),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error) and isinstance(again, WorkerGroupError)


@pytest.mark.parametrize("how, words", [((11, None), "SIGSEGV"), ((None, 3), "exit code 3"), ((None, None), "unknown")])
def test_a_death_says_how_it_came(how, words):
    assert words in str(WorkerDied("actor", 0, 1, "update", 7, *how))


def test_the_end_of_a_process_is_known_to_those_who_are_not_its_parent():
    child = Child(lambda: os.kill(os.getpid(), 15))
    watcher = open_pidfd(child.pid)
    assert child.outcome() == (15, None)
    assert outcome_by_pidfd(watcher) in [(15, None), (None, None)]  # the second before Linux 6.15
    os.close(watcher)

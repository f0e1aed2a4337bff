"""Restarts of a run whose cluster has too few nodes: each waits for them once more, and is no failed step."""

from types import SimpleNamespace

import pytest

from verl.single_controller.errors import NodesMissing
from verl.trainer.restarts import _wait_s, note_step, run_with_restarts
from verl.utils.exit_codes import ExitCode


class Tree(SimpleNamespace):
    def with_values(self, changes):
        return self


def config(tmp_path, restarts):
    keys = {"default_local_dir": str(tmp_path / "run"), "max_restarts": restarts, "restart_wait": 0.01}
    return Tree(trainer=SimpleNamespace(**keys, max_time=None))


def attempts(file):
    """Number of this attempt, counted in a file that all attempts see."""
    with file.open("a") as notes:
        notes.write(".")
    return file.stat().st_size


def test_a_run_is_started_again_until_its_nodes_are_there(tmp_path, capfd):
    def run(tree):
        if attempts(tmp_path / "count") <= 3:
            raise NodesMissing("resource pool [1, 1] needs CPU: 2, and the cluster has CPU: 1 on 1 node.")

    run_with_restarts(config(tmp_path, 3), run)
    said = capfd.readouterr().err
    assert "for lack of nodes; restart 3 of 3 from where it began" in said and "for the second time" not in said


def test_nodes_that_do_not_come_end_it_with_the_exit_code_of_a_lost_worker(tmp_path, capfd):
    def run(tree):
        attempts(tmp_path / "count")
        raise NodesMissing("resource pool [1, 1] needs CPU: 2, and the cluster has CPU: 1 on 1 node.")

    with pytest.raises(SystemExit) as ending:
        run_with_restarts(config(tmp_path, 1), run)
    said = capfd.readouterr().err
    assert ending.value.code == ExitCode.WORKER and (tmp_path / "count").stat().st_size == 2
    assert "for lack of nodes, and trainer.max_restarts=1 is used up" in said


def test_waits_double_up_to_ten_minutes_however_many_there_are():
    assert [_wait_s(10.0, number) for number in (0, 1, 5, 6, 5000)] == [10.0, 20.0, 320.0, 600.0, 600.0]
    assert _wait_s(0.0, 5000) == 0.0


def test_a_step_that_fails_again_after_a_wait_for_nodes_ends_the_run(tmp_path, capfd):
    def run(tree):
        if attempts(tmp_path / "count") == 2:
            raise NodesMissing("resource pool [1, 1] needs CPU: 2, and the cluster has CPU: 1 on 1 node.")
        note_step(4)
        raise SystemExit(int(ExitCode.WORKER))

    with pytest.raises(SystemExit):
        run_with_restarts(config(tmp_path, 9), run)
    assert (tmp_path / "count").stat().st_size == 3
    assert "in step 4, for the second time: it is not started again" in capfd.readouterr().err

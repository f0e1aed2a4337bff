"""A hostile reward function costs its sample a named outcome, in time; every other sample gets its score."""

import os
from pathlib import Path

import pytest

from tests.rewards.managers.batches import TOKENIZER, batch_of
from tests.sandbox.test_supervisor import running
from tests.support.waiting import wait_for
from verl.config.reward import RewardSandboxConfig
from verl.rewards.managers import BatchRewardManager, NaiveRewardManager, RewardError
from verl.sandbox.pool import Pool, SandboxedFunction, SlowStart, Source, sandboxed
from verl.sandbox.supervisor import Limits, descendants

FILE = str(Path(__file__).parent / "files" / "hostile_cases.py")
LIMITS = Limits(cpu_s=30, memory_mb=400, output_mb=1, processes=8)
TIMEOUT_S = 2.0

OUTCOMES = {
    "raise": "raised",
    "raise_base": "raised",
    "raise_group": "raised",
    "recurse": "raised",
    "sleep": "timeout",
    "hang_deaf": "timeout",
    "sys_exit": "exit",
    "os_exit": "exit",
    "os_exit_0": "exit",
    "shut_everything": "exit",
    "abort": "crash",
    "segfault": "crash",
    "kill_self": "crash",
    "kill_group": "crash",
    "write_channel": "crash",
    "forge_answer": "crash",
    "print_much": "output",
    "none": "wrong_type",
    "text": "wrong_type",
    "list": "wrong_type",
    "complex": "wrong_type",
    "odd": "wrong_type",
    "nested": "wrong_type",
    "no_score": "wrong_type",
    "score_none": "wrong_type",
    "huge_dict": "wrong_type",
    "huge_int": "not_finite",
    "nan": "not_finite",
    "inf": "not_finite",
    "allocate": "memory",
    "hog": "memory",
    "hog_shared": "memory",
    "bomb": "processes",
    "print_protocol": None,
    "odd_column": None,
    "leave_thread": None,
    "leave_child": None,
    "die_later": None,
    "move_away": None,
    "kill_parent": None,
    "take_stdout": None,
}
"""Outcome of each case; None: the score it returned."""


os.environ["VERL_TEST_PID_NAMESPACE"] = os.readlink("/proc/self/ns/pid")  # hostile cases compare it with theirs


@pytest.fixture(scope="module")
def pool():
    pool = Pool(Source(FILE, "compute_score"), LIMITS, workers=1)
    yield pool
    pool.close()


def manager(pool: Pool, cls=NaiveRewardManager, timeout_s=TIMEOUT_S, **options):
    function = SandboxedFunction(pool, timeout_s=timeout_s, batch_timeout_s=timeout_s)
    return cls(TOKENIZER, 0, function, **{"on_error": "zero_and_count", **options})


def outcomes(manager, cases: list[str]) -> tuple[list[float], list[str | None]]:
    result = manager(batch_of(cases), return_dict=True)
    return result["reward_tensor"].sum(-1).tolist(), result["reward_extra_info"]["reward_error_kind"]


@pytest.mark.parametrize("case", OUTCOMES)
def test_a_hostile_case_has_its_outcome_and_the_other_samples_their_scores(pool, case, capfd):
    timeout_s = TIMEOUT_S if OUTCOMES[case] == "timeout" else 10 * TIMEOUT_S  # to fill memory takes its time
    scores, kinds = outcomes(manager(pool, timeout_s=timeout_s), ["right", case, "right"])
    assert kinds == [None, OUTCOMES[case], None]
    assert scores == [1.0, float(OUTCOMES[case] is None), 1.0]
    assert len(capfd.readouterr().out) < 2**20


def test_all_hostile_cases_in_one_batch_have_the_same_outcomes(pool):
    cases = [case for case in OUTCOMES if case not in ("hang_deaf", "hog", "hog_shared", "kill_group", "die_later")]
    two = Pool(Source(FILE, "compute_score"), LIMITS, workers=2)
    try:
        assert outcomes(manager(two), cases)[1] == [OUTCOMES[case] for case in cases]
    finally:
        two.close()


def test_a_call_finds_the_folder_it_started_in(pool):
    result = manager(pool)(batch_of(["move_away", "where_am_i"]), return_dict=True)
    assert result["reward_extra_info"]["moved"] == [None, False]


def test_the_message_says_where_a_hanging_function_is_and_what_to_raise(pool):
    with pytest.raises(RewardError) as error:
        manager(pool, on_error="stop")(batch_of(["right", "sleep"]))
    text = str(error.value)
    assert "sample 1 of the batch" in text and "under way for 2 s [timeout]" in text
    assert "hostile_cases.py" in text and "in compute_score" in text and "reward_model.sandbox.timeout_s" in text


def test_what_was_left_behind_ends_with_the_pool():
    pool = Pool(Source(FILE, "compute_score"), LIMITS, workers=1)
    outcomes(manager(pool), ["leave_child", "leave_thread"])
    assert running("verl-left-behind")
    processes = [*pool.pids, *descendants(pool.pids[0])]
    pool.close()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in processes), "the processes to be gone")
    assert not running("verl-left-behind")


@pytest.mark.parametrize(
    ("case", "outcome"),
    [("sleep", "timeout"), ("raise", "raised"), ("os_exit", "exit"), ("none", "wrong_type"), ("segfault", "crash")],
)
def test_of_calls_under_way_together_the_guilty_one_fails(case, outcome):
    pool = sandboxed(Source(FILE, "compute_later"), LIMITS, 1, 60)
    assert outcomes(manager(pool), ["right", case, "right", "right"])[1] == [None, outcome, None, None]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("too_few", ["wrong_count"] * 3),
        ("too_many", ["wrong_count"] * 3),
        ("one_bad", ["not_finite", None, None]),
        ("dict", ["wrong_type"] * 3),
        ("none", ["wrong_type"] * 3),
        ("text", ["wrong_type"] * 3),
        ("raise", ["raised"] * 3),
        ("sleep", ["timeout"] * 3),
        ("os_exit", ["exit"] * 3),
        ("generator", [None] * 3),
    ],
)
def test_a_batch_function_fails_as_a_whole_or_by_sample(case, expected):
    pool = sandboxed(Source(FILE, "in_batch"), LIMITS, 1, 60)
    assert outcomes(manager(pool, BatchRewardManager), [case, "right", "right"])[1] == expected


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("def compute_score(:\n", RuntimeError, "failed while it was loaded.*SyntaxError"),
        ("import no_such_module_anywhere\n", RuntimeError, "ModuleNotFoundError"),
        ("def other(): pass\n", AttributeError, "no function or class 'compute_score'; it has other"),
        ("import sys; sys.exit(3)\n", RuntimeError, "SystemExit: 3"),
        ("import os; os._exit(3)\n", RuntimeError, "exit code 3"),
        ("import ctypes; ctypes.string_at(0)\n", RuntimeError, "SIGSEGV"),
        ("import time; time.sleep(60)\n", SlowStart, "was not loaded in time: it took more than 2 s.*start_timeout_s"),
        ("x = bytearray(10 << 30)\n", RuntimeError, "MemoryError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused(tmp_path, text, error, message):
    (tmp_path / "reward.py").write_text(text)
    pool = Pool(Source(str(tmp_path / "reward.py"), "compute_score"), LIMITS, start_timeout_s=2)
    with pytest.raises(error, match=message):
        SandboxedFunction(pool)
    assert bool(pool.pids) == (error is SlowStart)  # whoever has more patience may still have it
    pool.close()


def test_arguments_that_do_not_travel_are_the_samples_own_failure(pool):
    odd = batch_of(["right", "right"])
    odd.non_tensor_batch["extra_info"][1]["handle"] = open(os.devnull)  # noqa: SIM115
    result = manager(pool)(odd, return_dict=True)
    assert result["reward_extra_info"]["reward_error_kind"] == [None, "raised"]


def test_the_defaults_end_an_allocation_of_10_gib():
    assert RewardSandboxConfig().memory_mb < 10 * 1024

import logging
import subprocess
import sys
import time

import pytest

from verl.telemetry import profiler
from verl.telemetry.profiler import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer
from verl.utils import debug, process


@pytest.mark.parametrize("timer", [simple_timer, marked_timer])
def test_a_timer_adds_up_also_when_the_block_raises(timer):
    timing = {"gen": 1.0}
    with pytest.raises(KeyError), timer("gen", timing):
        time.sleep(0.01)
        raise KeyError
    with timer("adv", timing):
        pass
    assert 1.01 <= timing["gen"] < 2
    assert 0 <= timing["adv"] < 1


def test_memory_lines_go_to_the_logger_at_its_level(caplog):
    logger = logging.getLogger("test.memory")
    logger.setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, "test.memory"):
        log_gpu_memory_usage("quiet", logger, level=logging.DEBUG)

        @GPUMemoryLogger("actor", logger, level=logging.INFO)
        def update(x):
            """doc"""
            return x + 1

        assert update(1) == 2 and update.__doc__ == "doc"
    heads = [record.message.split(",")[0] for record in caplog.records]
    assert heads == ["Before actor.update", "After actor.update"]


def test_debug_has_the_public_names():
    assert debug.marked_timer is profiler.marked_timer
    assert debug.GPUMemoryLogger is profiler.GPUMemoryLogger


def test_profiler_config_is_the_one_of_the_config_tree():
    from verl.config.trainer import ProfilerConfig

    assert profiler.ProfilerConfig is ProfilerConfig


def test_the_timers_need_no_torch():
    code = "import sys, verl.utils.debug; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_warning_is_said_once(caplog):
    process.forget_warnings()
    assert process.warn_once("same")
    assert not process.warn_once("same")
    assert process.warn_once("other", key="k") and not process.warn_once("third", key="k")
    assert [record.message for record in caplog.records] == ["same", "other"]


def test_the_level_of_loggers_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "debug")
    assert process.get_logger("verl.test.level").level == logging.DEBUG
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "loud")
    with pytest.raises(ValueError, match="VERL_LOGGING_LEVEL=LOUD"):
        process.get_logger("verl.test.level")

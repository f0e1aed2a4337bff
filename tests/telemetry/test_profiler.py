import contextlib
import gzip
import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import codetiming
import pytest
import torch

from verl.telemetry import profiler
from verl.telemetry.profiler import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer
from verl.utils import debug, process


@pytest.mark.parametrize("timer", [simple_timer, marked_timer])
def test_a_timer_adds_up_also_when_the_block_raises(timer, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr(codetiming._timer, "time", clock)
    timing = {"gen": 1.0}
    with pytest.raises(KeyError), timer("gen", timing):
        clock.now += 0.5
        raise KeyError
    with timer("adv", timing):
        clock.now += 0.25
    assert timing == {"gen": 1.5, "adv": 0.25}


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


SETTINGS = {"tool": "torch", "discrete": False, "contents": [], "max_module_calls": 10, "torch_memory": {}}


def events(path):
    return json.loads(gzip.open(path).read())["traceEvents"]


def test_nothing_is_marked_while_nothing_is_recorded():
    trace = profiler.ProcessTrace()
    assert type(trace.mark("gen")) is type(trace.call("actor", "update_actor")) is contextlib.nullcontext


def test_a_trace_is_bounded_and_of_all_roles_of_its_process(tmp_path):
    trace, layer = profiler.ProcessTrace(), torch.nn.Linear(4, 4)
    trace.begin("actor", 3, {**SETTINGS, "folder": str(tmp_path)}, ["actor"])
    trace.begin("critic", 3, {**SETTINGS, "folder": str(tmp_path)}, ["critic"])
    for role, method in (("actor", "compute_log_prob"), ("critic", "compute_values")):
        with trace.call(role, method):
            for _ in range(100):
                layer(torch.ones(1, 4))
    assert trace.end("actor") == []
    (file,) = trace.end("critic")
    assert file.path == str(tmp_path / "actor+critic-rank3.json.gz") and file.bytes > 0
    names = [event["name"] for event in events(file.path)]
    assert names.count("aten::linear") == 20 and {"old_log_prob", "values"} <= set(names)
    assert not trace.is_recording


def test_memory_without_cuda_is_a_trace_of_allocations_and_an_error_leaves_no_file(tmp_path):
    trace = profiler.ProcessTrace()
    settings = {**SETTINGS, "folder": str(tmp_path), "tool": "torch_memory", "discrete": True}
    trace.begin("actor", 0, settings, ["actor"])
    with trace.call("actor", "generate_sequences"), trace.mark("not wanted"):
        torch.ones(4)
    for _ in range(2):
        with trace.call("actor", "update_actor"):
            torch.ones(4)
    names = [path.rpartition("/")[2] for path, _, _ in trace.end("actor")]
    assert names == ["actor-update_actor-rank0.json.gz", "actor-update_actor-rank0-2.json.gz"]
    assert any(event["name"] == "[memory]" for event in events(tmp_path / names[0]))
    trace.begin("actor", 0, {**settings, "discrete": False}, ["actor"])
    trace.abandon()
    assert trace.end("actor") == [] and len(list(tmp_path.iterdir())) == 2

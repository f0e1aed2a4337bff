"""What an engine notes of itself, and its numbers."""

import pytest

from tests.workers.rollout.conftest import rollout_config
from verl.telemetry.flight_recorder import flight_recorder
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.monitor import EngineMonitor
from verl.workers.rollout.server.server import prometheus_text, render

SAMPLING = SamplingParams(max_tokens=4)
REQUESTS = [Request((1,) * length, SAMPLING, seed=length) for length in (3, 9, 5)]


@pytest.fixture(autouse=True)
def forget():
    flight_recorder().forget()
    yield
    flight_recorder().forget()


def test_a_generation_is_noted_while_it_runs_and_forgotten_when_it_ends():
    monitor = EngineMonitor()
    monitor.engine, monitor.names = "hf", ["a", "b", "c"]
    with monitor.generating(REQUESTS):
        notes = flight_recorder().read().notes
    assert (notes["engine"], notes["phase"], notes["requests"]) == ("hf", "generate", 3)
    assert notes["longest_prompts"] == [9, 5, 3] and notes["first_requests"] == ["a", "b", "c"]
    assert flight_recorder().read().notes == {}
    with monitor.generating(REQUESTS[:2]):  # names are of one generation
        assert flight_recorder().read().notes["first_requests"] == ["seed 3", "seed 9"]


def test_what_failed_stays_noted_for_the_error():
    monitor = EngineMonitor()
    with pytest.raises(ValueError), monitor.phase("sync"):
        raise ValueError
    assert flight_recorder().read().notes["phase"] == "sync"


def test_numbers_are_those_since_the_last_call():
    monitor = EngineMonitor()
    completions = [Completion([1, 2], None, "stop")] * 3
    with monitor.generating(REQUESTS):
        monitor.tick()
        monitor.gauge(running=3)
        monitor.tick()
        monitor.gauge(running=1)
    monitor.count(REQUESTS, completions)
    own = {"prefix_cache_queries": 10, "prefix_cache_hits": 4, "preemptions": 1}
    metrics = monitor.take_metrics(own)
    assert metrics.pop("generated_tokens_per_s") > 0 and metrics.pop("prompt_tokens_per_s") > 0
    assert metrics == {
        "requests": 3,
        "generated_tokens": 6,
        "prompt_tokens": 17,
        "steps": 2,
        "running_mean": 2,
        "running_max": 3,
        "prefix_hit_rate": 0.4,
        "preemptions": 1,
    }
    again = monitor.take_metrics({**own, "preemptions": 3})
    assert again["requests"] == 0 and again["preemptions"] == 2 and "prefix_hit_rate" not in again
    assert monitor.totals()["generated_tokens"] == 6


def test_hf_counts_what_it_generates(synced):
    rollout = synced()
    rollout.generate([Request((5, 6, 7), SamplingParams(max_tokens=6, ignore_eos=True), seed=i) for i in range(4)], 1)
    metrics = rollout.monitor.take_metrics(rollout.totals())
    assert (metrics["requests"], metrics["generated_tokens"], metrics["prompt_tokens"]) == (4, 24, 12)
    assert metrics["steps"] == 6 and metrics["running_max"] == 4  # the first step reads the prompt
    assert rollout.memory_parts()["rollout weights"] > 0
    rollout.sleep()
    assert rollout.memory_parts() == {"rollout weights": 0}


def test_prometheus_reads_what_is_rendered(model_folder):
    parser = pytest.importorskip("prometheus_client.parser")
    rollout = HFRollout(model_folder("qwen2"), rollout_config(load_format="auto"))
    rollout.monitor.engine = 'h"f'
    rollout.generate([Request((5, 6, 7), SAMPLING)], 0)
    families = {family.name: family for family in parser.text_string_to_metric_families(prometheus_text(rollout))}
    (sample,) = families["verl_rollout_prompt_tokens"].samples
    assert (sample.name, sample.value, sample.labels) == ("verl_rollout_prompt_tokens_total", 3, {"engine": 'h"f'})
    assert families["verl_rollout_version"].type == "gauge" and families["verl_rollout_version"].samples[0].value == 0
    assert render({}, "gauge", {}) == ""

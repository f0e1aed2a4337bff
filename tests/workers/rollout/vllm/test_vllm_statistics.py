"""vLLM's own numbers arrive as metrics and as Prometheus reads them; its lack of cache names the keys that help."""

import pytest

from tests.workers.rollout.conftest import rollout_config, weights_of
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.memory import RolloutOutOfMemory, memory_errors
from verl.workers.rollout.server.server import prometheus_text
from verl.workers.rollout.weights.sync import sync_weights

pytestmark = pytest.mark.vllm
PROMPT = tuple(range(3, 60)) * 5  # over two blocks, so that the second reading hits the prefix cache


@pytest.fixture(scope="module")
def engine(model_folder, reference):
    config = rollout_config(name="vllm", max_num_seqs=4, disable_log_stats=False, prompt_length=300)
    engine = get_rollout_class("vllm")(model_folder("tied"), config)
    engine.monitor.engine = "vllm"
    engine.wake()
    sync_weights(weights_of(reference("tied")), engine, version=1)
    return engine


def draw(engine, count, tokens=8):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.generate([Request(PROMPT, sampling, seed=i) for i in range(count)], 1)
    return engine.monitor.take_metrics(engine.totals())


def test_levels_rates_and_counters_of_each_call(engine):
    first = draw(engine, 1)
    assert (first["requests"], first["generated_tokens"], first["prompt_tokens"]) == (1, 8, len(PROMPT))
    assert first["prefix_hit_rate"] == 0 and first["preemptions"] == 0 and first["steps"] >= 8
    again = draw(engine, 10)
    assert again["prefix_hit_rate"] > 0.5  # 256 of 285 tokens were read before
    assert again["running_max"] == 4 and again["waiting_max"] >= 6  # max_num_seqs=4
    assert 0 < again["cache_usage_mean"] <= again["cache_usage_max"] < 1


def test_prometheus_reads_verls_numbers_and_vllms(engine):
    from prometheus_client.parser import text_string_to_metric_families

    draw(engine, 1)
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text(engine))}
    assert families["verl_rollout_generated_tokens"].samples[0].value >= 8
    assert families["verl_rollout_version"].samples[0].value == 1
    assert "vllm:generation_tokens" in families


def test_memory_is_known_by_part(engine):
    parts = engine.memory_parts()
    assert parts["rollout weights"] > 1 << 18 and parts["rollout cache"] > 1 << 20
    engine.sleep()
    assert engine.memory_parts() == {"rollout weights": 0, "rollout cache": 0}


def test_a_cache_too_small_for_one_sequence_names_the_keys(model_folder):
    config = rollout_config(name="vllm", engine_kwargs={"vllm": {"kv_cache_memory_bytes": 1 << 14}})
    with pytest.raises(RolloutOutOfMemory, match="rollout.name=vllm: no memory left in phase start") as caught:
        with memory_errors(config, "start"):
            get_rollout_class("vllm")(model_folder("tied"), config)
    assert "Raise actor_rollout_ref.rollout.gpu_memory_utilization" in str(caught.value)
    assert "actor_rollout_ref.rollout.max_model_len" in str(caught.value)

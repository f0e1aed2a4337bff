"""vLLM's own numbers: levels of its scheduler after each step, and the counters it keeps for Prometheus."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.monitor import EngineMonitor

_COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}


def watch_steps(llm: Any, monitor: EngineMonitor) -> None:
    """Have every step of vLLM tell ``watch`` that it finished, and how full the engine is."""
    monitor.reports_steps = True
    engine = llm.llm_engine
    core = getattr(engine.engine_core, "engine_core", None)  # None where the engine lives in a process of its own
    scheduler = getattr(core, "scheduler", None)
    step = engine.step

    def watched_step() -> Any:
        outputs = step()
        monitor.tick()
        if scheduler is not None:
            cache = scheduler.kv_cache_manager.usage
            monitor.gauge(running=len(scheduler.running), waiting=len(scheduler.waiting), cache_usage=cache)
        return outputs

    engine.step = watched_step


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters since it was built; none with ``disable_log_stats=true``."""
    if not llm.llm_engine.log_stats:
        return {}
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if name := _COUNTERS.get(metric.name):
            found[name] = found.get(name, 0.0) + metric.value
    return found


def prometheus_text(llm: Any) -> str:
    """All of vLLM's metrics in Prometheus' text format; empty with ``disable_log_stats=true``."""
    if not llm.llm_engine.log_stats:
        return ""
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(REGISTRY).decode()

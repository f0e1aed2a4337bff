"""Profiled steps: what is in the traces, where they lie, and that they change no number."""

import gzip
import json

import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job, train_sft
from tests.trainer.test_options import GAE, numbers


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def train(task, folder, **settings):
    """Three steps; returns the metrics of each."""
    given = {"trainer__logger": "[file]", "trainer__total_training_steps": 3, "trainer__log_dir": folder}
    given |= {"trainer__default_local_dir": folder, "actor_rollout_ref__actor__skip_old_log_probs": False}
    run_job(overrides(task, **given, **settings))
    return {row["step"]: row["data"] for row in read_metrics(folder / "metrics.jsonl")}


def spans(path):
    """Names of the spans of a trace that verl made, by how often; and the number of operators."""
    events = json.loads(gzip.open(path).read())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return {name: names.count(name) for name in names}, sum(event.get("cat") == "cpu_op" for event in events)


def test_a_trace_has_the_stages_of_the_metrics_and_changes_no_number(task, tmp_path, capsys):
    plain = train(task, tmp_path / "plain", **GAE)
    profiled = train(task, tmp_path / "run", **GAE, trainer__profile_steps="[2]")
    assert numbers(profiled) == numbers(plain)
    (trace,) = (tmp_path / "run" / "profile").rglob("*.*")
    assert trace.relative_to(tmp_path / "run").as_posix() == "profile/step_2/actor_rollout+critic-rank0.json.gz"
    found, operators = spans(trace)
    stages = {name.removeprefix("timing_s/") for name in profiled[2] if name.startswith("timing_s/")}
    assert stages - set(found) <= {"reshard", "generate_sequences", "canary", "trace", "dump_rollout_generations"}
    assert {"step", "gen", "old_log_prob", "values", "adv", "update_critic", "update_actor"} <= set(found)
    assert found["step"] == 1 and operators > 1000
    assert "1.0" not in plain and f"traces in {trace.parent}" in capsys.readouterr().out


def test_adjacent_steps_share_a_trace_and_calls_have_their_own(task, tmp_path):
    settings = {"global_profiler__steps": "[1,2]", "global_profiler__profile_continuous_steps": True}
    train(task, tmp_path / "one", **settings, global_profiler__max_module_calls=5)
    (trace,) = (tmp_path / "one" / "profile").rglob("*.gz")
    assert trace.parent.name == "steps_1-2" and spans(trace)[0]["step"] == 2
    settings = {"trainer__profile_steps": "[3]", "actor_rollout_ref__actor__profiler__enable": True}
    settings["actor_rollout_ref__rollout__profiler__enable"] = False
    train(task, tmp_path / "many", **settings, actor_rollout_ref__actor__profiler__tool_config__torch__discrete=True)
    traces = {path.name: spans(path) for path in (tmp_path / "many" / "profile" / "step_3").iterdir()}
    assert set(traces) == {f"actor_rollout-{name}-rank0.json.gz" for name in ("old_log_prob", "update_actor")}
    bounded, _ = spans(trace)
    assert bounded["gen"] >= 2 and "update_actor" in bounded
    assert spans(trace)[1] < sum(operators for _, operators in traces.values())


def test_steps_on_examples_are_recorded_too(task, tmp_path):
    rows = [json.dumps({"question": f"{number}", "answer": f"{number % 10}"}) for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = f"data.train_files={tmp_path}/rows.jsonl data.prompt_key=question data.response_key=answer "
    words += f"model.path={task['actor_rollout_ref.model.path']} trainer.default_local_dir={tmp_path}/run "
    words += "data.train_batch_size=8 data.max_length=64 trainer.total_training_steps=3 trainer.device=cpu "
    words += "engine.strategy=local trainer.n_gpus_per_node=1 trainer.logger=[file] trainer.export_model=false "
    train_sft([*words.split(), "trainer.profile_interval=[2,3]"])
    (trace,) = (tmp_path / "run" / "profile").rglob("*.gz")
    assert trace.parent.name == "steps_2-3" and spans(trace)[0]["step"] == 2

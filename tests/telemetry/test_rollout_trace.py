"""Every sample of a run is recorded where `rollout.trace` says."""

import json
import sys

import pytest

from tests.support.runs import make_task, overrides, run_job
from verl.telemetry.rollout_trace import inputs_and_outputs, open_trace

TRACE = "actor_rollout_ref__rollout__trace__"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("trace"))


def run(task, folder, **settings):
    settings = {"trainer__total_training_steps": 2, "trainer__default_local_dir": folder, **settings}
    return run_job(overrides(task, **settings))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_backend_has_a_record_a_sample_with_all_that_is_known(task, tmp_path):
    trainer = run(task, tmp_path / "run", **{f"{TRACE}backend": "file", f"{TRACE}token2text": True})
    files = sorted((tmp_path / "run" / "rollout_trace").iterdir())
    assert [path.name for path in files] == ["1.jsonl", "2.jsonl"]
    records = read(files[1])
    assert [record["uid"] for record in records] == [f"step2-{i // 4}" for i in range(16)]
    for record in records:
        assert record["step"] == 2 and record["version"] == 1 and record["seconds"] > 0
        assert record["prompt"] == trainer.tokenizer.decode(record["prompt_ids"])
        assert record["response"] == trainer.tokenizer.decode(record["response_ids"])
        ended = record["response_ids"][-1] == trainer.tokenizer.eos_token_id
        assert record["finish_reason"] == ("stop" if ended else "length")
        assert 0 <= record["score"] <= 1
    assert len({tuple(record["prompt_ids"]) for record in records}) == 4


def test_text_is_left_out_unless_asked_for_and_the_folder_may_lie_elsewhere(task, tmp_path):
    run(task, tmp_path / "run", **{f"{TRACE}backend": "file", f"{TRACE}dir": tmp_path / "there"})
    record = read(tmp_path / "there" / "1.jsonl")[0]
    assert "response" not in record and record["response_ids"]
    assert not (tmp_path / "run" / "rollout_trace").exists()


@pytest.mark.parametrize("backend", ["weave", "mlflow"])
def test_a_missing_package_is_said_with_its_install_line_before_anything_starts(task, tmp_path, monkeypatch, backend):
    monkeypatch.setitem(sys.modules, backend, None)
    monkeypatch.delitem(sys.modules, f"verl.utils.trace_{backend}", raising=False)
    with pytest.raises(
        ValueError, match=rf"trace.backend={backend} needs the package {backend}.*pip install"
    ) as caught:
        run(task, tmp_path / "run", **{f"{TRACE}backend": backend})
    assert "backend=file, which needs nothing" in str(caught.value)


def test_mlflow_has_a_trace_a_sample(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    records = [
        {"step": 1, "uid": f"u{i}", "prompt_ids": [1], "response_ids": [i], "response": f"r{i}", "score": i / 2}
        for i in range(3)
    ]
    trace = open_trace("mlflow", "project", "run-1", tmp_path)
    trace.log(1, records)
    trace.finish()
    import mlflow

    experiment = mlflow.get_experiment_by_name("project")
    found = mlflow.MlflowClient().search_traces(locations=[experiment.experiment_id])
    spans = sorted((trace.data.spans[0] for trace in found), key=lambda span: span.attributes["uid"])
    assert [span.inputs for span in spans] == [{"prompt_ids": [1]}] * 3
    assert [span.outputs for span in spans] == [{"response_ids": [i], "response": f"r{i}"} for i in range(3)]
    assert [span.attributes["score"] for span in spans] == [0, 0.5, 1]
    assert {trace.info.tags["run"] for trace in found} == {"run-1"}


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="trace.backend='wave' is unknown. Use one of file, mlflow, weave"):
        open_trace("wave", "p", "e", "f")


def test_a_record_splits_into_what_went_in_what_came_out_and_the_rest():
    record = {"step": 1, "prompt_ids": [1], "response_ids": [2], "score": 0.5}
    assert inputs_and_outputs(record) == ({"prompt_ids": [1]}, {"response_ids": [2]}, {"step": 1, "score": 0.5})


def test_the_turns_of_a_trajectory_are_what_came_out():
    turns, rows = [{"role": "assistant", "text": "up"}], [{"prompt_ids": [1], "response_ids": [2]}]
    record = {"step": 1, "turns": turns, "rows": rows, "status": "completed"}
    assert inputs_and_outputs(record) == ({}, {"turns": turns, "rows": rows}, {"step": 1, "status": "completed"})

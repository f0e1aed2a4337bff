"""With servers, a run says of its rollouts what it says without."""

import json

import httpx

from tests.agents.conftest import ROLLOUT
from tests.support.runs import read_metrics

KEPT = {f"{ROLLOUT}__skip_rollout": True, f"{ROLLOUT}__calculate_log_probs": True, "trainer__logger": "[file]"}


def test_traces_numbers_memory_and_kept_batches(run, tmp_path):
    folder = tmp_path / "run"
    settings = KEPT | {f"{ROLLOUT}__skip_dump_dir": tmp_path / "kept", "trainer__memory_ledger": True}
    _, first = run(**settings, **{f"{ROLLOUT}__trace__backend": "file"})
    rows = [row["data"] for row in read_metrics(folder / "metrics.jsonl")]
    for row in rows:
        assert row["rollout/engine/requests"] == 16 and row["rollout/engine/generated_tokens_per_s"] > 0
        assert row["rollout/engine/prompt_tokens"] > 0 and row["rollout/engine/running_max"] > 1
        assert row["training/rollout_probs_diff_mean"] < 1e-5 and row["memory/rollout_sync_gb"] > 0
    records = [json.loads(line) for line in (folder / "rollout_trace" / "2.jsonl").read_text().splitlines()]
    assert {record["version"] for record in records} == {1} and len(records) == 16
    assert all(record["finish_reason"] in ("stop", "length") and record["seconds"] > 0 for record in records)
    assert len({record["seconds"] for record in records}) > 1  # each row's own
    (folder / "metrics.jsonl").unlink()
    _, again = run(**settings)
    assert again == first
    assert "rollout/engine/requests" not in read_metrics(folder / "metrics.jsonl")[0]["data"]


def test_prometheus_can_scrape_a_server(monkeypatch, run):
    from verl.agents import AgentLoopManager

    found, close = [], AgentLoopManager.close

    def scrape(manager):
        if not manager._loop.is_closed():
            key = json.loads(manager.servers_file.read_text())["api_key"]
            headers = {"Authorization": f"Bearer {key}"}
            found.append(httpx.get(f"{manager.addresses[0]}/metrics", headers=headers))
        close(manager)

    monkeypatch.setattr(AgentLoopManager, "close", scrape)
    run()
    (answer,) = found
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'verl_rollout_requests_total{engine="hf"} 32' in answer.text.splitlines()

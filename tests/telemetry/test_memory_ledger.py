"""Memory by phase: what is held when a phase ends, of all ranks, as metrics and as a table."""

import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.telemetry.memory import (
    Entry,
    MemoryLedger,
    bytes_by_place,
    memory_metrics,
    memory_table,
    optimizer_tensors,
)

PHASES = ["rollout_wake", "rollout_sync", "rollout_generate", "rollout_sleep", "log_prob", "update_actor"]


def test_a_phase_that_holds_more_is_seen():
    ledger = MemoryLedger(lambda: {"weights": 7})
    with ledger.phase("before"):
        pass
    with ledger.phase("after"):
        kept = torch.ones(64 << 18)  # 64 MiB
    before, after = ledger.take()
    assert (before.phase, after.phase) == ("before", "after") and before.at < after.at
    assert after.host - before.host > 0.9 * kept.nbytes and after.parts == {"weights": 7}
    with ledger.phase("later"):
        pass
    assert ledger.take()[0].parts == {}  # parts are reported once
    assert ledger.take() == []


def test_parts_count_every_storage_once():
    weight = torch.ones(10)
    assert bytes_by_place([weight, weight.view(5, 2), weight[:3], torch.ones(2)], "cpu") == 48
    assert bytes_by_place([weight], "cuda") == 0
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    assert bytes_by_place(optimizer_tensors(optimizer), "cpu") == 2 * 20 * 4 + 2 * 4  # two moments, two counters


def test_metrics_are_of_the_rank_with_most_and_of_the_devices_peak():
    ranks = [[Entry("sync", 1, 0.1, host=2**30)], [Entry("sync", 1, 0.1, host=2**31)]]
    assert memory_metrics(ranks) == {"memory/sync_gb": 2.0}
    on_device = [[Entry("sync", 1, 0.1, 2**30, allocated=2**29, peak=3 * 2**30, reserved=2**32, device=2**33)]]
    assert memory_metrics(on_device) == {"memory/sync_gb": 3.0}
    table = memory_table(on_device[0])
    assert "GiB (in use by all processes" in table
    assert table.splitlines()[1].split() == ["phase", "seconds", "device", "reserved", "torch", "peak", "host"]
    assert table.splitlines()[2].split() == ["sync", "0.10", "8.00", "4.00", "0.50", "3.00", "1.00"]


@pytest.mark.parametrize("critic", [False, True])
def test_a_run_shows_a_table_once_and_logs_each_phase(tmp_path, capsys, critic):
    gae = {"algorithm__adv_estimator": "gae", "critic__ppo_micro_batch_size_per_gpu": 8} if critic else {}
    run_job(
        overrides(
            make_task(tmp_path / "task"),
            trainer__total_training_steps=2,
            trainer__memory_ledger=True,
            actor_rollout_ref__actor__skip_old_log_probs=False,
            trainer__logger="[file]",
            trainer__default_local_dir=tmp_path / "run",
            **gae,
        )
    )
    out = capsys.readouterr().out
    assert out.count("Memory at the end of each phase") == 1 and "rollout weights" in out
    rows = [row["data"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    expected = {f"memory/{phase}_gb" for phase in PHASES + ["values", "update_critic"] * critic}
    assert expected <= rows[0].keys() and expected <= rows[1].keys() and "memory/start_gb" in rows[0]
    assert all(0 < rows[1][name] < 8 for name in expected)

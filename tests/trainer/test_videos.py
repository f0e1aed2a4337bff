"""The whole loop with videos: rollout and trainer agree on every token of a policy that is shown frames."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.images import SHOWN, make_tiny_vl_model, video_row
from tests.support.runs import overrides, read_metrics, run_job

ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"
SETTINGS = {
    "data__train_batch_size": 4,
    "data__max_prompt_length": 96,
    "data__max_response_length": 4,
    "data__shuffle": False,
    f"{ROLLOUT}__n": 2,
    f"{ROLLOUT}__ignore_eos": True,
    f"{ROLLOUT}__calculate_log_probs": True,
    f"{ROLLOUT}__log_prob_micro_batch_size_per_gpu": 8,
    f"{ACTOR}__ppo_mini_batch_size": 4,
    f"{ACTOR}__ppo_micro_batch_size_per_gpu": 4,
    f"{ACTOR}__optim__lr": "2e-3",
    "actor_rollout_ref__model__enable_gradient_checkpointing": False,
    "trainer__logger": "[file]",
    "trainer__total_training_steps": 2,
}


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.chdir(tmp_path)
    rows = [video_row(*shown, index=i) for i, shown in enumerate(SHOWN[:4] * 2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    return {
        "data.train_files": str(tmp_path / "train.parquet"),
        "data.val_files": str(tmp_path / "train.parquet"),
        "actor_rollout_ref.model.path": make_tiny_vl_model(tmp_path / "model", initializer_range=0.1),
    }


def run(task, tmp_path, **settings):
    run_job(overrides(task, **{**SETTINGS, **settings}))
    rows = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    (tmp_path / "metrics.jsonl").unlink()
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4
    return [row["actor/grad_norm"] for row in rows]


def test_two_steps_go_the_same_way_however_the_rows_are_dealt(task, tmp_path):
    plain = run(task, tmp_path)
    assert len(plain) == 2
    for way in (
        {f"{ACTOR}__strategy": "fsdp2", "trainer__n_gpus_per_node": 2},
        {"data__return_multi_modal_inputs": False, "actor_rollout_ref__model__use_remove_padding": True},
    ):
        assert run(task, tmp_path, **way) == pytest.approx(plain, rel=1e-3)


def test_where_requests_travel_as_text_videos_are_refused_by_name(task, tmp_path):
    with pytest.raises(Exception, match="rollout.mode=sync"):
        run(task, tmp_path, **{f"{ROLLOUT}__mode": "async"})

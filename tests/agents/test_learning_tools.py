"""A tiny random model learns to call a tool and to tell what it answers."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.commands import ROOT, calls_of, main_ppo_overrides
from tests.support.learning import SEED, check_learned
from tests.support.runs import read_metrics, run_job
from verl.utils.import_utils import load_extern_type

FOLDER = ROOT / "examples" / "agentic" / "ask_a_tool"


@pytest.mark.parametrize(
    "text, turns, score",
    [("x", 2, 0.0), ("y", 2, 0.0), ("?tyyya?", 4, 0.1), ("?tyyyak", 4, 0.2), ("?tyyyax", 4, 0.4), ("?tyyyay", 4, 1.0)],
)
def test_the_reward_rises_with_each_step_to_the_secret(text, turns, score):
    reward = load_extern_type(str(FOLDER / "reward.py"), "compute_score")
    assert reward("ask_a_tool", text, "y", {"num_turns": turns})["score"] == score


@pytest.mark.learning
def test_a_policy_learns_to_ask_a_tool_and_to_tell_what_it_said(tmp_path, monkeypatch):
    """The published recipe; 0.7 is what a policy reaches that asks and answers always the same."""
    monkeypatch.chdir(ROOT)
    prepare = str(FOLDER / "prepare.py")
    load_extern_type(prepare, "write_model")(tmp_path / "model", SEED)
    for name, count in (("train", 512), ("test", 32)):
        pq.write_table(pa.Table.from_pylist(load_extern_type(prepare, "rows")(count)), tmp_path / f"{name}.parquet")
    places = {"DATA": str(tmp_path), "RUN": str(tmp_path / "run"), "STEPS": "70"}
    recipe = FOLDER / "run_ask_a_tool_tiny_cpu.sh"
    (words,) = main_ppo_overrides(calls_of(recipe, tmp_path, f"trainer.seed={SEED}", environment=places))
    run_job([*words, "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.progress_bar=false"])
    metrics = [row["data"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    scores = [row["critic/score/mean"] for row in metrics if "critic/score/mean" in row]
    assert len(scores) == 70
    check_learned("tool", scores, over=(10, 10))

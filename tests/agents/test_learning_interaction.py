"""A tiny random model learns to find a number by what a simulated user says to its first guess."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.commands import ROOT, calls_of, main_ppo_overrides
from tests.support.learning import SEED, check_learned
from tests.support.runs import read_metrics, run_job
from verl.utils.import_utils import load_extern_type
from verl.utils.tiny_model import make_tiny_model

FOLDER = ROOT / "examples" / "agentic" / "higher_lower"


@pytest.mark.learning
def test_who_reads_the_users_answer_finds_the_number(tmp_path, monkeypatch):
    """The published recipe, with its own data and user; two thirds is what who does not read can reach."""
    monkeypatch.chdir(ROOT)
    make_tiny_model(tmp_path / "model", seed=SEED)
    rows = load_extern_type(str(FOLDER / "prepare.py"), "rows")
    for name, count in (("train", 513), ("test", 48)):
        pq.write_table(pa.Table.from_pylist(rows(count)), tmp_path / f"{name}.parquet")
    places = {"MODEL": str(tmp_path / "model"), "DATA": str(tmp_path), "RUN": str(tmp_path / "run"), "STEPS": "120"}
    recipe = FOLDER / "run_higher_lower_tiny_cpu.sh"
    (words,) = main_ppo_overrides(calls_of(recipe, tmp_path, f"trainer.seed={SEED}", environment=places))
    run_job([*words, "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.progress_bar=false"])
    metrics = [row["data"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    scores = [row["agent/interaction_agent/success"] for row in metrics if "agent/interaction_agent/success" in row]
    assert len(scores) == 120
    check_learned("simulated user", scores, over=(10, 10))

"""A recorded step is computed again bit for bit, and the row that breaks a step is found."""

import json
import math

import pytest

from tests.support.runs import make_task, overrides, run_job
from verl.algorithms.advantages.common import NonFiniteError
from verl.trainer.ppo.replay import main
from verl.trainer.ppo.step_bundle import STEP, bundle_folder
from verl.utils.exit_codes import ExitCode, exit_code
from verl.workers.engine.local import LocalEngine

PPO = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref__actor__ppo_epochs": 2,
    "actor_rollout_ref__actor__strategy": "fsdp2",
    "critic__strategy": "fsdp2",
    "trainer__n_gpus_per_node": 2,
    "critic__ppo_micro_batch_size_per_gpu": 8,
}
BREAKS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str))) * (1e30 if extra_info["index"] == 5 else 1e-3)
"""


PASS = {"actor_rollout_ref__actor__skip_old_log_probs": False}


def settings(**more):
    return {"trainer__total_training_steps": 2, "data__train_batch_size": 4, **more}


@pytest.mark.ranks
def test_a_step_is_computed_again_bit_for_bit(tmp_path, capsys):
    task = make_task(tmp_path / "task")
    run_job(overrides(task, **settings(trainer__dump_steps="[2]", **PPO)))
    folder = bundle_folder(task["trainer.default_local_dir"], 2)
    assert {"actor", "critic"} <= {path.name for path in folder.iterdir()}
    capsys.readouterr()
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "step 2: all equal, bit for bit" in said
    for name in ("token_level_scores", "old_log_probs", "values", "advantages", "actor/grad_norm", "critic/grad_norm"):
        assert any(line.split()[1:2] == [name] and line.endswith("equal") for line in said.splitlines()), said


def test_the_row_that_breaks_the_gradient_is_found(tmp_path, capsys):
    task = make_task(tmp_path / "task", rows=8)
    (tmp_path / "task" / "reward.py").write_text(BREAKS)
    plain = {"algorithm__norm_adv_by_std_in_grpo": False, "data__shuffle": False}
    trainer = run_job(overrides(task, **settings(**plain)))
    assert trainer.metrics["actor/nonfinite_steps"] == 1 and trainer.global_steps == 2
    folder = bundle_folder(task["trainer.default_local_dir"], 2)
    said = capsys.readouterr().out
    assert "the gradient of actor was not finite" in said and f"verl replay {folder}" in said
    assert main([str(folder)]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gradient")]
    assert 1 <= len(rows) <= 4 and all("index=5): norm" in row for row in rows), rows
    assert not math.isfinite(json.loads((folder / STEP).read_text())["metrics"]["actor/grad_norm"])


@pytest.fixture
def spoiled(monkeypatch):
    """The actor's forward pass gives NaN for the last token of row 2, from the second step on."""
    infer, calls = LocalEngine.infer, []

    def spoiling(self, data, want, *rest, **more):
        scored = infer(self, data, want, *rest, **more)
        calls.append(len(data))
        if len(data) == 16 and calls.count(16) == 2:
            column = scored.ragged("log_probs")
            column.values[int(column.layout.offsets[3]) - 1] = float("nan")
        return scored

    monkeypatch.setattr(LocalEngine, "infer", spoiling)


def test_a_log_prob_that_is_not_finite_ends_the_run_and_leaves_the_step(tmp_path, spoiled, capsys):
    task = make_task(tmp_path / "task")
    with pytest.raises(NonFiniteError, match=r"Step 2: old_log_probs, .* in row 2 \(uid=step2-0, .* token \d+ of") as e:
        run_job(overrides(task, **settings(**PASS)))
    assert exit_code(e.value) is ExitCode.UNHEALTHY
    folder = bundle_folder(task["trainer.default_local_dir"], 2)
    assert f"step 2 failed; its rows are written: verl replay {folder}" in capsys.readouterr().out
    assert main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert "old_log_probs           differs in 1 of" in said and "first in row 2 (uid=step2-0" in said
    assert "the step had ended with NonFiniteError: Step 2" in said


def test_a_log_prob_of_the_update_itself_ends_the_run_too(tmp_path, monkeypatch):
    train, calls = LocalEngine.train_and_score, []

    def spoiling(self, *words, **more):
        metrics, scored = train(self, *words, **more)
        calls.append(len(calls))
        if len(calls) == 2:
            scored.ragged("log_probs").values[-1] = float("nan")
        return metrics, scored

    monkeypatch.setattr(LocalEngine, "train_and_score", spoiling)
    with pytest.raises(NonFiniteError, match=r"Step 2: old_log_probs, .* in row 15 \(uid=step2-3, .* token \d+ of"):
        run_job(overrides(make_task(tmp_path / "task"), **settings()))


def test_rows_that_are_not_finite_can_be_left_out(tmp_path, spoiled):
    trainer = run_job(overrides(make_task(tmp_path / "task"), **settings(trainer__on_nonfinite="skip")))
    assert trainer.metrics["training/nonfinite_rows"] == 1 and trainer.metrics["actor/nonfinite_steps"] == 0
    assert math.isfinite(trainer.metrics["actor/grad_norm"]) and trainer.metrics["actor/grad_norm"] > 0


def test_a_folder_that_is_no_bundle_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "holds no step.json. Name a folder steps/step_N of a run" in capsys.readouterr().err

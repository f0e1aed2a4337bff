"""A task that teaches nothing is said, once a cause, with what to change."""

import pytest

from tests.config.helpers import typed
from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.trainer.ppo.run_log import LearningSignalMonitor

GOOD = {"batch/zero_advantage_ratio": 0.25, "batch/zero_std_ratio": 0.25, "actor/grad_norm": 1.0}
EQUAL = {"batch/zero_advantage_ratio": 1.0, "batch/zero_std_ratio": 1.0, "actor/grad_norm": 0.0}
FAILED = {**EQUAL, "batch/solve_none": 4.0, "batch/solve_all": 0.0, "critic/score/mean": 0.0}
SOLVED = {**EQUAL, "batch/solve_none": 0.0, "batch/solve_all": 4.0, "critic/score/mean": 1.0}


def said(metrics, steps=5, entropy=1.0, **changes):
    watch = LearningSignalMonitor(typed().with_values(changes))
    return [sentence for _ in range(steps) for sentence in watch.note(metrics, entropy)]


@pytest.mark.parametrize(
    ("metrics", "entropy", "words"),
    [
        (FAILED, 1.0, ["had the same reward (mean 0)", "samples", "rollout.n (now 1)", "filter_groups.enable=true"]),
        (SOLVED, 1.0, ["had the same reward (mean 1)", "The task is solved", "harder prompts"]),
        ({"batch/zero_advantage_ratio": 1.0}, 1.0, ["every advantage was 0", "critic/rewards/{min,max}"]),
        ({**GOOD, "actor/grad_norm": 0.0}, 1.0, ["actor/grad_norm was 0 though advantages were not"]),
        ({**EQUAL, "batch/token_ratio": 0.0}, 1.0, ["no response had a token in the loss", "sample_mask"]),
        ({**GOOD, "batch/truncated_ratio": 1.0}, 1.0, ["cut at the length limit", "data.max_response_length (now"]),
        (GOOD, 0.001, ["entropy was below 0.01 nats a token (now 0.001)", "clip_ratio_high"]),
    ],
)
def test_a_cause_is_said_with_its_count_and_what_to_change(metrics, entropy, words):
    [sentence] = said(metrics, 7, entropy)
    assert sentence.startswith("in 5 of the last 5 steps ")
    assert not [word for word in words if word not in sentence]


def test_a_run_that_learns_is_left_alone():
    assert not said({**GOOD, "batch/truncated_ratio": 0.9}, 30)
    assert not said(FAILED, 4)
    assert not said({**GOOD, "batch/truncated_ratio": 1.0}, 30, **{"actor_rollout_ref.rollout.ignore_eos": True})


def test_steps_need_not_follow_one_another():
    watch = LearningSignalMonitor(typed())
    found = [watch.note(metrics) for metrics in [SOLVED, GOOD] * 5]
    assert [step for step, sentences in enumerate(found, 1) if sentences] == [9]
    assert found[8][0].startswith("in 5 of the last 9 steps ")
    assert watch.summary() == "5 of 10 steps had advantages of 0 only and taught nothing"


def test_a_run_says_that_its_reward_is_the_same_for_all(tmp_path, monkeypatch, capfd):
    reward = tmp_path / "constant.py"
    reward.write_text("def compute_score(**row):\n    return 0.5\n")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    words = overrides(
        make_task(tmp_path / "task"),
        trainer__total_training_steps=5,
        trainer__logger="[file]",
        custom_reward_function__path=str(reward),
    )
    run_job(words)
    output = capfd.readouterr()
    assert "step 5: in 5 of the last 5 steps all responses to each prompt had the same reward (mean 0.5)" in (
        output.out + output.err
    )
    assert "5 of 5 steps had advantages of 0 only and taught nothing" in output.out + output.err
    rows = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert all(row["batch/zero_std_ratio"] == 1 and row["batch/zero_advantage_ratio"] == 1 for row in rows[-5:])

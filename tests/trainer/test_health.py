"""What keeps a run from learning, or will end it, is said once a cause with what to change, and ends it if asked to."""

import json
import re
from typing import get_args

import numpy as np
import pytest
import torch
from pytest import approx

from tests.config.helpers import problems, typed
from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.config.trainer import HealthConfig, HealthRule
from verl.protocol import DataProto
from verl.trainer.ppo.health import HealthMonitor, UnhealthyRun, growth
from verl.trainer.ppo.metric_utils import signal_metrics

GOOD = {"batch/zero_advantage_ratio": 0.25, "batch/zero_std_ratio": 0.25, "actor/grad_norm": 1.0}
EQUAL = {
    "batch/zero_advantage_ratio": 1.0,
    "batch/zero_std_ratio": 1.0,
    "critic/groups_without_signal": 1.0,
    "actor/grad_norm": 0.0,
}
FAILED = {**EQUAL, "batch/solve_none": 4.0, "batch/solve_all": 0.0, "critic/score/mean": 0.0}
SOLVED = {**EQUAL, "batch/solve_none": 0.0, "batch/solve_all": 4.0, "critic/score/mean": 1.0}


MOST = {**GOOD, "critic/groups_without_signal": 0.95}
SAME = {**GOOD, "batch/identical_responses": 1.0}
CONSTANT = {**GOOD, "critic/score/min": 0.5, "critic/score/max": 0.5, "critic/score/mean": 0.5}


def said(metrics, steps=5, entropy=1.0, **changes):
    watch = HealthMonitor(typed().with_values(changes))
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
        ({**GOOD, "batch/truncated_ratio": 0.6}, 1.0, ["many responses (60%) were cut", "they are not complete"]),
        (MOST, 1.0, ["the responses to most prompts (95%) had the same reward", "their advantages were 0"]),
        (SAME, 2.0, ["the same as another to the same prompt, with an entropy of 2", "engine repeat itself"]),
        (SAME, 0.1, ["the same as another", "raise actor_rollout_ref.rollout.temperature (now 1)"]),
        (CONSTANT, 1.0, ["every response of the batch had the same reward (0.5)", "verl check data"]),
        ({**GOOD, "training/rollout_probs_diff_mean": 0.2}, 1.0, ["mismatch_threshold=0.01 (now 0.2)", "rollout_is"]),
        (GOOD, 0.001, ["entropy was below 0.01 nats a token (now 0.001)", "clip_ratio_high"]),
    ],
)
def test_a_cause_is_said_with_its_count_and_what_to_change(metrics, entropy, words):
    [sentence] = said(metrics, 7, entropy)
    assert sentence.startswith("in 5 of the last 5 steps ")
    assert not [word for word in words if word not in sentence]


def test_a_run_that_learns_is_left_alone():
    assert not said({**GOOD, "batch/truncated_ratio": 0.4, "critic/groups_without_signal": 0.8}, 30)
    assert not said(FAILED, 4)
    assert not said({**GOOD, "batch/truncated_ratio": 1.0}, 30, **{"actor_rollout_ref.rollout.ignore_eos": True})


def trace(series, **changes):
    """Messages and the step of each, for one value a step of each metric."""
    watch = HealthMonitor(typed().with_values(changes))
    steps = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    entropies = [step.pop("entropy", 1.0) for step in steps]
    return [
        (number, sentence)
        for number, (step, entropy) in enumerate(zip(steps, entropies, strict=True), 1)
        for sentence in watch.note(step, entropy)
    ]


def test_responses_that_grow_threefold_and_an_entropy_that_falls_to_a_tenth_are_said():
    lengths = [100 * 1.05**step for step in range(40)]
    [(step, sentence)] = trace({"response_length/mean": lengths})
    assert 23 <= step <= 35 and "responses became longer" in sentence and "from 12" in sentence
    assert not trace({"response_length/mean": [100 * 1.02**step for step in range(40)]})
    assert not trace({"response_length/mean": [10, 2] * 20}), "a few tokens are no drift"
    [(step, sentence)] = trace({"entropy": [1.0] * 25 + [0.05] * 6})
    assert step == 30 and "(1 -> 0.05 nats a token)" in sentence


@pytest.mark.parametrize("name", ["actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"])
def test_a_jump_of_a_kl_is_said_in_its_step(name):
    usual = [0.002, 0.001, -0.001] * 5
    [(step, sentence)] = trace({name: [*usual, 0.3, 0.001]})
    assert step == 16 and sentence.startswith(f"{name} jumped to 0.3, where 0.001 was usual")
    assert not trace({name: [*usual, 0.04]}) and not trace({name: [*usual, 0.3]}, **{"trainer.health.kl_jump": None})


def test_memory_that_will_not_last_to_the_end_is_said_with_the_process_that_grows():
    noise = np.random.default_rng(0).normal(0, 5, 100)

    def run(slope, total_steps, free=10_000.0, **changes):
        watch = HealthMonitor(typed().with_values(changes), total_steps)
        sizes = ({"driver": 500 + n, "actor 0 (pid 7)": 4000 + slope * i + n} for i, n in enumerate(noise))
        return [text for memory in sizes for text in watch.note(GOOD, 1.0, memory, free)]

    [sentence] = run(20.0, 1000)
    assert re.search(r"grows by (19|20)\S* MiB a step, most of all that of actor 0 \(pid 7\)", sentence)
    assert "10000 MiB are left" in sentence
    assert not run(20.0, 400) and not run(0.0, 10**6)
    assert not run(20.0, 1000, **{"trainer.health.memory": None})
    assert growth([5.0] * 40) == 0 and growth([1.0, 2.0]) == 0 and growth([2.0 * n for n in range(40)]) == approx(2)
    assert growth([min(100.0 * n, 1000) for n in range(40)]) == 0, "a start is no leak"
    assert growth([0.0] * 15 + [500.0] * 25) == approx(0, abs=1e-9), "nor is what is taken once"


def test_a_monitor_goes_on_where_a_checkpoint_left_it():
    whole, first, second = (HealthMonitor(typed()) for _ in range(3))
    steps = [{**FAILED, "response_length/mean": 10.0 * 1.1**step} for step in range(40)]
    said_by_whole = [whole.note(step) for step in steps]
    said_by_parts = [first.note(step) for step in steps[:22]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    said_by_parts += [second.note(step) for step in steps[22:]]
    assert said_by_parts == said_by_whole and sum(map(len, said_by_whole)) == 2
    assert second.summary() == whole.summary() and second.state_dict() == whole.state_dict()


def test_groups_that_repeat_a_response_and_groups_without_advantage_are_counted():
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]])
    batch = DataProto.from_dict(
        {
            "responses": torch.tensor([[1, 2], [1, 2], [1, 0], [3, 4], [3, 5], [1, 2]]),
            "attention_mask": torch.cat([torch.ones(6, 1, dtype=torch.long), mask], 1),
            "response_mask": mask,
            "advantages": torch.tensor([[0.0, 0], [0, 0], [0, 0], [1, 1], [-1, -1], [0, 0]]),
            "token_level_scores": torch.zeros(6, 2),
        },
        non_tensors={"uid": np.array(["a", "a", "a", "b", "b", "alone"], dtype=object)},
    )
    metrics = signal_metrics(batch)
    assert metrics["batch/identical_responses"] == 2 / 5 and metrics["critic/groups_without_signal"] == 1 / 2


def test_every_limit_is_a_rule_and_an_unknown_rule_is_refused():
    assert "groups_without_sgnal" in problems("trainer.halt_on=[groups_without_sgnal]")
    assert not problems("trainer.halt_on=[truncation,memory,mismatch]")
    assert "trainer.health.kl_jump=null" in problems("trainer.halt_on=[kl_jump]", "trainer.health.kl_jump=null")
    assert set(HealthConfig()) < set(get_args(HealthRule))


def test_steps_need_not_follow_one_another():
    watch = HealthMonitor(typed())
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
        trainer__total_training_steps=7,
        trainer__logger="[file]",
        trainer__save_freq=2,
        trainer__halt_on="[constant_reward]",
        custom_reward_function__path=str(reward),
    )
    with pytest.raises(UnhealthyRun, match=r"step 6: trainer.halt_on=\[constant_reward\] ends the run.*global_step_6"):
        run_job(words)
    output = capfd.readouterr()
    assert "step 5: in 5 of the last 5 steps all responses to each prompt had the same reward (mean 0.5)" in (
        output.out + output.err
    )
    rows = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert all(row["batch/zero_std_ratio"] == 1 and row["batch/zero_advantage_ratio"] == 1 for row in rows[-5:])

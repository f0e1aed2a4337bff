"""The numbers a user compares between runs: closed forms, and the bootstrap against its definition written out."""

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    bootstrap_metric,
    calc_maj_val,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
)


def make_batch() -> DataProto:
    """Two rows; prompts of 2 and 3 tokens in a window of 3, responses of 4 and 2 in a window of 4."""
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])  # row 0 has a hole: a tool's answer
    columns = {
        "prompts": torch.tensor([[9, 1, 2], [1, 2, 3]]),
        "responses": torch.tensor([[4, 5, 6, 7], [4, 5, 9, 9]]),
        "attention_mask": attention,
        "response_mask": mask,
        "token_level_scores": torch.tensor([[0.0, 0, 0, 2], [0, 1, 0, 0]]),
        "token_level_rewards": torch.tensor([[-0.5, 0, 0, 2], [0, 1, 0, 0]]),
        "advantages": torch.tensor([[1.0, 2, 0, 3], [4, 5, 0, 0]]),
        "returns": torch.tensor([[1.0, 2, 0, 3], [4, 5, 0, 0]]),
        "values": torch.tensor([[1.0, 2, 100, 3], [4, 5, 0, 0]]),
    }
    return DataProto.from_dict(tensors=columns, meta_info={"global_token_num": [6, 5]})


def test_scores_are_summed_over_a_response_and_advantages_taken_where_the_mask_is_one():
    metrics = compute_data_metrics(make_batch(), use_critic=True)
    expected = {
        "critic/score/mean": 1.5,
        "critic/score/max": 2,
        "critic/score/min": 1,
        "critic/rewards/mean": 1.25,
        "critic/rewards/max": 1.5,
        "critic/rewards/min": 1,
        "critic/advantages/mean": 3,
        "critic/advantages/max": 5,
        "critic/advantages/min": 1,
        "critic/values/max": 5,
        "critic/vf_explained_var": 1,
        "response_length/mean": 3,
        "response_length/max": 4,
        "response_length/min": 2,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 2.5,
        "prompt_length/clip_ratio": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_metrics_of_the_critic_are_left_out_without_one():
    batch = make_batch()
    batch.pop(batch_keys=["values"])
    metrics = compute_data_metrics(batch, use_critic=False)
    assert not any(name.startswith(("critic/values", "critic/vf")) for name in metrics)
    assert "num_turns/mean" not in metrics


def test_turns_are_counted_when_the_batch_has_them():
    batch = make_batch()
    batch.non_tensor_batch["__num_turns__"] = np.array([2, 5])
    metrics = compute_data_metrics(batch)
    assert (metrics["num_turns/min"], metrics["num_turns/mean"], metrics["num_turns/max"]) == (2, 3.5, 5)


def groups_of(scores, advantages=None, finish=None):
    """Rows of one token, two a group, with these scores."""
    ones = torch.ones(len(scores), 1)
    columns = {
        "responses": torch.full((len(scores), 1), 4),
        "attention_mask": torch.ones(len(scores), 2, dtype=torch.long),
        "response_mask": ones.long(),
        "token_level_scores": torch.tensor(scores).unsqueeze(-1),
        "token_level_rewards": torch.tensor(scores).unsqueeze(-1),
        "advantages": ones if advantages is None else torch.tensor(advantages).unsqueeze(-1),
        "returns": ones,
    }
    objects = {"uid": np.array([f"u{i // 2}" for i in range(len(scores))], dtype=object)}
    if finish is not None:
        objects["finish_reason"] = np.array(finish, dtype=object)
    return DataProto.from_dict(tensors=columns, non_tensors=objects)


def test_what_a_batch_teaches_is_counted_by_groups_and_by_responses():
    scores = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.5, -1.0, -1.0]  # solved, failed, mixed, equal, failed
    advantages = [0.0] * 4 + [-1.0, 1.0] + [0.0] * 4
    batch = groups_of(scores, advantages, ["length"] * 3 + ["stop"] * 7)
    metrics = compute_data_metrics(batch, use_critic=False)
    expected = {
        "batch/solve_all": 1,
        "batch/solve_none": 2,
        "batch/zero_std_ratio": 0.8,
        "batch/zero_advantage_ratio": 0.8,
        "batch/truncated_ratio": 0.3,
        "batch/token_ratio": 1,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_without_groups_nothing_is_said_of_their_spread_and_a_masked_response_teaches_nothing():
    metrics = compute_data_metrics(make_batch())
    assert "batch/zero_std_ratio" not in metrics and metrics["batch/token_ratio"] == pytest.approx(5 / 6)
    batch = groups_of([1.0, 0.0])
    batch.put("response_mask", torch.tensor([[0], [0]]))
    metrics = compute_data_metrics(batch, use_critic=False)
    assert metrics["batch/zero_advantage_ratio"] == 1 and metrics["batch/token_ratio"] == 0


def test_generation_time_is_divided_by_response_tokens_and_updates_by_all_tokens():
    metrics = compute_timing_metrics(make_batch(), {"gen": 0.6, "update_actor": 1.1, "step": 2.0})
    assert metrics["timing_s/step"] == 2.0
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(100)
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(100)
    assert "timing_per_token_ms/step" not in metrics


def test_throughput_is_tokens_per_second_and_device():
    metrics = compute_throughout_metrics(make_batch(), {"step": 2.0}, n_gpus=2)
    assert metrics == {"perf/total_num_tokens": 11, "perf/time_per_step": 2.0, "perf/throughput": 2.75}


def bootstrap_by_definition(data, k, reduce, resamples=1000, seed=42):
    random = np.random.RandomState(seed)
    results = [reduce([data[i] for i in random.choice(len(data), k, replace=True)]) for _ in range(resamples)]
    return np.mean(results), np.std(results)


@pytest.mark.parametrize("reduce", [np.max, np.min, np.mean, np.median])
@pytest.mark.parametrize("n, k", [(4, 2), (8, 8), (70, 3)])
def test_bootstrap_equals_its_definition(reduce, n, k):
    data = np.random.RandomState(0).rand(n).tolist()
    assert bootstrap_metric(data, k, [reduce])[0] == pytest.approx(bootstrap_by_definition(data, k, reduce))


def test_majority_is_the_most_frequent_answer_and_the_first_of_equals():
    votes = [{"pred": p, "val": v} for p, v in [("b", 0.1), ("a", 0.2), ("a", 0.3), ("b", 0.4)]]
    assert calc_maj_val(votes, "pred", "val") == 0.1
    assert calc_maj_val(votes[1:], "pred", "val") == 0.2


@pytest.mark.parametrize("n", [2, 5, 8, 16, 20, 46, 65])
def test_validation_metrics_equal_the_prompt_by_prompt_definition(n):
    random = np.random.RandomState(1)
    scores = random.randint(0, 2, size=(3, n)) + random.rand(3, n).round(1)
    preds = random.choice(list("abc"), size=(3, n))
    order = random.permutation(3 * n)  # samples of a prompt need not be neighbours
    result = process_validation_metrics(
        ["gsm8k"] * (3 * n),
        np.repeat(["p", "q", "r"], n)[order].tolist(),
        {"reward": scores.reshape(-1)[order].tolist(), "pred": preds.reshape(-1)[order].tolist()},
    )
    assert set(result["gsm8k"]) == {"reward"}
    metrics = result["gsm8k"]["reward"]
    rows = [[j for j in order if j // n == q] for q in range(3)]  # each prompt's samples in the order they come
    flat, flat_preds = scores.reshape(-1), preds.reshape(-1)
    assert metrics[f"mean@{n}"] == pytest.approx(flat.mean())
    assert metrics[f"std@{n}"] == pytest.approx(np.mean([flat[row].std() for row in rows]))
    for k in {2, n}:
        for name, reduce in (("best", np.max), ("worst", np.min)):
            by_prompt = [bootstrap_by_definition(flat[row].tolist(), k, reduce) for row in rows]
            mean, std = np.mean(by_prompt, axis=0)
            assert metrics[f"{name}@{k}/mean"] == pytest.approx(mean)
            assert metrics[f"{name}@{k}/std"] == pytest.approx(std)
        by_prompt = [
            bootstrap_by_definition(
                [{"val": flat[j], "pred": flat_preds[j]} for j in row], k, lambda d: calc_maj_val(d, "pred", "val")
            )
            for row in rows
        ]
        mean, std = np.mean(by_prompt, axis=0)
        assert metrics[f"maj@{k}/mean"] == pytest.approx(mean)
        assert metrics[f"maj@{k}/std"] == pytest.approx(std)


def test_validation_metrics_are_the_same_every_time_and_move_with_the_seed():
    random = np.random.RandomState(3)
    columns = {"reward": random.rand(40).tolist(), "pred": random.choice(list("ab"), 40).tolist()}
    samples = (["s"] * 40, np.repeat(np.arange(5), 8).tolist(), columns)
    first, again, other = (process_validation_metrics(*samples, seed=seed) for seed in (42, 42, 43))
    assert first == again != other
    assert first["s"]["reward"]["maj@8/mean"] != other["s"]["reward"]["maj@8/mean"]


def test_subset_sizes_double_up_to_the_number_of_samples():
    result = process_validation_metrics(["s"] * 6, ["p"] * 6, {"reward": [0, 1, 0, 1, 1, 1]})
    names = {name for name in result["s"]["reward"] if name.startswith("best")}
    assert names == {f"best@{k}/{stat}" for k in (2, 4, 6) for stat in ("mean", "std")}


def test_one_sample_a_prompt_gives_the_mean_only():
    result = process_validation_metrics(["s", "s", "t"], ["p", "q", "p"], {"reward": [0.0, 1.0, 5.0], "acc": [1, 1, 0]})
    assert result == {
        "s": {"reward": {"mean@1": 0.5}, "acc": {"mean@1": 1.0}},
        "t": {"reward": {"mean@1": 5.0}, "acc": {"mean@1": 0.0}},
    }


def test_prompts_with_different_numbers_of_samples_are_averaged_by_metric():
    result = process_validation_metrics(["s"] * 3, ["p", "p", "q"], {"reward": [0.0, 1.0, 4.0]})
    assert result["s"]["reward"]["mean@2"] == 0.5
    assert result["s"]["reward"]["mean@1"] == 4.0


def test_a_variable_gives_metrics_where_it_is_a_number_for_every_sample():
    result = process_validation_metrics(
        ["s", "s", "t"],
        ["p", "q", "p"],
        {"reward": [1, True, np.float32(2)], "note": ["a", "b", "c"], "acc": [1, None, 0.5], "pred": [None, None, "x"]},
    )
    assert {source: set(variables) for source, variables in result.items()} == {"s": {"reward"}, "t": {"reward", "acc"}}

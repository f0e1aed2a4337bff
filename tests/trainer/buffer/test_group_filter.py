"""Dynamic sampling: a step trains on groups that differ in reward, and every prompt is sampled until it was judged."""

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs import make_task, overrides, read_metrics, run_job
from tests.trainer.buffer import over_sampling_job
from tests.trainer.buffer.test_prompt_pool import loader, numbers
from tests.trainer.test_resume import assert_same_checkpoint
from tests.trainer.test_resume import numbers as of_metrics
from verl.config.algorithm import FilterGroupsConfig
from verl.protocol import DataProto
from verl.trainer.buffer.prompt_pool import GroupFilter, PoolEntry, PromptPool, metric_values, varying_groups

# -- which groups vary ------------------------------------------------------------------------------------------------


def responses(scores, uids=None, **extra):
    """A batch of responses of two tokens whose rewards sum to ``scores``."""
    rewards = torch.tensor([[0.25, score - 0.25] for score in scores])
    columns = {name: np.array(values, dtype=object) for name, values in extra.items()}
    columns["uid"] = np.array(["a"] * len(scores) if uids is None else uids, dtype=object)
    batch = DataProto.from_dict({"responses": torch.ones_like(rewards).long()}, columns)
    batch.put("token_level_scores", rewards)
    batch.meta_info["reward_extra_keys"] = list(extra)
    return batch


def test_groups_vary_if_any_response_does_wherever_its_row_stands():
    uids = ["a", "b", "c", "a", "b", "c", "a"]
    assert varying_groups(uids, np.array([1.0, 0.5, 2.0, 1.0, 0.25, 2.0, 0.0])) == {"a": True, "b": True, "c": False}
    assert varying_groups(["one"], np.array([1.0])) == {"one": False}


def test_equal_values_do_not_vary_by_rounding():
    tenths = np.full(3, 0.1)
    assert tenths.std() > 0 and varying_groups(["a"] * 3, tenths) == {"a": False}


def test_metrics_are_what_the_function_returned_or_the_sum_of_rewards():
    alone = responses([1.0, 0.5])
    assert all(metric_values(alone, name).tolist() == [1.0, 0.5] for name in ("seq_reward", "acc", "score"))
    mixed = responses([1.0, 0.5], acc=[True, True], reward_error=[0.0, 0.0])
    assert metric_values(mixed, "acc").tolist() == [1.0, 1.0]
    assert metric_values(mixed, "seq_final_reward").tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("extra", "metric", "said"),
    [({"pred": [1, 2]}, "acc", "use seq_reward, or one it returns: pred"), ({}, "f1", "it returned the score alone"),
     ({"acc": ["x", "y"]}, "acc", "must be finite numbers"), ({"acc": [1.0, float("nan")]}, "acc", "row 1"),
     ({"acc": [1.0, None]}, "acc", "must be finite numbers")],
)  # fmt: skip
def test_a_metric_that_is_no_number_is_named(extra, metric, said):
    with pytest.raises(ValueError, match="algorithm.filter_groups.metric") as error:
        metric_values(responses([1.0, 0.5], **extra), metric)
    assert said.lower() in str(error.value).lower()


# -- prompts ----------------------------------------------------------------------------------------------------------


def chooser(pool, batch_size, gen_batch_size, bound=0, say=print):
    config = FilterGroupsConfig(metric="seq_reward", max_num_gen_batches=bound)
    return GroupFilter(config, pool, batch_size, gen_batch_size, say)


def answered(prompts, is_good):
    """Two responses to each prompt, which differ where ``is_good(its index)``."""
    rows = prompts.repeat(2, interleave=True)
    scores = [1.0 if row % 2 and is_good(index) else 0.0 for row, index in enumerate(numbers(rows))]
    rows.put("responses", torch.ones(len(rows), 1).long())
    rows.put("token_level_scores", torch.tensor(scores)[:, None])
    return rows


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_no_prompt_is_lost_or_trained_on_twice_in_an_epoch(data):
    gen_batch_size, batch_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rows = gen_batch_size * data.draw(st.integers(1, 4))
    good = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    pool, trained = PromptPool(loader(rows, gen_batch_size)), []
    for step in range(1, 7):
        chosen = chooser(pool, batch_size, gen_batch_size)
        while not chosen.add(answered(chosen.take(step), good.__contains__), step):
            pass
        batch, metrics = chosen.finish()
        assert len(batch) == 2 * batch_size and metrics["filter_groups/kept"] == batch_size
        assert metrics["filter_groups/surplus"] == pool.num_deferred == len(pool.entries)
        seen = metrics["filter_groups/kept"] + metrics["filter_groups/dropped"] + metrics["filter_groups/surplus"]
        assert seen == gen_batch_size * metrics["train/num_gen_batches"]
        trained += numbers(batch)[::2]
        if data.draw(st.booleans()):  # a restart
            state = pickle.loads(pickle.dumps((pool.state(), pool.loader.state_dict())))
            pool = PromptPool(loader(rows, gen_batch_size))
            pool.load_state(*state[0])
            pool.loader.load_state_dict(state[1])
    left = numbers(pool.take(pool.num_deferred, 99)) if pool.num_deferred else []
    assert set(trained + left) <= good
    times = np.bincount(trained + left, minlength=rows)[sorted(good)]
    assert times.max() - times.min() <= 1


def test_surplus_prompts_come_first_with_their_names_and_places():
    pool = PromptPool(loader(8, 4))
    chosen = chooser(pool, 2, 4)
    prompts = chosen.take(1)
    assert chosen.add(answered(prompts, lambda index: True), 1)
    batch, _ = chosen.finish()
    assert list(batch.non_tensor_batch["uid"]) == ["step1-0", "step1-0", "step1-1", "step1-1"]
    again = chosen.take(2)
    assert list(again.non_tensor_batch["uid"]) == ["step1-2", "step1-3", "step2-0", "step2-1"]
    assert numbers(again)[:2] == numbers(prompts)[2:] and pool.entries["step1-2"] == PoolEntry(1, 2, deferrals=0)
    chosen.add(answered(again, lambda index: False), 2)
    assert list(chosen.take(2).non_tensor_batch["uid"]) == [f"step2-{i}" for i in range(2, 6)]


def test_the_bound_is_an_error_that_counts_and_no_bound_a_reminder():
    said = []
    chosen = chooser(PromptPool(loader(4, 4)), 4, 4, bound=3)
    draw = lambda good: chosen.add(answered(chosen.take(7), good), 7)  # noqa: E731
    assert not draw(lambda index: False) and not draw(lambda index: index < 3)
    with pytest.raises(
        ValueError, match=r"batches=3: .* step 7, .* 3 batches of 4 .* to 3 differ .* 0.125; .* needs 4"
    ):
        draw(lambda index: False)
    chosen = chooser(PromptPool(loader(8, 4)), 2, 4, say=said.append)
    for _ in range(20):
        assert not draw(lambda index: False)
    assert len(said) == 2 and "step 7: in 20 batches" in said[1]


def test_a_value_that_only_some_rewards_have_is_none_in_the_others():
    chosen = chooser(PromptPool(loader(4, 4)), 4, 4)
    for step, extra in ((1, {}), (1, {"why": "so"})):
        rows = answered(chosen.take(step), lambda index: index % 2)
        rows.non_tensor_batch |= {name: np.full(len(rows), value, dtype=object) for name, value in extra.items()}
        rows.meta_info["reward_extra_keys"] = list(extra)
        chosen.add(rows, step)
    batch, _ = chosen.finish()
    assert list(batch.non_tensor_batch["why"]) == [None] * 4 + ["so"] * 4
    assert batch.meta_info["reward_extra_keys"] == ["why"]


# -- whole runs -------------------------------------------------------------------------------------------------------

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = extra_info["index"] % 3 != 0 and len(solution_str) > 0 and solution_str[0] > "P"
    return {"score": float(right) + len(solution_str) / 100, "acc": right}
"""
FILTERED = {
    "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__metric": "acc",
    "data__gen_batch_size": 3,
    "trainer__logger": "[file]",
    "trainer__total_training_steps": 4,
    "trainer__save_freq": 1,
}
ASYNC = {"actor_rollout_ref__rollout__mode": "async"}


def run(tmp_path, monkeypatch, name, job=run_job, **settings):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.jsonl"))
    task = make_task(tmp_path / "task", rows=12)
    (tmp_path / "task" / "reward.py").write_text(REWARD)
    folders = {
        "trainer__default_local_dir": str(tmp_path / name),
        "trainer__rollout_data_dir": str(tmp_path / f"{name}_dump"),
    }
    job(overrides(task, **{**FILTERED, **folders, **settings}))
    return {row["step"]: row["data"] for row in read_metrics(tmp_path / f"{name}.jsonl")}


def dumped(tmp_path, name, step):
    lines = (tmp_path / f"{name}_dump" / f"{step}.jsonl").read_text().splitlines()
    return [(row["input"], row["output"], row["acc"]) for row in map(json.loads, lines)]


def deterministic(metrics):
    clocks = ("rollout/bubble", "rollout/idle", "rollout/waiting")
    return {name: value for name, value in of_metrics(metrics).items() if not name.startswith(clocks)}


@pytest.mark.parametrize("mode", [{}, ASYNC], ids=["sync", "async"])
def test_a_resumed_run_equals_the_run_never_stopped(tmp_path, monkeypatch, mode):
    job = over_sampling_job.run if mode else run_job
    whole = run(tmp_path, monkeypatch, "whole", job, **mode)
    rows = dumped(tmp_path, "whole", 1)
    assert len(rows) == 16 and all(0 < sum(acc for *_, acc in rows[i : i + 4]) < 4 for i in range(0, 16, 4))
    assert sum(step["filter_groups/dropped"] for step in whole.values()) > 0
    assert sum(step["filter_groups/surplus"] for step in whole.values()) > 0
    source = next(step for step in (3, 2, 1) if whole[step]["filter_groups/surplus"])
    path = tmp_path / "whole" / f"global_step_{source}"
    resume = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(path)}
    resumed = run(tmp_path, monkeypatch, "resumed", job, **mode, **resume)
    assert sorted(resumed) == list(range(source + 1, 5))
    assert all(deterministic(resumed[step]) == deterministic(whole[step]) for step in resumed)
    assert all(dumped(tmp_path, "resumed", step) == dumped(tmp_path, "whole", step) for step in resumed)
    assert_same_checkpoint(*(tmp_path / name / "global_step_4" for name in ("whole", "resumed")))


def test_a_run_that_cannot_fill_its_batch_stops_with_a_way_out(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="max_num_gen_batches=1: no more may be sampled for step 1"):
        run(tmp_path, monkeypatch, "bounded", algorithm__filter_groups__max_num_gen_batches=1)


def test_a_run_whose_groups_all_differ_is_the_run_without_the_filter(tmp_path, monkeypatch):
    same = {"data__gen_batch_size": 4, "algorithm__filter_groups__metric": "seq_reward", "trainer__save_freq": -1}
    rewards = {"custom_reward_function__path": str(tmp_path / "lengths.py"), "trainer__total_training_steps": 2}
    (tmp_path / "lengths.py").write_text("def compute_score(solution_str, **_):\n    return hash_of(solution_str)\n"
                                         "def hash_of(text):\n    return sum(map(ord, text)) % 97 / 97\n")  # fmt: skip
    one = run(tmp_path, monkeypatch, "filtered", **same, **rewards)
    other = run(tmp_path, monkeypatch, "plain", **same, **rewards, algorithm__filter_groups__enable=False)
    mine = [n for n in one[1] if n.startswith("filter_groups/")] + ["train/num_gen_batches"]
    for step in (1, 2):
        assert one[step]["filter_groups/dropped"] == one[step]["filter_groups/surplus"] == 0
        assert {k: v for k, v in of_metrics(one[step]).items() if k not in mine} == of_metrics(other[step])

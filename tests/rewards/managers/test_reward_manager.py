import asyncio
import math

import numpy as np
import pytest
import torch

from tests.rewards.managers.batches import RESPONSE_LENGTH, TOKENIZER, batch_of
from tests.support.waiting import wait_for
from verl.rewards.managers import (
    AbstractRewardManager,
    BatchRewardManager,
    NaiveRewardManager,
    RewardError,
    get_reward_manager_cls,
    register,
)
from verl.rewards.managers.rule import SlowCallWatch


def naive(function=None, num_examine=0, **kwargs) -> NaiveRewardManager:
    return NaiveRewardManager(TOKENIZER, num_examine, function, **kwargs)


def scores(rewards: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in rewards.sum(-1).tolist()]


def test_the_score_stands_on_the_last_token_of_each_response_and_nowhere_else():
    rewards = naive()(batch_of(["1", "12345", "x" * (RESPONSE_LENGTH - 1)]))
    assert rewards.shape == (3, RESPONSE_LENGTH) and rewards.dtype == torch.float32
    expected = torch.zeros(3, RESPONSE_LENGTH)
    expected[0, 1], expected[1, 5] = 0.2, 1.0  # the last token is the EOS
    assert torch.equal(rewards, expected)


def test_an_empty_response_is_scored_on_its_first_place():
    rewards = naive(lambda **kwargs: 1.0)(batch_of(["", "1"]))
    assert rewards.nonzero().tolist() == [[0, 0], [1, 1]]


def test_packed_and_padded_batches_score_alike():
    data = batch_of(["1", "12345", "abc"])
    assert torch.equal(naive()(data), naive()(data.packed()))


def test_the_function_gets_text_goal_and_a_copy_of_extra_info_with_turns():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        calls.append((data_source, solution_str, ground_truth, dict(extra_info)))
        extra_info["index"] = "changed"
        return 0

    data = batch_of(["a", "b"], truths=[{"target": [1]}, "7"], source=["s", "t"], __num_turns__=[2, 4])
    naive(compute_score)(data)
    assert calls == [
        ("s", "a", {"target": [1]}, {"index": 100, "num_turns": 2}),
        ("t", "b", "7", {"index": 101, "num_turns": 4}),
    ]
    assert data.non_tensor_batch["extra_info"][0] == {"index": 100}


def test_a_function_gets_what_tools_said_of_the_conversation_under_verls_name():
    data = batch_of(["a", "b"], reward_scores=[{"calc": 1.0}, None])
    seen = []
    naive(lambda extra_info, **kwargs: seen.append(extra_info) or 0.0)(data)
    assert [info["rollout_reward_scores"] for info in seen] == [{"calc": 1.0}, {}]


def test_reward_kwargs_reach_every_call():
    manager = naive(lambda solution_str, weight, **kwargs: weight * len(solution_str), weight=2)
    assert scores(manager(batch_of(["a", "abc"]))) == [2.0, 6.0]


@pytest.mark.parametrize(
    "result", [1, True, 1.0, np.float32(1), np.bool_(True), torch.tensor(1.0), np.array([1.0]), {"score": 1}]
)
def test_numbers_of_every_kind_are_scores(result):
    assert scores(naive(lambda **kwargs: result)(batch_of(["a"]))) == [1.0]


def test_dict_results_become_columns_of_full_length():
    def compute_score(solution_str, **kwargs):
        return {"score": 1.0, "acc": True, "pred": solution_str} if solution_str == "a" else 0.5

    result = naive(compute_score)(batch_of(["a", "b"]), return_dict=True)
    assert scores(result["reward_tensor"]) == [1.0, 0.5]
    assert result["reward_extra_info"] == {"score": [1.0, 0.5], "acc": [True, None], "pred": ["a", None]}


def test_plain_results_have_no_extra_columns():
    assert naive()(batch_of(["1"]), return_dict=True)["reward_extra_info"] == {}


def broken(solution_str, **kwargs):
    if solution_str == "bad":
        raise KeyError("no such key")
    return 1.0


def test_an_error_of_the_function_stops_with_everything_named():
    with pytest.raises(RewardError) as error:
        naive(broken)(batch_of(["a", "bad"], truths=["5", "goal"]))
    text = str(error.value)
    parts = (
        "broken",
        __file__,
        "sample 1 of the batch",
        "data_source='digits'",
        "index=101",
        "KeyError: 'no such key'",
    )
    for part in (
        *parts,
        "response: 'bad'",
        "ground_truth: 'goal'",
        'raise KeyError("no such key")',
        "on_error=zero_and",
    ):
        assert part in text


def test_zero_and_count_goes_on_and_counts(caplog):
    result = naive(broken, on_error="zero_and_count")(batch_of(["a", "bad", "c"]), return_dict=True)
    assert scores(result["reward_tensor"]) == [1.0, 0.0, 1.0]
    assert result["reward_extra_info"]["reward_error"] == [0.0, 1.0, 0.0]
    assert "failed on 1 of 3 samples" in caplog.text and "KeyError" in caplog.text


def test_zero_and_count_reports_the_column_when_nothing_failed():
    result = naive(broken, on_error="zero_and_count")(batch_of(["a"]), return_dict=True)
    assert result["reward_extra_info"]["reward_error"] == [0.0]


@pytest.mark.parametrize(
    "result, reason",
    [
        (math.nan, "returned nan; a score must be finite"),
        (math.inf, "returned inf"),
        ("1.0", "returned '1.0' of type str"),
        (None, "returned None of type NoneType"),
        ((1.0, {}), "of type tuple"),
        ({"acc": 1}, "a dict without 'score'; its keys are acc"),
        ({"score": math.nan}, "returned nan"),
        (np.zeros(2), "of type ndarray"),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "zero_and_count"])
def test_what_is_no_finite_number_is_an_error_and_never_a_silent_zero(result, reason, on_error, caplog):
    manager = naive(lambda **kwargs: result, on_error=on_error)
    if on_error == "stop":
        with pytest.raises(RewardError, match="sample 0") as error:
            manager(batch_of(["a"]))
        assert reason in str(error.value)
    else:
        assert manager(batch_of(["a"]), return_dict=True)["reward_extra_info"]["reward_error"] == [1.0]
        assert reason in caplog.text


def test_sys_exit_in_the_function_is_an_error_like_any_other():
    def leave(**kwargs):
        raise SystemExit(0)

    async def leave_later(**kwargs):
        raise SystemExit(0)

    for function in (leave, leave_later):
        with pytest.raises(RewardError, match="SystemExit"):
            naive(function)(batch_of(["a"]))


def test_unknown_on_error_is_refused():
    with pytest.raises(ValueError, match="on_error='ignore' is not known: use stop, zero_and_count, drop"):
        naive(on_error="ignore")


def test_async_functions_are_awaited_together_and_keep_their_order():
    running, most = 0, 0

    async def compute_score(solution_str, **kwargs):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 * (4 - len(solution_str)))
        running -= 1
        return float(len(solution_str))

    assert scores(naive(compute_score, max_concurrent=2)(batch_of(["a", "ab", "abc"]))) == [1.0, 2.0, 3.0]
    assert most == 2


def test_async_functions_may_keep_a_session_between_batches_and_run_inside_a_loop():
    lock = asyncio.Lock()

    async def compute_score(**kwargs):
        async with lock:
            await asyncio.sleep(0)
        return 1.0

    manager = naive(compute_score)

    async def inside():
        return manager(batch_of(["a", "b", "c"]))

    assert scores(manager(batch_of(["a", "b"]))) == [1.0, 1.0]
    assert scores(asyncio.run(inside())) == [1.0, 1.0, 1.0]


def test_an_async_error_names_its_own_sample():
    async def compute_score(solution_str, **kwargs):
        await asyncio.sleep(0)
        return broken(solution_str)

    with pytest.raises(RewardError, match="sample 1 of the batch"):
        naive(compute_score)(batch_of(["a", "bad"]))


def test_rm_scores_are_returned_unchanged():
    data = batch_of(["a", "b"])
    data.put("rm_scores", torch.arange(2.0 * RESPONSE_LENGTH).view(2, -1))
    assert torch.equal(naive(broken)(data), data.column("rm_scores"))
    assert torch.equal(naive(broken)(data, return_dict=True)["reward_tensor"], data.column("rm_scores"))


def test_num_examine_prints_that_many_of_each_data_source(capsys):
    naive(num_examine=1, function=lambda **kwargs: {"score": 1, "acc": 0})(
        batch_of(["a", "b", "c"], source=["s", "s", "t"])
    )
    out = capsys.readouterr().out
    assert out.count("[prompt] q") == 2
    assert [line for line in out.splitlines() if line.startswith("[response]")] == ["[response] a", "[response] c"]
    assert "[ground_truth] 5" in out and "[score] 1.0" in out and "[acc] 0" in out


def test_responses_are_decoded_in_one_call_and_prompts_not_at_all():
    class Counting:
        calls = 0

        def batch_decode(self, ids, **kwargs):
            self.calls += 1
            return TOKENIZER.batch_decode(ids, **kwargs)

    counting = Counting()
    NaiveRewardManager(counting, 0)(batch_of(["a", "b", "c"]))
    assert counting.calls == 1


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_a_missing_column_is_named_with_those_there_are(column):
    data = batch_of(["a"])
    data.pop(non_tensor_batch_keys=[column])
    with pytest.raises(RewardError, match=rf"no column '{column}'.*extra_info"):
        naive()(data)


def test_a_row_without_ground_truth_is_named():
    data = batch_of(["a", "b"])
    data.non_tensor_batch["reward_model"][1] = {"style": "rule"}
    with pytest.raises(RewardError, match="Sample 1 .*holds no ground_truth"):
        naive()(data)


def test_batch_function_is_called_once_with_lists():
    calls = []

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, factor):
        calls.append((data_sources, solution_strs, ground_truths, [info["index"] for info in extra_infos]))
        return [{"score": factor * len(text), "acc": 1} for text in solution_strs]

    manager = BatchRewardManager(TOKENIZER, 0, compute_score, factor=2)
    result = manager(batch_of(["a", "abc"]), return_dict=True)
    assert calls == [(["digits"] * 2, ["a", "abc"], ["5", "5"], [100, 101])]
    assert scores(result["reward_tensor"]) == [2.0, 6.0] and result["reward_extra_info"]["acc"] == [1, 1]


@pytest.mark.parametrize("wrap", [list, tuple, np.array, torch.tensor])
def test_batch_results_may_be_any_sequence(wrap):
    manager = BatchRewardManager(TOKENIZER, 0, lambda **kwargs: wrap([0.5, 1.0]))
    assert scores(manager(batch_of(["a", "b"]))) == [0.5, 1.0]


def test_async_batch_function_is_awaited():
    async def compute_score(solution_strs, **kwargs):
        await asyncio.sleep(0)
        return [1.0] * len(solution_strs)

    assert scores(BatchRewardManager(TOKENIZER, 0, compute_score)(batch_of(["a", "b"]))) == [1.0, 1.0]


def test_batch_result_of_another_length_is_an_error():
    with pytest.raises(RewardError, match="returned 1 scores for 2 responses"):
        BatchRewardManager(TOKENIZER, 0, lambda **kwargs: [1.0])(batch_of(["a", "b"]))
    counted = BatchRewardManager(TOKENIZER, 0, lambda **kwargs: 1 / 0, on_error="zero_and_count")
    assert counted(batch_of(["a", "b"]), return_dict=True)["reward_extra_info"]["reward_error"] == [1.0, 1.0]


def test_a_function_that_cannot_be_called_is_found_before_training():
    with pytest.raises(
        TypeError, match=r"parameters \(answer, truth\) and is called with the keywords data_source, sol"
    ):
        naive(lambda answer, truth: 1.0)
    with pytest.raises(TypeError, match="reward_model.reward_manager=batch: set that"):
        naive(lambda data_sources, solution_strs, ground_truths, extra_infos: [1.0])
    with pytest.raises(TypeError, match="reward_model.reward_manager=naive: set that"):
        BatchRewardManager(TOKENIZER, 0)


def test_registry_knows_its_names_and_suggests_the_nearest():
    assert (
        get_reward_manager_cls("naive") is NaiveRewardManager and get_reward_manager_cls("batch") is BatchRewardManager
    )
    with pytest.raises(ValueError, match="'niave' is not known; known are .*Did you mean 'naive'"):
        get_reward_manager_cls("niave")


def test_a_users_manager_is_found_by_its_name_and_a_taken_name_is_refused():
    @register("test_only_constant")
    class Constant(AbstractRewardManager):
        def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **reward_kwargs):
            pass

        def __call__(self, data, return_dict=False):
            return torch.ones(len(data), RESPONSE_LENGTH)

    assert get_reward_manager_cls("test_only_constant") is Constant
    with pytest.raises(ValueError, match="'naive' belongs to verl.rewards.managers.built_in.NaiveRewardManager"):
        register("naive")(Constant)


def test_the_watch_says_which_call_takes_long(caplog):
    with SlowCallWatch(lambda key: f"sample {key}", every_s=0.02) as watch:
        with watch.call(0):
            pass
        with watch.call(7):
            wait_for(lambda: "has been at sample 7" in caplog.text, "the line")
    assert "sample 0" not in caplog.text
    assert "test_the_watch_says_which_call_takes_long" in caplog.text

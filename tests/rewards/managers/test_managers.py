"""The managers other than naive and batch, and functions chosen by data source."""

import threading

import pytest

from tests.rewards.managers.batches import TOKENIZER, batch_of
from tests.rewards.managers.test_scoring import config, write
from verl.config.reward import RewardSandboxConfig
from verl.rewards.functions.calling import BySource
from verl.rewards.managers import DAPORewardManager, PrimeRewardManager, RewardError, get_reward_manager_cls
from verl.rewards.managers.scoring import compute_reward, load_reward_manager


def scores(tensor):
    return [round(value, 6) for value in tensor.sum(-1).tolist()]


BUFFER = {"enable": True, "len": 8, "penalty_factor": 2.0, "log": True}


def test_dapo_charges_the_part_of_the_buffer_that_was_used():
    manager = DAPORewardManager(TOKENIZER, 0, lambda **kwargs: 1.0, max_resp_len=12, overlong_buffer_cfg=BUFFER)
    result = manager(batch_of(["a", "abc", "abcdefg", "abcdefghijk"]), return_dict=True)  # 2, 4, 8, 12 tokens
    assert scores(result["reward_tensor"]) == [1.0, 1.0, 0.0, -1.0]
    assert result["reward_extra_info"]["overlong_reward"] == [0.0, 0.0, -1.0, -2.0]
    assert result["reward_extra_info"]["overlong"] == [False, False, True, True]


def test_dapo_without_buffer_is_naive():
    manager = DAPORewardManager(TOKENIZER, 0, lambda **kwargs: 1.0)
    result = manager(batch_of(["abcdefghijk"]), return_dict=True)
    assert scores(result["reward_tensor"]) == [1.0] and result["reward_extra_info"] == {}


def test_dapo_charges_no_failed_sample():
    manager = DAPORewardManager(
        TOKENIZER, 0, lambda **kwargs: None, max_resp_len=4, overlong_buffer_cfg=BUFFER | {"len": 4},
        on_error="zero_and_count",
    )  # fmt: skip
    assert scores(manager(batch_of(["abcdefghijk"]))) == [0.0]


@pytest.mark.parametrize(
    "options", [{}, {"max_resp_len": 4}, {"max_resp_len": 8, "overlong_buffer_cfg": {"enable": 1}}]
)
def test_dapo_refuses_a_buffer_that_has_no_place(options):
    with pytest.raises(ValueError, match="0 < len <= max_resp_len"):
        DAPORewardManager(TOKENIZER, 0, None, **{"overlong_buffer_cfg": BUFFER, **options})


def test_dapo_refuses_a_misspelt_key():
    with pytest.raises(ValueError, match="has lenght; known are"):
        DAPORewardManager(TOKENIZER, 0, None, max_resp_len=8, overlong_buffer_cfg={"enable": False, "lenght": 4})


def test_prime_calls_side_by_side_and_by_place_where_names_differ():
    together = threading.Barrier(3, timeout=20)

    def judge(source, text, truth, info):
        together.wait()
        return float(len(text)) + (truth == "5") + (source == "digits")

    manager = PrimeRewardManager(TOKENIZER, 0, judge, num_processes=3)
    assert scores(manager(batch_of(["a", "ab", "abc"]))) == [3.0, 4.0, 5.0]


def test_prime_shares_the_samples_among_processes(tmp_path):
    path = write(
        tmp_path,
        "import time\ndef compute_score(solution_str, **kwargs):\n    begin = time.monotonic()\n    time.sleep(0.05)\n"
        "    return {'score': len(solution_str), 'begin': begin, 'end': time.monotonic()}\n",
    )
    settings = config(path, reward_manager="prime", sandbox=RewardSandboxConfig(workers=3))
    manager = load_reward_manager(settings, TOKENIZER, 0)
    assert type(manager) is get_reward_manager_cls("prime")
    assert scores(compute_reward(batch_of(["a"]), manager)[0]) == [1.0]
    result, extra = compute_reward(batch_of(["x" * (i % 5) for i in range(60)]), manager)
    calls = list(zip(extra["begin"], extra["end"], strict=True))
    at_once = [sum(begin <= moment < end for begin, end in calls) for moment, _ in calls]
    assert 2 <= max(at_once) <= 3
    assert scores(result) == [float(i % 5) for i in range(60)]


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_do_not_depend_on_the_worker(tmp_path, workers):
    path = write(
        tmp_path,
        "import random\ndef compute_score(solution_str, **kwargs):\n"
        "    return {'score': random.random(), 'order': ''.join(set('abcdefgh'))}\n",
    )
    settings = config(path, sandbox=RewardSandboxConfig(workers=workers))
    texts = ["x" * (i % 7) for i in range(40)]
    rewards, extra = compute_reward(batch_of(texts), load_reward_manager(settings, TOKENIZER, 0))
    again, _ = compute_reward(batch_of(texts), load_reward_manager(settings, TOKENIZER, 0))
    assert rewards.equal(again) and len(set(extra["order"])) == 1
    KNOWN.append(rewards)
    assert all(KNOWN[0].equal(other) for other in KNOWN)


KNOWN: list = []


@pytest.mark.parametrize("enable", [True, False])
def test_functions_are_chosen_by_data_source(tmp_path, enable):
    one = write(tmp_path, "def compute_score(**kwargs):\n    return 1\n\ndef two(**kwargs):\n    return 2\n")
    settings = config(one, reward_manager="naive", sandbox=RewardSandboxConfig(enable=enable))
    settings.reward_model.by_source = {"math/*": f"{one}:two", "digits": "builtin"}
    data = batch_of(["12345", "x", "x", "x"], source=["digits", "math/a", "other", "digits"])
    manager = load_reward_manager(settings, TOKENIZER, 0)
    assert scores(compute_reward(data, manager)[0]) == [1.0, 2.0, 1.0, 0.0]


def test_a_place_that_names_no_function_is_refused():
    settings = config(reward_manager="naive")
    settings.reward_model.by_source = {"math": "score"}
    with pytest.raises(ValueError, match="by_source.math='score' names no function: write file.py:function"):
        load_reward_manager(settings, TOKENIZER, 0)


def test_an_error_names_the_function_of_its_source():
    def bad(**kwargs):
        raise KeyError("mine")

    manager = PrimeRewardManager(TOKENIZER, 0, BySource({"b": bad}, lambda **kwargs: 1.0))
    with pytest.raises(RewardError, match="bad .*failed on sample 1 .*data_source='b'"):
        manager(batch_of(["x", "y"], source=["a", "b"]))


def test_a_manager_may_be_in_a_file(tmp_path):
    path = write(
        tmp_path,
        "from verl.rewards.managers import NaiveRewardManager\n"
        "class Twice(NaiveRewardManager):\n    def __call__(self, data, return_dict=False):\n"
        "        result = super().__call__(data, return_dict=True)\n        result['reward_tensor'] *= 2\n"
        "        return result if return_dict else result['reward_tensor']\n",
        "manager.py",
    )
    manager = load_reward_manager(config(reward_manager=f"{path}:Twice"), TOKENIZER, 0)
    assert scores(compute_reward(batch_of(["12345", "x"]), manager)[0]) == [2.0, 0.0]

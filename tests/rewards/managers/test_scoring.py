import sys
from types import SimpleNamespace

import pytest
import torch

from tests.config.helpers import typed
from tests.rewards.managers.batches import RESPONSE_LENGTH, TOKENIZER, batch_of
from verl.config.reward import RewardSandboxConfig
from verl.protocol import DataProto
from verl.rewards.managers import BatchRewardManager, NaiveRewardManager, RewardError, register
from verl.rewards.managers.scoring import compute_reward, get_custom_reward_fn, load_reward_manager
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class Section(SimpleNamespace):
    """A config section: attributes and ``get``."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def config(path=None, name="compute_score", reward_kwargs=None, **reward_model) -> Section:
    custom = Section(path=None if path is None else str(path), name=name, reward_kwargs=reward_kwargs or {})
    return Section(
        custom_reward_function=custom, reward_model=Section(**reward_model), data=Section(reward_fn_key="data_source")
    )


def score(settings: Section, responses: list[str]) -> list[float]:
    rewards, _ = compute_reward(batch_of(responses), load_reward_manager(settings, TOKENIZER, num_examine=0))
    return rewards.sum(-1).tolist()


def write(folder, text: str, name: str = "reward.py"):
    (folder / name).write_text(text)
    return folder / name


def test_without_a_file_the_built_in_rules_score():
    assert get_custom_reward_fn(config()) is None
    assert score(config(), ["12345", "x"]) == [1.0, 0.0]


def test_a_plain_function_scores_and_gets_its_kwargs(tmp_path):
    path = write(
        tmp_path,
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1):\n"
        "    return weight * len(solution_str)\n",
    )
    assert score(config(path), ["a", "abc"]) == [1.0, 3.0]
    assert score(config(path, reward_kwargs={"weight": 2}), ["a", "abc"]) == [2.0, 6.0]


def test_a_function_of_another_name_and_signature_scores(tmp_path):
    path = write(tmp_path, "def mine(solution_str, **kwargs):\n    return {'score': 1, 'keys': sorted(kwargs)}\n")
    manager = load_reward_manager(config(path, name="mine"), TOKENIZER, num_examine=0)
    _, extra = compute_reward(batch_of(["a"]), manager)
    assert extra["keys"] == [["data_source", "extra_info", "ground_truth"]]


def test_an_async_function_scores(tmp_path):
    path = write(
        tmp_path,
        "import asyncio\nasync def compute_score(solution_str, **kwargs):\n"
        "    await asyncio.sleep(0)\n    return len(solution_str)\n",
    )
    assert score(config(path, reward_kwargs={"unused": 1}), ["a", "abc"]) == [1.0, 3.0]


def test_a_batch_function_scores_with_the_batch_manager(tmp_path):
    path = write(
        tmp_path,
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):\n"
        "    return [len(text) for text in solution_strs]\n",
    )
    settings = config(path, reward_manager="batch")
    assert isinstance(load_reward_manager(settings, TOKENIZER, 0), BatchRewardManager)
    assert score(settings, ["a", "abc"]) == [1.0, 3.0]


IMPORTING = """
{statement}
from verl.rewards.scorers import default_compute_score
from verl.rewards.scorers.gsm8k import compute_score as gsm8k_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return BONUS + default_compute_score(data_source, solution_str, ground_truth)
"""


@pytest.mark.parametrize("style", ["from .{name} import BONUS", "from {name} import BONUS"])
def test_a_file_may_import_its_neighbours(tmp_path, style):
    name = f"neighbour_{'relative' if '.' in style else 'absolute'}"
    write(tmp_path, "BONUS = 3\n", f"{name}.py")
    path = write(tmp_path, IMPORTING.format(statement=style.format(name=name)))
    assert score(config(path), ["12345"]) == [4.0]


def test_a_file_may_put_its_folder_on_the_path_itself(tmp_path):
    (tmp_path / "lib").mkdir()
    write(tmp_path / "lib", "BONUS = 5\n", "own_path_helper.py")
    statement = (
        "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'lib'))\n"
        "from own_path_helper import BONUS"
    )
    assert score(config(write(tmp_path, IMPORTING.format(statement=statement))), ["x"]) == [5.0]


def test_a_file_inside_a_package_may_import_upwards(tmp_path):
    package = tmp_path / "pack" / "rewards"
    package.mkdir(parents=True)
    write(tmp_path / "pack", "", "__init__.py")
    write(package, "", "__init__.py")
    write(tmp_path / "pack", "BONUS = 7\n", "shared.py")
    path = write(package, IMPORTING.format(statement="from ..shared import BONUS"))
    assert score(config(path), ["x"]) == [7.0]


def test_home_and_relative_paths_name_the_file(tmp_path, monkeypatch):
    write(tmp_path, "def compute_score(**kwargs):\n    return 1\n", "home_reward.py")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert score(config("~/home_reward.py"), ["x"]) == [1.0]
    monkeypatch.chdir(tmp_path)
    assert score(config("home_reward.py"), ["x"]) == [1.0]


def test_training_and_validation_share_one_module(tmp_path):
    path = write(tmp_path, "calls = []\ndef compute_score(**kwargs):\n    calls.append(1)\n    return len(calls)\n")
    assert score(config(path), ["x"]) == [1.0] and score(config(path), ["x"]) == [2.0]


def test_dataclasses_and_pickles_of_the_file_work(tmp_path):
    path = write(
        tmp_path,
        "from __future__ import annotations\nimport pickle\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Result:\n    value: int\n"
        "def compute_score(**kwargs):\n    return pickle.loads(pickle.dumps(Result(2))).value\n",
    )
    assert score(config(path), ["x"]) == [2.0]


def test_missing_file_function_or_module_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.py"):
        get_custom_reward_fn(config(tmp_path / "nowhere.py"))
    path = write(tmp_path, "def compute_scores(**kwargs):\n    return 1\n")
    with pytest.raises(
        AttributeError, match="no function or class 'compute_score'; it has compute_scores.*Did you mean"
    ):
        get_custom_reward_fn(config(path))
    path = write(tmp_path, "import no_such_module_anywhere\n", "broken.py")
    with pytest.raises(RuntimeError, match="broken.py failed while it was loaded in line 1: ModuleNotFoundError"):
        get_custom_reward_fn(config(path))
    assert not [name for name in sys.modules if name.endswith(".broken")]


def test_a_file_that_changed_is_run_again(tmp_path):
    path = write(tmp_path, "def compute_score(**kwargs):\n    return 1\n")
    assert score(config(path), ["x"]) == [1.0]
    write(tmp_path, "def compute_score(**kwargs):\n    return 2 + 0\n")
    assert score(config(path), ["x"]) == [2.0]


def test_on_error_reaches_the_manager(tmp_path):
    path = write(tmp_path, "def compute_score(**kwargs):\n    return 1 / 0\n")
    with pytest.raises(RewardError, match=f"compute_score .{path}:1. failed on sample 0.*ZeroDivisionError"):
        score(config(path), ["x"])
    manager = load_reward_manager(config(path, on_error="zero_and_count"), TOKENIZER, 0)
    rewards, extra = compute_reward(batch_of(["x"]), manager)
    assert rewards.sum() == 0 and extra["reward_error"] == [1.0]


def test_reward_kwargs_of_the_manager_reach_it(tmp_path):
    path = write(tmp_path, "def compute_score(solution_str, scale, **kwargs):\n    return scale\n")
    settings = config(path)
    settings.reward_model.reward_kwargs = {"scale": 4}
    assert score(settings, ["x"]) == [4.0]


@register("test_only_old_style")
class OldStyle:
    """As managers were written before ``return_dict`` and ``on_error``."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", fill=1.0):
        self.fill = fill

    def __call__(self, data):
        return torch.full(data.batch["responses"].shape, self.fill)


def test_a_manager_of_the_old_style_is_called_as_it_wants_to_be(caplog):
    settings = config(reward_manager="test_only_old_style", on_error="zero_and_count")
    settings.reward_model.reward_kwargs = {"fill": 0.5}
    rewards, extra = compute_reward(batch_of(["a", "b"]), load_reward_manager(settings, TOKENIZER, 0))
    assert torch.equal(rewards, torch.full((2, RESPONSE_LENGTH), 0.5)) and extra == {}
    assert "on_error=zero_and_count has no effect" in caplog.text


def test_a_manager_that_hands_its_keywords_on_is_given_padded_rewards():
    def counted(manager):
        def call(*args, **kwargs):
            calls.append(kwargs)
            return manager(*args, **kwargs)

        return call

    def old(data, return_dict=False):
        return {"reward_tensor": torch.ones(data.ragged("responses").shape)}

    def doubled(data, **kwargs):
        result = NaiveRewardManager(TOKENIZER, 0)(data, **kwargs)
        return {**result, "reward_tensor": 2 * result["reward_tensor"]}

    calls = []
    for manager, wanted in ((old, [float(RESPONSE_LENGTH)] * 2), (doubled, [2.0, 0.0])):
        rewards, _ = compute_reward(batch_of(["12345", "x"]), counted(manager))
        assert rewards.sum(-1).tolist() == wanted
    assert calls == [{"return_dict": True}] * 2


def test_a_batch_whose_episodes_all_failed_is_rewarded_with_0_and_no_function_is_called():
    def never(data, return_dict=False):
        raise AssertionError("called")

    batch = batch_of(["a", "b"], episode_status=["error", "error"])
    rewards, columns = compute_reward(batch, never)
    assert torch.equal(rewards, torch.zeros(2, RESPONSE_LENGTH)) and columns == {}


def test_a_batch_without_rows_has_no_texts_and_no_rewards():
    manager = NaiveRewardManager(TOKENIZER, 0)
    for data in (batch_of(["a"])[:0], batch_of(["a"]).packed()[:0]):
        assert compute_reward(data, manager)[0].shape == (0, RESPONSE_LENGTH)


@pytest.mark.parametrize(
    "result, reason",
    [
        (torch.zeros(2), r"returned a tensor of shape \(2,\) for 2 responses"),
        ([0.0, 1.0], "returned list"),
        (torch.full((2, RESPONSE_LENGTH), float("nan")), r"not finite, in rows \[0, 1\]"),
    ],
)
def test_rewards_of_another_shape_or_not_finite_are_refused(result, reason):
    with pytest.raises(ValueError, match=reason):
        compute_reward(batch_of(["a", "b"]), lambda data, return_dict=False: result)


def test_finite_rewards_whose_sum_overflows_are_taken():
    rewards = torch.full((2, RESPONSE_LENGTH), 6e4, dtype=torch.float16)
    assert torch.equal(compute_reward(batch_of(["a", "b"]), lambda data, return_dict=False: rewards)[0], rewards)


def test_errors_of_a_manager_are_not_swallowed():
    def manager(data, return_dict=False):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compute_reward(batch_of(["a"]), manager)


def test_default_manager_is_naive():
    assert type(load_reward_manager(config(), TOKENIZER, 1)) is NaiveRewardManager


# -- agent loops that bring rewards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "unasked"),
    [
        ({"custom_reward_function.path": "mine.py"}, "custom_reward_function.path=mine.py is not called in training"),
        ({"reward_model.enable": True}, "reward_model.enable=true"),
        ({}, None),
    ],
)
def test_rewards_of_agent_loops_are_said_once_to_keep_a_function_or_model_from_being_asked(words, unasked):
    said, config = [], typed().with_values(words)
    batch = DataProto.from_dict(tensors={"rm_scores": torch.zeros(1, 1)})
    trainer = SimpleNamespace(
        config=config,
        options=config,
        use_rm=config.reward_model.enable,
        reward_fn=NaiveRewardManager(None, 0),
        global_steps=1,
        say=said.append,
        has_warned_unused_reward=False,
    )
    for _ in range(2):
        RayPPOTrainer.warn_unused_reward(trainer, batch)
    assert len(said) == (unasked is not None) and (not said or unasked in said[0])
    trainer.has_warned_unused_reward = False
    RayPPOTrainer.warn_unused_reward(trainer, DataProto.from_dict(tensors={"responses": torch.zeros(1, 1)}))
    assert not trainer.has_warned_unused_reward


ENVIRONMENT = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(2**i for i, name in enumerate(["A_API_KEY", "B_TOKEN", "C_TOKEN", "PLAIN"]) if name in os.environ)
"""


def test_a_reward_function_sees_no_keys_but_those_that_are_listed(tmp_path, monkeypatch):
    for name in ("A_API_KEY", "B_TOKEN", "C_TOKEN", "PLAIN"):
        monkeypatch.setenv(name, "value")
    (tmp_path / "reward.py").write_text(ENVIRONMENT)
    for visible, expected in (([], 8), (["B_*"], 10)):
        settings = config(tmp_path / "reward.py", sandbox=RewardSandboxConfig(visible_keys=visible))
        assert score(settings, ["a"]) == [expected]

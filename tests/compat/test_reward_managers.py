"""Reward managers users wrote for verl, registered in a module of theirs and chosen in the config."""

from pathlib import Path

import pytest

from tests.compat.support import FILES, train


@pytest.fixture
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FILES))


def test_a_manager_over_items_scores_training_and_validation(task, on_path, capfd):
    trainer = train(
        task,
        "+reward_model.reward_kwargs.length_price=0.01",
        reward_model__reward_manager="per_token",
        actor_rollout_ref__model__external_lib="my_reward_manager",
        trainer__test_freq=1,
    )
    assert trainer.reward_fn.length_price == 0.01
    assert trainer.metrics["critic/score/min"] < 0.0  # the price of length
    assert {"val-core/digits/acc/mean@1", "val-aux/digits/reward/mean@1"} <= set(trainer.metrics)
    assert "[seen]" in capfd.readouterr().out


def test_a_manager_without_return_dict_scores(task, on_path, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_reward_manager")
    trainer = train(task, reward_model__reward_manager="tensor_only", trainer__test_freq=1)
    assert trainer.metrics["critic/score/max"] >= 0.0


def test_an_error_in_a_users_manager_is_its_own(task, on_path, tmp_path):
    path = Path(tmp_path) / "reward.py"
    path.write_text("def compute_score(**kwargs):\n    raise KeyError('answer')\n")
    with pytest.raises(KeyError, match="answer"):
        train(
            task,
            files={"custom_reward_function.path": str(path)},
            reward_model__reward_manager="per_token",
            actor_rollout_ref__model__external_lib="my_reward_manager",
        )

"""Trajectories of several rows: rewards, groups and returns are those of the trajectory."""

import numpy as np
import pytest
import torch

from verl.batch.partition import MiniBatches
from verl.config.algorithm import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.ppo.experience import compute_advantage
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.trajectories import JoinedTrajectories, first_rows, trajectory_numbers, trajectory_sums

GROUPS = ["a", "a", "b", "b"]
TURNS = [[3, 2], [4], [1, 1, 2], [2, 3]]
"""Tokens of each turn of four trajectories."""


def batch(split: bool, seed: int = 0, states: bool = False) -> DataProto:
    """The four trajectories; one row a turn, or one row each with a masked token between two turns."""
    draw = torch.Generator().manual_seed(seed)
    rows, masks, uids, names, values, state_ids = [], [], [], [], [], []
    for number, (uid, lengths) in enumerate(zip(GROUPS, TURNS, strict=True)):
        rewards = [torch.randn(length, generator=draw) for length in lengths]
        critic = [torch.randn(length, generator=draw) for length in lengths]
        turn_states = [f"s{k % 2}" for k in range(len(lengths))]
        if split:
            for reward, value, state in zip(rewards, critic, turn_states, strict=True):
                rows.append(reward)
                masks.append(torch.ones(len(reward)))
                values.append(value)
                state_ids.append([state])
                uids.append(uid)
                names.append(f"t{number}")
            continue
        gap = torch.zeros(1)
        rows.append(torch.cat([part for reward in rewards for part in (reward, gap)][:-1]))
        values.append(torch.cat([part for value in critic for part in (value, gap)][:-1]))
        masks.append(torch.cat([part for reward in rewards for part in (torch.ones(len(reward)), gap)][:-1]))
        uids.append(uid)
        names.append(f"t{number}")
        state_ids.append(turn_states)
    width = max(len(row) for row in rows)

    def padded(parts):
        return torch.stack([torch.nn.functional.pad(part, (0, width - len(part))) for part in parts])

    lengths = torch.tensor([len(row) for row in rows])
    real = (torch.arange(width) < lengths[:, None]).long()
    prompt = torch.ones(len(rows), 2, dtype=torch.int64)
    data = DataProto.from_dict(
        {
            "prompts": prompt,
            "responses": real,
            "input_ids": torch.cat([prompt, real], 1),
            "attention_mask": torch.cat([prompt, real], 1),
            "response_mask": padded(masks).long(),
            "token_level_scores": padded(rows),
            "token_level_rewards": padded(rows),
            "values": padded(values),
        },
        non_tensors={"uid": np.array(uids, dtype=object), "trajectory_id": np.array(names, dtype=object)},
    )
    if states:
        data.non_tensor_batch["turn_state_ids"] = np.empty(len(rows), dtype=object)
        data.non_tensor_batch["turn_state_ids"][:] = state_ids
    return data


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "gae", "reinforce", "agentic_reinforce", "step_reinforce", "gigpo", "opo"]
)
def test_turns_as_rows_have_the_advantages_of_the_whole_trajectory(estimator):
    states, options = estimator == "gigpo", {"gamma": 0.9, "lam": 0.8, "config": AlgorithmConfig()}
    whole = compute_advantage(batch(split=False, states=states), estimator, **options)
    joined = JoinedTrajectories(batch(split=True, states=states))
    compute_advantage(joined.batch, estimator, **options)
    rows = joined.split()
    for name in ("advantages", "returns"):
        expected = whole.column(name)[whole.column("response_mask") != 0]
        found = rows.column(name)[rows.column("response_mask") != 0]
        torch.testing.assert_close(found, expected)


def test_no_reward_is_lost_and_rows_keep_their_order():
    data = batch(split=True)
    before = {name: data.column(name).clone() for name in ("token_level_scores", "values", "response_mask")}
    joined = JoinedTrajectories(data)
    assert joined.batch.column("token_level_scores").sum() == pytest.approx(before["token_level_scores"].sum().item())
    assert joined.batch.column("response_mask").sum() == before["response_mask"].sum()
    back = joined.split()
    for name, values in before.items():
        assert torch.equal(back.column(name)[:, : values.shape[1]], values), name


def test_a_batch_of_one_row_a_trajectory_is_left_alone():
    data = batch(split=False)
    assert trajectory_numbers(data) is None and first_rows(data) is None
    assert JoinedTrajectories(data).batch is data
    sums = torch.arange(4.0)
    assert trajectory_sums(data, sums) is sums


def test_scores_are_counted_once_a_trajectory():
    split = JoinedTrajectories(batch(split=True))
    compute_advantage(split.batch, "grpo", config=AlgorithmConfig())
    whole = compute_advantage(batch(split=False), "grpo", config=AlgorithmConfig())
    found, expected = (compute_data_metrics(data, use_critic=False) for data in (split.split(), whole))
    for name in ("critic/score/mean", "critic/score/max", "critic/rewards/min", "batch/zero_std_ratio"):
        assert found[name] == pytest.approx(expected[name]), name


def test_optimizer_steps_take_whole_trajectories():
    numbers = trajectory_numbers(batch(split=True))
    steps = MiniBatches(rows=2, epochs=2, shuffle=True, seed=3).steps(len(numbers), numbers)
    assert len(steps) == 4
    for step in steps:
        own = set(numbers[step])
        assert len(own) == 2 and sorted(step) == [row for row in range(len(numbers)) if numbers[row] in own]

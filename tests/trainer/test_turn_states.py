"""Where ``gigpo`` finds the states in which turns began."""

import numpy as np
import pytest
import torch

from tests.trainer.test_experience import batch_of
from verl.agents.base import AgentLoopOutput
from verl.agents.manager import assemble_outputs
from verl.config.algorithm import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.ppo.experience import attach_reward, compute_advantage, gigpo_metrics, turn_states

CONFIG = AlgorithmConfig().with_values({"adv_estimator": "gigpo", "gigpo.mode": "mean_norm"})
STATES = [["start", "hall"], ["start", "hall"]]


def column(values):
    filled = np.empty(len(values), dtype=object)
    filled[:] = values
    return filled


def two_turns():
    """Two responses to one prompt, a tool's token between two turns; the first earned 1, the second 3."""
    data = batch_of([2, 2], [3, 3], 2, 4)
    data.put("response_mask", torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0]]))
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 3.0, 0.0]])
    return attach_reward(data, rewards, {})


def estimated(data):
    data.put("token_level_rewards", data.ragged("token_level_scores"))
    compute_advantage(data, "gigpo", config=CONFIG)
    return data.column("advantages")[:, :3]


def from_the_reward_function(data):
    return attach_reward(data, data.column("token_level_scores"), {"turn_state_ids": STATES})


def from_the_data(data):
    data.non_tensor_batch["extra_info"] = column([{"turn_state_ids": states} for states in STATES])
    return data


def from_a_column(data):
    data.non_tensor_batch["turn_state_ids"] = column(STATES)
    return data


@pytest.mark.parametrize("add", [from_the_reward_function, from_the_data, from_a_column])
def test_states_come_from_the_reward_function_the_data_or_a_column(add):
    data = add(two_turns())
    assert turn_states(data) == STATES
    # episode -1, 1; the first turns' returns 0.95 and 2.85, the second turns' 1 and 3
    expected = torch.tensor([[-1.95, 0, -2.0], [1.95, 0, 2.0]])
    torch.testing.assert_close(estimated(data), expected)
    assert gigpo_metrics(data) == {"gigpo/turns_per_response": 2, "gigpo/shared_state_fraction": 1}


def test_an_agent_loop_returns_them_with_its_tokens():
    prompts = DataProto(non_tensor_batch={"raw_prompt_ids": column([[1, 2], [1, 2]])})
    outputs = [
        AgentLoopOutput([1, 2], [3, 4, 5], [1, 0, 1], extra_fields={"turn_state_ids": states}) for states in STATES
    ]
    batch = assemble_outputs(prompts, outputs, prompt_length=2, response_length=4, pad_token_id=0)
    assert turn_states(batch) == STATES


def test_without_them_turns_are_refused_by_name():
    with pytest.raises(ValueError, match="2 of the batch's responses have several turns.*'turn_state_ids'"):
        estimated(two_turns())
    assert turn_states(two_turns()) is None

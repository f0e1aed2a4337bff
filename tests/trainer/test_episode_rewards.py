"""No reward of an episode is lost or moved by what stands between and behind the turns of the policy."""

import numpy as np
import pytest
import torch

from verl.agents import AgentLoopOutput
from verl.agents.outputs import assemble_outputs
from verl.config.algorithm import AlgorithmConfig
from verl.protocol import DataProto
from verl.rewards.managers.episode import reward_of_episodes
from verl.rewards.managers.scoring import compute_reward
from verl.trainer.ppo.experience import Shaping, attach_reward, compute_advantage, response_column

ESTIMATORS = ("grpo", "rloo", "gae", "agentic_reinforce", "step_reinforce", "gigpo", "reinforce_plus_plus")
NORMALIZED = {"mean": "group", "std": "group"}


def episodes(seed):
    """Turns of random lengths and rewards: for each of 6 rows a list of (tokens, reward), and the episode's reward."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(6):
        turns = [(int(random.integers(1, 4)), float(random.normal())) for _ in range(random.integers(1, 4))]
        rows.append((turns, float(random.normal())))
    return rows


def batch_of(rows, gaps, behind):
    """The batch of these episodes with ``gaps[row]`` masked tokens between turns and ``behind[row]`` at the end."""
    outputs = []
    for (turns, score), gap, tail in zip(rows, gaps, behind, strict=True):
        mask, spans = [], []
        for number, (length, _) in enumerate(turns):
            mask += [0] * (gap if number else 0)
            spans.append((len(mask), len(mask) + length))
            mask += [1] * length
        mask += [0] * tail
        outputs.append(
            AgentLoopOutput(
                [5, 6],
                list(range(1, len(mask) + 1)),
                mask,
                reward_score=score,
                turn_rewards=[reward for _, reward in turns],
                turn_spans=spans,
                turn_state_ids=[f"s{number}" for number in range(len(turns))],
            )
        )
    prompts = DataProto(non_tensor_batch={"raw_prompt_ids": np.array([[5, 6]] * len(rows) + [None], dtype=object)[:-1]})
    batch = assemble_outputs(prompts, outputs, 4, 40, 0)
    batch.non_tensor_batch["uid"] = np.array(["a"] * 3 + ["b"] * 3, dtype=object)
    return batch


def scored(batch, algorithm=None):
    rewards, extra = compute_reward(batch, reward_of_episodes(None, "environment"))
    attach_reward(batch, rewards, extra)
    shaping = Shaping(algorithm or AlgorithmConfig(), 40)
    shaping.shape_scores(batch)
    shaping.finish_rewards(batch)
    return batch


def advantages(batch, estimator):
    if estimator == "gae":
        values = batch.ragged("response_mask")
        batch.put("values", values.like(torch.zeros(len(values.values))))
    # without the spread of a group, which hides changes of the one score that stands out
    config = AlgorithmConfig(adv_estimator=estimator).with_values({"gigpo.mode": "mean_norm"})
    compute_advantage(batch, estimator, norm_adv_by_std_in_grpo=False, config=config)
    mask = response_column(batch, "response_mask") != 0
    return response_column(batch, "advantages")[mask]


def layouts(seed):
    random = np.random.default_rng(1000 + seed)
    return random.integers(1, 5, 6).tolist(), random.integers(0, 5, 6).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_every_reward_stands_on_a_generated_token(seed):
    rows = episodes(seed)
    batch = scored(batch_of(rows, *layouts(seed)))
    scores = response_column(batch, "token_level_scores")
    expected = [sum(reward for _, reward in turns) + score for turns, score in rows]
    torch.testing.assert_close(scores.sum(-1), torch.tensor(expected), atol=1e-5, rtol=0)
    assert not scores[response_column(batch, "response_mask") == 0].any()


@pytest.mark.parametrize("algorithm", ["plain", "normalized"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_do_not_depend_on_what_is_masked(estimator, algorithm):
    """Neither on how long the answers between turns are, nor on what follows the last turn."""
    config = AlgorithmConfig()
    if algorithm == "normalized":
        config = config.with_values({f"reward_shaping.norm.{name}": kind for name, kind in NORMALIZED.items()})
    for seed in range(5):
        rows = episodes(seed)
        expected = advantages(scored(batch_of(rows, [1] * 6, [0] * 6), config), estimator)
        found = advantages(scored(batch_of(rows, *layouts(seed)), config), estimator)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_turns_reward_is_without_effect(estimator):
    """A higher reward of any turn, the last one in front of masked tokens too, raises the advantages of its row."""
    rows = episodes(7)
    before = advantages(scored(batch_of(rows, *layouts(7))), estimator)
    lengths = [sum(length for length, _ in turns) for turns, _ in rows]
    begins = np.cumsum([0, *lengths])
    for row, (turns, score) in enumerate(rows):
        for number in range(len(turns)):
            changed = [(length, reward + 5.0 * (place == number)) for place, (length, reward) in enumerate(turns)]
            others = [*rows[:row], (changed, score), *rows[row + 1 :]]
            after = advantages(scored(batch_of(others, *layouts(7))), estimator)
            own = slice(begins[row], begins[row + 1])
            assert (after[own] - before[own]).abs().max() > 1e-3, (row, number)
            if estimator in ("grpo", "rloo"):
                assert (after[own] > before[own]).all(), (row, number)

"""Credit by turns without a critic: turns that began in the same state are compared with each other (GiGPO).

A *state* is what the policy saw when its turn began: a page, a board, a tool's answer. Whoever runs the environment
names it; equal names mean equal states.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from verl.algorithms.advantages.common import Groups, Turns, builtin_estimator, find_turns, outcome_scores

STATE_COLUMN = "turn_state_ids"
"""Column with the states of each row's turns, a list a row."""


@builtin_estimator(
    "gigpo",
    "w_e norm_G(s_i) + w_s norm_S(G_k) for all tokens of turn k; S: the group's turns that began in the same state",
    "several turns in an environment that comes back to the same states, see [below](#which-state-a-turn-began-in)",
    "arXiv:2505.10978",
    "algorithms/advantages/test_gigpo.py::test_gigpo_by_hand_compares_episodes_and_turns_of_the_same_state",
    options="algorithm.gigpo.{episode_weight,step_weight,mode} algorithm.step_gamma",
    ragged=True,
)
def compute_gigpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray | Sequence,
    turn_state_ids: Sequence[Sequence[Any]] | None = None,
    step_gamma: float = 0.95,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    mode: str = "mean_std_norm",
    epsilon: float = 1e-6,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Judge an episode against its group, and each of its turns against the other turns begun in the same state.

    With r_k the sum of the rewards in turn k of response i, s_i the sum of all of them, and S(i, k) the turns of the
    group, those of i included, that began in the state of turn k,

        G_ik = sum_(j >= k) step_gamma^(j - k) r_ij
        A_t  = episode_weight norm_g(s_i) + step_weight norm_S(i,k)(G_ik)      for every token t of turn k

    norm subtracts the mean of the group and divides by its unbiased std + epsilon; with ``mode="mean_norm"`` it does
    not divide. A turn whose state no other turn has adds nothing. A response alone in its group is compared with zero.

    A batch whose responses have one turn each needs no states: all turns then began with their prompt, and
    A = (episode_weight + step_weight) times the advantage of ``grpo``.

    Args:
        token_level_rewards: (B, R) float; of turns, only unmasked tokens are read.
        response_mask: (B, R); each run of ones is a turn. A row of zeros counts as an episode, not as turns.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        turn_state_ids: (B,) sequences, one entry for each of the row's turns: text, numbers, arrays, or lists of them.
            States are compared within a group only.
        step_gamma: discount from turn to turn, in [0, 1]; ``algorithm.step_gamma``.
        episode_weight, step_weight, mode: ``algorithm.gigpo``; read from ``config``, the ``algorithm`` section, where
            that is given.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
        ValueError: there are several turns and no states, a row has not one state a turn, or ``mode`` is unknown.

    Source: Feng et al. 2025, Group-in-Group Policy Optimization, equations 3 to 8 (arXiv:2505.10978), there with
    weights of 1.
    """
    if (options := getattr(config, "gigpo", None)) is not None:
        episode_weight, step_weight, mode = options.episode_weight, options.step_weight, options.mode
    if mode not in ("mean_std_norm", "mean_norm"):
        raise ValueError(f"algorithm.gigpo.mode={mode} is not known. Known: mean_std_norm, mean_norm.")
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    turns = find_turns(token_level_rewards, response_mask)
    to_go, same_state = turns.to_go(step_gamma).double(), anchor_groups(turns, index, turn_state_ids)
    episode = groups.centred(scores)
    step = to_go - same_state.mean(to_go)  # not `centred`: a turn whose state no other turn has adds nothing
    if mode == "mean_std_norm":
        episode = episode / (groups.scale(scores) + epsilon)
        # a turn alone in its state: 0 / epsilon
        step = step / (same_state.std(to_go) + epsilon)
    combined = episode_weight * episode[turns.row] + step_weight * step
    advantages = turns.to_tokens(combined.to(token_level_rewards.dtype))
    return advantages, advantages


def anchor_groups(turns: Turns, index: np.ndarray | Sequence, turn_state_ids: Sequence[Sequence[Any]] | None) -> Groups:
    """The K turns, grouped by prompt and by the state they began in.

    Raises:
        ValueError: see ``compute_gigpo_outcome_advantage``.
    """
    counts, prompts = turns.counts.tolist(), index.tolist() if hasattr(index, "tolist") else list(index)
    if turn_state_ids is None:
        several = [row for row, count in enumerate(counts) if count > 1]
        if several:
            raise ValueError(
                f"algorithm.adv_estimator=gigpo: {len(several)} of the batch's responses have several turns (first: "
                f"row {several[0]}, {counts[several[0]]} turns), and there is no column {STATE_COLUMN!r} that says "
                f"in which state each began. Have the agent loop return it, extra_fields={{{STATE_COLUMN!r}: [...]}}, "
                f"or the reward function next to its score: a list a response, one entry a turn. Without states use "
                f"grpo, step_reinforce or agentic_reinforce."
            )
        return Groups([prompts[row] for row in turns.row.tolist()], turns.row.device)
    keys: list[Hashable] = []
    for row, count in enumerate(counts):
        states = turn_state_ids[row]
        given = "no list" if states is None or isinstance(states, str) else f"{len(states)} entries"
        # a row without a token has no turn, whatever states it brings
        if count and given != f"{count} entries":
            raise ValueError(
                f"algorithm.adv_estimator=gigpo: {STATE_COLUMN} of row {row} has {given}, and the response has {count} "
                f"turns (runs of ones in response_mask). Give one state for each turn, in order; two turns without a "
                f"token of tool or user between them are one."
            )
        prompt = prompts[row]
        for state in states if count else ():
            keys.append((prompt, state if type(state) in (str, int) else state_key(state)))
    return Groups(keys, turns.row.device)


def anchor_metrics(groups: Groups, num_rows: int) -> dict[str, float]:
    """Metrics of the comparison: turns a response, and the share of turns that others began in the same state."""
    total = len(groups.group)
    shared = int((~groups.is_alone).sum())
    return {"gigpo/turns_per_response": total / max(num_rows, 1), "gigpo/shared_state_fraction": shared / max(total, 1)}


def state_key(state: Any) -> Hashable:
    """Return a hashable key of a state: equal for equal text, numbers, arrays, and lists or mappings of them.

    Raises:
        ValueError: something that cannot be compared by value.
    """
    if isinstance(state, (np.ndarray, Tensor)):
        array = np.asarray(state)
        # shape and dtype too: the same bytes may be another state
        return ("array", array.shape, array.dtype.str, array.tobytes())
    if isinstance(state, Mapping):
        return ("mapping", frozenset((name, state_key(value)) for name, value in state.items()))
    if isinstance(state, (list, tuple)):
        return ("list", *map(state_key, state))
    if state is None or isinstance(state, (str, bytes, int, float, np.generic)):
        return state
    raise ValueError(
        f"{STATE_COLUMN}: a state is a {type(state).__name__}, which cannot be compared by value. Name states by text "
        f"or numbers: what the environment shows, or a hash of it."
    )

"""FrozenLake: every map can be walked, and an episode depends on its seed and actions alone."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.envs import Environment, make
from verl.envs.game import choice_of

TINY = {"size": 2, "num_holes": 1, "prompt": "terse", "answer": "plain", "actions": "LDRU", "invalid_reward": -0.1}


@pytest.mark.parametrize(
    "options", [{}, {"is_slippery": True}, {"size": 7, "num_holes": 36}, {"size": 3, "p": 0}, TINY]
)
def test_the_solution_of_every_map_wins(options):
    env = make("FrozenLake", **options)
    assert isinstance(env, Environment)
    for seed in range(100):
        env.reset(seed=seed)
        for action in env.solve():
            last = env.step(action)
        assert last[1:4] == (1.0, True, False) and last[4]["success"] is True


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.floats(0, 1), st.integers(0, 2**32))
def test_a_number_of_holes_is_met_exactly_and_leaves_a_way(size, share, seed):
    most = size * size - (2 * size - 1)
    env = make("FrozenLake", size=size, num_holes=round(share * most), prompt="terse")
    observation, _ = env.reset(seed=seed)
    assert observation.count("O") == round(share * most)
    assert observation[0] == "P" and observation[-1] == "G" and env.solve()


def play(env, seed, actions):
    return [env.reset(seed=seed), *(env.step(action) for action in actions if not env.is_over)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.booleans())
def test_an_episode_depends_on_its_seed_and_actions_alone(seed, other, is_slippery):
    generator = np.random.default_rng(other)
    one, two = (make("FrozenLake", is_slippery=is_slippery) for _ in range(2))
    actions = [one.random_action(generator) if generator.random() < 0.9 else "hm" for _ in range(20)]
    before = random.getstate(), np.random.get_state()[1].tolist()
    first = play(one, seed, actions)
    two.reset(seed=other)
    random.seed(1), np.random.seed(1)
    after = random.getstate(), np.random.get_state()[1].tolist()
    assert play(two, seed, actions) == first == play(one, seed, actions)
    assert after == (random.getstate(), np.random.get_state()[1].tolist())
    random.setstate(before[0])


def test_the_smallest_lake_has_two_maps_of_which_no_fixed_way_crosses_more_than_one():
    env = make("FrozenLake", **TINY)
    maps = [env.reset(seed=seed)[0] for seed in range(200)]
    assert set(maps) == {"PO\n_G", "P_\nOG"} and 70 < maps.count("P_\nOG") < 130


def test_rewards_are_those_of_the_options_and_a_turn_without_an_action_moves_nobody():
    env = make("FrozenLake", **TINY, step_reward=-0.01, hole_reward=-1.0)
    observation = next(text for seed in range(9) if (text := env.reset(seed=seed)[0]) == "PO\n_G")
    assert env.step("x") == (observation, -0.1, False, False, {"success": False, "valid_action": False})
    wall = env.step("L")
    assert wall[1] == -0.01 and wall[4] == {"success": False, "valid_action": True, "effective": False}
    assert env.step("r")[1:4] == (-1.01, True, False)
    with pytest.raises(RuntimeError, match=r"Call reset\(\) first"):
        env.step("L")


def test_without_the_map_observations_tell_no_hole_and_state_ids_still_do():
    shown, hidden = make("FrozenLake"), make("FrozenLake", show_map=False, prompt="terse")
    texts = {hidden.reset(seed=seed)[0] for seed in range(20)}
    assert texts == {"P???\n????\n????\n????"}
    assert shown.reset(seed=3) and hidden.reset(seed=3) and shown.state_id == hidden.state_id
    assert len({hidden.reset(seed=seed) and hidden.state_id for seed in range(20)}) > 10


def test_a_slippery_move_goes_where_it_should_in_a_third_of_the_turns():
    env = make("FrozenLake", size=30, num_holes=0, is_slippery=True)
    env.reset(seed=0)
    places = [env.player]
    for _ in range(600):
        env.player = (15, 15)
        env.step("<answer>Up</answer>")
        places.append(env.player)
    shares = [places.count(place) / 600 for place in ((14, 15), (15, 14), (15, 16))]
    assert sum(shares) == pytest.approx(1) and max(abs(share - 1 / 3) for share in shares) < 0.06


def test_a_map_of_the_row_is_taken_and_a_bad_one_refused():
    env = make("FrozenLake", prompt="terse")
    assert env.reset(seed=0, desc=["FSF", "FHG"])[0] == "_P_\n_OG"
    assert len(env.solve()) == 2
    for desc, told in (
        (["SF", "H"], "no map"),
        (["SH", "HG"], "no way"),
        (["SS", "FG"], "no map"),
        (["SX", "FG"], "X"),
    ):
        with pytest.raises(ValueError, match=told):
            env.reset(seed=0, desc=desc)
    assert len(env.reset(seed=0)[0]) == 19
    with pytest.raises(ValueError, match="has map; it brings desc, or nothing"):
        env.reset(seed=0, map=[])


@pytest.mark.parametrize(
    "options",
    [
        {"size": 1},
        {"num_holes": 10},
        {"p": 2},
        {"actions": "LDR"},
        {"symbols": "PPOG"},
        {"answer": "x"},
        {"max_steps": 0},
    ]
    + [{"prompt": "ful"}],
)
def test_an_option_that_makes_no_sense_is_refused_with_its_key(options):
    with pytest.raises(ValueError, match=rf"FrozenLake: {next(iter(options))}=.*env\.registry"):
        make("FrozenLake", **options)


def test_max_steps_truncates():
    env = make("FrozenLake", max_steps=2)
    env.reset(seed=0)
    assert env.step("")[2:4] == (False, False) and env.step("")[2:4] == (False, True)


@pytest.mark.parametrize(
    "text, style, choice",
    [
        ("<answer> up </answer>", "tag", 0),
        ("<answer>up</answer> or <answer>Down</answer>", "tag", 1),
        ("up", "tag", None),
        ("Down\n", "plain", 1),
        ("go down", "plain", None),
        ("not up: DOWN.", "mention", 1),
        ("upside", "mention", None),
        ("", "plain", None),
        ("<answer></answer>", "tag", None),
    ],
)
def test_an_action_is_found_where_the_style_says(text, style, choice):
    assert choice_of(text, ["Up", "Down"], style) == choice

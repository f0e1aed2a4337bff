"""The built-in games: solvable, seeded by their own generators, and hard to break with text."""

import random
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.envs import make
from verl.envs.base import built_in_names
from verl.rewards.scorers.short_answers import equation_value

GAMES = {
    "FrozenLake": [{}, {"is_slippery": True, "show_map": False}],
    "Sokoban": [{}, {"dim_room": (7, 9), "num_boxes": 2}, {"dim_room": (5, 5), "num_boxes": 2, "wall_share": 1}],
    "Guess": [{}, {"low": -5, "high": 1000, "is_compared": False}],
    "Bandit": [{}, {"arms": "XYZ", "probabilities": None, "num_pulls": 3}],
    "Countdown": [{}, {"num_numbers": 6, "operations": "/"}, {"num_numbers": 2, "low": 1, "high": 2}],
    "Math": [{}, {"scorer": "openai/gsm8k", "form": "#### ANSWER"}],
}
CASES = [(name, options) for name, all_options in GAMES.items() for options in all_options]
games = pytest.mark.parametrize("name, options", CASES)


def test_every_built_in_game_is_tested_here():
    assert set(built_in_names()) == {*GAMES, "Code"}


@games
def test_the_solution_of_every_task_wins_with_the_highest_reward_that_a_game_gives(name, options):
    env = make(name, **options)
    for seed in range(25):
        env.reset(seed=seed)
        actions = env.solve()
        for action in actions:
            assert not env.is_over
            _, reward, terminated, truncated, info = env.step(action)
        assert actions and info["success"] is True and terminated and not truncated
        assert reward >= 1 or name == "Bandit"


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 2**32), st.integers(0, 2**32))
def test_an_episode_depends_on_its_seed_and_actions_alone(case, seed, other):
    one, two = make(case[0], **case[1]), make(case[0], **case[1])
    chooser = np.random.default_rng(other)
    random.seed(5), np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    episode, actions = [one.reset(seed=seed)], []
    while not one.is_over and len(actions) < 25:
        actions.append(one.random_action(chooser) if chooser.random() < 0.8 else "nothing")
        state = one.state_id
        episode += [one.step(actions[-1]), one.state_id, one.frame()]
        assert (
            actions[-1] != "nothing" or not one.task_keys or name_of(one) in ("Math", "Code") or state == one.state_id
        )
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    two.reset(seed=other)
    random.seed(6)
    repeated = [two.reset(seed=seed)]
    for action in actions:
        repeated += [two.step(action), two.state_id, two.frame()]
    assert repeated == episode


def name_of(env):
    return type(env).__name__


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CASES), st.integers(0, 99), st.lists(st.text(max_size=30) | st.from_regex("<answer>.*</answer>"))
)
def test_no_text_breaks_a_game_nor_earns_more_than_its_bounds(case, seed, texts):
    env = make(case[0], **case[1], **({"max_steps": 30} if case[0] != "Bandit" else {}))
    env.reset(seed=seed)
    for text in texts:
        if env.is_over:
            break
        observation, reward, terminated, truncated, info = env.step(text)
        assert isinstance(observation, str) and -2 <= reward <= 12 and {"success", "valid_action"} <= set(info)
        assert type(terminated) is bool and type(truncated) is bool and not (terminated and truncated)


# -- Sokoban ----------------------------------------------------------------------------------------------------------
ROOM = ["######", "#@$. #", "# $ .#", "######"]


def test_sokoban_pays_for_boxes_on_targets_takes_it_back_and_ends_when_all_are():
    env = make("Sokoban", prompt="terse", answer="plain", actions="LDRU")
    assert env.reset(seed=0, room=ROOM)[0] == "######\n#PXO_#\n#_X_O#\n######"
    rewards = [env.step(move)[1] for move in "RRLLDRR"]
    np.testing.assert_allclose(rewards, [0.9, -1.1, -0.1, -0.1, -0.1, -0.1, 0.9])
    assert not env.is_over and env.boxes == {(1, 4), (2, 4)}
    # the first box stands against the wall: nobody can bring it back
    assert env.solve() == []
    env.reset(seed=0, room=ROOM)
    moves = env.solve()
    last = [env.step(move) for move in moves][-1]
    assert last[1] == pytest.approx(10.9) and last[2] and len(moves) == 5


def test_sokoban_pushes_one_box_and_no_wall():
    env = make("Sokoban", prompt="terse", answer="plain", actions="LDRU")
    env.reset(seed=0, room=["#######", "#@$$..#", "#######"])
    for move in "RLUD":
        _, reward, _, _, info = env.step(move)
        assert (reward, info["effective"]) == (-0.1, False)


@pytest.mark.parametrize("room", [["#@.#"], ["@@$."], ["@$.?"], ["$."]])
def test_a_room_that_is_none_is_refused(room):
    with pytest.raises(ValueError, match="is no room"):
        make("Sokoban").reset(seed=0, room=room)


def test_rooms_have_their_boxes_off_the_targets_and_differ():
    env = make("Sokoban", num_boxes=2, dim_room=(7, 7), prompt="terse")
    rooms = [env.reset(seed=seed)[0] for seed in range(50)]
    assert all(Counter(room)["X"] == 2 == Counter(room)["O"] + Counter(room)["S"] for room in rooms)
    assert len(set(rooms)) == 50


def test_the_fullest_rooms_are_found_too():
    env = make("Sokoban", dim_room=(5, 5), num_boxes=2, wall_share=1)
    assert all(env.reset(seed=seed) and env.solve() for seed in range(300))


# -- the others -------------------------------------------------------------------------------------------------------
def test_guess_can_be_won_by_halving():
    env = make("Guess", high=1000, answer="plain", prompt="terse")
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        low, high = 1, 1000
        while not env.is_over:
            middle = (low + high) // 2
            observation, reward, *_ = env.step(str(middle))
            if observation.endswith("higher"):
                low = middle + 1
            else:
                high = middle - 1
        assert reward == 1 and env.turns <= 10


def test_bandit_pays_as_often_as_its_best_arm_does():
    env = make("Bandit", num_pulls=2000)
    env.reset(seed=1)
    paid = [env.step(action)[1] for action in env.solve()]
    assert len(paid) == 2000 and np.mean(paid) == pytest.approx(0.9, abs=0.03)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.sampled_from(["+", "-", "+-*/", "/*"]), st.integers(0, 10**6))
def test_a_countdown_target_is_reached_with_each_number_once(count, operations, seed):
    env = make("Countdown", num_numbers=count, operations=operations, max_target=2000, answer="plain")
    env.reset(seed=seed)
    value, used = equation_value(env.solve()[0])
    assert value == env.target and used == Counter(env.numbers) and 1 <= value <= 2000


def test_countdown_answers_a_wrong_equation_with_its_value_and_takes_three():
    env = make("Countdown", prompt="terse", answer="plain", wrong_reward=0.1)
    assert env.reset(seed=0, numbers=[3, 4, 2], target=24)[0] == "3 4 2 -> 24"
    assert env.step("3+4*2 = 24") == (
        "3 4 2 -> 24\n3+4*2 = 11",
        0.1,
        False,
        False,
        {"success": False, "valid_action": True},
    )
    assert not env.step("3*8")[4]["valid_action"] and not env.is_over
    assert env.step("3 × 4 ÷ 0.5")[3] is True
    env.reset(seed=0, numbers=[3, 4, 2], target=24)
    assert env.step("(3*4)*2")[1:3] == (1.0, True)


def test_math_tells_a_wrong_answer_and_discounts_a_late_one(tmp_path):
    env = make("Math", discount=0.5)
    task = {"question": "Half of 1?", "ground_truth": "\\frac{1}{2}"}
    assert env.reset(seed=0, **task)[0].endswith("Half of 1?")
    assert env.step("\\boxed{2}")[:2] == ("That is not right. Find the mistake and answer again.", 0.0)
    assert env.step("no box")[4] == {"success": False, "valid_action": False}
    assert env.step("\\boxed{0.5}")[1:3] == (0.5, True)
    (tmp_path / "mine.py").write_text("def score(data_source, solution_str, ground_truth, extra_info): return 0.7")
    own = make("Math", scorer=f"{tmp_path}/mine.py:score", form="so ANSWER", success_score=0.8, max_steps=2)
    own.reset(seed=0)
    # the last attempt earns its score, though it is no success
    assert own.step("so 1")[1:4] == (0.0, False, False) and own.step("so 1")[1:4] == (0.7, False, True)
    with pytest.raises(NotImplementedError, match="'maths' has no built-in scorer"):
        make("Math", scorer="maths")


def test_code_runs_programs_and_tells_the_first_failure():
    env = make("Code", share_reward=0.5)
    env.reset(seed=0)
    assert env.step(env.solve()[0])[1:3] == (1.0, True)
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "4"]}
    assert env.reset(seed=0, question="Print it.", tests=tests)[0].endswith("Print it.")
    assert "No block" in env.step("print(input())")[0]
    observation, reward, *_ = env.step("```python\nprint(1)\n```")
    assert reward == 0 and observation.startswith(
        "2 of 3 tests fail.\nTest 2 with the arguments 2: wrong. expected '2'"
    )
    assert env.step("```python\nprint(input())\n```")[1] == pytest.approx(0.5 * 2 / 3)
    # the third test is hidden: its input is not told
    assert env.is_over and env.feedback("") == "1 of 3 tests fail."


def test_a_program_that_hangs_holds_up_no_other():
    hanging, quick = make("Code", test_s=2, total_s=3), make("Code")
    hanging.reset(seed=0)
    thread = threading.Thread(target=hanging.step, args=("```python\nwhile True: pass\n```",))
    thread.start()
    quick.reset(seed=0)
    assert quick.step(quick.solve()[0])[1] == 1 and thread.is_alive()
    thread.join(10)
    assert {result.outcome.value for result in hanging.results} == {"timeout"}


@pytest.mark.parametrize("name", [*GAMES, "Code"])
def test_a_task_of_other_keys_and_a_step_without_an_episode_are_refused(name):
    env = make(name)
    with pytest.raises(ValueError, match="the row's task has stray"):
        env.reset(seed=0, stray=1)
    with pytest.raises(RuntimeError, match=r"Call reset\(\) first"):
        make(name).step("")


@pytest.mark.parametrize("name", [*GAMES, "Code"])
def test_an_unknown_option_is_refused_with_the_known_ones(name):
    with pytest.raises(TypeError, match=f"{name} got .*'promt'. Did you mean 'prompt'. It takes .*invalid_reward"):
        make(name, promt="full")


@pytest.mark.parametrize(
    "name, options",
    [
        ("Sokoban", {"dim_room": (4, 6)}),
        ("Sokoban", {"num_boxes": 9}),
        ("Sokoban", {"symbols": "#_"}),
        ("Guess", {"high": 1}),
        ("Guess", {"words": "ab"}),
        ("Bandit", {"arms": "A"}),
        ("Bandit", {"probabilities": (1, 2)}),
        ("Bandit", {"max_steps": 3}),
        ("Countdown", {"operations": "^"}),
        ("Countdown", {"answer": "mention"}),
        ("Math", {"form": "x"}),
        ("Math", {"answer": "tag"}),
        ("Code", {"test_s": 0}),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_with_its_key(name, options):
    with pytest.raises(ValueError, match=rf"{name}: {next(iter(options))}=.*env\.registry"):
        make(name, **options)

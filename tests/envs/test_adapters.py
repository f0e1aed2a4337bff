"""Environments of other packages: seeded, readable, and refused by name where they cannot be played."""

import random
import threading
import time

import numpy as np
import pytest

from verl.envs import make
from verl.envs.adapters import OwnRandomState
from verl.envs.check import check, text_of


# -- gymnasium --------------------------------------------------------------------------------------------------------
@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


def test_frozen_lake_of_gymnasium_is_played_by_words_on_a_map_that_shows_the_player(gymnasium):
    env = make("gymnasium:FrozenLake-v1", actions="LDRU", answer="plain", is_slippery=False, success_return=1)
    first, _ = env.reset(seed=0)
    assert first.startswith("Actions are L, D, R, U.") and first.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert env.step("sideways")[4] == {"success": False, "valid_action": False}
    for move in "DDRRDR":
        observation, reward, terminated, truncated, info = env.step(move)
    assert observation.endswith("SFFF\nFHFH\nFFFH\nHFF[G]")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


@pytest.mark.parametrize(
    "name, options",
    [
        ("FrozenLake-v1", {}),
        ("Blackjack-v1", {"success_return": 1, "answer": "plain"}),
        ("Taxi-v4", {"observation": "both"}),
        ("CartPole-v1", {}),
        ("Pendulum-v1", {}),
        ("CliffWalking-v1", {"max_steps": 20}),
    ],
)
def test_environments_of_gymnasium_pass_the_check(gymnasium, name, options):
    report = check(f"gymnasium:{name}", options, episodes=5)
    assert not report.faults and not report.refused, text_of(report)
    assert report.numbers()["valid_action"] == 1
    assert (report.numbers()["success"] is None) == ("success_return" not in options)


def test_a_box_of_numbers_is_read_within_its_bounds(gymnasium):
    env = make("gymnasium:Pendulum-v1", answer="plain", prompt="terse")
    assert len(env.reset(seed=0)[0].split()) == 3
    for text in ("0.5", "[-2.0]", " +1e-1 "):
        assert env.step(text)[4]["valid_action"]
    for text in ("3", "nan", "0.1 0.2", "one", ""):
        assert not env.step(text)[4]["valid_action"]


def test_a_time_limit_of_gymnasium_truncates(gymnasium):
    env = make("gymnasium:MountainCar-v0", prompt="terse", answer="plain")
    env.reset(seed=0)
    answers = [env.step("1") for _ in range(200)]
    assert answers[-1][2:4] == (False, True) and not any(answer[3] for answer in answers[:-1])


@pytest.mark.parametrize(
    "name, options, told",
    [
        ("FrozenLak-v1", {}, "FrozenLake"),
        ("", {}, "gymnasium:FrozenLake-v1"),
        ("CartPole-v1", {"observation": "ansi"}, "renders no text"),
        ("CartPole-v1", {"actions": "LRU"}, "must be 2 different names"),
        ("Pendulum-v1", {"actions": "L"}, "has no effect"),
    ],
)
def test_what_gymnasium_has_not_is_refused(gymnasium, name, options, told):
    with pytest.raises(ValueError, match=told):
        make(f"gymnasium:{name}", **options)


# -- others -----------------------------------------------------------------------------------------------------------
def test_a_package_that_is_not_there_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr("verl.envs.adapters.is_package_available", lambda name: False)
    with pytest.raises(ImportError, match=r"needs the package textarena.*\[textarena\]"):
        make("textarena:Mastermind-v0")


def test_environments_that_call_the_model_themselves_are_refused():
    with pytest.raises(ValueError, match="calls the model itself.*base URL"):
        make("verifiers:wordle")


def test_the_global_generators_are_those_of_one_environment_at_a_time():
    one, two = OwnRandomState(), OwnRandomState()
    random.seed(7), np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    found = []
    for state in (one, two):
        with state.entered(3):
            found.append([random.random(), np.random.random()])
    for state in (one, two):
        with state.entered():
            found.append([random.random(), np.random.random()])
    assert found[0] == found[1] and found[2] == found[3] != found[0]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_game_of_textarena_is_played_and_repeats_itself():
    pytest.importorskip("textarena")
    env = make("textarena:GuessTheNumber-v0")
    first, _ = env.reset(seed=3)
    assert "between 1 and 20" in first
    low, high = 1, 20
    while not env.is_over:
        middle = (low + high) // 2
        observation, reward, *_, info = env.step(f"I say [{middle}].")
        low, high = (middle + 1, high) if "higher" in observation else (low, middle - 1)
    assert reward == 1 and info == {"success": True, "valid_action": True}
    report = check("textarena:GuessTheNumber-v0", episodes=5, actions=["[3]", "[17]", "9"])
    assert not report.faults, text_of(report)
    assert 0.1 < report.numbers()["valid_action"] < 0.9
    with pytest.raises(ValueError, match="no game for one player"):
        make("textarena:TicTacToe-v0").reset(seed=0)
    with pytest.raises(ValueError, match="Did you mean"):
        make("textarena:GuessNumber-v0")


def test_a_task_of_reasoning_gym_is_an_episode_of_one_turn():
    pytest.importorskip("reasoning_gym")
    report = check("reasoning_gym:chain_sum", agent="solve", episodes=5)
    assert not report.faults and report.numbers()["success"] == 1 and report.numbers()["turns"]["max"] == 1
    with pytest.raises(ValueError, match="seed=3 is set by each episode"):
        make("reasoning_gym:chain_sum", seed=3)


def test_an_openenv_server_is_played_over_its_socket():
    pytest.importorskip("openenv")
    uvicorn = pytest.importorskip("uvicorn")
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.seed = seed
            return Heard(text=f"Say {seed}.")

        def step(self, action, timeout_s=None, **kwargs):
            is_right = action.message == str(self.seed)
            return Heard(text=action.message, reward=float(is_right), done=is_right)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        kind, options = f"openenv:http://127.0.0.1:{port}", {"observation_key": "text"}
        report = check(kind, options, episodes=3, actions=["0", "1", "2"], max_steps=20)
        assert not report.faults and not report.refused, text_of(report)
        assert report.numbers()["success"] == 1 and report.episodes[0]["transcript"][0] == "Say 0."
        report = check(kind, {"observation_key": "words"}, episodes=1)
        assert "is no field of the observation; it has text" in report.faults["raised"].text
    finally:
        server.should_exit = True
        thread.join(10)

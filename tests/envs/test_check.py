"""``verl env check`` names each fault of an environment, in time, and finds none in those of the package."""

import json
import sys
from pathlib import Path

import pytest

from verl.cli import main
from verl.envs.check import check, text_of

CASES = {
    "global_random": "def step(self, action): return str(random.random()), 0.0, True, False, {'success': True}",
    "deterministic": "def step(self, action): return str(time.time()), 0.0, True, False, {'success': True}",
    "shared": """
    state = {}
    def reset(self, *, seed):
        self.state['seed'] = seed
        self.turns = 0
        return 'go', {}
    def step(self, action):
        self.turns += 1
        return str(self.state['seed']), 0.0, self.turns > 2, False, {'success': True}""",
    "reset": """
    turns = 0
    def step(self, action):
        self.turns += 1
        return str(self.turns), 0.0, self.turns % 3 == 0, False, {'success': True}""",
    "timeout": "def step(self, action): time.sleep(1000)",
    "exit": "def step(self, action): os._exit(3)",
    "crash": "def step(self, action): ctypes.string_at(0)",
    "raised": "def step(self, action): return int(action)",
    "not_finite": "def step(self, action): return '', float('nan'), True, False, {}",
    "wrong_type": "def step(self, action): return '', 0.0, True, {}",
    "wrong_type ": "def step(self, action): return b'bytes', 0.0, True, False, {}",
    "wrong_type  ": "def step(self, action): return 'x' * 2**20, 0.0, True, False, {}",
    "wrong_type   ": "def step(self, action): return 'x', None, True, False, {}",
    "wrong_type    ": "def frame(self): return 3",
    "info": "def step(self, action): return 'x', 1.0, True, False, {'success': 'yes'}",
}
SOURCE = """
import ctypes, os, random, time

class Env:
    def reset(self, *, seed):
        return 'go', {}
    def step(self, action):
        return 'on', 0.0, False, False, {'success': False}
    def random_action(self, generator):
        return str(int(generator.integers(9)))
    BODY
"""
TOLD = {
    "global_random": "numpy.random.default_rng(seed)",
    "deterministic": "no seed sets",
    "shared": "another instance plays at the same time",
    "reset": "reset must set again",
    "timeout": "step did not return within 0.5 s (--step-timeout)",
    "exit": "exit code 3",
    "raised": "invalid literal",
    "wrong_type": "(observation, reward, terminated, truncated, info)",
    "wrong_type ": "Decode bytes",
    "wrong_type  ": "1048576 characters",
    "wrong_type   ": "it must be a number",
    "wrong_type    ": "frame returned 3; it must return text",
    "info": "info['success'] is 'yes'",
}


def written(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.replace("BODY", body))
    return f"{file}:Env"


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_with_its_place_and_a_way_out(case, tmp_path):
    report = check(written(tmp_path, CASES[case]), episodes=3, step_timeout=0.5, max_steps=8)
    assert case.strip() in report.faults and report.exit_code() == 2
    finding = report.faults[case.strip()]
    assert TOLD.get(case, "") in finding.text and finding.seed is not None
    allowed = {"global_random": {"deterministic"}, "raised": {"wrong_type"}}.get(case, set())
    assert set(report.faults) <= {case.strip(), *allowed}


def test_an_environment_that_begins_no_episode_is_a_fault(tmp_path):
    report = check(written(tmp_path, "def reset(self, *, seed): raise KeyError('no map')"), episodes=2)
    assert (
        report.faults["raised"].text == "reset raised KeyError: 'no map'." and report.numbers()["ended"]["failed"] == 2
    )
    assert "reset raised" in text_of(report)


def test_what_is_no_environment_or_takes_no_seed_is_told_how_to_be_one(tmp_path):
    (tmp_path / "none.py").write_text("class Env: pass")
    assert "no method reset and step" in check(f"{tmp_path}/none.py:Env").refused
    report = check(written(tmp_path, "def reset(self): return 'go', {}"), episodes=1)
    assert report.faults["raised"].text.endswith("Write it as def reset(self, *, seed, **task).")


def test_an_environment_that_eats_memory_is_ended(tmp_path):
    body = "def step(self, action): self.all = [bytearray(b'x' * 2**20) for _ in range(4000)]"
    report = check(written(tmp_path, body), episodes=1, memory_mb=200)
    assert "--memory-mb" in report.faults["memory"].text


def test_a_hang_is_told_with_its_line(tmp_path):
    report = check(written(tmp_path, CASES["timeout"]), episodes=1, step_timeout=0.5)
    assert "mine.py" in report.faults["timeout"].trace and "mine.py" in text_of(report)


def test_an_environment_that_cannot_be_made_or_found_is_refused(tmp_path, capsys):
    assert main(["env", "check", "FrozenLaek"]) == 2
    assert "Did you mean 'FrozenLake'" in capsys.readouterr().out
    assert main(["env", "check", "FrozenLake", "--kwargs", "size=1"]) == 2
    assert "size=1 must be at least 2" in capsys.readouterr().out
    assert main(["env", "check", f"{tmp_path}/none.py:Env"]) == 2
    assert "No Python file" in capsys.readouterr().out


def test_what_is_doubtful_is_a_warning_and_an_error_with_strict(tmp_path, capsys):
    name = written(tmp_path, "def step(self, action): return 'x' * 9000, 1.0, False, False, {'values': [1]}")
    words = ["env", "check", name, "--episodes", "10", "--max-steps", "3"]
    assert main(words) == 0 and main([*words, "--strict"]) == 1
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {one["check"] for one in report["warnings"]} == {"success", "long", "endless", "constant", "info"}
    assert report["ended"] == {"terminated": 0, "truncated": 0, "limit": 10, "failed": 0}


def test_an_async_environment_with_words_for_actions_passes(tmp_path):
    body = """
    async def reset(self, *, seed, goal='7'):
        self.goal = goal
        return [{'role': 'user', 'content': f'Say {goal}.'}], {}
    async def step(self, action):
        return 'no', float(action == self.goal), True, False, {'success': action == self.goal}"""
    report = check(written(tmp_path, body), episodes=30, actions=["6", "8"], task={"goal": "8"})
    assert not report.faults and not report.warnings and 0.2 < report.numbers()["success"] < 0.8


@pytest.mark.parametrize(
    "name, agent, kwargs",
    [
        ("FrozenLake", "random", {"is_slippery": True}),
        ("FrozenLake", "solve", {"size": 2, "num_holes": 1, "answer": "plain", "actions": "LDRU"}),
        ("Sokoban", "solve", {}),
        ("Guess", "random", {}),
        ("Bandit", "solve", {}),
        ("Countdown", "random", {}),
        ("Math", "solve", {}),
        ("Code", "solve", {}),
    ],
)
def test_the_games_of_the_package_have_no_faults(name, agent, kwargs):
    report = check(name, kwargs, agent=agent, episodes=3 if name == "Code" else 12)
    assert not report.faults and not report.refused, text_of(report)
    if agent == "solve":
        assert report.numbers()["success"] == 1


def test_the_example_passes_and_can_be_won():
    example = f"{Path(__file__).parents[2]}/examples/agentic/lock.py:Lock"
    assert not check(example, {"digits": 1}, episodes=20).faults
    report = check(example, agent="solve", episodes=5)
    assert not report.faults and not report.warnings and report.numbers()["success"] == 1


def test_the_check_imports_no_torch(tmp_path):
    body = "def step(self, action): return '', 1.0, True, False, {'success': 'torch' not in sys.modules}"
    name = written(tmp_path, body.replace("sys.modules", "__import__('sys').modules"))
    assert check(name, episodes=1).numbers()["success"] == 1
    assert "verl.envs.check" in sys.modules


def test_a_person_plays_by_keyboard(tmp_path, monkeypatch, capsys):
    answers = iter(["5", "3", "oops"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    words = ["env", "check", "Guess", "--agent", "keyboard", "--task", "number=3", "--kwargs", "answer=plain"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "5: lower" in shown and "success       1" in shown


def test_the_first_episode_is_shown(capsys):
    assert main(["env", "check", "Guess", "--agent", "solve", "--episodes", "1", "--show"]) == 0
    assert "> <answer>" in capsys.readouterr().out


def test_the_environments_are_listed_with_their_options(capsys):
    assert main(["env", "list"]) == 0
    shown = capsys.readouterr().out
    assert "FrozenLake" in shown and "gymnasium:" in shown
    assert main(["env", "list", "FrozenLake"]) == 0
    shown = capsys.readouterr().out
    assert "num_holes: int | None = None" in shown and "invalid_reward: of a turn" in shown
    assert main(["env", "list", "nonsense"]) == 2
    assert "is not known" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["env", "check", "FrozenLake", "--episodes", "0"])
    assert end.value.code == 2

"""Episodes that are stopped and go on in a later step, of a real run with an environment in a file of the user's."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.runs import overrides
from tests.trainer.buffer.over_sampling_job import run as run_in_process
from verl.agents.base import _LOOPS
from verl.agents.episode import ConversationEnvironment, EpisodeLimits, EpisodeLoop, Reply
from verl.utils.tiny_model import make_tiny_model

ROLLOUT = "actor_rollout_ref.rollout"

ENVIRONMENT = '''
import json
import uuid
from pathlib import Path


class Echo:
    """Three turns; each says how many characters it read. Writes down whatever it is asked."""

    def __init__(self, log):
        self.log, self.name = Path(log), uuid.uuid4().hex

    def reset(self, *, seed, **task):
        self.seed, self.turn, self.read = seed, 0, []
        self.note("reset")
        return f"say {seed % 97}", {}

    def step(self, action):
        self.turn += 1
        self.read.append(action)
        self.note(action)
        reward = sum(character.isdigit() for character in action) / 8
        return f"{len(action)} read", reward, self.turn == 3, False, {"valid_action": bool(action.strip())}

    def note(self, what):
        with self.log.open("a") as file:
            file.write(json.dumps([self.seed, self.name, self.turn, what]) + "\\n")
'''


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo_env.py").write_text(ENVIRONMENT)
    make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=1)

    def run(folder, **settings):
        log = tmp_path / f"{folder}.log"
        task = {
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            "env.train.tags": "[Echo]",
            "env.train.n_groups": 2,
            "env.train.group_size": 2,
            "env.train.redundancy": 2,
            "env.registry.Echo.type": f"{tmp_path / 'echo_env.py'}:Echo",
            "env.registry.Echo.kwargs.log": str(log),
            "env.registry.Echo.max_tokens_per_step": 6,
            "trainer.default_local_dir": str(tmp_path / folder),
            "trainer.rollout_data_dir": str(tmp_path / folder / "samples"),
            "data.train_batch_size": 2,
            "data.max_response_length": 96,
            f"{ROLLOUT}.n": 2,
            f"{ROLLOUT}.partial_rollout": True,
            f"{ROLLOUT}.calculate_log_probs": True,
            f"{ROLLOUT}.max_running_requests": 3,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
            "trainer.test_freq": -1,
        }
        trainer = run_in_process(overrides(task, **settings))
        files = sorted((tmp_path / folder / "samples").iterdir(), key=lambda path: int(path.stem))
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
        return trainer, rows

    return run


@pytest.mark.parametrize("workers", [1, 2])
def test_a_continued_episode_asks_its_environment_nothing_twice(start, workers):
    settings = {f"{ROLLOUT}.agent.num_workers": workers, "trainer__total_training_steps": 5}
    trainer, steps = start("run", **settings)
    asked = [json.loads(line) for line in Path("run.log").read_text().splitlines()]
    assert [len(rows) for rows in steps] == [4] * 5
    assert trainer.metrics["rollout/staleness/max"] >= 0
    by_environment = Counter((name, turn) for _, name, turn, _ in asked)
    assert max(by_environment.values()) == 1  # each environment answers each turn once
    episodes = Counter((seed, turn, what) for seed, _, turn, what in asked if turn)
    # of two environments of a group each may hear the same; none hears it a third time
    assert max(episodes.values()) <= 2
    kept = [row for rows in steps for row in rows if len(row["turns"]) > 2]
    assert kept and all(row["status"] in ("completed", "max_tokens") for row in kept)


class InLoop(ConversationEnvironment):
    """An environment without threads: when a reply is there does not depend on the clock."""

    def __init__(self):
        self.read = []

    async def start(self, row):
        return Reply([{"role": "user", "content": f"say {row['env_seed'] % 97}"}])

    async def reply(self, turn):
        self.read.append(turn.text)
        reward, is_last = sum(character.isdigit() for character in turn.text) / 8, len(self.read) == 3
        return Reply([{"role": "user", "content": str(sum(map(len, self.read)))}], reward=reward, terminated=is_last)

    async def resume(self, row, turns, replies):
        self.read = [turn.text for turn in turns]
        RESUMED.append(len(turns))

    async def finish(self):
        return {"reward_score": 0.0}


class InLoopAgent(EpisodeLoop):
    def environment(self, row):
        return InLoop()

    def limits(self, row):
        return EpisodeLimits(tokens_per_turn=6)


RESUMED: list[int] = []


def test_a_run_that_was_stopped_goes_on_with_the_same_trajectories(start, monkeypatch):
    monkeypatch.setitem(_LOOPS, "env_agent", InLoopAgent)
    _, expected = start("whole", trainer__total_training_steps=4)
    start("cut", trainer__total_training_steps=2, trainer__save_freq=2)
    assert not RESUMED
    _, found = start("cut", trainer__total_training_steps=4, trainer__save_freq=2)
    assert RESUMED  # some episodes went on in a new environment, with the answers that were kept
    names = ("input", "output", "score", "advantage", "status")
    assert [[[row[name] for name in names] for row in rows] for rows in found[2:]] == [
        [[row[name] for name in names] for row in rows] for rows in expected[2:]
    ]

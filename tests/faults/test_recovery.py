"""Runs that lose a process and go on: within the step where the rollout is apart, else from the newest checkpoint."""

import functools
import signal

import pytest

import verl.trainer.ppo.job  # noqa: F401 - imported once, for all forks
from tests.faults.harness import Strike, by, config_of, run_cell
from tests.support.runs import make_task, read_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.disjoint import ActorWorker, RolloutWorker
from verl.workers.rollout.hf.rollout import HFRollout

pytestmark = pytest.mark.ranks

KILLED = by(signal.SIGKILL)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def undisturbed(task, tmp_path_factory):
    """Metrics of the run with actor and rollout apart that nothing happens to: rollout mode -> rows."""

    @functools.lru_cache
    def of(mode):
        folder = tmp_path_factory.mktemp("undisturbed")
        assert run_cell(apart(task, folder, mode), folder, None).code == 0
        return learned(folder)

    return of


def apart(task, folder, mode="sync", **settings):
    config = config_of(task, folder, apart=True, val_before_train=False, **settings)
    return config.with_values({"actor_rollout_ref.rollout.mode": mode})


def learned(folder):
    """What a run has learned, step by step: all numbers but those of time, memory and load."""
    (file,) = (folder / "run").glob("**/*.jsonl")
    words = ("timing", "perf/", "_per_s", "memory", "bubble", "idle", "waiting", "running_", "engine/steps")
    rows = [row["data"] for row in read_metrics(file)]
    return [{name: it for name, it in row.items() if not any(word in name for word in words)} for row in rows]


@pytest.mark.parametrize(
    "mode, owner, name", [("sync", RolloutWorker, "generate_sequences"), ("async", HFRollout, "step")]
)
def test_a_rollout_that_dies_is_started_again_and_generates_the_same_batch(
    task, tmp_path, undisturbed, mode, owner, name
):
    ended = run_cell(apart(task, tmp_path, mode), tmp_path, Strike(owner, name, KILLED, at=2))
    assert ended.code == 0 and ended.strikes == 1 and not ended.left, ended.text[-3000:]
    assert "the rollout is started again, and generates the same batch: Rank 0 of 1 died" in ended.text
    assert learned(tmp_path) == undisturbed(mode)


@pytest.mark.parametrize("processes", [1, 3])
def test_responses_of_a_rollout_that_dies_while_it_generates_all_the_time_go_on_from_their_tokens(
    task, tmp_path, processes
):
    names = {"partial_rollout": True, "max_staleness": 2, "calculate_log_probs": True, "max_running_requests": 2}
    names |= {"agent.num_workers": processes}
    config = apart(task, tmp_path, "async").with_values(
        {f"actor_rollout_ref.rollout.{name}": value for name, value in names.items()}
    )
    ended = run_cell(config, tmp_path, Strike(RolloutWorker, "serve", KILLED, at=2))
    assert ended.code == 0 and ended.strikes == 1 and not ended.left, ended.text[-3000:]
    assert "the rollout is started again, and continues the responses from the tokens they had" in ended.text
    steps = learned(tmp_path)
    assert all(row["rollout/staleness/max"] <= 2 for row in steps) and steps[-1]["rollout/groups_open"] == 0


def test_a_batch_that_kills_the_rollout_twice_ends_the_run(task, tmp_path):
    ended = run_cell(apart(task, tmp_path), tmp_path, Strike(RolloutWorker, "generate_sequences", KILLED, times=0))
    assert ended.code == 5 and ended.strikes == 2 and not ended.left
    assert "died while running rollout.generate_sequences" in ended.text


def test_a_run_that_lost_its_actor_goes_on_from_its_checkpoint_and_learns_the_same(task, tmp_path, undisturbed):
    config = apart(task, tmp_path, max_restarts=1, restart_wait=0.0, save_freq=1)
    ended = run_cell(config, tmp_path, Strike(ActorWorker, "update_actor", KILLED, at=2))
    assert ended.code == 0 and ended.strikes == 1 and not ended.left, ended.text[-3000:]
    assert "ended with exit code 5 in step 2; restart 1 of 1 from its newest checkpoint" in ended.text
    assert "resumed from" in ended.text and learned(tmp_path) == undisturbed("sync")


@pytest.mark.parametrize("when", ["weights were transferred", "a batch was generated ahead"])
def test_a_rollout_lost_while_the_actor_cannot_wait_costs_a_restart(task, tmp_path, undisturbed, when):
    config = apart(task, tmp_path, max_restarts=1, restart_wait=0.0, save_freq=1)
    strike = Strike(RolloutWorker, "receive_weights", KILLED, at=2)
    if when == "a batch was generated ahead":
        config = config.with_values({"actor_rollout_ref.rollout.max_staleness": 1})
        strike = Strike(RolloutWorker, "start_generating", KILLED, at=2)
    ended = run_cell(config, tmp_path, strike)
    assert ended.code == 0 and ended.strikes == 1 and not ended.left, ended.text[-3000:]
    assert "restart 1 of 1 from" in ended.text and "the rollout is started again" not in ended.text
    reason = when if when == "weights were transferred" else "it generated ahead"
    assert f"a process was lost while {reason}" in ended.text
    if when == "weights were transferred":
        assert learned(tmp_path) == undisturbed("sync")


def test_a_run_whose_driver_is_killed_goes_on_too(task, tmp_path, undisturbed):
    config = apart(task, tmp_path, max_restarts=1, restart_wait=0.0, save_freq=1)
    ended = run_cell(config, tmp_path, Strike(RayPPOTrainer, "improve", KILLED, at=2))
    assert ended.code == 0 and ended.strikes == 1 and not ended.left, ended.text[-3000:]
    assert "was killed by SIGKILL in step 2; restart 1 of 1 from its newest checkpoint" in ended.text
    assert learned(tmp_path) == undisturbed("sync")

"""Continuous generation: engines that never wait for the trainer, tokens of several versions, a bound on their age."""

import asyncio
import json
import pickle
from collections import Counter
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.learning import check_learned
from tests.support.runs import make_task, overrides, read_metrics, run_job
from tests.trainer.buffer.test_disjoint import APART, ROLLOUT, RUN, run
from tests.trainer.buffer.test_over_sampling import Prompts
from tests.workers.rollout.conftest import COMMON
from verl.agents.episode import Reply, ReplyLog
from verl.data.loader import build_train_loader
from verl.experimental.fully_async_policy import fully_async_main
from verl.rewards.managers.early import EarlyScoring
from verl.trainer.buffer.continuous import ContinuousScheduler, OpenGroup
from verl.trainer.buffer.partial_rollouts import PartialRollout, ProgressLog, SampleClient, SampleStopped, stop_samples
from verl.trainer.buffer.prompt_pool import PromptPool
from verl.trainer.main_ppo import main
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.base import Completion, Request, SamplingParams

CONTINUOUS = {
    **APART,
    f"{ROLLOUT}__mode": "async",
    f"{ROLLOUT}__partial_rollout": True,
    f"{ROLLOUT}__max_staleness": 2,
    f"{ROLLOUT}__max_running_requests": 2,
    "trainer__test_freq": 2,  # between training requests
    "trainer__total_training_steps": 6,
    "trainer__save_freq": 1,
    "data__max_response_length": 24,
}


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_no_group_is_trained_on_after_its_last_step_and_engines_always_have_work(data, staleness, batch_size):
    config = SimpleNamespace(staleness=staleness, max_postponements=None, partial_rollout=True)
    scheduler = ContinuousScheduler(config, None, batch_size, 0)
    scheduler.total_steps = 8
    trained = []
    for step in range(1, 9):
        for number in range(scheduler.num_prompts_of(step)):
            uid = f"{step}-{number}"
            scheduler.open[uid] = OpenGroup(uid, None, "", step, [], None)
        assert len(scheduler.open) == batch_size * min(1 + staleness, 8 - step + 1)
        waiting = data.draw(st.permutations(list(scheduler.open.values())))
        while scheduler.lacking(step, batch_size) or sum(group.finished >= 0 for group in waiting) < batch_size:
            next(group for group in waiting if group.finished < 0).finished = 0
        complete = sorted((group for group in waiting if group.finished >= 0), key=lambda group: group.step)
        for group in complete[:batch_size]:
            assert step - group.step <= staleness
            trained.append(scheduler.open.pop(group.uid).uid)
    assert not scheduler.open and len(set(trained)) == 8 * batch_size


class ScriptedClient:
    """Servers that answer at once, but for the requests of ``slow``: those end when they are aborted or let go."""

    def __init__(self, slow):
        self.slow, self.version, self.running = slow, 0, {}

    async def generate(self, request, *, request_id, session=None, priority=0):
        sample, tokens, version = request_id.rpartition("/")[0], [7, 8, 9], self.version
        reason = "stop"
        if sample == self.slow:
            self.running[request_id] = asyncio.get_running_loop().create_future()
            reason = await self.running[request_id]
        return Completion(tokens, [-1.0] * 3, reason, version)

    async def abort(self, request_ids=None):
        for name in [*self.running] if request_ids is None else request_ids:
            if name in self.running:
                self.running.pop(name).set_result("abort")


def test_new_weights_go_on_with_a_response_until_its_tokens_are_too_old():
    config = {"n": 2, "response_length": 64, "over_sample_rate": 0.0, "partial_rollout": True}
    config = SimpleNamespace(**config, staleness=1, max_staleness=1, max_postponements=4)
    pool = PromptPool(build_train_loader({"train_batch_size": 2, "dataloader_num_workers": 0}, Prompts(20)))
    scheduler = ContinuousScheduler(config, pool, 2, 0)
    scheduler.total_steps, client = 9, ScriptedClient("step1-0/0")

    async def one(name, row, seed, own):
        return await own.generate(Request(tuple(row["raw_prompt_ids"]), SamplingParams(64), seed))

    async def step(number):
        client.version = number - 1
        scheduler.gate.clear()
        await client.abort()
        await scheduler.start(scheduler.take(number), number, client, client.version, one)
        restarted = await scheduler.restart_old(client)
        return restarted, await scheduler.next_batch(number)

    async def run():
        first, second = await step(1), await step(2)
        assert first[0] == second[0] == (0, 0) and "step1-0" in scheduler.open
        assert {*first[1][0].non_tensor_batch["uid"], "step1-0"} == {"step1-0", "step1-1", "step1-2"}
        state = await scheduler.interrupted_state(client)
        assert state["started"]["step1-0"] == 1
        assert state["journals"]["step1-0/0"]["turns"][0]["versions"] == [0] * 3 + [1] * 3
        # two steps old: what this sample and the complete one beside it have is discarded, and generated again
        restarted, _ = await step(3)
        assert restarted == (2, 9) and "step1-0" in scheduler.open
        client.running.pop("step1-0/0/0").set_result("stop")
        (samples, _), (prompts, sampled) = await step(4)
        row = prompts.non_tensor_batch["uid"].tolist().index("step1-0")
        assert samples == 0 and sampled.outcomes[2 * row].token_ids == [7, 8, 9]
        assert sampled.versions[2 * row] == [2] * 3 and sampled.metrics["rollout/staleness/max"] == 1
        await scheduler.cancel()

    asyncio.run(run())


def test_a_sample_travels_with_its_log_and_one_that_is_stopped_waits_at_no_gate():
    async def run():
        turn = PartialRollout("key", [1, 2], [-0.1, -0.2], [2, 3], "stop")
        sample = SampleClient(None, "a/0", ProgressLog([turn], ReplyLog([Reply(reward=0.5)])), 3, 7, asyncio.Event())
        sent = pickle.loads(pickle.dumps(sample))
        assert sent.log == sample.log and (sent.sample_id, sent.version, sent.priority) == ("a/0", 3, 7)
        sent.attach(ScriptedClient(""), asyncio.Event())
        sent.log.clear()
        task = asyncio.ensure_future(sent.generate(Request((1,), SamplingParams(4), 0)))
        await asyncio.sleep(0)
        sent.stop()
        with pytest.raises(SampleStopped):
            await asyncio.wait_for(task, 5)
        # one that runs in another process, and begins again there as soon as it was stopped
        aborted = []

        async def abort(names):
            aborted.append(names)
            sent.running = "run 2"

        sent.running = "run 1"
        await asyncio.wait_for(stop_samples([sent], SimpleNamespace(abort=abort)), 5)
        assert aborted == [["run 1"]]

    asyncio.run(run())


def prompts_of(folder, steps):
    rows = [json.loads(line) for step in steps for line in (folder / f"{step}.jsonl").read_text().splitlines()]
    return Counter(row["input"] for row in rows)


def run_as_verl_does(folder, monkeypatch):
    """The metrics by step of the same options under the names of verl's own program, below another configuration."""
    given = {name: value for name, value in CONTINUOUS.items() if name.endswith(("requests", "n_gpus_per_node"))}
    given |= {name: value for name, value in {**RUN, **CONTINUOUS}.items() if not name.startswith("actor_rollout_ref")}
    given |= {name: value for name, value in RUN.items() if name.endswith("ppo_mini_batch_size")}
    given |= {"async_training__staleness_threshold": 2, "async_training__partial_rollout": True}
    given |= {f"{ROLLOUT}__agent__num_workers": 2}  # that of the whole run is 1
    given |= {"trainer__rollout_data_dir": folder / "resumed", "trainer__default_local_dir": folder / "run"}
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "resumed.jsonl"))
    main(overrides(make_task(folder / "task", rows=12), **given), fully_async_main.RECIPE)
    return {row["step"]: row["data"] for row in read_metrics(folder / "resumed.jsonl")}


def test_tokens_of_several_versions_are_trained_on_and_a_resumed_run_keeps_them(tmp_path, monkeypatch):
    begun = Counter()
    begin = EarlyScoring.begin
    counted = lambda scoring, seed, *response: begun.update([seed]) or begin(scoring, seed, *response)  # noqa: E731
    monkeypatch.setattr(EarlyScoring, "begin", counted)
    whole = run(tmp_path, "whole", monkeypatch, **CONTINUOUS, trainer__default_local_dir=tmp_path / "run")
    assert set(begun.values()) == {1} and len(begun) == 6 * 4 * 4  # as each ended, also those of groups that waited
    assert all(row["rollout/staleness/max"] <= 2 for row in whole.values())
    assert max(row["rollout/staleness/max"] for row in whole.values()) > 0
    assert max(row["rollout/interrupted_share"] for row in whole.values()) > 0
    assert all(row["rollout/samples_restarted"] == 0 for row in whole.values())
    assert all(0 <= row["rollout/bubble_share"] <= 1 for step, row in whole.items() if step > 1)
    assert whole[1]["rollout/groups_open"] == 8 and whole[6]["rollout/groups_open"] == 0
    # each token's log-prob is that of the weights that drew it: the first batch, of one version, shows the actor's own
    assert whole[1]["training/rollout_probs_diff_max"] < 1e-5
    counts = prompts_of(tmp_path / "whole", range(1, 7))
    assert len(counts) == 12 and len(set(counts.values())) == 1  # each prompt once in each of two epochs

    state = json.loads((tmp_path / "run" / "global_step_3" / "rollout.json").read_text())
    saved = {name: turns["turns"][0] for name, turns in state["journals"].items()}
    assert len(state["started"]) == 8 and any(turn["finish_reason"] is None for turn in saved.values())
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = run_as_verl_does(tmp_path, monkeypatch)
    assert sorted(resumed) == [4, 5, 6] and resumed[4]["rollout/stale_token_share"] > 0
    again = prompts_of(tmp_path / "whole", range(1, 4)) + prompts_of(tmp_path / "resumed", range(4, 7))
    assert again == counts


@pytest.mark.sglang
def test_sglang_continues_what_new_weights_interrupt(tmp_path, monkeypatch):
    task = make_task(tmp_path / "task", rows=12)
    task["actor_rollout_ref.model.path"] = make_tiny_model(tmp_path / "heads_of_32", **COMMON["tied"])
    settings = {**RUN, **CONTINUOUS, f"{ROLLOUT}__name": "sglang", f"{ROLLOUT}__tensor_model_parallel_size": 1}
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    run_job(overrides(task, **settings))
    rows = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(rows) == 6 and max(row["rollout/interrupted_share"] for row in rows) > 0
    assert 0 < max(row["rollout/staleness/max"] for row in rows) <= 2
    # of one version, the newest: the log-probs are the actor's own
    assert rows[0]["training/rollout_probs_diff_max"] < 1e-4


def oldest_groups_only(scheduler, step, count):
    """`ContinuousScheduler.lacking` of a step that trains on groups started two steps before, however fast each side
    is."""
    return sum(group.finished < 0 for group in scheduler.open.values() if group.step < step)


@pytest.mark.learning
@pytest.mark.parametrize("behind", [0, 2])
def test_two_steps_behind_the_reward_is_that_of_none(behind, tmp_path, monkeypatch):
    from tests.trainer.test_learning import TINY, rewards_of

    monkeypatch.setattr(ContinuousScheduler, "lacking", oldest_groups_only)
    settings = {**TINY, **APART, "trainer__total_training_steps": 24, f"{ROLLOUT}__max_staleness": behind}
    check_learned(f"{behind} steps behind", rewards_of(tmp_path, monkeypatch, **settings), over=(2, 4))
    rows = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert all(("rollout_corr/rollout_is_mean" in row) == (behind > 0) for row in rows)
    if behind:
        assert max(row["rollout/staleness/max"] for row in rows) == 2
        assert min(row["rollout/staleness/mean"] for row in rows[2:]) >= 1

"""Over-sampling on a real engine: prompts deferred, tokens kept and discarded, state restored."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from tests.support.engine_client import EngineClient
from tests.workers.rollout.conftest import rollout_config, weights_of
from verl.batch.ragged import Ragged
from verl.data.loader import build_train_loader
from verl.protocol import DataProto
from verl.trainer.buffer.over_sampling import GroupScheduler, max_deferrals, versions_column
from verl.trainer.buffer.partial_rollouts import prompt_key
from verl.trainer.buffer.prompt_pool import PromptPool
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.sync import sync_weights

LONGEST = 16


class Prompts(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"input_ids": torch.tensor([4 + i, 5, 6]), "index": i, "raw_prompt_ids": [4 + i, 5, 6]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), family="qwen2", initializer_range=0.1)
    rollout = HFRollout(folder, rollout_config())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def update(version):
        """Move the weights a little and hand them over."""
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
        rollout.wake()
        sync_weights(weights_of(model), rollout, version=version)

    rollout.update = update
    return rollout


class Run:
    """Steps of a run without its training: prompts, samples, weights that change."""

    def __init__(self, engine, rows=8, batch=2, max_running=None, **config):
        defaults = {"n": 2, "response_length": LONGEST, "over_sample_rate": 1.0, "max_postponements": None}
        defaults |= {"partial_rollout": False, "max_staleness": 1, **config}
        self.engine, self.max_running, self.rows, self.batch = engine, max_running, rows, batch
        self.config = SimpleNamespace(**defaults, staleness=defaults["max_staleness"])
        self.scheduler, self.step = self.fresh_scheduler(), 0
        self.trained, self.uids, self.sampled, self.prompts, self.deferrals = [], [], [], [], []

    def fresh_scheduler(self):
        data = {"train_batch_size": self.batch, "dataloader_num_workers": 0}
        pool = PromptPool(build_train_loader(data, Prompts(self.rows)))
        return GroupScheduler(self.config, pool, self.batch, seed=3)

    def restart(self, folder):
        """Save, forget everything, read it back."""
        self.scheduler.save(folder)
        position = self.scheduler.pool.loader.state_dict()
        self.scheduler = self.fresh_scheduler()
        self.scheduler.pool.loader.load_state_dict(position)
        self.scheduler.load(folder)

    def go(self, steps=1, new_weights=1):
        """Steps, each after ``new_weights`` weight updates."""
        for _ in range(steps):
            self.step += 1
            for _ in range(new_weights):
                self.engine.update(1 + (self.engine.version or 0))
            prompts = self.scheduler.take(self.step)
            self.deferrals.append([self.scheduler.pool.entries[u].deferrals for u in prompts.non_tensor_batch["uid"]])
            client = EngineClient(self.engine, self.max_running)
            sampled = asyncio.run(self.scheduler.sample(prompts, client, self.engine.version, self.one_turn(prompts)))
            self.sampled.append(sampled)
            self.prompts.append(prompts)
            self.trained += [int(i) for i in prompts.non_tensor_batch["index"][sampled.rows]]
            self.uids += list(prompts.non_tensor_batch["uid"][sampled.rows])
        return self

    @staticmethod
    def one_turn(prompts):
        async def run(row, seed, client):
            sampling = SamplingParams(LONGEST, want_log_probs=True, stop_token_ids=tuple(range(40)))
            return await client.generate(
                Request(tuple(prompts.non_tensor_batch["raw_prompt_ids"][row]), sampling, seed)
            )

        return run

    def metric(self, name):
        return [sampled.metrics[f"rollout/{name}"] for sampled in self.sampled]


def test_without_over_sampling_the_batch_is_all_prompts_however_many_run_at_a_time(engine):
    def tokens(max_running, new_weights=0):
        run = Run(engine, over_sample_rate=0.0, max_running=max_running).go(new_weights=new_weights)
        assert run.scheduler.num_prompts == 2 and run.sampled[0].rows == [0, 1]
        return [completion.token_ids for completion in run.sampled[0].outcomes]

    together = tokens(None, new_weights=1)
    assert len(together) == 4 and tokens(1) == tokens(3) == together


def test_the_first_groups_that_are_complete_make_the_batch(engine):
    run = Run(engine, over_sample_rate=1.5).go()
    [sampled] = run.sampled
    assert run.scheduler.num_prompts == 5 and len(sampled.outcomes) == 4 and sorted(sampled.finish_places) == [0, 1]
    longest = max(len(c.token_ids) for c in sampled.outcomes)
    assert run.metric("prompts_put_off") == [3]
    assert max(run.metric("tokens_generated/max")) <= longest + 1
    assert run.scheduler.pool.num_deferred == 3


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_prompt_is_lost_or_doubled_and_no_token_is_older_than_the_bound(engine, tmp_path, data):
    run = Run(
        engine,
        over_sample_rate=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
        partial_rollout=data.draw(st.booleans()),
        max_staleness=data.draw(st.integers(1, 2)),
        max_postponements=data.draw(st.sampled_from([None, 1, 3])),
        max_running=data.draw(st.sampled_from([None, 3])),
    )
    for _ in range(8):
        run.go(new_weights=data.draw(st.integers(0, 2)))
        if data.draw(st.booleans()):
            run.restart(tmp_path)
    held = [int(i) for i in run.scheduler.take(99).non_tensor_batch["index"][: run.scheduler.num_prompts - 2]]
    assert len(run.uids) == len(set(run.uids)) == 16
    times = torch.bincount(torch.tensor(run.trained + held), minlength=8)
    assert times.max() - times.min() <= 1
    for sampled in run.sampled:
        for versions, completion in zip(sampled.versions, sampled.outcomes, strict=True):
            assert len(versions) == len(completion.token_ids) == len(completion.log_probs) and versions == sorted(
                versions
            )
            assert len(set(versions)) <= run.config.max_staleness + 1
    if run.config.partial_rollout:
        assert max(run.metric("staleness/max")) <= run.config.max_staleness
    if run.config.over_sample_rate <= 1:  # else more may be deferred than one batch holds
        assert max(max(times) for times in run.deferrals) <= max_deferrals(run.config)


def test_kept_tokens_are_the_beginning_of_what_is_trained_on(engine):
    run = Run(engine, partial_rollout=True).go()
    kept = {sample: log.state()["turns"] for sample, log in run.scheduler.logs.items()}
    assert kept and run.metric("tokens_kept") == [sum(len(d["token_ids"]) for j in kept.values() for d in j)]
    run.go()
    uids = run.prompts[1].non_tensor_batch["uid"][run.sampled[1].rows]
    samples = [f"{uid}/{k}" for uid in uids for k in range(2)]
    continued = [(kept[s], c) for s, c in zip(samples, run.sampled[1].outcomes, strict=True) if s in kept]
    assert len(continued) == 4  # both deferred prompts were waited for
    for [before], completion in continued:
        length = len(before["token_ids"])
        assert completion.token_ids[:length] == before["token_ids"]
        assert completion.log_probs[:length] == before["log_probs"]
    assert run.metric("staleness/max") == [0, 1] and run.metric("tokens_discarded") == [0, 0]


def test_without_partial_rollout_every_token_of_the_batch_is_of_the_newest_weights(engine):
    run = Run(engine, rows=12).go(steps=5)
    versions = [{v for versions in sampled.versions for v in versions} for sampled in run.sampled]
    assert all(len(found) == 1 for found in versions) and len(set.union(*versions)) == 5
    assert sum(run.metric("tokens_discarded")) > 0 and not run.scheduler.logs


def test_after_the_most_deferrals_all_deferred_prompts_are_waited_for(engine):
    run = Run(engine, max_postponements=2, rows=12).go(steps=6)
    for sampled, times, waited in zip(run.sampled, run.deferrals, run.metric("prompts_waited_for"), strict=True):
        deferred = {row for row, count in enumerate(times) if count}
        assert max(times) <= 2 and waited == (len(deferred) if max(times) == 2 else 0)
        assert max(times) < 2 or deferred <= set(sampled.rows)
    assert {max(times) for times in run.deferrals} == {0, 1, 2}


def test_tokens_beyond_the_bound_are_generated_again(engine):
    run = Run(engine, partial_rollout=True, max_postponements=5, over_sample_rate=2.0).go(steps=2)
    held = sum(log.num_tokens for log in run.scheduler.logs.values())
    run.go(new_weights=2)  # two updates at once, so that all kept tokens are too old by one
    assert held and run.metric("tokens_discarded")[-1] > 0
    assert all(run.scheduler.staleness(v) <= 1 for sampled in run.sampled[-1:] for vs in sampled.versions for v in vs)


@pytest.mark.parametrize("partial", [False, True])
def test_a_resumed_run_equals_the_uninterrupted_one(engine, tmp_path, partial):
    def results(run):
        sampled = [(d.rows, d.outcomes, d.versions, d.finish_places, d.metrics) for d in run.sampled]
        return sampled, run.uids, run.scheduler.history.state_dict(), run.scheduler.logs, run.scheduler.weights

    def go(restarts):
        engine.version = 1
        run = Run(engine, partial_rollout=partial, max_running=3, max_postponements=2)
        for _ in range(5):
            run.go(new_weights=0)
            engine.version += 1  # the weights of both runs are the same at every step, under the same name
            if restarts:
                run.restart(tmp_path)
        return results(run)

    engine.update(1)  # awake, also where this test runs alone
    assert go(restarts=False) == go(restarts=True)


def test_long_prompts_of_the_past_start_first(engine):
    run = Run(engine, over_sample_rate=0.0, rows=4, max_running=1)
    for key, length in ((4, 3), (5, 9), (6, 1), (7, 5)):
        run.scheduler.history.observe(prompt_key([key, 5, 6]), [length])
    run.config.n = 1
    prompts, started = run.scheduler.take(1), []

    async def note(row, seed, client):
        await client.generate(Request(tuple(prompts.non_tensor_batch["raw_prompt_ids"][row]), SamplingParams(2), seed))
        started.append(int(prompts.non_tensor_batch["index"][row]))

    engine.update(engine.version + 1)
    asyncio.run(run.scheduler.sample(prompts, EngineClient(engine, 1), engine.version, note))
    lengths = {0: 3, 1: 9, 2: 1, 3: 5}
    assert started == sorted(started, key=lambda i: -lengths[i]) and len(started) == 2


def test_versions_stand_on_the_tokens_the_policy_generated():
    batch = DataProto.from_ragged(
        {"response_mask": Ragged.from_rows([[1, 1, 0, 1], [1], [0, 1]], 5, "right", 0, torch.int64)}
    )
    column = versions_column(batch, [[3, 3, 4], [7], [5]])
    assert column.padded().tolist() == [[3, 3, -1, 4, 0], [7, 0, 0, 0, 0], [-1, 5, 0, 0, 0]]

"""Responses drawn by several versions of the weights, on a real engine: nothing is lost."""

import asyncio
import copy
import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.engine_client import EngineClient
from tests.workers.rollout.conftest import rollout_config, weights_of
from verl.trainer.buffer.partial_rollouts import PartialRollout, ProgressLog, SampleClient, stop_samples
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.server.client import RolloutClient
from verl.workers.rollout.server.server import RolloutServer
from verl.workers.rollout.weights.sync import sync_weights

SAMPLING = SamplingParams(24, ignore_eos=True, want_log_probs=True)


@pytest.fixture(scope="session")
def versions(reference):
    """version -> a model; the second has moved away from the first."""
    second = copy.deepcopy(reference("tied"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return {1: reference("tied"), 2: second}


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request, model_folder, versions):
    """An engine, and a way to bring it to a version."""
    config = rollout_config(max_num_seqs=32, max_num_batched_tokens=512)
    rollout = get_rollout_class(request.param)(model_folder("tied"), config)

    def use(version):
        rollout.wake()
        sync_weights(weights_of(versions[version], rollout.weights_dtype), rollout, version=version)

    rollout.use = use
    return rollout


def requests(count=6, sampling=SAMPLING):
    return [Request(tuple(range(5 + i, 12 + i)), sampling, seed=100 + i) for i in range(count)]


async def draw(engine, logs, asked, stop_after=None, max_running=None):
    """Draw samples with these logs; stop them all once the engine has made that many steps."""
    client = EngineClient(engine, max_running)
    samples = [SampleClient(client, f"s{i}", log, engine.version) for i, log in enumerate(logs)]
    tasks = [asyncio.ensure_future(s.generate(r)) for s, r in zip(samples, asked, strict=True)]
    while stop_after is not None and client.num_steps < stop_after:
        await asyncio.sleep(0)
    if stop_after is not None:
        await stop_samples(samples, client)
    return await asyncio.gather(*tasks, return_exceptions=True), client


def two_versions(engine, asked, stop_after=8, **options):
    """Journals after a part under version 1 and the rest under version 2, and those of the first part."""
    logs = [ProgressLog() for _ in asked]
    engine.use(1)
    ended, _ = asyncio.run(draw(engine, logs, asked, stop_after, **options))
    first = copy.deepcopy(logs)
    engine.use(2)
    completions, _ = asyncio.run(draw(engine, logs, asked))
    return ended, first, logs, completions


def log_probs_under(model, prompt, tokens):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def test_what_was_drawn_is_a_prefix_of_the_response_and_every_token_names_its_weights(engine):
    ended, first, logs, completions = two_versions(engine, requests())
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    for before, after, completion in zip(first, logs, completions, strict=True):
        drawn, [turn] = before.num_tokens, after.turns
        assert 0 < drawn < 24 and turn.token_ids[:drawn] == before.turns[0].token_ids
        assert turn.log_probs[:drawn] == before.turns[0].log_probs
        assert turn.versions == [1] * drawn + [2] * (24 - drawn) == after.versions
        assert completion.token_ids == turn.token_ids and completion.finish_reason == "length"


def test_log_probs_are_those_of_the_weights_that_drew_each_token(engine, versions):
    asked = requests()
    *_, logs, _ = two_versions(engine, asked)
    for request, log in zip(asked, logs, strict=True):
        [turn] = log.turns
        of = {v: log_probs_under(model, request.prompt_ids, turn.token_ids) for v, model in versions.items()}
        expected = torch.stack([of[version][i] for i, version in enumerate(turn.versions)])
        torch.testing.assert_close(torch.tensor(turn.log_probs).double(), expected, atol=1e-4, rtol=0)
        assert (of[1] - of[2]).abs().max() > 0.01  # or the promise would be empty


def test_a_stop_text_is_seen_where_the_response_was_cut(engine, model_folder):
    """Greedy and with one version, so the response is the one never cut, up to the stop text across the cut."""
    greedy = SamplingParams(24, do_sample=False, ignore_eos=True, want_log_probs=True)
    engine.use(1)
    text_of = partial(hf_tokenizer(model_folder("tied")).decode, clean_up_tokenization_spaces=False)
    [whole] = engine.generate(requests(1, greedy), expect_version=1)
    for stop_after in range(5, 9):
        logs = [ProgressLog()]
        asyncio.run(draw(engine, logs, requests(1, greedy), stop_after))
        cut = logs[0].num_tokens
        across = text_of(whole.token_ids[cut - 2 : cut + 2])
        stopping, logs = replace(greedy, stop=(across,)), [ProgressLog()]
        [uncut] = engine.generate(requests(1, stopping), expect_version=1)
        asyncio.run(draw(engine, logs, requests(1, stopping), stop_after))
        [completion], _ = asyncio.run(draw(engine, logs, requests(1, stopping)))
        assert completion.token_ids == uncut.token_ids == logs[0].turns[0].token_ids
        assert completion.finish_reason == uncut.finish_reason == "stop"
        assert len(completion.log_probs) == len(completion.token_ids) == len(logs[0].versions)


def test_what_goes_on_asks_for_what_is_left():
    turn = PartialRollout("", [7, 8, 9], None, [1, 1, 1])
    for least, left in ((8, 5), (2, 0)):
        sampling = SamplingParams(10, first_token_temperature=9.0, extra={"min_tokens": least, "logit_bias": {3: 1.0}})
        rest = turn.continuation(Request((5, 6), sampling, seed=4))
        expected = SamplingParams(7, extra={"min_tokens": left, "logit_bias": {3: 1.0}})
        assert rest.sampling == expected and rest.prompt_ids == (5, 6, 7, 8, 9) and rest.seed != 4


def test_two_runs_stopped_at_the_same_step_are_equal_and_a_journal_survives_as_json(engine):
    *_, once, _ = two_versions(engine, requests())
    engine.use(1)
    logs = [ProgressLog() for _ in range(6)]
    asyncio.run(draw(engine, logs, requests(), stop_after=8))
    restarted = [ProgressLog.from_state(json.loads(json.dumps(log.state()))) for log in logs]
    engine.use(2)
    asyncio.run(draw(engine, restarted, requests()))
    assert restarted == once


def test_a_sample_that_never_got_its_turn_begins_later_as_if_for_the_first_time(engine):
    ended, first, logs, _ = two_versions(engine, requests(), max_running=2)
    assert [log.num_tokens > 0 for log in first] == [True, True] + [False] * 4
    assert logs[5].versions == [2] * 24
    alone = engine.generate([requests()[5]], expect_version=2)[0]
    assert logs[5].turns[0].token_ids == alone.token_ids


def test_a_complete_answer_is_given_again_without_drawing(engine):
    engine.use(1)
    logs = [ProgressLog()]
    [completion], _ = asyncio.run(draw(engine, logs, requests(1)))
    [again], client = asyncio.run(draw(engine, logs, requests(1)))
    assert again == completion and client.num_steps == 0


def test_a_conversation_goes_on_where_it_was_and_forgets_what_no_longer_fits(engine):
    """Three turns, each asking with all tokens before it; another second question drops the turns after it."""
    engine.use(1)

    async def talk(log, second=(50, 51)):
        sample = SampleClient(EngineClient(engine), "talk", log, 1)
        prompt = (5, 6, 7)
        for turn, asked in enumerate([(), second, (60,)]):
            prompt += asked
            answer = await sample.generate(Request(prompt, SamplingParams(5, ignore_eos=True), seed=turn))
            prompt += tuple(answer.token_ids)
        return prompt

    log = ProgressLog()
    whole = asyncio.run(talk(log))
    assert asyncio.run(talk(copy.deepcopy(log))) == whole
    begun = copy.deepcopy(log.turns[1])
    begun.token_ids, begun.versions, begun.finish_reason = begun.token_ids[:2], [1, 1], None
    cut = ProgressLog([copy.deepcopy(log.turns[0]), begun])
    assert asyncio.run(talk(cut))[:12] == whole[:12] and cut.num_tokens == 15
    other = asyncio.run(talk(log, second=(70,)))
    assert other[:8] == whole[:8] and other[8] == 70 and len(log.turns) == 3


def test_a_draft_longer_than_what_is_asked_now_is_drawn_anew(engine):
    engine.use(1)
    logs = [ProgressLog()]
    asyncio.run(draw(engine, logs, requests(1), stop_after=8))
    shorter = SamplingParams(3, ignore_eos=True, want_log_probs=True)
    [completion], _ = asyncio.run(draw(engine, logs, requests(1, shorter)))
    assert len(completion.token_ids) == 3 == logs[0].num_tokens


def test_samples_of_a_real_server_stop_at_once_those_that_run_and_those_that_wait(engine):
    engine.use(1)
    server = RolloutServer(engine, version=1)
    server.start()
    endless = SamplingParams(100, ignore_eos=True, want_log_probs=True)

    async def main():
        client = RolloutClient([server.address], max_running=2)
        logs = [ProgressLog() for _ in range(6)]
        samples = [SampleClient(client, f"s{i}", log, 1) for i, log in enumerate(logs)]
        asked = zip(samples, requests(6, endless), strict=True)
        tasks = [asyncio.ensure_future(sample.generate(request)) for sample, request in asked]
        while not (await client.health())[0]["steps"]:
            await asyncio.sleep(0.01)
        await stop_samples(samples, client)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        spans = client.take_spans()
        await client.close()
        return ended, logs, spans

    ended, logs, spans = asyncio.run(main())
    server.stop()
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert [log.num_tokens > 0 for log in logs] == [True] * 2 + [False] * 4
    assert max(log.num_tokens for log in logs) < 100
    assert len(spans) == 2 and all(span.asked <= span.started < span.ended for span in spans)

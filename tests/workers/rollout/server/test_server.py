"""A rollout server over real engines: what is generated, aborted, streamed and refused, and what its failures say."""

import asyncio
import json
import socket
import threading
from contextlib import suppress
from copy import copy

import httpx
import pytest

from tests.workers.rollout.conftest import rollout_config, standing_still, weights_of
from tests.workers.rollout.test_contract import mixed_requests, some_prompts
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, RequestsRunningError, SamplingParams
from verl.workers.rollout.server.client import RolloutClient
from verl.workers.rollout.server.messages import (
    BINARY,
    RolloutServerError,
    pack,
    request_from_json,
    request_to_json,
    unpack,
)
from verl.workers.rollout.server.server import RolloutServer
from verl.workers.rollout.weights.sync import sync_weights

ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]
JSON = {"Content-Type": "application/json"}
LONG = SamplingParams(100, ignore_eos=True, want_log_probs=True, temperature=0.7)


@pytest.fixture(scope="session")
def engines(model_folder, reference):
    built = {}

    def build(name):
        if name not in built:
            built[name] = get_rollout_class(name)(model_folder("tied"), rollout_config(max_num_seqs=32))
        engine = built[name]
        if engine.num_running:
            engine.abort(range(10**6))
        engine.wake()
        sync_weights(weights_of(reference("tied")), engine, version=1)
        return engine

    return build


@pytest.fixture(params=ENGINES)
def engine(request, engines):
    return engines(request.param)


@pytest.fixture
def serve(model_folder):
    """Start a server over an engine that holds version 1; stopped at the end."""
    started = []

    def start(engine, **options):
        server = RolloutServer(engine, 1, tokenizer=hf_tokenizer(model_folder("tied")), **options)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def ask(server, work, **options):
    """Run ``work(client)`` with a client of the server."""

    async def run():
        client = RolloutClient([server.address], **options)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generated(completions):
    return [(c.token_ids, c.finish_reason) for c in completions]


# -- engines, request by request ---------------------------------------------------------------------------------------


def test_requests_that_come_and_go_generate_what_one_call_generates(engine):
    requests = mixed_requests()
    expected = engine.generate(requests, 1)
    ended, request_ids = {}, []
    for request in requests:  # one more at each step, and a stranger who leaves early
        request_ids.append(engine.submit(request, 1))
        stranger = engine.submit(Request((5, 6, 7), LONG), 1)
        ended |= engine.step()
        engine.abort([stranger])
    while engine.num_running:
        ended |= engine.step()
    found = [ended[request_id] for request_id in request_ids]
    assert generated(found) == generated(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_an_abort_gives_the_beginning_of_what_would_have_been_generated(engine):
    request = Request(some_prompts(1)[0], LONG, seed=4)
    (whole,) = engine.generate([request], 1)
    request_ids = [engine.submit(request, 1), engine.submit(Request((9, 9), LONG), 1)]
    for _ in range(7):
        assert engine.step() == {}
    so_far = engine.partial(request_ids[0])
    part = engine.abort([request_ids[0], 12345])
    assert list(part) == [request_ids[0]] and part[request_ids[0]] == so_far
    assert so_far.finish_reason == "abort" and 0 < len(so_far.token_ids) < 20
    assert so_far.token_ids == whole.token_ids[: len(so_far.token_ids)]
    assert so_far.log_probs == pytest.approx(whole.log_probs[: len(so_far.token_ids)], abs=1e-4)
    assert engine.num_running == 1 and engine.partial(request_ids[0]) is None
    engine.abort(request_ids)
    assert engine.num_running == 0
    assert generated(engine.generate([request], 1)) == generated([whole])


def test_weights_do_not_change_under_running_requests(engine, reference):
    request_id = engine.submit(Request((5, 6), LONG), 1)
    engine.step()
    for call in (
        lambda: engine.generate([Request((5,), LONG)], 1),
        lambda: engine.sleep(2),
        lambda: sync_weights(weights_of(reference("tied")), engine, version=2),
    ):
        with pytest.raises(RequestsRunningError, match="1 submitted requests are running. End them first"):
            call()
    engine.abort([request_id])
    engine.sleep(2)


# -- server and client -------------------------------------------------------------------------------------------------


def test_the_server_generates_what_the_engine_generates_with_the_same_bits_of_log_probs(engine, serve):
    requests = [*mixed_requests(), *mixed_requests()]
    expected = engine.generate(requests, 1)
    server = serve(engine)
    found = ask(server, lambda client: asyncio.gather(*(client.generate(request) for request in requests)))
    assert generated(found) == generated(expected) and {c.version for c in found} == {1}
    assert all(a.log_probs == pytest.approx(b.log_probs, abs=1e-4) for a, b in zip(found, expected, strict=True))


def test_http_answers_while_the_engine_steps(engine, serve):
    server = serve(engine)

    async def work(client):
        running = asyncio.ensure_future(client.generate(Request((5,), LONG)))
        seen = 0
        while not running.done():
            (health,) = await client.health()
            seen += health["running"]
            assert health["error"] is None
            if seen == 2:
                still.go_on()
        return seen

    with standing_still(engine, 3) as still:
        assert ask(server, work) > 1


def test_abort_by_name_ends_one_and_abort_ends_all_with_their_beginnings(engine, serve):
    server = serve(engine)

    async def work(client):
        named = [asyncio.ensure_future(client.generate(Request((5,), LONG, i), request_id=f"r{i}")) for i in range(4)]
        while client.num_running < 2 or len(still.made) < 3:
            await asyncio.sleep(0.001)
        await client.abort(["r1", "unknown"])
        first = await named[1]
        others_run = [not named[i].done() for i in (0, 2, 3)]
        await client.abort()
        return first, others_run, await asyncio.gather(*named)

    with standing_still(engine, 3) as still:
        first, others_run, all_of_them = ask(server, work, max_running=3)
    assert first.finish_reason == "abort" and others_run == [True] * 3
    assert all(c.finish_reason == "abort" and len(c.log_probs) == len(c.token_ids) < 100 for c in all_of_them)


def test_pause_frees_the_engine_and_what_waits_is_generated_under_the_new_version(engine, serve, reference):
    server = serve(engine)

    async def work(client):
        running = [asyncio.ensure_future(client.generate(Request((5,), LONG, i))) for i in range(3)]
        while (await client.health())[0]["running"] < 3 or len(still.made) < 3:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(server.pause)
        still.go_on()
        late = asyncio.ensure_future(client.generate(Request((5,), SamplingParams(5))))
        cut = await asyncio.gather(*running)
        assert engine.num_running == 0
        engine.sleep(2)
        engine.wake()
        sync_weights(weights_of(reference("tied")), engine, version=2)
        assert not late.done()
        server.resume(2)
        return cut, await late

    with standing_still(engine, 3) as still:
        cut, late = ask(server, work)
    assert {c.finish_reason for c in cut} == {"abort"} and {c.version for c in cut} == {1}
    assert late.version == 2 and late.finish_reason != "abort"


def test_a_request_that_cannot_be_generated_is_refused_and_the_others_go_on(engines, serve):
    server = serve(engines("hf"))

    async def work(client):
        good = asyncio.ensure_future(client.generate(Request((5,), LONG)))
        with pytest.raises(ValueError, match="A prompt of 300 tokens does not fit"):
            await client.generate(Request((5,) * 300, LONG))
        twin = asyncio.ensure_future(client.generate(Request((5,), LONG), request_id="a"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'a' is in use"):
            await client.generate(Request((5,), LONG), request_id="a")
        return await good, await twin

    assert all(len(c.token_ids) == 100 for c in ask(server, work))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[]", "must be an object"),
        ("{", "Expecting property name"),
        ('{"sampling": {"max_tokens": 3}}', "prompt_ids must be a list of token ids"),
        ('{"prompt_ids": [1]}', "sampling.max_tokens is missing"),
        ('{"prompt_ids": [1], "sampling": {"max_tokens": 1, "beams": 3}}', "sampling has an unknown field 'beams'"),
        ('{"prompt_ids": [1], "sampling": {"max_tokens": 1}, "temperature": 1}', "unknown field 'temperature'"),
        ('{"prompt_ids": [1], "sampling": {"max_tokens": 0}}', "max_tokens=0: a response has at least one token"),
        ('{"prompt_ids": [1], "sampling": {"max_tokens": "x"}}', "max_tokens='x' must be an integer"),
        ('{"prompt_ids": [1], "sampling": {"max_tokens": 1}, "seed": "x"}', "seed='x' must be an integer"),
    ],
)
def test_a_wrong_body_is_named_field_by_field(body, message, engines, serve):
    answer = httpx.post(serve(engines("hf")).address + "/generate", content=body, headers=JSON)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_requests_survive_json():
    for request in mixed_requests():
        body = json.loads(json.dumps(request_to_json(request, "x", priority=3)))
        assert request_from_json(body) == (request, "x", 3)
        assert request_from_json(unpack(pack(request_to_json(request, "x", priority=3)))) == (request, "x", 3)


def test_answers_survive_packing_bit_by_bit():
    for log_probs in (None, [], [-0.1, -1e-45, -float(2**-40) / 3]):
        answer = {"token_ids": [0, 2**31 - 1, 7][: len(log_probs or ())], "log_probs": log_probs, "version": 3}
        assert unpack(pack(answer)) == answer


@pytest.mark.parametrize(
    "body", [b"", b"\xff" * 9, pack({"prompt_ids": [1, 2]})[:-3], pack({})[:8] + b'{"arrays": {"seed": 1}}', bytes(16)]
)
def test_a_wrong_packed_body_is_refused(body, engines, serve):
    answer = httpx.post(serve(engines("hf")).address + "/generate", content=body, headers={"Content-Type": BINARY})
    assert answer.status_code == 400, answer.text


def test_images_survive_json():
    from PIL import Image

    image = Image.effect_noise((7, 5), 50.0)
    body = json.loads(json.dumps(request_to_json(Request((1,), LONG, media={"image": [image]}), "x")))
    (found,) = request_from_json(body)[0].media["image"]
    assert (found.mode, found.size, found.tobytes()) == (image.mode, image.size, image.tobytes())


def test_an_engine_that_fails_fails_all_that_wait_with_its_own_words(engines, serve, monkeypatch):
    engine = engines("hf")
    server = serve(engine)
    steps = iter(range(3))

    def broken(*args):
        if next(steps, None) is None:
            raise FloatingPointError("logits are not finite")
        return forward(*args)

    forward = engine._forward
    monkeypatch.setattr(engine, "_forward", broken)

    async def work(client):
        requests = [
            asyncio.ensure_future(client.generate(Request((5,), LONG, i), request_id=f"r{i}")) for i in range(3)
        ]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        late = await asyncio.gather(client.generate(Request((5,), LONG)), return_exceptions=True)
        return errors + late, await client.health()

    errors, (health,) = ask(server, work)
    assert len(errors) == 4 and all(isinstance(error, RolloutServerError) for error in errors)
    assert all("FloatingPointError: logits are not finite" in str(error) for error in errors)
    assert server.address in str(errors[0]) and "r0 (prompt of 1 tokens" in str(errors[0])
    assert health["error"] == "FloatingPointError: logits are not finite"
    assert httpx.get(server.address + "/health").status_code == 503
    engine._running, engine._waiting = [], {}


def test_a_request_at_which_the_engine_fails_is_answered_too(engines, serve, monkeypatch):
    engine = engines("hf")
    server = serve(engine)

    def broken(request, version):
        raise RuntimeError("the scheduler is gone")

    monkeypatch.setattr(engine, "submit", broken)

    async def work(client):
        sent = [client.generate(Request((5,), LONG, i)) for i in range(2)]
        return await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), 20)

    assert all("the scheduler is gone" in str(error) for error in ask(server, work))


def test_a_server_that_goes_away_is_named_with_its_last_requests(engines, serve):
    server = serve(engines("hf"))

    async def work(client):
        running = asyncio.ensure_future(client.generate(Request((5, 6), LONG), request_id="mine"))
        while not client.num_running:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(server.stop)
        with pytest.raises(RolloutServerError) as error:
            await running
        with pytest.raises(RolloutServerError):
            await client.generate(Request((5, 6), LONG))
        return str(error.value)

    message = ask(server, work)
    assert server.address in message and "mine (prompt of 2 tokens, at most 100 more)" in message


def test_a_connection_that_a_stopping_server_was_accepting_is_closed(engines, serve):
    """Its client would wait for ever otherwise. Most tries meet the moment between the kernel's accept and ours."""
    for _ in range(20):
        server = serve(engines("hf"))
        with socket.create_connection((server.host, server.port), timeout=60) as connection:
            server.stop()
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""


# -- whose turn --------------------------------------------------------------------------------------------------------


def test_the_client_spreads_by_load_keeps_sessions_and_lets_the_urgent_go_first(engines, serve):
    first = serve(engines("hf"))
    second = serve(_another(engines("hf")))
    started = []

    async def run():
        client = RolloutClient([first.address, second.address], max_running=2)
        acquire = client._acquire_server

        async def acquire_and_record(request_id, *args):
            server = await acquire(request_id, *args)
            started.append(request_id)
            return server

        client._acquire_server = acquire_and_record

        async def one(name, tokens=30, **options):
            await client.generate(Request((5,), SamplingParams(tokens, ignore_eos=True)), request_id=name, **options)

        # of different lengths: places become free one after another
        tasks = [asyncio.ensure_future(one(f"{i}", 30 + 40 * i, session=f"s{i % 2}")) for i in range(4)]
        await asyncio.sleep(0)
        assert [len(server.running) or server.load for server in client._servers] == [2, 2]
        tasks += [asyncio.ensure_future(one("calm")), asyncio.ensure_future(one("urgent", priority=5))]
        await asyncio.sleep(0)
        assert client.num_waiting == 2
        homes = {session: server.address for session, server in client._server_of_session.items()}
        await asyncio.gather(*tasks)
        await client.close()
        return homes

    homes = asyncio.run(run())
    assert set(homes.values()) == {first.address, second.address}
    assert started[-2:] == ["urgent", "calm"]


def _another(engine):
    """A second engine with the weights of the first."""
    other = copy(engine)
    other._running, other._waiting = [], {}
    return other


def test_a_cancelled_call_ends_its_request_and_gives_its_place_to_the_next(engines, serve, monkeypatch):
    engine = engines("hf")
    server = serve(engine)

    async def work(client):
        tasks = [asyncio.ensure_future(client.generate(Request((5,), LONG, i))) for i in range(3)]
        while len(still.made) < 3:
            await asyncio.sleep(0.001)
        tasks[1].cancel()  # waits
        tasks[0].cancel()  # runs
        while not aborted:
            await asyncio.sleep(0.001)
        still.go_on()
        last = await tasks[2]
        return last, (await client.health())[0]

    abort, aborted = engine.abort, []
    monkeypatch.setattr(engine, "abort", lambda ids: (ended := abort(ids), aborted.extend(ended))[0])
    with standing_still(engine, 3) as still:
        last, health = ask(server, work, max_running=1)
    assert len(last.token_ids) == 100 and health["running"] == 0 and len(still.made) < 150


# -- who may ask -------------------------------------------------------------------------------------------------------


def test_an_address_that_others_reach_wants_a_key(engines, serve):
    with pytest.raises(ValueError, match="host='0.0.0.0' can be reached from other machines"):
        RolloutServer(engines("hf"), 1, "0.0.0.0")
    server = serve(engines("hf"), host="0.0.0.0", token="sesame")
    local = f"http://127.0.0.1:{server.port}"
    assert httpx.get(local + "/health").status_code == 401
    assert httpx.get(local + "/health", headers={"Authorization": "Bearer open"}).status_code == 401
    assert httpx.get(local + "/health", headers={"Authorization": "Bearer sesame"}).status_code == 200
    assert ask(server, lambda client: client.generate(Request((5,), SamplingParams(3))), token="sesame").token_ids


def test_a_stopped_server_leaves_no_thread(engines, serve):
    before = threading.active_count()
    server = serve(engines("hf"))
    assert threading.active_count() > before
    server.stop()
    assert threading.active_count() == before

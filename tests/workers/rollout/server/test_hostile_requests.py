"""Requests that are meant to end or to stall a server: each is refused with its reason, and the engine goes on."""

import base64
import io
import json
import socket

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.workers.rollout.conftest import rollout_config, weights_of
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.server.limits import Guard
from verl.workers.rollout.server.server import RolloutServer
from verl.workers.rollout.weights.sync import sync_weights

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
KEY = "sesame"


@pytest.fixture(scope="module")
def server(model_folder, reference):
    engine = HFRollout(model_folder("qwen2"), rollout_config())
    engine.wake()
    sync_weights(weights_of(reference("qwen2")), engine, version=1)
    tokenizer = hf_tokenizer(model_folder("qwen2"))
    tokenizer.chat_template = (
        "{{ tools | tojson if tools }}{{ extra }}{% for m in messages %}{{ m.content }}{% endfor %}>"
    )
    server = RolloutServer(
        engine, 1, tokenizer=tokenizer, token=KEY, parse_tool_calls=lambda ids, text, tools: (text, [])
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.address, headers={"Authorization": f"Bearer {KEY}"}, timeout=10) as client:
        yield client


@pytest.fixture
def post(server, client):
    """Send a body; afterwards the engine must generate what it would have generated before."""
    yield lambda path, body: client.post(path, json=body) if isinstance(body, dict) else client.post(path, content=body)
    assert server.loop.error is None
    answer = client.post("/generate", json=generate())
    assert answer.status_code == 200 and len(answer.json()["token_ids"]) == 4


def generate(prompt=(5, 6), **sampling):
    return {"prompt_ids": list(prompt), "sampling": {"max_tokens": 4, "ignore_eos": True, **sampling}, "seed": 1}


def image(text):
    return generate() | {"media": {"image": [text]}}


def png(width, height):
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (generate([10**9]), "prompt_ids has the token id 1000000000; the model's vocabulary ends at"),
        (generate([10**400]), "vocabulary"),
        (generate(banned_token_ids=[10**9]), "banned_token_ids has the token id 1000000000"),
        (generate(stop_token_ids=[10**9]), "stop_token_ids has the token id 1000000000"),
        (generate(extra={"logit_bias": {"1000000000": 1}}), "logit_bias has the token id 1000000000"),
        (generate(extra={"logit_bias": {"1": 1e39}}), "logit_bias[1]=1e+39 must be a number from -100 to 100"),
        (generate(extra={"logit_bias": {"1": "x"}}), "logit_bias[1]='x' must be a number"),
        (generate(extra={"logit_bias": {"a": 1}}), "logit_bias has the key 'a'"),
        (generate(extra={"logit_bias": [1]}), "logit_bias=[1] must be an object"),
        (generate(extra={"allowed_token_ids": []}), "allowed_token_ids must be a list of token ids, at least one"),
        (generate(extra={"allowed_token_ids": [10**9]}), "allowed_token_ids has the token id 1000000000"),
        (generate(extra={"allowed_token_ids": [7]}, banned_token_ids=[7]), "together leave no token"),
        (generate(extra={"allowed_token_ids": [7], "min_tokens": 2}, stop_token_ids=[7]), "together leave no token"),
        (generate(extra={"frequency_penalty": 1e39}), "frequency_penalty=1e+39 must be a number"),
        (generate(extra={"min_tokens": 10**400}), "min_tokens="),
        (generate(temperature=1e-320), "temperature=1e-320 must be 0, for the likeliest token, or a number from 1e-05"),
        (generate(temperature=10**400), "must be a number"),
        (generate(first_token_temperature=1e-320), "first_token_temperature=1e-320"),
        (generate(repetition_penalty=1e-320), "repetition_penalty=1e-320"),
        (generate(top_k=10**30), "top_k=1000000000000000000000000000000 is more than any vocabulary"),
        (generate(top_k=1.5), "top_k=1.5 must be an integer"),
        (generate(stop=["x" * 9] * 10_000), "stop has 10000 texts of 90000 characters"),
        (generate() | {"request_id": "x" * 1000}, "request_id="),
        (image("AAAA"), "media.image[0] cannot be read"),
        (image(png(640, 640)[:80]), "media.image[0] cannot be read"),
        (image(png(20_000, 20_000)), "400000000 pixels"),
        (image(5), "media.image[0] cannot be read"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe", "The body is no JSON"),
    ],
)  # fmt: skip
def test_a_request_for_tokens_that_would_end_the_engine_is_refused_with_its_reason(body, message, post, client):
    if isinstance(body, bytes):
        client.headers["Content-Type"] = "application/json"
    answer = post("/generate", body)
    client.headers.pop("Content-Type", None)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 100_000}, "n=100000 is more than the 128"),
        ({"chat_template_kwargs": {"chat_template": LOOPS}}, "templates of clients are not run"),
        ({"chat_template_kwargs": {"tokenize": False}}, "tokenize is decided by the server"),
        ({"chat_template_kwargs": {"extra": [[1] * 9] * 9}}, "must be a text, a number, true"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs='x' must be an object"),
        ({"logit_bias": {"1000000000": 1}}, "logit_bias has the token id"),
        ({"temperature": 1e-320}, "temperature=1e-320"),
        ({"temperature": True}, "temperature=True must be a number"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids has the token id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_would_end_or_stall_the_server_is_refused(stream, body, message, post):
    answer = post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "stream": stream, **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_many_prompts_times_many_choices_are_refused(post):
    answer = post("/v1/completions", {"prompt": ["x"] * 100, "n": 100, "max_tokens": 1})
    assert answer.status_code == 400 and "10000 responses" in answer.json()["error"]["message"]


def test_a_stream_whose_tool_calls_cannot_be_parsed_ends_with_an_error(server, post, monkeypatch):
    def fails(ids, text, tools):
        raise KeyError("parameters")

    monkeypatch.setattr(server, "parse_tool_calls", fails)
    for stream in (False, True):
        answer = post("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "max_tokens": 2, "stream": stream})
        assert answer.status_code == 500 and "KeyError: 'parameters'" in answer.json()["error"]["message"]


def test_a_client_may_bring_a_template_where_the_server_class_allows_it(server, post, monkeypatch):
    monkeypatch.setattr(server, "allows_client_templates", True)
    body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    answer = post("/v1/chat/completions", {**body, "chat_template_kwargs": {"chat_template": "abc"}})
    assert answer.json()["prompt_token_ids"] == server.tokenizer.encode("abc")


# -- who may ask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Authorization": ""}, 401, "missing or wrong"),
        ({"Authorization": "Bearer open"}, 401, "missing or wrong"),
        ({"Authorization": b"Bearer \xff\xfe"}, 401, "missing or wrong"),
        ({"Origin": "http://evil.example"}, 403, "Requests of web pages are refused"),
        ({"Origin": "null"}, 403, "Requests of web pages are refused"),
        ({"Host": "evil.example"}, 403, "The header Host names 'evil.example'"),
        ({"Host": "127.0.0.1.evil.example:80"}, 403, "The header Host names"),
        ({"Host": "[::1"}, 403, "The header Host names"),
        ({"Content-Type": "text/plain"}, 415, "The content type is 'text/plain'"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "Send JSON"),
        ({"Host": "localhost:9"}, 200, ""),
        ({"Content-Type": "application/json; charset=nonsense"}, 200, ""),
    ],
)
def test_strangers_pages_and_other_content_are_refused(headers, status, message, client, post):
    content = json.dumps(generate())
    answer = client.post("/generate", content=content, headers={"Content-Type": "application/json"} | headers)
    assert answer.status_code == status
    assert status == 200 or message in answer.json()["error"]["message"]


def test_a_body_that_is_too_long_or_unpacks_to_too_much_is_refused(client, post, monkeypatch):
    import gzip

    long = json.dumps({"prompt": "x" * (1 << 25), "max_tokens": 1}).encode()
    for body, more in ((long, {}), (gzip.compress(long), {"Content-Encoding": "gzip"})):
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"} | more)
        assert answer.status_code == 413 and "more than 16777216 bytes" in answer.json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(server, client, post, monkeypatch):
    monkeypatch.setattr("verl.workers.rollout.server.limits._BODY_TIMEOUT_S", 0.2)
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        lines = ("POST /abort HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", "Content-Length: 9")
        connection.sendall("\r\n".join([*lines, "Content-Type: application/json", "", "{"]).encode())
        assert b" 408 " in connection.recv(100).split(b"\r\n")[0]


def test_a_server_for_other_machines_takes_any_name_of_its_own():
    class Asked:
        headers = {"Host": "trainer.example:80", "Authorization": "Bearer k"}

    Guard("0.0.0.0", "k").check(Asked)
    with pytest.raises(ValueError, match="trainer.example"):
        Guard("127.0.0.1", "k").check(Asked)


# -- anything at all ---------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-3, 9), st.integers(), st.sampled_from([2**31, 2**63, -(2**63), 10**30, 10**400, 10**9]), st.floats()
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=3), st.just("1")), inner, max_size=3)
    ),
    max_leaves=5,
)
IDS = st.lists(st.one_of(st.integers(0, 99), NUMBERS), max_size=4)
USUAL = {
    "prompt_ids": IDS, "prompt": st.one_of(st.text(max_size=5), IDS, st.lists(IDS, max_size=3)),
    "stop_token_ids": IDS, "banned_token_ids": IDS, "allowed_token_ids": IDS, "seed": NUMBERS,
    "temperature": NUMBERS, "top_p": st.floats(0, 1), "top_k": NUMBERS, "min_p": st.floats(0, 1),
    "n": st.integers(1, 3),
    "repetition_penalty": NUMBERS, "logit_bias": st.dictionaries(NUMBERS.map(str), NUMBERS, max_size=2),
    "stop": st.lists(st.text(max_size=3), max_size=2), "first_token_temperature": NUMBERS, "min_tokens": NUMBERS,
    "frequency_penalty": NUMBERS, "presence_penalty": NUMBERS, "stream": st.booleans(), "want_log_probs": st.booleans(),
    "logprobs": st.sampled_from([0, 1, True, None]), "tools": st.just([TOOL]), "chat_template_kwargs": ANYTHING,
    "messages": st.lists(st.fixed_dictionaries({"role": st.text(max_size=3), "content": ANYTHING}), max_size=2),
    "stream_options": st.just({"include_usage": True}), "request_ids": st.just(["a"]), "media": ANYTHING,
}  # fmt: skip


def some(names, always):
    """Objects with some fields of these names, most of them of the usual kind, and those of ``always``."""
    fields = {name: st.one_of(USUAL.get(name, ANYTHING), USUAL.get(name, ANYTHING), ANYTHING) for name in names}
    return st.fixed_dictionaries(
        {name: st.one_of(st.just(value), st.just(value), st.just(value), fields.get(name, ANYTHING))
         for name, value in always.items()},
        optional=fields,
    )  # fmt: skip


EXTRA = some(["logit_bias", "allowed_token_ids", "min_tokens", "frequency_penalty", "presence_penalty"], {})
SAMPLING = some([name for name in vars(SamplingParams(1)) if name not in ("extra", "max_tokens")], {"max_tokens": 3})
OPENAI = ["n", "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs", "return_token_ids", "tools",
          "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
          "logit_bias", "chat_template_kwargs", "tool_choice", "response_format"]  # fmt: skip
BODIES = st.one_of(
    st.tuples(st.just("/generate"), st.builds(
        lambda body, sampling, extra: {**body, "sampling": {**sampling, **({"extra": extra} if extra else {})}},
        some(["seed", "priority", "request_id", "media"], {"prompt_ids": [5, 6]}), SAMPLING, EXTRA)),
    st.tuples(st.just("/v1/completions"), some(OPENAI, {"prompt": "ab", "max_tokens": 3})),
    st.tuples(st.just("/v1/chat/completions"), some(OPENAI, {"messages": HELLO, "max_tokens": 3})),
    st.tuples(st.sampled_from(["/generate", "/abort", "/v1/completions", "/v1/chat/completions"]), ANYTHING),
)  # fmt: skip


@settings(max_examples=200, deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(BODIES)
def test_no_body_ends_the_server_or_stalls_it(server, client, case):
    path, body = case
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, answer.text
    assert server.loop.error is None
    if answer.status_code == 200 and "text/event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text

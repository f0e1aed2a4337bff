"""An agent that knows OpenAI's API and nothing of us: a plain HTTP client."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest

from tests.workers.rollout.conftest import rollout_config, standing_still, weights_of
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.server.openai_api import TextStream
from verl.workers.rollout.server.server import RolloutServer
from verl.workers.rollout.weights.sync import sync_weights

HELLO = [{"role": "user", "content": "Hello"}]
FEW = {"max_tokens": 12, "seed": 3}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return hf_tokenizer(model_folder("qwen2"))


@pytest.fixture(scope="module")
def server(model_folder, reference, tokenizer):
    engine = HFRollout(model_folder("qwen2"), rollout_config())
    engine.wake()
    sync_weights(weights_of(reference("qwen2")), engine, version=7)
    server = RolloutServer(engine, 7, tokenizer=tokenizer)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def post(server):
    def call(path, body):
        return httpx.post(f"{server.address}/v1/{path}", json=body, timeout=30)

    return call


def chunks(server, path, body):
    """The events of a streamed answer."""
    with httpx.stream("POST", f"{server.address}/v1/{path}", json={**body, "stream": True}, timeout=30) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def engine_generates(server, prompt, seed=3, **sampling):
    sampling = SamplingParams(12, stop_token_ids=(server.tokenizer.eos_token_id,), want_log_probs=True, **sampling)

    async def draw():
        return await server.generate(Request(tuple(prompt), sampling, seed))

    return asyncio.run_coroutine_threadsafe(draw(), server._events).result(30)


def test_chat_applies_the_template_and_generates_what_the_engine_generates(server, post, tokenizer):
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=True, return_dict=False)
    expected = engine_generates(server, prompt)
    answer = post("chat/completions", {"messages": HELLO, "logprobs": True, "return_token_ids": True, **FEW}).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.token_ids and answer["prompt_token_ids"] == prompt
    assert choice["message"] == {
        "role": "assistant",
        "content": tokenizer.decode(expected.token_ids, skip_special_tokens=True),
    }
    assert choice["finish_reason"] == expected.finish_reason
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(expected.log_probs, abs=1e-5)
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(expected.token_ids),
        "total_tokens": len(prompt) + len(expected.token_ids),
    }
    assert answer["object"] == "chat.completion" and answer["system_fingerprint"] == "version-7"


def test_completions_take_texts_and_token_ids_and_n(server, post, tokenizer):
    text, ids = "A text", tokenizer.encode("A text")
    body = {"prompt": [ids, ids], "n": 2, "temperature": 0.8, "logprobs": 0, "return_token_ids": True, **FEW}
    answer = post("completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    generated = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert len(set(generated)) == 4 and list(generated[0]) == engine_generates(server, ids, temperature=0.8).token_ids
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(generated[0])
    one = post("completions", {"prompt": text, "temperature": 0.8, **FEW}).json()["choices"][0]
    assert one["text"] == tokenizer.decode(generated[0], skip_special_tokens=True) and one["logprobs"] is None


def test_no_seed_gives_another_answer_each_time_and_a_seed_the_same(post):
    def text(**more):
        return post("completions", {"prompt": "x", "max_tokens": 12, **more}).json()["choices"][0]["text"]

    assert len({text() for _ in range(4)}) == 4
    assert len({text(seed=5) for _ in range(3)}) == 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_adds_up_to_the_whole_answer(path, server, post):
    body = {**FEW, "n": 2, "logprobs": 0 if path == "completions" else True, "return_token_ids": True}
    body |= {"prompt": "Some"} if path == "completions" else {"messages": HELLO}
    whole = post(path, body).json()
    events = chunks(server, path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    assert len(events) > 6, "it came in one piece"
    for index, expected in enumerate(whole["choices"]):
        mine = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        text = "".join(choice["text"] if path == "completions" else choice["delta"]["content"] for choice in mine)
        assert text == (expected["text"] if path == "completions" else expected["message"]["content"])
        assert [token for choice in mine for token in choice["token_ids"]] == expected["token_ids"]
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == expected["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(stream, server, post):
    body = {"prompt": "Some", "max_tokens": 40, "ignore_eos": True, "seed": 3}
    text = post("completions", body).json()["choices"][0]["text"]
    stop = text[9:12]
    expected = text[: text.index(stop)]
    body["stop"] = ["never there", stop]
    if stream:
        choices = [choice for event in chunks(server, "completions", body) for choice in event["choices"]]
    else:
        choices = post("completions", body).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stop_text_over_several_pieces_is_held_back_until_it_is_sure():
    stream = TextStream(lambda ids: "".join(map(chr, ids)), stop=["abc"])
    assert [stream.add([ord(c)]) for c in "xabyabcz"] == ["x", "", "", "aby", "", "", "", ""]
    assert stream.is_stopped
    stream = TextStream(lambda ids: "".join(map(chr, ids)), stop=["abc"])
    assert stream.add([ord("a")]) == "" and stream.add([], is_last=True) == "a"


def test_characters_of_several_tokens_come_whole():
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    stream = TextStream(decode)
    pieces = [stream.add([byte]) for byte in "aé€b".encode()]
    assert "".join(pieces) == "aé€b" and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"beam_width": 3}, "unknown field 'beam_width'"),
        ({"tools": [{"type": "function"}]}, "tools[0]={'type': 'function'} must be"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice='required' cannot be honoured"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "cannot be honoured"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls=false cannot be honoured"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs=5 is not supported here"),
        ({"n": 0}, "n=0 must be an integer of at least 1"),
        ({"max_tokens": "many"}, "max_tokens='many' must be an integer"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"temperature": -1}, "temperature=-1 must not be negative"),
        ({"stop": [""]}, "none of them empty"),
        ({"stream_options": {"speed": 1}}, "stream_options has an unknown field 'speed'"),
        ({"messages": []}, "messages must be a list of objects"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of the type 'text'"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "does not fit"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_in_openais_form(stream, body, message, post):
    answer = post("chat/completions", {"messages": HELLO, **FEW, "stream": stream, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["type"] == "invalid_request_error"


@pytest.fixture
def with_tools(server, monkeypatch):
    """A template that shows tools, and a parser that finds a call in any text."""
    template = "{{ tools | tojson if tools }}{% for message in messages %}{{ message.content }}{% endfor %}>"
    monkeypatch.setattr(server.tokenizer, "chat_template", template)

    def parse(token_ids, text, tools):
        assert token_ids and tools == [TOOL]
        found = [("look", {"at": text[:2]}, ""), ("look", None, "look{"), ("", None, "nameless")]
        return text[2:], [SimpleNamespace(name=n, arguments=a, raw=raw, id="") for n, a, raw in found]

    monkeypatch.setattr(server, "parse_tool_calls", parse)


def test_tools_are_shown_and_calls_are_answered_in_openais_form(server, post, with_tools, tokenizer):
    plain = post("chat/completions", {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", **FEW}).json()
    text = plain["choices"][0]["message"]["content"]
    assert plain["usage"]["prompt_tokens"] > len(tokenizer.encode(json.dumps(TOOL)))
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "auto", "return_token_ids": True, **FEW}
    (choice,) = post("chat/completions", body).json()["choices"]
    (event,) = chunks(server, "chat/completions", body)
    message, delta = choice["message"], event["choices"][0]["delta"]
    assert message["content"] == delta["content"] == text[2:] + "\nnameless"
    functions = [{"name": "look", "arguments": json.dumps({"at": text[:2]})}, {"name": "look", "arguments": "look{"}]
    assert [call["function"] for call in message["tool_calls"]] == functions
    assert [(call["index"], call["function"]) for call in delta["tool_calls"]] == list(enumerate(functions))
    assert choice["finish_reason"] == event["choices"][0]["finish_reason"] == "tool_calls"
    assert event["choices"][0]["token_ids"] == choice["token_ids"]


def test_answers_of_tools_are_read(post, with_tools, server, monkeypatch, tokenizer):
    template = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }}"
    monkeypatch.setattr(server.tokenizer, "chat_template", template + "{% endfor %}{{ m.content }}{% endfor %}")
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "blue"}]}]
    answer = post("chat/completions", {"messages": messages, "return_token_ids": True, **FEW}).json()
    assert tokenizer.decode(answer["prompt_token_ids"]) == "userHelloassistantskytoolblue"


def test_tools_that_the_template_does_not_show_are_refused(post, server, monkeypatch):
    body = {"messages": HELLO, "tools": [TOOL], **FEW}
    assert "no parser of tool calls" in post("chat/completions", body).json()["error"]["message"]
    monkeypatch.setattr(server, "parse_tool_calls", lambda *_: ("", []))
    monkeypatch.setattr(server.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}>")
    answer = post("chat/completions", body)
    assert answer.status_code == 400 and "does not show them" in answer.json()["error"]["message"]


def test_another_model_is_not_found_and_ours_is_listed(server, post):
    assert post("completions", {"prompt": "x", "model": "gpt-4"}).status_code == 404
    (model,) = httpx.get(f"{server.address}/v1/models").json()["data"]
    assert post("completions", {"prompt": "x", "model": model["id"]}).status_code == 200


def test_an_answer_begun_under_old_weights_goes_on_under_the_new(server, post, reference):
    """The trainer takes the engine in the middle; the agent notices nothing but time."""
    engine = server.engine
    body = {"prompt": "Some", "max_tokens": 150, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    before = post("completions", body).json()["choices"][0]["token_ids"]

    async def work():
        async with httpx.AsyncClient(timeout=30) as client:
            running = asyncio.ensure_future(client.post(f"{server.address}/v1/completions", json=body))
            while len(still.made) < 20:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(server.pause)
            still.go_on()
            assert engine.num_running == 0 and not running.done()
            engine.sleep(2)
            engine.wake()
            sync_weights(((n, -w if "o_proj" in n else w) for n, w in named), engine, version=8)
            server.resume(8)
            return (await running).json()

    named = [(name, tensor.clone()) for name, tensor in weights_of(reference("qwen2"))]
    with standing_still(engine, 20) as still:
        answer = asyncio.run(work())
    tokens = answer["choices"][0]["token_ids"]
    assert len(tokens) == 150 and answer["system_fingerprint"] == "version-8"
    kept = next(i for i, (old, new) in enumerate(zip(before, tokens, strict=True)) if old != new)
    assert kept >= 15
    (rest,) = (c.token_ids for c in generate_directly(server, [*server.tokenizer.encode("Some"), *tokens[:-20]], 20))
    assert rest == tokens[-20:], "the end is what the new weights draw"
    server.pause()
    sync_weights(iter(named), engine, version=7)
    server.resume(7)


def generate_directly(server, prompt, count):
    server.pause()
    found = server.engine.generate([Request(tuple(prompt), SamplingParams(count, temperature=0, ignore_eos=True))], 8)
    server.resume(8)
    return found

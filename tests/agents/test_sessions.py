"""Agents outside: what passes through a session is recorded as it was generated."""

import asyncio
import json
import os
import sys

import aiohttp
import pytest

from tests.support.sessions import HELLO, SAMPLING, Servers, check_rows, run_loop, tokenizer_with_tools
from verl.agents.base import EpisodeStatus
from verl.agents.conversation import ChatRenderer
from verl.agents.episode import EpisodeLimits
from verl.agents.gateway import Gateway, close_gateway
from verl.agents.outside_agent import AgentFailed
from verl.agents.session import Session
from verl.sandbox.forked_calls import close_all
from verl.utils.tiny_model import make_tokenizer

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with_tools()


def a_session(tokenizer, answers=("one", "two", "three", "four"), limits=None, **options):
    servers = Servers(tokenizer, answers, options.pop("wait_s", 0.0))
    renderer = ChatRenderer(tokenizer, prompt_length=options.pop("prompt_length", 300))
    row = {"raw_prompt": HELLO, "raw_prompt_ids": renderer.prompt_ids(HELLO)}
    sampling = SAMPLING | options.pop("sampling", {})
    return Session(servers, renderer, sampling, limits or EpisodeLimits(None, None, None, None), row, **options)


def talk(session, agent, host="127.0.0.1"):
    """What ``agent(post, url)`` returns; ``post`` sends JSON below the session's URL and returns (status, body)."""

    async def work():
        gateway = await Gateway.of(host)
        try:
            async with aiohttp.ClientSession() as client:
                with gateway.opened(session) as url:
                    if host == "0.0.0.0":
                        url = url.replace(gateway.address, f"http://127.0.0.1:{gateway.port}")

                    async def post(path, body, url=url, **options):
                        async with client.post(f"{url}/{path}", json=body, **options) as answer:
                            is_json = answer.content_type == "application/json"
                            return answer.status, await (answer.json() if is_json else answer.text())

                    return await agent(post, url)
        finally:
            await close_gateway()

    return asyncio.run(work())


async def chat(post, messages, **fields):
    status, body = await post("v1/chat/completions", {"model": "policy", "messages": messages, **fields})
    assert status == 200, body
    return body["choices"][0]["message"]


def result(content, message):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_a_conversation_that_goes_on_is_one_row_of_the_tokens_generated(tokenizer):
    session = a_session(tokenizer, [f"I add.{CALL}", " 2 it is ", "bye"])

    async def agent(post, url):
        messages = list(HELLO)
        first = await chat(post, messages, tools=[CALCULATOR])
        assert first["content"] == "I add." and first["tool_calls"][0]["function"]["name"] == "add"
        assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
        # sent back as clients do: other spaces in the JSON, fields without a value
        first["tool_calls"][0]["function"]["arguments"] = '{ "x":1 }'
        messages += [first | {"refusal": None, "function_call": None}, result("2", first)]
        second = await chat(post, messages, tools=[CALCULATOR], tool_choice="auto")
        assert second == {"role": "assistant", "content": " 2 it is "}
        messages += [{"role": "assistant", "content": "2 it is"}, {"role": "user", "content": "Bye"}]
        await chat(post, messages, tools=[CALCULATOR])

    talk(session, agent)
    (output,) = session.outputs(EpisodeStatus.COMPLETED, 0.0)
    check_rows([output], session.servers)
    assert len(output.turn_spans) == 3 and output.num_turns == 1 + 3 + 1
    text = tokenizer.decode(output.prompt_ids + output.response_ids)
    assert text.startswith("<|im_start|>tools\n") and CALL in text, "as generated, not as the template writes it"
    assert "<|im_start|>tool\n2<|im_end|>" in text


def test_the_first_prompt_has_the_ids_of_the_data(tokenizer):
    session = a_session(tokenizer)
    session.row["raw_prompt_ids"] = [5, 6, 7]
    talk(session, lambda post, url: chat(post, HELLO))
    assert session.outputs(EpisodeStatus.COMPLETED, 0.0)[0].prompt_ids == [5, 6, 7]


def test_a_rewritten_history_becomes_several_rows_of_which_the_last_has_the_reward(tokenizer):
    session = a_session(tokenizer, ["<think>so</think>one", "two", "three", "four"])

    async def agent(post, url):
        first = await chat(post, HELLO)
        stripped = {**first, "content": "one"}  # agents drop the reasoning
        more = [*HELLO, stripped, {"role": "user", "content": "more"}]
        second = await chat(post, more)
        await chat(post, [{"role": "system", "content": "Sum up."}, *HELLO])
        await chat(post, [*more, second, {"role": "user", "content": "end"}])
        assert (await post("reward", {"reward": 0.5}))[0] == 200
        assert (await post("reward", {"reward": 0.25, "turn": 0}))[0] == 200

    talk(session, agent)
    outputs = session.outputs(EpisodeStatus.COMPLETED, 0.0)
    check_rows(outputs, session.servers)
    assert [len(output.turn_spans) for output in outputs] == [1, 1, 2]
    assert [output.reward_score for output in outputs] == [0.0, 0.0, 0.5]
    assert [output.turn_rewards for output in outputs] == [[0.25], [0.0], [0.0, 0.0]]


def test_calls_at_the_same_time_and_second_tries_are_rows_of_their_own(tokenizer):
    session = a_session(tokenizer, wait_s=0.02)

    async def agent(post, url):
        await asyncio.gather(*(chat(post, HELLO) for _ in range(3)))
        with pytest.raises(asyncio.TimeoutError):  # a client that gives up and asks again
            await asyncio.wait_for(chat(post, [{"role": "user", "content": "x"}]), 0.01)
        await asyncio.sleep(0.05)
        await chat(post, [{"role": "user", "content": "x"}])

    talk(session, agent)
    outputs = session.outputs(EpisodeStatus.COMPLETED, 0.0)
    assert len(outputs) == 4 and all(len(output.turn_spans) == 1 for output in outputs)
    del session.servers.asked[3]
    assert [output.prompt_ids for output in outputs] == session.servers.asked


def test_a_prompt_longer_than_its_window_begins_in_the_response(tokenizer):
    session = a_session(tokenizer, prompt_length=20)
    talk(session, lambda post, url: chat(post, [{"role": "user", "content": "x" * 50}]))
    (output,) = session.outputs(EpisodeStatus.COMPLETED, 0.0)
    check_rows([output], session.servers)
    assert len(output.prompt_ids) == 20


def test_a_stream_has_what_the_whole_answer_has(tokenizer):
    session = a_session(tokenizer, [f"I add.{CALL}", f"I add.{CALL}"])
    body = {"messages": HELLO, "tools": [CALCULATOR], "logprobs": True, "return_token_ids": True}

    async def agent(post, url):
        _, whole = await post("v1/chat/completions", body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, lines = await post("v1/chat/completions", body | options)
        return whole, [line.removeprefix("data: ") for line in lines.split("\n\n") if line]

    whole, lines = talk(session, agent)
    assert lines[-1] == "[DONE]"
    chunk, usage = map(json.loads, lines[:-1])
    (choice,), (expected,) = chunk["choices"], whole["choices"]
    (call,) = choice["delta"].pop("tool_calls")
    (expected_call,) = expected["message"].pop("tool_calls")
    assert call["function"] == expected_call["function"] and call["index"] == 0 and call["id"] != expected_call["id"]
    assert choice["delta"] == expected["message"] and choice["token_ids"] == expected["token_ids"]
    assert choice["finish_reason"] == expected["finish_reason"] == "tool_calls"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.5] * len(choice["token_ids"])
    assert usage["usage"]["completion_tokens"] == len(choice["token_ids"])


# -- tools and sampling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "content", "calls"),
    [
        ({"tools": [CALCULATOR], "tool_choice": "none"}, CALL, 0),
        ({}, CALL, 0),
        ({"tools": [CALCULATOR]}, None, 1),
    ],
)
def test_calls_are_read_where_the_request_has_tools_and_lets_them_be_called(fields, content, calls, tokenizer):
    message = talk(a_session(tokenizer, [CALL]), lambda post, url: chat(post, HELLO, **fields))
    assert message["content"] == content and len(message.get("tool_calls", ())) == calls


def test_a_call_with_broken_arguments_keeps_them_as_text_and_the_agent_can_answer(tokenizer):
    broken = '<tool_call>{"name": "add", "arguments": {"x": }}</tool_call>'
    session = a_session(tokenizer, [broken, "sorry"])

    async def agent(post, url):
        message = await chat(post, HELLO, tools=[CALCULATOR])
        function = message["tool_calls"][0]["function"]
        assert function["name"] == "add" and '{"x": }' in function["arguments"]
        await chat(post, [*HELLO, message, result("no JSON", message)], tools=[CALCULATOR])

    talk(session, agent)
    (output,) = session.outputs(EpisodeStatus.COMPLETED, 0.0)
    check_rows([output], session.servers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [CALCULATOR], "tool_choice": "required"}, "tool_choice='required' cannot be honoured"),
        ({"tools": [CALCULATOR], "tool_choice": {"type": "function"}}, "tool_choice={'type': 'function'} cannot"),
        ({"tools": [CALCULATOR], "parallel_tool_calls": False}, "parallel_tool_calls=false cannot be honoured"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]={'type': 'web_search'} must be"),
        ({"n": 2}, "n=2 is not supported in a session"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "data.apply_chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of the type 'text'"),
        ({"model": "gpt-4"}, "model='gpt-4' is not served here"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, message, tokenizer):
    async def agent(post, url):
        return await post("v1/chat/completions", {"messages": HELLO, **fields})

    status, body = talk(a_session(tokenizer), agent)
    assert status == (404 if "model" in fields else 400) and message in body["error"]["message"]


def test_a_template_that_shows_no_tools_is_refused(tokenizer):
    plain = make_tokenizer("char")
    plain.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}>"
    plain.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "

    async def agent(post, url):
        return await post("v1/chat/completions", {"messages": HELLO, "tools": [CALCULATOR]})

    status, body = talk(a_session(plain), agent)
    assert status == 400 and "does not show them" in body["error"]["message"]


def test_sampling_is_the_runs_with_what_a_request_gives(tokenizer):
    session = a_session(tokenizer, ["one.two", "x"], limits=EpisodeLimits(None, None, None, 50), sampling={"top_k": 7})

    async def agent(post, url):
        fields = {"temperature": 0.5, "stop": ["."], "max_tokens": 20, "seed": 4, "frequency_penalty": 0.1}
        assert (await chat(post, HELLO, **fields))["content"] == "one"
        await chat(post, HELLO)

    talk(session, agent)
    first, second = session.servers.sampling
    assert (first["temperature"], first["top_k"], first["max_tokens"], first["stop"]) == (0.5, 7, 20, (".",))
    assert first["extra"] == {"frequency_penalty": 0.1} and "seed" not in first
    assert (second["temperature"], second["max_tokens"], second["stop"]) == (1.0, 50, ())


# -- limits, rewards, errors -------------------------------------------------------------------------------------------


def test_limits_are_errors_to_the_agent_with_a_code_and_a_status(tokenizer):
    session = a_session(tokenizer, ["x"] * 9, limits=EpisodeLimits(2, None, None, None), sampling={"max_tokens": 60})

    async def agent(post, url):
        first = await chat(post, HELLO)
        long = [*HELLO, first, {"role": "user", "content": "y" * 100}]
        status, body = await post("v1/chat/completions", {"messages": long})
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert session.status is EpisodeStatus.TOKENS
        await chat(post, [*HELLO, first, {"role": "user", "content": "y"}])
        assert session.status is None, "the agent has found a way"
        status, body = await post("v1/chat/completions", {"messages": HELLO})
        assert status == 400 and body["error"]["code"] == "max_assistant_turns"

    talk(session, agent)
    assert session.status is EpisodeStatus.ASSISTANT_TURNS
    check_rows(session.outputs(session.status, 0.0), session.servers)


def test_a_turn_cut_by_the_window_says_so(tokenizer):
    session = a_session(tokenizer, ["x" * 99], sampling={"max_tokens": 30})

    async def agent(post, url):
        return (await post("v1/chat/completions", {"messages": HELLO}))[1]["choices"][0]["finish_reason"]

    assert talk(session, agent) == "length" and session.status is EpisodeStatus.TOKENS


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"reward": "much"}, "reward='much' must be a finite number"),
        ({"reward": float("nan")}, "must be a finite number"),
        ({"rewards": 1}, "unknown field 'rewards'"),
        ({"reward": 1, "turn": 3}, "turn=3 must be the number"),
        ({"info": {"steps": None}}, "info.steps=None"),
        ([1], "The body must be an object"),
    ],
)
def test_a_reward_that_is_none_is_refused_and_not_recorded(body, message, tokenizer):
    session = a_session(tokenizer)

    async def agent(post, url):
        await chat(post, HELLO)
        return await post("reward", body)

    status, answer = talk(session, agent)
    assert status == 400 and message in answer["error"]["message"]
    assert session.reward is None and not session.turn_rewards


def test_unknown_ended_and_locked_sessions(tokenizer):
    session = a_session(tokenizer)

    async def agent(post, url):
        async def codes(url, **options):
            answers = [
                await post(path, body, url, **options)
                for path, body in (("v1/chat/completions", {"messages": HELLO}), ("reward", {"reward": 1}))
            ]
            return [(status, body["error"]["code"]) for status, body in answers]

        assert await codes(url[:-1]) == [(404, "session_not_found")] * 2
        assert (await post("v1/completions", {}))[0] == 404
        assert (await post("reward", {"reward": 1, "final": True}))[0] == 200
        assert await codes(url) == [(410, "session_ended")] * 2

    talk(session, agent)

    async def locked(post, url):
        for header in ({}, {"Authorization": "Bearer wrong"}):
            status, body = await post("v1/chat/completions", {"messages": HELLO}, headers=header)
            assert status == 401 and body["error"]["code"] == "invalid_api_key"
        key = (await Gateway.of("0.0.0.0")).api_key
        headers = {"Authorization": f"Bearer {key}"}
        assert (await post("v1/chat/completions", {"messages": HELLO}, headers=headers))[0] == 200

    talk(a_session(tokenizer), locked, host="0.0.0.0")


def test_what_the_servers_raise_ends_the_session_and_is_kept(tokenizer):
    class Stopped(BaseException):
        pass

    session = a_session(tokenizer, [Stopped()])

    async def agent(post, url):
        return [(await post("v1/chat/completions", {"messages": HELLO}))[0] for _ in range(2)]

    assert talk(session, agent) == [410, 410] and isinstance(session.failure, Stopped)


# -- the agent loop ----------------------------------------------------------------------------------------------------

AGENT = """
import asyncio, json, os, time, urllib.request

def ask(base_url, api_key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]

def blocking(base_url, api_key, row):
    message = ask(base_url, api_key, row["messages"])
    return {"reward": len(message["content"]), "success": True, "pid": os.getpid(), "index": row["index"]}

async def coroutine(base_url, api_key, row):
    return await asyncio.to_thread(blocking, base_url, api_key, row)

def raises(base_url, api_key, row):
    ask(base_url, api_key, row["messages"])
    raise KeyError("no such thing")

async def leaves(base_url, api_key, row):
    raise SystemExit(3)

def crashes(base_url, api_key, row):
    os.abort()

def hangs(base_url, api_key, row):
    ask(base_url, api_key, row["messages"])
    time.sleep(100)

async def waits(base_url, api_key, row):
    await asyncio.to_thread(ask, base_url, api_key, row["messages"])
    await asyncio.sleep(100)

def says_nothing(base_url, api_key, row):
    pass

def goes_on(base_url, api_key, row):
    while True:
        ask(base_url, api_key, row["messages"])

def no_number(base_url, api_key, row):
    ask(base_url, api_key, row["messages"])
    return "good"
"""


@pytest.fixture
def agent_file(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    yield tmp_path / "agent.py"
    close_all()


@pytest.mark.parametrize("function", ["blocking", "coroutine"])
@pytest.mark.parametrize("runs_in", ["auto", "thread", "process"])
def test_a_function_runs_in_the_driver_a_thread_or_a_process(function, runs_in, tokenizer, agent_file):
    output = run_loop(tokenizer, function=f"{agent_file}:{function}", runs_in=runs_in)
    assert output.reward_score == 3 and output.status == "completed"
    info = output.extra_fields["episode_info"]
    assert info["success"] == 1 and (info["pid"] == os.getpid()) == (runs_in != "process")


def test_64_sessions_at_a_time_keep_apart(tokenizer, agent_file):
    outputs = run_loop(tokenizer, function=f"{agent_file}:coroutine", rows=64)
    assert [output.extra_fields["episode_info"]["index"] for output in outputs] == list(range(64))
    outputs = run_loop(tokenizer, function=f"{agent_file}:blocking", rows=16, runs_in="process")
    assert [output.extra_fields["episode_info"]["index"] for output in outputs] == list(range(16))
    assert len({output.extra_fields["episode_info"]["pid"] for output in outputs}) > 0


@pytest.mark.parametrize(
    ("function", "runs_in", "cause"),
    [
        ("raises", "thread", "KeyError: 'no such thing'"),
        ("raises", "process", "KeyError: 'no such thing'"),
        ("leaves", "driver", "SystemExit: 3"),
        ("leaves", "process", "SystemExit: 3"),
        ("crashes", "process", "its process has ended: crash"),
        ("says_nothing", "thread", "ended without an answer of the policy"),
        ("no_number", "thread", "the returned reward='good' must be a finite number"),
    ],
)
def test_an_agent_that_fails_is_an_error_of_its_own_episode(function, runs_in, cause, tokenizer, agent_file):
    error = run_loop(tokenizer, function=f"{agent_file}:{function}", runs_in=runs_in)
    assert isinstance(error, AgentFailed | ValueError) and cause in str(error)


@pytest.mark.parametrize(("function", "runs_in"), [("waits", "driver"), ("hangs", "thread"), ("hangs", "process")])
def test_an_agent_that_never_ends_is_stopped_with_a_status(function, runs_in, tokenizer, agent_file):
    output = run_loop(tokenizer, function=f"{agent_file}:{function}", runs_in=runs_in, timeout=1.5)
    assert output.status == "episode_timeout" and output.reward_score is None


def test_an_agent_that_goes_on_past_a_limit_ends_with_its_status(tokenizer, agent_file):
    outputs = run_loop(tokenizer, function=f"{agent_file}:goes_on", turns=3)
    assert [output.status for output in outputs] == ["max_assistant_turns"] * 3


PROGRAM = """
import json, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from agent import ask
import urllib.request
row = json.load(sys.stdin)
ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row["messages"])
if sys.argv[2] == "fail":
    print("this is why")
    raise SystemExit(4)
if sys.argv[2] == "hang":
    import time
    time.sleep(100)
body = json.dumps({"reward": 0.5, "info": {"row": row["index"]}}).encode()
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["VERL_REWARD_URL"], body, headers))
"""


def test_a_program_is_an_agent(tokenizer, agent_file):
    program = agent_file.with_name("program.py")
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(agent_file)]
    output = run_loop(tokenizer, command=[*command, "reward"])
    assert output.reward_score == 0.5 and output.extra_fields["episode_info"] == {"row": 0}
    error = run_loop(tokenizer, command=[*command, "fail"])
    assert isinstance(error, AgentFailed) and "exit code 4" in str(error) and "this is why" in str(error)
    assert run_loop(tokenizer, command=[*command, "hang"], timeout=2.0).status == "episode_timeout"


def test_an_entry_of_the_users_file_names_its_own_function(tokenizer, agent_file):
    output = run_loop(tokenizer, {"function": f"{agent_file}:blocking"}, function="elsewhere.py:nothing")
    assert output.reward_score == 3


def test_no_agent_is_refused_with_the_key(tokenizer):
    assert "openai_agent.function is null" in str(run_loop(tokenizer))
    assert "'my_agent' must be path/file.py:function" in str(run_loop(tokenizer, function="my_agent"))

"""A conversation with a served model, its tools, and the server itself."""

import asyncio
import io
import json
import os
import threading

import pytest
from aiohttp import web

from tests.support.runs import make_task
from tests.trainer.test_generation import responses, words
from verl.config.generation import GenerationConfig
from verl.config.load import load
from verl.config.rollout import MultiTurnConfig
from verl.tools.toolbox import RowToolbox, Toolbox
from verl.trainer.generation.chat import AnswerRefused, Chat
from verl.trainer.main_chat import main
from verl.trainer.main_generation import main as generate
from verl.trainer.main_generation_server import main as generate_by_servers
from verl.trainer.main_generation_server import serve

TOOLS = '''
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b
'''


def delta(**content):
    return {"choices": [{"index": 0, "delta": content, "finish_reason": None}]}


CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("chat"))


async def scripted(answers, seen):
    """A server that gives these answers: chunks of a stream, or the message of an error."""

    async def answer(request):
        assert request.headers["Authorization"] == "Bearer key"
        seen.append(await request.json())
        chunks = answers.pop(0)
        if isinstance(chunks, str):
            return web.json_response({"error": {"message": chunks}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"


def test_a_conversation_calls_tools_keeps_its_messages_and_takes_a_refused_turn_back(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    toolbox = Toolbox(MultiTurnConfig(function_tool_path=str(tmp_path / "tools.py")))
    answers = [[delta(content=None, tool_calls=[CALL])], [delta(content="It is"), delta(content=" 5.")], "too long"]
    seen, written = [], []

    async def talk():
        runner, address = await scripted(answers, seen)
        try:
            tools = RowToolbox(toolbox, {})
            chat = Chat(address, "key", {"max_tokens": 9}, tools, "Be brief.", written.append, written.append)
            assert await chat.ask("2 + 3?") == "It is 5."
            kept = list(chat.messages)
            with pytest.raises(AnswerRefused, match="too long"):
                await chat.ask("and more?")
            assert chat.messages == kept
            chat.reset()
            return kept, chat.messages
        finally:
            await runner.cleanup()

    try:
        kept, after = asyncio.run(talk())
    finally:
        toolbox.close()
    assert [message["role"] for message in kept] == ["system", "user", "assistant", "tool", "assistant"]
    assert kept[3]["content"] == "5" and after == kept[:1]
    assert seen[1]["messages"] == kept[:4] and seen[0]["max_tokens"] == 9
    assert seen[0]["tools"][0]["function"]["name"] == "add"
    assert written == ['[add({"a": 2, "b": 3})]', "[add -> 5]", "It is", " 5."]


def test_verl_chat_answers_each_line_and_forgets_on_request(task, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n/reset\nhello\n"))
    model = task["actor_rollout_ref.model.path"]
    main([model, "--system", "Be brief.", "rollout.response_length=6", "trainer.device=cpu"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"loading {model}\n") and "(no answer" not in shown
    before, after = shown.removeprefix(f"loading {model}\n").split("(a new conversation)\n")
    assert before.strip() and before.count("\n") >= 2 and after.count("\n") >= 1


def test_responses_by_servers_are_those_of_whole_batches(task, tmp_path):
    generate(words(task, tmp_path / "sync.parquet"))
    generate_by_servers(words(task, tmp_path / "async.parquet"))
    assert responses(tmp_path / "sync.parquet") == responses(tmp_path / "async.parquet")


@pytest.mark.parametrize("data", [[], ["data.val_files=nowhere.parquet"]], ids=["served", "data"])
def test_a_server_of_responses_says_once_that_it_reads(tmp_path, capsys, data):
    with pytest.raises(SystemExit):
        generate_by_servers([str(tmp_path / "no_model"), *data])
    assert capsys.readouterr().err.count("reading the configuration") == 1


def test_a_served_model_answers_whom_its_file_of_keys_lets_in(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [f"model.path={task['actor_rollout_ref.model.path']}", "trainer.val_only=false", "rollout.n=1"]
    given += [word for word in words(task, "x")[2:] if not word.startswith("data.")]
    config, stop, found = load(given, config_name="generation", root=GenerationConfig).config, threading.Event(), {}

    def ask():
        try:
            path = tmp_path / f"servers-{os.getpid()}.json"
            while not path.exists() or not path.read_text():
                stop.wait(0.05)
            found["mode"], servers = path.stat().st_mode & 0o777, json.loads(path.read_text())
            for key in (servers["api_key"], "wrong"):
                chat = Chat(servers["base_urls"][0].removesuffix("/v1"), key, {"max_tokens": 4, "temperature": 0})
                found[key == "wrong"] = asyncio.run(asyncio.wait_for(chat.ask("hi"), 60))
        except BaseException as error:
            found["error"] = error
        finally:
            stop.set()

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    serve(config, stop=stop)
    client.join()
    assert found["mode"] == 0o600 and found[False] and isinstance(found["error"], AnswerRefused)
    assert not list(tmp_path.glob("servers-*"))

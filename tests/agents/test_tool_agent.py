"""Agent tool_agent: what tools answer to the turns of one row, and what is left of it."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.tools.conftest import make_toolbox  # noqa: F401 - a fixture
from verl.agents.episode import AssistantTurn, ToolCall
from verl.agents.tool_agent import ToolEnvironment
from verl.tools import toolbox as toolboxes

FUNCTIONS = """
@function_tool
def add(a: int, b: int) -> int:
    return a + b


@function_tool
def meet(folder: str, name: str) -> str:
    open(os.path.join(folder, name), "w").close()
    end = time.monotonic() + 60
    while len(os.listdir(folder)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    return "".join(sorted(os.listdir(folder)))


@function_tool
def hang():
    time.sleep(1000)
"""


class Scored:
    """A user who answers each turn with what it said, and ends at "bye"."""

    def __init__(self):
        self.closed = 0

    async def start(self):
        pass

    async def answer(self, messages):
        said = messages[-1]["content"]
        return SimpleNamespace(content=f"you said {said}", is_last=said == "bye", score=0.5, info={"x": 1})

    async def close(self):
        self.closed += 1


@pytest.fixture
def environment(make_toolbox, monkeypatch):  # noqa: F811
    """An environment of the functions above, with options of ``multi_turn``."""

    def make(row=None, user=None, functions=FUNCTIONS, **options):
        toolbox = make_toolbox(functions, **options)
        monkeypatch.setattr("verl.agents.tool_agent.toolbox_of", lambda _: toolbox)
        return ToolEnvironment(toolbox.options, {"raw_prompt": [], **(row or {})}, user)

    return make


def turn(*calls, text="", number=0):
    calls = [call if isinstance(call, ToolCall) else ToolCall(*call) for call in calls]
    return AssistantTurn(number, text, [1], "stop", calls, [{"role": "assistant", "content": text}])


def talk(environment, *turns):
    """Hold an episode; returns the replies and the columns."""

    async def work():
        await environment.start({"raw_prompt": []})
        replies = [await environment.reply(one) for one in turns]
        columns = await environment.finish()
        await environment.close()
        return replies, columns

    return asyncio.run(work())


def test_calls_of_a_turn_are_answered_in_order_with_what_went_wrong(environment):
    calls = [
        ("add", {"a": 1, "b": 2}),
        ("sub", {}),
        ToolCall("add", None, error="Expecting value"),
        ("add", {"a": "x", "b": 1}),
    ]
    (reply,), columns = talk(environment(max_parallel_calls=4), turn(*calls))
    assert [message["content"] for message in reply.messages] == [
        "3",
        "Error: there is no tool 'sub'; tools are: add, meet, hang",
        "Error: the arguments of add are no JSON object: Expecting value",
        "Error: arguments of add: a must be integer, not 'x'",
    ]
    assert {message["role"] for message in reply.messages} == {"tool"} and not reply.is_last and reply.num_calls == 4
    kinds = [(call["name"], call["outcome"]) for call in columns["tool_calls"]]
    assert kinds == [("add", "ok"), ("unknown", "unknown_tool"), ("add", "invalid_json"), ("add", "invalid_arguments")]
    assert reply.reward is None and columns["tool_rewards"] == [] and columns["reward_scores"] == {}


def test_calls_run_at_the_same_time_and_those_over_the_limit_are_told(environment, tmp_path):
    tools = environment(max_parallel_calls=3, tool_num_workers=3, tool_timeout=60.0)
    (tmp_path / "met").mkdir()
    reply = asyncio.run(tools.reply(turn(*(("meet", {"folder": str(tmp_path / "met"), "name": n}) for n in "abcd"))))
    texts = [message["content"] for message in reply.messages]
    # none of the three ended before all had begun
    assert texts == ["abc", "abc", "abc", "Error: meet was not called: a turn may have 3 tool calls."]
    assert reply.num_calls == 3 and tools.calls[-1].outcome == "not_called"


def test_a_conversation_has_so_many_calls(environment):
    tools = environment(max_parallel_calls=2, max_tool_calls=3)
    one = ("add", {"a": 1, "b": 1})
    (first, second), columns = talk(tools, turn(one, one), turn(one, one))
    assert first.num_calls == 2 and second.num_calls == 1
    assert second.messages[1]["content"] == "Error: add was not called: the conversation may have 3 tool calls."
    assert [call["outcome"] for call in columns["tool_calls"]] == ["ok", "ok", "ok", "not_called"]


def test_a_turn_without_a_call_ends_the_episode(environment):
    (reply,), columns = talk(environment(), turn(text="the answer"))
    assert reply.terminated and not reply.messages and columns["tool_calls"] == []


def test_a_tool_that_hangs_is_answered_in_time_for_it_alone(environment):
    tools = environment(tool_timeout=0.5, max_parallel_calls=2)
    (reply,), columns = talk(tools, turn(("hang", {}), ("add", {"a": 2, "b": 3})))
    assert [m["content"] for m in reply.messages] == ["Error: it did not answer within 0.5 seconds", "5"]
    assert [call["outcome"] for call in columns["tool_calls"]] == ["timeout", "ok"]


def test_a_user_answers_turns_without_a_call_and_scores_them(environment):
    user = Scored()
    tools = environment(user=user)
    turns = turn(text="hello"), turn(("add", {"a": 1, "b": 1})), turn(text="bye", number=2)
    (hello, call, bye), columns = talk(tools, *turns)
    assert hello.messages == ({"role": "user", "content": "you said hello"},) and hello.reward == 0.5
    assert call.messages[0]["content"] == "2" and call.reward is None
    assert bye.is_last and bye.terminated and bye.info == {"x": 1} and user.closed == 1
    assert columns["turn_scores"] == [0.5, 0.5] and columns["reward_scores"] == {"user_turn_rewards": [0.5, 0.5]}


GSM8K = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: A tool for calculating the reward of gsm8k.
        parameters:
          type: object
          properties: {answer: {type: string, description: "The model's answer"}}
          required: [answer]
"""


def test_rewards_of_a_tool_are_those_of_its_turns_and_of_its_conversation(environment):
    row = {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}
    tools = environment(row, functions="", yaml=GSM8K)
    assert [schema["function"]["name"] for schema in tools.tools] == ["calc_gsm8k_reward"]
    calls = [turn(("calc_gsm8k_reward", {"answer": answer})) for answer in ("7", 72, "#### 72")]
    replies, columns = talk(tools, *calls)
    assert [reply.reward for reply in replies] == [-0.05, 0.0, -0.05] == columns["tool_rewards"]
    assert replies[0].messages[0]["content"] == "Current parsed answer='7' reward=0.0"
    assert columns["reward_scores"] == {"calc_gsm8k_reward": 1.0}
    assert not tools.toolbox.tools["calc_gsm8k_reward"]._instances


def test_a_row_that_tools_cannot_serve_fails_with_its_cause(environment):
    with pytest.raises(RuntimeError, match="create: ValueError: .*create_kwargs.* has no ground_truth"):
        talk(environment(functions="", yaml=GSM8K))
    with pytest.raises(ValueError, match="the row has no raw_prompt.*data.return_raw_chat=true"):
        asyncio.run(environment().start({}))


def test_the_tools_of_a_run_are_loaded_once_and_closed_at_its_end(make_toolbox, tmp_path):  # noqa: F811
    options = make_toolbox(FUNCTIONS).options
    one = toolboxes.toolbox_of(options)
    assert toolboxes.toolbox_of(options) is one
    asyncio.run(toolboxes.RowToolbox(one, {}).call("add", {"a": 1, "b": 1}))
    assert one.processes.pids
    toolboxes.close_toolboxes()
    assert not one.processes.pids and toolboxes.toolbox_of(options) is not one
    toolboxes.close_toolboxes()

"""Calls of tools: every failure is an answer, in time, and belongs to its own call."""

import asyncio
import os
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.tools.conftest import HEAD, ROW
from verl.tools.calls import text_of, truncated
from verl.tools.toolbox import RowToolbox, row_tools

FUNCTIONS = """
class Color(enum.Enum):
    RED = "red"


@function_tool
def add(a: int, b: int = 2) -> int:
    return a + b


@function_tool
def paint(color: Color):
    return color.name


@function_tool
def fail(how: str):
    if how == "raise":
        raise ValueError("no such thing")
    if how == "hang":
        time.sleep(1000)
    if how == "spin":
        while True:
            pass
    if how == "exit":
        os._exit(3)
    if how == "sys_exit":
        sys.exit("bye")
    if how == "segfault":
        os.kill(os.getpid(), 11)
    if how == "memory":
        return len(bytearray(3 * 1024**3))
    if how == "bytes":
        return b"abc"
    if how == "object":
        return object()
    if how == "megabyte":
        return "x" * 2**20
    if how == "surrogate":
        return chr(0xD800)
    if how == "orphan":
        import subprocess
        return subprocess.Popen(["sleep", "1000"]).pid
    return None


@function_tool
def look_up(key: str, *, table: dict, default: str = "nothing"):
    return table.get(key, default)


@function_tool
def pid() -> int:
    return os.getpid()


@function_tool
async def wait(seconds: float):
    await asyncio.sleep(seconds)
    return {"slept": seconds}


@function_tool
def hold(folder: str, name: str) -> str:
    open(os.path.join(folder, name), "w").close()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.01)
    return name


@function_tool
def meet(folder: str, name: str) -> str:
    open(os.path.join(folder, name), "w").close()
    end = time.monotonic() + 60
    while len(os.listdir(folder)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    return "".join(sorted(os.listdir(folder)))
"""


def test_answers_are_text_or_json_and_arguments_typed(call):
    calls = [
        ("add", {"a": 1}),
        ("add", {"a": "1", "b": "4"}),
        ("paint", {"color": "red"}),
        ("wait", {"seconds": 0}),
        ("fail", {"how": "none"}),
        ("fail", {"how": "surrogate"}),
    ]
    found = call(FUNCTIONS, *calls)
    assert [one.text for one in found] == ["3", "5", "RED", '{"slept": 0.0}', "", "?"]
    assert {one.outcome for one in found} == {"ok"} and [one.name for one in found] == [name for name, _ in calls]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "name, arguments, outcome, words",
    [
        ("ad", {"a": 1}, "unknown_tool", "there is no tool 'ad'; tools are: add, paint, fail, look_up"),
        ("add", None, "invalid_json", "the arguments of add are no JSON object"),
        ("add", {}, "invalid_arguments", "arguments of add: a is missing"),
        ("add", {"a": 1, "c": 1}, "invalid_arguments", "c is not a parameter; parameters are: a, b"),
        ("add", {"a": [1]}, "invalid_arguments", "a must be integer, not [1]"),
        ("paint", {"color": "blue"}, "invalid_arguments", "color must be one of 'red', not 'blue'"),
        ("look_up", {"key": "k", "table": {}}, "invalid_arguments", "table is not a parameter"),
        ("fail", {"how": "raise"}, "error", "ValueError: no such thing"),
        ("fail", {"how": "bytes"}, "error", "it returned 3 bytes"),
        ("fail", {"how": "object"}, "error", "it returned a object, which is no text and no JSON"),
        ("fail", {"how": "hang"}, "timeout", "it did not answer within 0.5 seconds"),
        ("wait", {"seconds": 100}, "timeout", "it did not answer within 0.5 seconds"),
    ],
)
def test_each_failure_is_an_answer_that_says_what_is_wrong(call, workers, name, arguments, outcome, words):
    calls = [(name, arguments), ("add", {"a": 1})]
    found, after = call(FUNCTIONS, *calls, tool_num_workers=workers, tool_timeout=0.5)
    assert found.outcome == outcome and words in found.text and found.text.startswith("Error: ")
    assert after.text == "3"


@pytest.mark.parametrize(
    "how, outcome",
    [("spin", "timeout"), ("exit", "exit"), ("sys_exit", "exit"), ("segfault", "crash"), ("memory", "memory")],
)
def test_what_runs_away_ends_its_own_process_only(call, how, outcome):
    calls = [("pid", {}), ("fail", {"how": how}), ("add", {"a": 1})]
    first, found, after = call(FUNCTIONS, *calls, tool_timeout=1.5, tool_memory_mb=1024)
    assert (first.outcome, found.outcome, after.text) == ("ok", outcome, "3"), found


def test_nothing_that_a_function_started_is_left(make_toolbox):
    toolbox = make_toolbox(FUNCTIONS, tool_timeout=1.0)

    async def work():
        tools = RowToolbox(toolbox, ROW)
        await tools.call("fail", {"how": "orphan"})
        await asyncio.gather(*(tools.call("fail", {"how": "hang"}) for _ in range(2)))

    before = set(psutil.Process().children(recursive=True))
    asyncio.run(work())
    toolbox.close()
    time.sleep(0.2)
    assert not [p for p in set(psutil.Process().children(recursive=True)) - before if p.is_running()]


def test_a_megabyte_is_cut_and_names_of_no_tool_are_not_kept(call):
    found, unknown = call(FUNCTIONS, ("fail", {"how": "megabyte"}), ("y" * 1000, {}), max_tool_response_length=50)
    assert len(found.text) < 100 and found.outcome == "ok"
    assert unknown.name == "unknown" and len(unknown.text) < 100


def test_calls_run_at_the_same_time_in_as_many_processes_as_allowed(make_toolbox, tmp_path):
    toolbox = make_toolbox(FUNCTIONS, tool_num_workers=3, tool_timeout=60.0)

    async def work():
        tools = RowToolbox(toolbox, ROW)
        three = [tools.call("meet", {"folder": str(tmp_path / "met"), "name": name}) for name in "abc"]
        return await asyncio.gather(*three)

    (tmp_path / "met").mkdir()
    met = asyncio.run(work())
    assert [one.text for one in met] == ["abc"] * 3  # none ended before all had begun
    assert len(toolbox.processes.pids) == 3


def test_waiting_for_a_free_process_is_no_time_of_the_tool(make_toolbox, tmp_path, monkeypatch):
    toolbox = make_toolbox(FUNCTIONS, tool_num_workers=2, tool_timeout=60.0)
    clock = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr("verl.tools.toolbox.time", clock)
    monkeypatch.setattr("verl.tools.processes.time", clock)

    async def work():
        tools = RowToolbox(toolbox, ROW)
        calls = [*(("hold", {"folder": str(tmp_path), "name": name}) for name in "ab"), ("add", {"a": 1})]
        begun = [asyncio.ensure_future(tools.call(*one)) for one in calls]
        while not {"a", "b"} <= set(os.listdir(tmp_path)):
            await asyncio.sleep(0.01)
        clock.now += 7.0  # while the third waits
        (tmp_path / "go").touch()
        return await asyncio.gather(*begun)

    assert [(one.text, one.seconds) for one in asyncio.run(work())] == [("a", 7.0), ("b", 7.0), ("3", 0.0)]


def test_processes_are_started_when_they_are_needed_and_serve_many_calls(call, make_toolbox):
    pids = {one.text for one in call(FUNCTIONS, *[("pid", {})] * 5)}
    assert len(pids) == 1 and str(os.getpid()) not in pids
    assert make_toolbox(FUNCTIONS).processes.pids == []


def test_a_cancelled_call_frees_its_process(make_toolbox):
    toolbox = make_toolbox(FUNCTIONS, tool_num_workers=1)

    async def work():
        tools = RowToolbox(toolbox, ROW)
        task = asyncio.ensure_future(tools.call("fail", {"how": "hang"}))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        return await asyncio.wait_for(tools.call("add", {"a": 1}), 10)

    assert asyncio.run(work()).text == "3"


# -- classes -----------------------------------------------------------------------------------------------------------

CLASSES = '''
class Counter(BaseTool):
    """Counts its calls in a conversation."""

    seen = []

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.counts = {}

    async def create(self, instance_id=None, start=0, **kwargs):
        self.counts[instance_id] = start
        self.seen.append(kwargs)
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        how = parameters.get("how")
        if how == "raise":
            raise KeyError("gone")
        if how == "block":
            time.sleep(3)
        if how == "new":
            return ToolResponse(text="new"), None, {"x": 1}
        if how == "image":
            return ToolResponse(image=["i"]), 0.0, {}
        return f"{self.counts[instance_id]} {self.config['word']} {kwargs}", 0.5, {}

    async def calc_reward(self, instance_id, scale=1.0):
        return scale * self.counts[instance_id]

    async def release(self, instance_id, **kwargs):
        del self.counts[instance_id]
'''
YAML = """
tools:
  - class_name: {path}:Counter
    config: {{type: native, word: times}}
    tool_schema:
      type: function
      function:
        name: count
        description: Count.
        parameters: {{type: object, properties: {{how: {{type: string}}}}, required: []}}
"""


@pytest.fixture
def counter(make_toolbox, tmp_path):
    path = tmp_path / "classes.py"
    path.write_text(HEAD + CLASSES)
    return make_toolbox(yaml=YAML.format(path=path), tool_timeout=1.0)


def test_a_class_has_a_state_for_each_conversation_and_a_reward_at_its_end(counter):
    kwargs = {
        "create_kwargs": {"start": 5},
        "execute_kwargs": {"k": 1},
        "calc_reward_kwargs": {"scale": 2.0},
        "release_kwargs": None,
    }

    async def work():
        one, other = RowToolbox(counter, {"tools_kwargs": {"count": kwargs, "absent": None}}), RowToolbox(counter, {})
        await one.create()
        await other.create()
        texts = [await tools.call("count", {}) for tools in (one, one, other)]
        new = await one.call("count", {"how": "new"})
        rewards = await one.rewards(), await other.rewards()
        await one.release()
        await other.release()
        return texts, new, rewards

    texts, new, rewards = asyncio.run(work())
    assert [one.text for one in texts] == ["6 times {'k': 1}", "7 times {'k': 1}", "1 times {}"]
    assert (texts[0].reward, new.reward, new.text, new.metrics) == (0.5, None, "new", {"x": 1})
    assert rewards == ({"count": 16.0}, {"count": 1.0})
    tool = counter.tools["count"]
    assert not tool.counts and {"create_kwargs": {"start": 5}} in type(tool).seen


def test_a_class_that_raises_or_blocks_answers_in_time_and_others_go_on(counter):
    async def work():
        tools = RowToolbox(counter, {})
        await tools.create()
        found = [await tools.call("count", {"how": how}) for how in ("raise", "block", "fine")]
        with pytest.raises(NotImplementedError, match="tool 'count' answered with images"):
            await tools.call("count", {"how": "image"})
        return found

    raised, blocked, after = asyncio.run(work())
    assert (raised.outcome, raised.text) == ("error", "Error: KeyError: 'gone'")
    assert (blocked.outcome, after.outcome) == ("timeout", "ok")


def test_a_wrong_entry_is_named(make_toolbox, tmp_path):
    def refused(error, words, yaml):
        with pytest.raises(error, match=words):
            make_toolbox(yaml=yaml)

    refused(ValueError, "it has no list 'tools'", "tool: 1")
    refused(ValueError, r"tools\[0\]: it has no class_name", "tools: [{config: {}}]")
    refused(ModuleNotFoundError, "nowhere", "tools: [{class_name: nowhere.Tool}]")
    refused(TypeError, "is no subclass of verl.tools.base_tool.BaseTool", "tools: [{class_name: pathlib.Path}]")
    refused(ValueError, "is no type of tools", "tools: [{class_name: verl.tools.BaseTool, config: {type: x}}]")
    refused(ValueError, "tool BaseTool: it has no schema", "tools: [{class_name: verl.tools.BaseTool}]")


# -- tools of a row ----------------------------------------------------------------------------------------------------


def test_a_row_chooses_its_tools():
    known = ["a", "b", "c"]
    assert row_tools({}, known).names == known
    assert row_tools({"extra_info": {"tool_selection": ["c", "a"]}}, known).names == ["c", "a"]
    assert row_tools({"extra_info": {"tool_selection": []}}, known).names == []
    kwargs = {"b": {"create_kwargs": {"x": 1}}, "a": None}
    needed = row_tools({"extra_info": {"tools_kwargs": kwargs, "need_tools_kwargs": True}}, known)
    assert (
        needed.names == ["b"] and needed.of("b", "create_kwargs") == {"x": 1} and needed.of("b", "execute_kwargs") == {}
    )
    assert row_tools({"tools_kwargs": '{"b": {"create_kwargs": {"x": 1}}}'}, known).of("b", "create_kwargs") == {"x": 1}
    with pytest.raises(ValueError, match="the row asks for a tool 'cc'; tools are a, b, c. Did you mean 'c'"):
        row_tools({"extra_info": {"tool_selection": ["cc"]}}, known)


def test_a_row_gives_a_function_what_the_policy_does_not_see(call, make_toolbox):
    row = {"extra_info": {"tools_kwargs": {"look_up": {"execute_kwargs": {"table": {"k": "v"}}}}}}
    found = call(FUNCTIONS, ("look_up", {"key": "k"}), ("look_up", {"key": "z"}), row=row)
    assert [one.text for one in found] == ["v", "nothing"]
    toolbox = make_toolbox(FUNCTIONS)
    assert "table" not in str(toolbox.schemas(["look_up"]))
    with pytest.raises(ValueError, match=r"tools_kwargs\['look_up'\]\['execute_kwargs'\] of a row has \[\], .*'table'"):
        RowToolbox(toolbox, {})
    assert RowToolbox(toolbox, {"extra_info": {"tool_selection": ["add"]}}).schemas == toolbox.schemas(["add"])


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "side, length, cut",
    [
        ("left", 4, "abcd...(truncated)"),
        ("right", 4, "(truncated)...ghij"),
        ("middle", 4, "ab...(truncated)...ij"),
        ("middle", 5, "abc...(truncated)...ij"),
        ("middle", 1, "a...(truncated)..."),
        ("middle", 10, "abcdefghij"),
    ],
)
def test_a_long_answer_keeps_its_head_its_tail_or_both(side, length, cut):
    assert truncated("abcdefghij", length, side) == cut


def test_values_are_shown_as_json():
    assert [text_of(value) for value in ("x", None, {"ä": [1, 2.5, True]})] == ["x", "", '{"ä": [1, 2.5, true]}']

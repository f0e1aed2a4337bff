"""Several processes of agent loops: slots of rollout servers that the driver lends them, and what they send."""

import asyncio
import os
import signal
import threading
from collections import Counter, deque
from concurrent.futures import CancelledError
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from aiohttp import web
from hypothesis import given, settings

from tests.agents.conftest import ROLLOUT, outputs
from tests.support.episodes import config_of, tokenizer
from tests.support.waiting import wait_for
from tests.trainer.buffer.test_continuous import CONTINUOUS
from tests.trainer.buffer.test_disjoint import run as disjoint_run
from verl.agents.clients import BorrowingClient, WorkersClient
from verl.agents.workers import AgentLoopWorkers
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.server.messages import RolloutServerError, unpack

pytestmark = pytest.mark.ranks

LOOP = '''
import asyncio, os
from pathlib import Path

from verl.agents import AgentLoopBase, AgentLoopOutput, register


@register("fan")
class Fan(AgentLoopBase):
    """Sends requests with ``prompts`` at once; its response has the answers to all."""

    async def run(self, sampling_params, **row):
        Path(__file__).with_name(f"process_of_{row['prompts'][0]}").write_text(str(os.getpid()))
        ask = self.server_manager.generate
        done = await asyncio.gather(*(ask(prompt_ids=[i], sampling_params=sampling_params) for i in row["prompts"]))
        ids = [token for one in done for token in one.token_ids]
        return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=[1] * len(ids), num_turns=2)


class OneWay(Exception):
    """Can be pickled, and not be made again."""

    def __init__(self, first, second):
        super().__init__(first)


@register("one_way")
class OneWayLoop(AgentLoopBase):
    async def run(self, sampling_params, **row):
        fields = {"error": OneWay(1, 2)}
        return AgentLoopOutput(prompt_ids=[1], response_ids=[1], response_mask=[1], num_turns=2, extra_fields=fields)
'''


class OneWay(Exception):
    """Can be pickled, and not be made again."""

    def __init__(self, first, second):
        super().__init__(first)


class Server:
    """Answers a prompt of one token with that token, while it is let."""

    def __init__(self):
        self.running, self.most = set(), 0
        self.lets_go = asyncio.Event()

    async def start(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort", self.abort)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return "http://{}:{}".format(*self.runner.addresses[0])

    async def generate(self, http):
        token = unpack(await http.read())["prompt_ids"][-1]
        self.running.add(token)
        self.most = max(self.most, len(self.running))
        try:
            await self.lets_go.wait()
        finally:
            self.running.discard(token)
        return web.json_response({"token_ids": [token], "log_probs": None, "finish_reason": "stop", "version": 0})

    async def abort(self, http):
        return web.json_response({})


class Processes:
    """Processes of agent loops, and rows that run in them."""

    def __init__(self, folder, number):
        self.folder, self.loop = folder, asyncio.new_event_loop()
        (folder / "fan.py").write_text(LOOP)
        config = config_of(
            f"actor_rollout_ref.rollout.agent.num_workers={number}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'fan.py'}",
            "actor_rollout_ref.rollout.mode=async",
            "trainer.controller=local",
        )
        self.workers = AgentLoopWorkers(config, tokenizer(), None, None, "local", self.loop, self.wait)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.workers.connect()
        self.server = Server()
        self.address = self.wait(self.server.start())

    def submit(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait(self, coroutine):
        return self.submit(coroutine).result(120)

    def use(self, max_running, *others):
        self.client = self.workers.use_servers([*others, self.address], "token", max_running)

    def run(self, number, **row):
        row = {"agent_name": "fan", "raw_prompt_ids": [1], **row}
        return self.submit(self.workers.run(number, row, 0, SamplingParams(4), None, 1))

    def start(self, *prompts):
        """Run a row in the process with the fewest; returns its future."""
        future = self.run(prompts[0], prompts=prompts)
        wait_for(lambda: future.done() or self.process_of(prompts[0]), "the row to begin")
        return future

    def process_of(self, prompt):
        path = self.folder / f"process_of_{prompt}"
        return int(path.read_text() or 0) if path.exists() else 0

    def let_go(self):
        self.loop.call_soon_threadsafe(self.server.lets_go.set)

    def loads(self):
        return [server.load for server in self.client._servers]

    def close(self):
        self.let_go()
        self.workers.close()
        self.wait(self.server.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def processes(tmp_path):
    started = []

    def start(number):
        started.append(Processes(tmp_path, number))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_process_with_many_requests_uses_the_slots_that_others_do_not_need(processes):
    two = processes(2)
    two.use(5)
    row = two.start(*range(10, 18))
    wait_for(lambda: len(two.server.running) == 5, "all five slots to be used by one process")
    other = two.start(20)
    assert two.process_of(20) != two.process_of(10) and not other.done()
    two.let_go()
    assert row.result(120).response_ids == [*range(10, 18)] and other.result(120).response_ids == [20]
    wait_for(lambda: two.loads() == [0], "the slots to come back")
    assert two.server.most == 5


def test_more_processes_than_slots_finish(processes):
    three = processes(3)
    three.use(1)
    rows = [three.start(10 * row, 10 * row + 1) for row in range(1, 7)]
    assert len({three.process_of(10 * row) for row in range(1, 7)}) == 3
    three.let_go()
    assert [row.result(120).response_ids for row in rows] == [[10 * row, 10 * row + 1] for row in range(1, 7)]
    assert three.server.most == 1


def test_a_process_that_dies_gives_its_slots_back(processes):
    two = processes(2)
    two.use(2)
    first = two.start(10, 11, 12)
    wait_for(lambda: len(two.server.running) == 2, "the slots to be used")
    second = two.start(20, 21)
    os.kill(two.process_of(10), signal.SIGKILL)
    wait_for(lambda: two.server.running == {20, 21}, "the slots to be lent to the other process")
    two.let_go()

    def both_have_ended():
        two.workers.check()
        return first.done() and second.done()

    wait_for(both_have_ended, "the rows of both processes, one of which is started again")
    assert first.result().response_ids == [10, 11, 12] and second.result().response_ids == [20, 21]


def test_rows_that_are_cancelled_while_they_run_or_wait_leave_no_slot_used(processes):
    two = processes(2)
    two.use(1)
    rows = [two.start(10 * row) for row in range(1, 4)]
    wait_for(lambda: len(two.server.running) == 1, "a request to run")
    for row in rows:
        row.cancel()
    for row in rows:
        with suppress(CancelledError):
            row.result(120)
    last = two.start(40)
    wait_for(lambda: two.server.running == {40}, "the slot to be free for another row")
    two.let_go()
    assert last.result(120).response_ids == [40]


def test_a_row_that_is_cancelled_as_soon_as_it_is_sent_is_answered(processes):
    two = processes(2)
    two.use(1)

    async def cancelled_at_once(link):
        sent = [
            link.submit("row", number, {"agent_name": "fan"}, 0, SamplingParams(4), None, 1, "") for number in range(8)
        ]
        for call, _ in sent:
            link.cancel(call)
        done, _ = await asyncio.wait([answer for _, answer in sent], timeout=60)
        return len(done)

    assert two.wait(cancelled_at_once(two.workers.links[0])) == 8


def test_a_server_that_fails_in_one_process_gets_no_requests_of_others(processes):
    two = processes(2)
    two.use(1, "http://127.0.0.1:1")  # where nobody listens
    two.let_go()
    with pytest.raises(RolloutServerError, match="127.0.0.1:1 failed"):
        two.start(10).result(120)
    rows = [two.start(10 * row) for row in range(2, 6)]
    assert [row.result(120).response_ids for row in rows] == [[10 * row] for row in range(2, 6)]


def test_requests_to_servers_that_others_replace_fail_and_hold_no_slot_of_the_new_ones(processes):
    two = processes(2)
    two.use(1)
    rows = [two.start(10), two.start(20)]
    wait_for(lambda: len(two.server.running) == 1, "a request to run")
    two.use(1)
    for row in rows:
        with pytest.raises(RolloutServerError):
            row.result(120)
    two.let_go()
    rows = [two.start(30), two.start(40)]
    assert [row.result(120).response_ids for row in rows] == [[30], [40]] and two.loads() == [0]


def test_a_dead_process_whose_connection_stays_open_is_replaced_and_gives_its_slots_back(processes):
    two = processes(2)
    two.use(2)
    first, second = two.start(10, 11), two.start(20)
    wait_for(lambda: len(two.server.running) == 2, "the slots to be used")
    link = two.workers.links[0]  # of the row that began first
    # as that of a node that is gone: nothing says that the other end is no longer there
    two.loop.call_soon_threadsafe(link.writer.transport.pause_reading)
    os.kill(two.process_of(10), signal.SIGKILL)
    two.let_go()

    def both_have_ended():
        two.workers.check()
        return first.done() and second.done()

    wait_for(both_have_ended, "the rows of both processes")
    assert first.result().response_ids == [10, 11] and second.result().response_ids == [20]
    wait_for(lambda: two.loads() == [0], "the slots to come back")


def test_what_the_other_end_cannot_read_fails_its_row_alone(processes):
    two = processes(2)
    two.use(2)
    two.let_go()
    with pytest.raises(RuntimeError, match=r"an answer of process \d of the agent loops cannot be read here: .*Error"):
        two.run(1, agent_name="one_way").result(60)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        two.run(2, prompts=[1], value=OneWay(1, 2)).result(60)
    rows = [two.start(10), two.start(20)]
    assert [row.result(120).response_ids for row in rows] == [[10], [20]]


# -- messages that cross -----------------------------------------------------------------------------------------------


class Wire:
    """A connection whose messages arrive in order, when they are let."""

    def __init__(self, client, addresses):
        self.is_lost, self.driver = False, client
        self.up, self.down = deque(), deque()
        self.client = BorrowingClient(addresses, None, lambda *message: self.up.append(message))
        self.lent, self.tasks = [], {}

    def notify(self, method, server_set, *answer):
        if not self.is_lost:
            self.down.append(answer)

    def deliver_up(self):
        method, *arguments = self.up.popleft()
        getattr(self.driver, f"on_{method}")(self, *arguments)

    def deliver_down(self):
        self.client.take(*self.down.popleft())

    def begin(self, name):
        async def one():
            server = await self.client._acquire_server(name, None, 0)
            if server is not None:
                self.lent.append(server)

        self.tasks[name] = asyncio.ensure_future(one())

    def end(self):
        self.client._release_server(self.lent.pop())

    def lose(self):
        self.is_lost = True
        self.up.clear()
        self.down.clear()
        for task in self.tasks.values():
            task.cancel()
        self.driver.reclaim(self)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 3), st.integers(1, 2))
def test_no_slot_is_lost_or_lent_twice_whatever_crosses_on_the_way(data, max_running, num_servers):
    addresses = [f"http://s{number}" for number in range(num_servers)]

    async def go():
        driver = WorkersClient(None, addresses, "", max_running, 1)
        wires = [Wire(driver, addresses) for _ in range(3)]
        count = 0
        for _ in range(data.draw(st.integers(10, 40))):
            wire = data.draw(st.sampled_from([wire for wire in wires if not wire.is_lost]))
            live = [name for name, task in wire.tasks.items() if not task.done()]
            acts = ["begin"] * 3 + ["up"] * 3 * bool(wire.up) + ["down"] * 3 * bool(wire.down)
            acts += ["end"] * bool(wire.lent) + ["cancel", "abort"] * bool(live)
            acts += ["lose"] * (sum(not one.is_lost for one in wires) > 1)
            act = data.draw(st.sampled_from(acts))
            if act == "begin":
                count += 1
                wire.begin(f"r{count}")
            elif act == "cancel":
                wire.tasks[data.draw(st.sampled_from(live))].cancel()
            elif act == "abort":
                name = data.draw(st.sampled_from(live))
                waits = name in [request_id for request_id, _ in wire.client._asked.values()]
                await wire.client.abort([name])
                await asyncio.sleep(0)
                assert wire.tasks[name].done() or not waits  # it does not wait for the driver
            else:
                {"up": wire.deliver_up, "down": wire.deliver_down, "end": wire.end, "lose": wire.lose}[act]()
            for _ in range(data.draw(st.integers(0, 2))):
                await asyncio.sleep(0)
            used = Counter(server.number for wire in wires if not wire.is_lost for server in wire.lent)
            loads = [server.load for server in driver._servers]
            assert all(used[number] <= load <= max_running for number, load in enumerate(loads))
        live = [wire for wire in wires if not wire.is_lost]
        for _ in range(40 * (1 + count)):
            for wire in live:
                while wire.up:
                    wire.deliver_up()
                await asyncio.sleep(0)
                while wire.down:
                    wire.deliver_down()
                while wire.lent:
                    wire.end()
        assert all(task.done() for wire in live for task in wire.tasks.values())  # none waits for ever
        assert [server.load for server in driver._servers] == [0] * num_servers
        assert not driver._asked and not any(wire.client.num_waiting for wire in live)

    asyncio.run(go())


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_responses_are_the_same_with_more_processes_than_slots(run):
    expected = outputs(run()[1])
    found = run(**{f"{ROLLOUT}__agent__num_workers": 3, f"{ROLLOUT}__max_running_requests": 2})[1]
    assert outputs(found) == expected


def test_engines_that_generate_all_the_time_serve_more_processes_than_they_have_slots(tmp_path, monkeypatch):
    given = {name: value for name, value in CONTINUOUS.items() if not name.endswith("max_running_requests")}
    given |= {f"{ROLLOUT}__max_num_seqs": 2, f"{ROLLOUT}__agent__num_workers": 4}
    given |= {"trainer__total_training_steps": 2, "trainer__save_freq": -1}
    metrics = disjoint_run(tmp_path, "run", monkeypatch, **given)
    assert sorted(metrics) == [1, 2]
    assert all(len((tmp_path / "run" / f"{step}.jsonl").read_text().splitlines()) == 16 for step in metrics)

"""Episodes in environments: episodes a second, busy share of the engine, CPU of the driver a turn, prefixes reused.

``python -m benchmarks.agents [--turns 4] [--workers N...] [--vllm] [--save]``. A rollout server in a process of its own
answers each turn with 16 tokens, 2 ms a step, 256 requests at a time, and no model: what is measured is everything
around it. Steps of 1 ms use the processor, as games do; those of 50 ms sleep, as services do. ``workers`` 0: threads of
the driver; ``none``: no environment, its answers are made by the event loop. ``engine_busy`` is the share of the time
in which the engine computes. CPU is in ms a turn: that of the driver has HTTP in it, and ``over_none`` is its ratio to
the row ``none`` of as many episodes. ``wall_over_least`` is the time of the run over that of its longest part: the
turns one after the other, the slots of the engine, or the processor time of all steps; ``waited_share`` of it the
driver waited for a processor that others had.

``--workers 1 2`` measures, instead, agent loops in as many processes (``rollout.agent.num_workers``; 1: in the driver):
CPU of the driver a turn, that of the processes, episodes a second.

``--vllm`` adds real vLLM with a tiny model, 16 episodes of 8 turns: the share of prompt tokens that its prefix cache
had, and CPU over that without the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import report
from tests.support.episodes import config_of, episode, tokenizer
from verl.agents.base import register
from verl.agents.episode import ConversationEnvironment, EpisodeLoop, Reply
from verl.agents.rows import RowRunner
from verl.agents.workers import AgentLoopWorkers
from verl.config.rollout import RolloutConfig
from verl.envs.host import EnvironmentHost, close_hosts
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.base import Completion, Request, RolloutEngine, SamplingParams
from verl.workers.rollout.server.client import RolloutClient

EPISODES, STEPS_MS, WORKERS = (16, 256, 1000), (1, 50), (0, 1, 4)
SLOTS, TOKENS, TOKEN_S = 256, 16, 0.002
OBSERVATION = "The number is {} and the board below it has some forty more characters."
ENVIRONMENT = '''
import time

class Timed:
    """Answers after some ms, which it computes or sleeps."""
    def __init__(self, ms, turns):
        self.seconds, self.turns = ms / 1000, turns
    def reset(self, *, seed):
        self.left = self.turns
        return OBSERVATION.format(seed), {}
    def step(self, action):
        if self.seconds > 0.01:
            time.sleep(self.seconds)
        else:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        self.left -= 1
        return OBSERVATION.format(self.left), 1.0, self.left <= 0, False, {"success": True}
'''


# -- the engine --------------------------------------------------------------------------------------------------------
class TimedEngine(RolloutEngine):
    """Answers every request with the same tokens, ``TOKEN_S`` a step, ``SLOTS`` at a time."""

    is_asleep = False
    weights_dtype = None  # type: ignore[assignment]  # there are no weights
    version = 1
    config = RolloutConfig()

    def __init__(self) -> None:
        super().__init__()
        ids = tokenizer().encode("a" * (TOKENS - 1), add_special_tokens=False)
        self.answer = [*ids, tokenizer().eos_token_id]
        self.left: dict[int, int] = {}

    def submit(self, request: Request, expect_version: int) -> int:
        number = next(self._request_ids)
        self.left[number] = TOKENS
        return number

    def step(self) -> dict[int, Completion]:
        time.sleep(TOKEN_S)
        running = list(self.left)[:SLOTS]
        for number in running:
            self.left[number] -= 1
        done = [number for number in running if not self.left[number]]
        for number in done:
            del self.left[number]
        return {number: Completion(list(self.answer), [-1.0] * TOKENS, "stop", 1) for number in done}

    @property
    def num_running(self) -> int:
        return len(self.left)

    def _generate(self, requests: list[Request]) -> list[Completion]:
        raise NotImplementedError

    def update_weights(self, version: int, buckets: Any) -> Any:
        raise NotImplementedError

    def sleep(self, level: int = 1) -> None:
        raise NotImplementedError

    def wake(self, tags: Any = ()) -> None:
        raise NotImplementedError


def serve(make: Callable[[], Any], pipe: Any) -> None:
    """A rollout server: its process ends with the pipe."""
    from verl.workers.rollout.server.server import RolloutServer

    server = RolloutServer(make(), 1)
    pipe.send(server.start())
    pipe.recv()
    server.stop()


# -- episodes ----------------------------------------------------------------------------------------------------------
class Immediate(ConversationEnvironment):
    """What the environment of this file answers, from the event loop."""

    def __init__(self, turns: int):
        self.left = turns

    async def start(self, row: Mapping[str, Any]) -> Reply:
        return Reply([{"role": "user", "content": OBSERVATION.format(row["env_seed"])}])

    async def reply(self, turn: Any) -> Reply:
        self.left -= 1
        text = OBSERVATION.format(self.left)
        return Reply([{"role": "user", "content": text}], reward=1.0, terminated=self.left <= 0)


@register("immediate")
class ImmediateLoop(EpisodeLoop):
    def environment(self, row: Mapping[str, Any]) -> Immediate:
        return Immediate(row["turns"])


async def run(config: Any, address: str, server: int, count: int, agent: str, turns: int) -> dict[str, float]:
    """Run episodes all at once; what they cost."""
    client, host = RolloutClient([address]), EnvironmentHost.of(config.env)
    rows = [
        {"agent_name": agent, "env_tag": "Timed", "env_seed": number, "turns": turns, "raw_prompt_ids": []}
        for number in range(count)
    ]
    # processes have started and connections are open
    await asyncio.gather(*(episode(config, client, row, number) for number, row in enumerate(rows[:16])))
    steps = (await client.health())[0]["steps"]
    start, cpu, before = time.perf_counter(), time.process_time(), cpu_seconds(host.pids)
    server_before, waited = cpu_seconds([server]), waited_seconds()
    outputs = await asyncio.gather(*(episode(config, client, row, number, 2000) for number, row in enumerate(rows)))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    of_workers, of_server = cpu_seconds(host.pids) - before, cpu_seconds([server]) - server_before
    assert all(len(output.turn_rewards) == turns for output in outputs)
    steps = (await client.health())[0]["steps"] - steps
    await client.close()
    close_hosts(asyncio.get_running_loop())
    return {
        "s": wall,
        "episodes_a_s": count / wall,
        "turns_a_s": count * turns / wall,
        "engine_busy": steps * TOKEN_S / wall,
        "cpu_ms": 1000 * cpu / count / turns,
        "worker_cpu_ms": 1000 * of_workers / count / turns,
        "server_cpu_ms": 1000 * of_server / count / turns,
        "waited_share": (waited_seconds() - waited) / wall,
    }


def waited_seconds() -> float:
    """Seconds that this thread was ready to run and had no processor; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds of processes and all below them."""
    total = 0.0
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
    return total


def least_seconds(count: int, ms: int, turns: int) -> float:
    """Seconds that the run takes where nothing around engine and environments costs any."""
    one_by_one = turns * (TOKENS * TOKEN_S + ms / 1000)
    slots = count * turns * TOKENS * TOKEN_S / SLOTS
    processor = count * turns * ms / 1000 / (os.cpu_count() or 1) if ms < 10 else 0.0
    return max(one_by_one, slots, processor)


def measure(address: str, server: int, turns: int, folder: str) -> list[dict[str, Any]]:
    file = Path(folder) / "timed.py"
    file.write_text(f"OBSERVATION = {OBSERVATION!r}\n{ENVIRONMENT}")
    rows: list[dict[str, Any]] = []
    for count in EPISODES:
        none = asyncio.run(run(config_of(), address, server, count, "immediate", turns))
        rows.append({"episodes": count, "step_ms": 0, "workers": "none", **none})
        for ms in STEPS_MS:
            for workers in WORKERS:
                tag = {"Timed": {"type": f"{file}:Timed", "kwargs": {"ms": ms, "turns": turns}}}
                config = config_of(f"env.num_workers={workers}").with_values({"env.registry": tag})
                found = asyncio.run(run(config, address, server, count, "env_agent", turns))
                more = {
                    "over_none": found["cpu_ms"] / none["cpu_ms"],
                    "wall_over_least": found["s"] / least_seconds(count, ms, turns),
                }
                rows.append({"episodes": count, "step_ms": ms, "workers": workers, **found, **more})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


# -- processes of agent loops ------------------------------------------------------------------------------------------
def measure_processes(address: str, turns: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Episodes without an environment, with agent loops in so many processes; the least CPU of three turns."""
    rows = []
    for count in EPISODES[1:]:
        found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
        for _ in range(3):
            for size in sizes:
                found[size].append(run_processes(address, turns, size, count))
        for size, several in found.items():
            rows.append({"episodes": count, "agent_workers": size, **min(several, key=lambda one: one["cpu_ms"])})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def run_processes(address: str, turns: int, size: int, count: int) -> dict[str, float]:
    config = config_of(f"actor_rollout_ref.rollout.agent.num_workers={size}")
    loop, sampling = asyncio.new_event_loop(), SamplingParams(2000)

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    workers = AgentLoopWorkers(config, tokenizer(), None, None, "local", loop, wait) if size > 1 else None
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    if workers is not None:
        workers.connect()
        client: RolloutClient = workers.use_servers([address], None, None)
    else:
        client = RolloutClient([address])
    runner = RowRunner(config, tokenizer())

    async def one(number: int) -> Any:
        row = {"agent_name": "immediate", "env_seed": number, "turns": turns, "raw_prompt_ids": []}
        if workers is not None:
            return await workers.run(number, row, number, sampling, None, 0)
        return await runner.run(number, row, number, sampling, client)

    async def episodes(count: int) -> list[Any]:
        return await asyncio.gather(*map(one, range(count)))

    wait(episodes(16))
    pids = [pid for group in workers.groups for pid in group.pids] if workers else []
    start, cpu, before = time.perf_counter(), time.process_time(), cpu_seconds(pids)
    outputs = wait(episodes(count))
    wall, cpu, own = time.perf_counter() - start, time.process_time() - cpu, cpu_seconds(pids) - before
    assert all(len(output.turn_rewards) == turns for output in outputs)
    wait(client.close())
    if workers is not None:
        workers.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    each = 1000 / count / turns
    return {"episodes_a_s": count / wall, "cpu_ms": each * cpu, "worker_cpu_ms": each * own}


# -- prefixes ----------------------------------------------------------------------------------------------------------
def measure_prefixes(folder: str) -> list[dict[str, Any]]:
    rows = []
    for with_cache in (False, True):
        command = [sys.executable, "-m", "benchmarks.agents", "--prefixes", folder, *["--cache"] * with_cache]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    rows[1]["cpu_over_no_cache"] = rows[1]["cpu_ms"] / rows[0]["cpu_ms"]
    return rows


def prefixes(folder: str, with_cache: bool) -> dict[str, Any]:
    """Episodes with vLLM, all in this process."""
    from benchmarks.serving import synced_engine
    from verl.workers.rollout.server.server import RolloutServer

    sizes = {"prompt_length": 128, "response_length": 1536, "max_model_len": 1664, "disable_log_stats": False}
    engine = synced_engine("vllm", folder, engine_kwargs={"vllm": {"enable_prefix_caching": with_cache}}, **sizes)
    server, config = RolloutServer(engine, 1), config_of("actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=32")
    server.start()

    async def run_all(turns: int) -> None:
        client = RolloutClient([server.address])
        row = {"agent_name": "immediate", "turns": turns, "raw_prompt_ids": []}
        rows = [{**row, "env_seed": number} for number in range(16)]
        await asyncio.gather(*(episode(config, client, row, number, 1536) for number, row in enumerate(rows)))
        await client.close()

    asyncio.run(run_all(1))
    before, start = engine.totals(), time.process_time()
    asyncio.run(run_all(8))
    cpu, after = time.process_time() - start, engine.totals()
    asked, found = (after.get(name, 0) - before.get(name, 0) for name in ("prefix_cache_queries", "prefix_cache_hits"))
    return {"engine": "vllm", "prefix_caching": with_cache, "cpu_ms": 1000 * cpu / 128,
            "prefix_reused": found / asked if asked else 0.0}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", help="processes of agent loops")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--prefixes", help=argparse.SUPPRESS)
    parser.add_argument("--cache", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.prefixes:
        print(json.dumps(prefixes(given.prefixes, given.cache)), flush=True)
        os._exit(0)  # the engine's own threads need no goodbye
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(TimedEngine, theirs), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        if given.workers:
            rows = measure_processes(ours.recv(), given.turns, given.workers)
        else:
            rows = measure(ours.recv(), server.pid or 0, given.turns, folder)
    ours.send(None)
    server.join(10)
    if given.vllm:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure_prefixes(str(make_tiny_model(folder)))
    report("agents_workers" if given.workers else "agents", rows)


if __name__ == "__main__":
    main()

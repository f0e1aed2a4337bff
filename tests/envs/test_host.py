"""Environments of which one hangs, crashes or runs away: its own episode fails, and nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.support.waiting import wait_for
from verl.config.env import EnvConfig, EnvTagConfig
from verl.envs.base import register
from verl.envs.host import EnvironmentFailure, EnvironmentHost, close_hosts
from verl.envs.process import WORKER_LOST
from verl.envs.worker import MAX_OBSERVATION, checked
from verl.sandbox.supervisor import descendants

FILE = str(Path(__file__).parent / "hostile.py")
HOSTILE, AWAITED = EnvTagConfig(type=f"{FILE}:Hostile"), EnvTagConfig(type=f"{FILE}:Awaited")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits of Linux")


def on_host(work, **options):
    """The result of ``work(host)`` in an event loop of its own; no process is left after it."""

    async def main():
        host = EnvironmentHost(EnvConfig(**{"step_timeout": 1.0, "reset_timeout": 20.0, **options}))
        try:
            return await asyncio.wait_for(work(host), 60)
        finally:
            host.close()

    result = asyncio.run(main())
    assert not [pid for pid in descendants(os.getpid()) if "verl.envs.worker" in command_of(pid)]
    return result


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def episode(host, *actions, tag=HOSTILE, seed=0, task=None):
    """Answers to the actions of one episode; the last may be its failure."""
    environment = await host.open("T", tag)
    try:
        answers = [await environment.reset(seed, task)]
        for action in actions:
            answers.append(await environment.step(action))
        return answers
    except EnvironmentFailure as failure:
        return failure
    finally:
        await environment.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("tag", [HOSTILE, AWAITED])
def test_an_environment_answers_the_same_in_a_thread_and_in_a_process(workers, tag):
    first, second = on_host(lambda host: episode(host, "go", tag=tag, seed=5, task={"a": 1}), num_workers=workers)
    if tag is HOSTILE:
        assert (first.text, first.info, first.state_id) == ("seed 5", {"task": 1}, 5)
        assert (second.text, second.reward, second.info["success"], second.terminated) == ("go 1", 1.0, True, False)
        assert second.messages == [{"role": "user", "content": "go 1"}]
    else:
        assert first.text is None and [one["role"] for one in first.messages] == ["system", "user"]
        assert (second.reward, second.terminated) == (0.0, True)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("sleep", "timeout", "env.step_timeout"),
        ("spin", "timeout", "in spin"),
        ("raises", "raised", "no such cell"),
        ("leave", "exit", "SystemExit"),
        ("megabyte", "wrong_type", "1000000 characters"),
        ("as_bytes", "wrong_type", "of type bytes"),
        ("wrong_messages", "wrong_type", "'content'"),
        ("not_a_number", "not_finite", "nan"),
        ("text_reward", "wrong_type", "the reward is '1'"),
        ("no_flag", "wrong_type", "terminated is 'no'"),
        ("four", "wrong_type", "(observation, reward, terminated, truncated, info)"),
        ("messages_in_info", "wrong_type", "info has 'messages'"),
        ("odd_state", "wrong_type", "state_id"),
    ],
)
def test_what_goes_wrong_is_named_with_its_episode_and_leaves_the_others_alone(workers, action, kind, words):
    async def work(host):
        good = [episode(host, *["go"] * 3, seed=seed) for seed in range(3)]
        bad, *others = await asyncio.gather(episode(host, action, seed=77), *good)
        return bad, others, len(host.pids)

    bad, others, processes = on_host(work, num_workers=workers, step_timeout=0.5)
    assert isinstance(bad, EnvironmentFailure) and bad.kind == kind
    assert "environment 'T' (seed 77)" in str(bad) and words in str(bad)
    assert [[answer.text for answer in answers] for answers in others] == [
        [f"seed {seed}", "go 1", "go 2", "go 3"] for seed in range(3)
    ]
    assert processes == workers


@linux
@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("exit", "exit"),
        ("exit_in_c", "exit"),
        ("crash", "crash"),
        ("kill_group", "crash"),
        ("allocate", "memory"),
        ("map_memory", "memory"),
        ("spin_in_c", "timeout"),
        ("block_all_signals", "timeout"),
    ],
)
def test_what_ends_its_process_is_named_and_the_next_episode_runs(action, kind):
    async def work(host):
        return await episode(host, action), await episode(host, "go")

    timeout = 10.0 if action == "map_memory" else 1.0
    bad, good = on_host(work, num_workers=1, memory_mb=512, step_timeout=timeout)
    assert bad.kind == kind
    assert good[-1].text == "go 1"


@linux
def test_of_several_steps_under_way_each_says_what_happened_and_the_cause_is_found_alone():
    async def work(host):
        idle = await host.open("T", HOSTILE)
        await idle.reset(9)
        lost = await asyncio.gather(episode(host, "sleep", seed=1), episode(host, "exit_in_c", seed=2))
        with pytest.raises(EnvironmentFailure) as of_idle:
            await idle.step("go")
        # both again at once, each in a process of its own now
        again = await asyncio.gather(episode(host, "go", seed=1), episode(host, "exit_in_c", seed=2))
        return [*lost, of_idle.value], again

    lost, (innocent, guilty) = on_host(work, num_workers=1, step_timeout=20.0)
    assert [failure.kind for failure in lost] == [WORKER_LOST] * 3
    assert all("exit code 3" in str(failure) for failure in lost)
    assert innocent[-1].text == "go 1" and guilty.kind == "exit"


@linux
@pytest.mark.parametrize(("action", "kind"), [("crash", "crash"), ("exit", "exit")])
def test_the_cause_is_known_among_several_where_the_process_can_tell(action, kind):
    async def work(host):
        others = [episode(host, "sleep", seed=number) for number in range(3)]
        return await asyncio.gather(episode(host, action, seed=7), *others), dict(host.suspects)

    (guilty, *others), suspects = on_host(work, num_workers=1, step_timeout=3.0)
    assert guilty.kind == kind
    if action == "crash":
        assert [failure.kind for failure in others] == [WORKER_LOST] * 3 and suspects == {("T", 7): 1}
    else:  # it ends no more than its own call
        assert [failure.kind for failure in others] == ["timeout"] * 3 and not suspects


@linux
def test_of_many_suspects_each_has_its_turn_alone():
    def again(host):
        return asyncio.gather(*[episode(host, "exit_in_c" if n == 5 else "go", seed=n) for n in range(20)])

    async def work(host):
        first = await asyncio.gather(*[episode(host, "exit_in_c" if n == 5 else "sleep", seed=n) for n in range(20)])
        return first, await again(host)

    first, second = on_host(work, num_workers=1, step_timeout=20.0)
    assert [failure.kind for failure in first] == [WORKER_LOST] * 20
    assert [number for number, answers in enumerate(second) if isinstance(answers, EnvironmentFailure)] == [5]
    assert second[5].kind == "exit"


def test_a_process_with_many_hanging_environments_is_replaced_and_ends_with_its_last():
    async def work(host):
        kept = await host.open("T", HOSTILE)
        await kept.reset(0)
        [first] = host.pids
        await asyncio.gather(*[episode(host, "sleep") for _ in range(10)])
        await episode(host, "go")
        both = host.pids
        answer = await kept.step("go")
        await kept.close()
        while first in host.pids:
            await asyncio.sleep(0.01)
        return first, both, answer

    first, both, answer = on_host(work, num_workers=1, step_timeout=0.3)
    assert first in both and len(both) == 2 and answer.text == "go 1"


def test_async_environments_that_hang_or_block_their_loop_fail_alone():
    async def work(host):
        hang = await episode(host, "sleep", tag=AWAITED)
        block = await episode(host, "block", tag=AWAITED)
        return hang, block, await episode(host, "go", tag=AWAITED)

    hang, block, good = on_host(work, num_workers=1, step_timeout=0.3)
    assert (hang.kind, block.kind) == ("timeout", "timeout") and good[-1].terminated


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reset_has_its_own_limit(workers):
    def work(host):
        return episode(host, task={"how": "hang"})

    assert "env.reset_timeout" in str(on_host(work, num_workers=workers, reset_timeout=1.0))
    failed = on_host(lambda host: episode(host, task={"how": "raise", "x": 1}), num_workers=workers)
    assert failed.kind == "raised" and "no such task ['x']" in str(failed)


@linux
def test_children_that_an_environment_forks_answer_nothing_and_end_with_the_host():
    async def work(host):
        answers = await episode(host, "fork", "fork_and_return", "go")
        return [answer.text for answer in answers]

    assert on_host(work, num_workers=1) == ["seed 0", "fork 1", "fork_and_return 2", "go 3"]


def test_a_cancelled_step_goes_on_and_its_answer_is_not_asked_for_twice():
    async def work(host):
        environment = await host.open("T", EnvTagConfig(type=f"{FILE}:Hostile", kwargs={"slow_s": 0.2}))
        await environment.reset(0)
        step = asyncio.ensure_future(environment.step("go"))
        await asyncio.sleep(0.05)
        step.cancel()
        await asyncio.wait({step})
        again = await environment.step("go")
        return step.cancelled(), again.text, (await environment.step("go")).text

    assert on_host(work) == (True, "go 1", "go 2")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("most", "allowed"), [(2, {"max_concurrent_steps": 2}), (8, {})])
def test_no_more_steps_run_at_a_time_than_allowed_and_as_many_as_are(most, allowed, workers, tmp_path):
    tag = EnvTagConfig(type=f"{FILE}:Hostile", kwargs={"folder": str(tmp_path), "meeting": most})

    async def work(host):
        environments = [await host.open("T", tag) for _ in range(8)]
        await asyncio.gather(*[environment.reset(seed) for seed, environment in enumerate(environments)])
        return await asyncio.gather(*[environment.step("meet") for environment in environments])

    answers = on_host(work, num_workers=workers, step_timeout=50.0, **allowed)
    assert max(int(answer.text) for answer in answers) == most


def test_what_of_info_cannot_be_kept_is_said_once():
    async def work(host):
        return await episode(host, "odd_info", "odd_info")

    for workers in (0, 1):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            answer = on_host(work, num_workers=workers)[-1]
        assert answer.info == {"ok": 1, "name": "a"} and answer.reward == 1.0
        said = [str(one.message) for one in found if "left out" in str(one.message)]
        assert len(said) == 1 and all(name in said[0] for name in ("'list'", "'nan'", "'3'"))


def test_what_a_process_prints_does_not_hold_it_up(capfd):
    answers = on_host(lambda host: episode(host, *["shout"] * 3), num_workers=1)
    assert len(answers) == 4
    assert len(capfd.readouterr().out) < 1 << 19


def test_an_environment_registered_in_a_file_is_found_by_other_processes():
    sys.path.insert(0, str(Path(FILE).parent))
    try:
        from hostile import Hostile
    finally:
        sys.path.pop(0)
    register("RegisteredHostile")(Hostile)

    @register("LocalHostile")
    class Local(Hostile):
        pass

    tag = EnvTagConfig(type="RegisteredHostile")
    assert on_host(lambda host: episode(host, "go", tag=tag), num_workers=1)[-1].text == "go 1"
    with pytest.raises(ValueError, match="LocalHostile.*env.num_workers=0"):
        on_host(lambda host: episode(host, tag=EnvTagConfig(type="LocalHostile")), num_workers=1)


def test_a_host_belongs_to_its_event_loop_and_ends_with_it():
    async def main():
        host = EnvironmentHost.of(EnvConfig(num_workers=1))
        assert EnvironmentHost.of(EnvConfig(num_workers=1)) is host
        assert EnvironmentHost.of(EnvConfig(num_workers=2)) is not host
        await episode(host, "go")
        return host, asyncio.get_running_loop()

    host, loop = asyncio.run(main())
    assert len(host.pids) == 1
    close_hosts(loop)
    assert not host.pids


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_driver_is_killed(how):
    code = f"""
import asyncio
from verl.config.env import EnvConfig, EnvTagConfig
from verl.envs.host import EnvironmentHost
async def main():
    host = EnvironmentHost.of(EnvConfig(num_workers=2))
    tag = EnvTagConfig(type="{FILE}:Hostile")
    environments = [await host.open("T", tag) for _ in range(4)]
    for environment in environments:
        await environment.reset(0)
    await environments[0].step("fork")
    print("up", flush=True)
    await environments[1].step("sleep")
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "up\n"
        family = list(descendants(driver.pid))
        assert len([pid for pid in family if "verl.envs.worker" in command_of(pid)]) >= 7
        os.kill(driver.pid, how)
    wait_for(lambda: not any("verl.envs.worker" in command_of(pid) for pid in family), "the processes to be gone")


def test_an_observation_is_bounded():
    assert checked(("x" * MAX_OBSERVATION, {}), is_reset=True).text
    with pytest.raises(TypeError, match="Let the environment shorten it"):
        checked(("x" * (MAX_OBSERVATION + 1), {}), is_reset=True)

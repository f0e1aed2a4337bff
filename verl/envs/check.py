"""``verl env check`` and ``list``: play an environment before any training does, and list the environments there are.

Exit codes: 0: no fault; 1: no fault, and ``--strict`` has warnings; 2: faults, or it cannot be made.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pickle
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from verl.envs.adapters import ADAPTERS
from verl.envs.base import environment_class, known_names
from verl.envs.game import TextGame
from verl.sandbox.messages import FrameReader, framed, start_child
from verl.sandbox.outcomes import Outcome
from verl.sandbox.pool import stack_of
from verl.sandbox.supervisor import descendants, end, outcome_of
from verl.utils.distribution import install_command
from verl.utils.import_utils import is_package_available

LONG = 8000
"""Characters of an observation above which there is a warning: some 2,000 tokens of every turn."""


@dataclass
class Finding:
    """What is wrong, once: with the first place and the number of times."""

    check: str
    text: str
    seed: int | None = None
    step: int | None = None
    trace: str = ""
    count: int = 1


@dataclass
class Report:
    """Results of a check."""

    name: str
    agent: str
    episodes: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, Finding] = field(default_factory=dict)
    warnings: dict[str, Finding] = field(default_factory=dict)
    refused: str | None = None
    """Why the environment could not be made."""

    def add(self, kind: dict[str, Finding], check: str, text: str, **where: Any) -> None:
        if check in kind:
            kind[check].count += 1
        else:
            kind[check] = Finding(check, text, **where)

    def exit_code(self, is_strict: bool = False) -> int:
        return 2 if self.refused or self.faults else 1 if is_strict and self.warnings else 0

    def numbers(self) -> dict[str, Any]:
        """Return means and ranges over all episodes; an empty dict without any."""
        if not self.episodes:
            return {}
        turns, totals = [one["turns"] for one in self.episodes], [sum(one["rewards"]) for one in self.episodes]
        rewards = [reward for one in self.episodes for reward in one["rewards"]]
        reported = [one["success"] for one in self.episodes if one["success"] is not None]
        valid, asked = (sum(one["valid"][index] for one in self.episodes) for index in (0, 1))
        steps = sorted(seconds for one in self.episodes for seconds in one["step_s"])
        characters = [count for one in self.episodes for count in one["characters"]]
        endings = [one["ended"] for one in self.episodes]
        return {
            "episodes": len(self.episodes),
            "success": sum(map(bool, reported)) / len(reported) if reported else None,
            "valid_action": valid / asked if asked else None,
            "turns": _range(turns),
            "reward_of_a_turn": _range(rewards),
            "reward_of_an_episode": _range(totals),
            "ended": {name: endings.count(name) for name in ("terminated", "truncated", "limit", "failed")},
            "reset_ms": _range([one["reset_s"] * 1e3 for one in self.episodes]),
            "step_ms": _range([seconds * 1e3 for seconds in steps]),
            "characters": _range(characters),
            "info": sorted({key for one in self.episodes for key in one["info"]}),
        }


def _range(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "min": min(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "max": max(values),
    }


def check(
    kind: str,
    kwargs: dict[str, Any] | None = None,
    *,
    agent: str = "random",
    actions: list[str] | None = None,
    task: dict[str, Any] | None = None,
    episodes: int = 100,
    seed: int = 0,
    max_steps: int = 100,
    reset_timeout: float = 60.0,
    step_timeout: float = 60.0,
    memory_mb: int | None = 8192,
    ask: Callable[[str], str | None] | None = None,
) -> Report:
    """Play an environment in a process of its own, each episode twice.

    Args:
        kind, kwargs: as of ``env.registry.<tag>.type`` and ``.kwargs``.
        agent: ``random`` (``random_action``, else words of the observation), ``solve`` or ``keyboard``.
        actions: those that the random agent chooses from instead.
        task: what a row says of the episode.
        seed: of the first episode; the next has one more.
        max_steps: turns after which an episode is left.
        reset_timeout, step_timeout: seconds in which a call must return; then the process is killed.
        memory_mb: MiB that the process may use.
        ask: returns the action to an observation, of the agent ``keyboard``; None ends the check.
    """
    setup = {
        **{"kind": kind, "kwargs": kwargs or {}, "task": task or {}, "agent": agent, "actions": actions or []},
        **{"episodes": episodes, "seed": seed, "max_steps": max_steps, "sys_path": sys.path},
        "memory_mb": memory_mb,
    }
    report = Report(kind, agent)
    limits = {"reset": reset_timeout, "step": step_timeout}
    with tempfile.NamedTemporaryFile("r", prefix="verl-env-") as stack:
        with _probe({**setup, "stack_file": stack.name}) as (process, channel):
            _listen(process, channel, report, limits, ask, stack)
    _judge(report, agent)
    return report


@contextmanager
def _probe(setup: dict[str, Any]) -> Iterator[tuple[Any, socket.socket]]:
    # what the environment prints goes to stderr: stdout is the report's
    process, channel = start_child("verl.envs.probe", dict(os.environ), stdout=2)
    try:
        channel.sendall(framed(pickle.dumps(setup)))
        yield process, channel
    finally:
        channel.close()
        end(process)


def _listen(
    process: Any, channel: socket.socket, report: Report, limits: dict[str, float], ask: Any, stack: Any
) -> None:
    """Take the messages of a probe until it is done, ends otherwise, or is late."""
    reader, at, is_below_init = FrameReader(), {"at": "the start of its process", "limit": "reset"}, True
    deadline = time.monotonic() + 60
    where: dict[str, Any] = {}
    while True:
        try:
            channel.settimeout(max(1e-3, deadline - time.monotonic()))
            data = channel.recv(1 << 20)
        except TimeoutError:
            seconds = limits[at["limit"]]
            trace = _stack(process.pid, stack, is_below_init)
            text = f"{at['at']} did not return within {seconds:g} s (--{at['limit']}-timeout), and was killed."
            report.add(report.faults, "timeout", text, trace=trace, **where)
            return
        except ConnectionError:
            data = b""
        if not data:
            outcome = outcome_of(process.wait())
            text = f"{at['at']} ended its process: {outcome.value}, exit code {process.returncode}."
            if outcome is Outcome.MEMORY:
                text = f"{at['at']} took more memory than the process may use (--memory-mb), and was killed."
            report.add(report.faults, outcome.value, text, **where)
            return
        for message in reader.feed(data):
            if "at" in message:
                at = message
                where = {"seed": message["seed"], "step": message["step"]}
            elif "ask" in message:
                answer = ask(message["ask"]) if ask else None
                if answer is None:
                    return
                channel.settimeout(None)
                channel.sendall(framed(pickle.dumps(answer)))
            elif "refused" in message:
                report.refused = message["refused"] + (f"\n{message['trace']}" if message["trace"] else "")
            elif "episode" in message:
                report.episodes.append(message)
            elif "ready" in message:
                is_below_init = message["is_below_init"]
            elif "done" in message:
                return
            else:
                kind = report.faults if "fault" in message else report.warnings
                place = {"seed": message["seed"], "step": message["step"], "trace": message["trace"]}
                report.add(kind, message.get("fault") or message["warning"], message["text"], **place)
            deadline = time.monotonic() + limits[at["limit"]]


def _stack(supervisor: int, stack: Any, is_below_init: bool) -> str:
    """Return the stack of a probe that hangs; empty if it does not tell within a second."""
    import signal

    below = list(descendants(supervisor))
    if len(below) <= is_below_init:
        return ""
    os.kill(below[int(is_below_init)], signal.SIGUSR1)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        time.sleep(0.02)
        stack.seek(0)
        if "verl/envs/probe.py" in (text := stack.read()):
            return stack_of(text.encode())
    return ""


def _judge(report: Report, agent: str) -> None:
    """Add what shows in all episodes together."""
    numbers = report.numbers()
    if not numbers or numbers["turns"]["max"] == 0:
        return
    reported = [one for one in report.episodes if one["success"] is not None]
    warn = report.warnings
    if agent == "solve" and (lost := [one for one in reported if not one["success"]]):
        text = f"solve() did not win {len(lost)} of {len(reported)} episodes."
        report.add(report.faults, "solve", text, seed=lost[0]["seed"])
    if not reported:
        report.add(warn, "success", "info has no 'success': the metric env/<tag>/success will be missing. Add a bool.")
    if numbers["characters"]["max"] > LONG:
        text = (
            f"an observation has {numbers['characters']['max']:.0f} characters, which every turn adds to the context. "
            "Shorten it, or raise data.max_response_length."
        )
        report.add(warn, "long", text)
    ended = numbers["ended"]
    if ended["limit"] == len(report.episodes):
        turns = report.episodes[0]["turns"]
        text = f"no episode ended within {turns} turns. End one by terminated or truncated, or set --max-steps."
        report.add(warn, "endless", text)
    totals = {sum(one["rewards"]) for one in report.episodes if one["ended"] != "failed"}
    if agent != "solve" and len(report.episodes) > 9 and len(totals) == 1:
        text = (
            f"all episodes earned {totals.pop():g}: a policy that acts so has nothing to learn from. Vary the reward."
        )
        report.add(warn, "constant", text)


# -- Output ------------------------------------------------------------------------------------------------------------
def _shown(value: float | None) -> str:
    return "not reported" if value is None else f"{value:.4g}"


def _spread(values: dict[str, float] | None) -> str:
    if values is None:
        return "none"
    return f"{values['mean']:.4g} in the mean, from {values['min']:.4g} to {values['max']:.4g}"


def text_of(report: Report, shows: bool = False) -> str:
    """Return a report as people read it."""
    if report.refused:
        return f"fault: {report.name} cannot be made: {report.refused}"
    lines, numbers = [], report.numbers()
    if shows and report.episodes:
        lines += [_transcript(report.episodes[0]), ""]
    if numbers:
        ended = ", ".join(f"{name} {count}" for name, count in numbers["ended"].items() if count)
        first = report.episodes[0]["seed"]
        lines += [
            f"{report.name}: {numbers['episodes']} episodes, agent {report.agent}, seeds from {first}",
            f"  success       {_shown(numbers['success'])}",
            f"  valid action  {_shown(numbers['valid_action'])}",
            f"  turns         {_spread(numbers['turns'])}",
            f"  ended         {ended}",
            f"  reward        {_spread(numbers['reward_of_an_episode'])}",
            f"    of a turn   {_spread(numbers['reward_of_a_turn'])}",
            f"  reset         {_spread(numbers['reset_ms'])} ms",
            f"  step          {_spread(numbers['step_ms'])} ms",
            f"  observation   {_spread(numbers['characters'])} characters",
            f"  info          {', '.join(numbers['info']) or 'nothing'}",
        ]
    for level, findings in (("fault", report.faults), ("warning", report.warnings)):
        for one in findings.values():
            place = "" if one.seed is None else f" [seed {one.seed}, turn {one.step}]" if one.step is not None else ""
            times = f" ({one.count} times)" if one.count > 1 else ""
            lines.append(f"{level}: {one.check}: {one.text}{place}{times}")
            lines += [f"    {line}" for line in one.trace.strip().splitlines()[-12:]]
    counts = ((len(report.faults), "fault"), (len(report.warnings), "warning"))
    lines.append(", ".join(f"{count} {word}{'s' * (count != 1)}" for count, word in counts))
    return "\n".join(lines)


def _transcript(episode: dict[str, Any]) -> str:
    lines = [episode["transcript"][0]] if episode["transcript"] else []
    for action, observation, reward in zip(
        episode["actions"], episode["transcript"][1:], episode["rewards"], strict=False
    ):
        lines += [f"> {action}", f"  reward {reward:g}", observation]
    return "\n".join(lines)


def _listed(name: str | None) -> str:
    """Return the environments there are; those of a package; or the options of one."""
    if name in ADAPTERS:
        return "\n".join(f"{name}:{one}" for one in _names_in(str(name)))
    if name:
        return _described(environment_class(name))
    lines = [f"{one:<14} {(inspect.getdoc(environment_class(one)) or '').partition('.')[0]}." for one in known_names()]
    lines += ["", "path/file.py:Class, package.module.Class: your own; docs/environments.md", ""]
    for prefix, (_, package, extra, example) in ADAPTERS.items():
        state = "installed" if is_package_available(package) else f"not installed: {install_command(extra)}"
        lines.append(f"{f'{prefix}:{example}':<32} {state}")
    return "\n".join([*lines, "", "verl env list NAME tells the options of one, or the names of a package."])


def _described(maker: Any) -> str:
    """Return signature and docstring of a class; of a game with the arguments that all games have."""
    cls = maker.func if isinstance(maker, partial) else maker
    arguments = ", ".join(str(one) for one in inspect.signature(cls).parameters.values())
    parts = [f"{cls.__name__}({arguments})", inspect.getdoc(cls) or "It has no docstring."]
    if isinstance(cls, type) and issubclass(cls, TextGame):
        parts += ["TextGame:", inspect.getdoc(TextGame) or ""]
    return "\n\n".join(parts)


def _names_in(prefix: str) -> list[str]:
    package = ADAPTERS[prefix][1]
    if not is_package_available(package):
        raise ImportError(f"{package} is not installed. Install it with {install_command(ADAPTERS[prefix][2])}")
    if prefix == "gymnasium":
        import gymnasium

        return sorted(gymnasium.registry)
    if prefix == "textarena":
        import textarena

        return sorted(one[:-4] for one in textarena.envs.registration.ENV_REGISTRY if one.endswith("-raw"))
    if prefix == "reasoning_gym":
        import reasoning_gym

        return sorted(reasoning_gym.factory.DATASETS)
    return ["http://HOST:PORT"]


# -- Command -----------------------------------------------------------------------------------------------------------
def _pair(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE. Write it as size=4.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _above_zero(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0.")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl env", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|list")
    one = commands.add_parser("check", help="play an environment, each episode twice, and say what is wrong with it")
    one.add_argument("name", help="built-in name, path/file.py:Class, package.module.Class, or gymnasium:ID")
    one.add_argument("--agent", choices=["random", "solve", "keyboard"], default="random")
    one.add_argument("--actions", nargs="+", metavar="TEXT", help="texts that the random agent chooses from")
    one.add_argument("--episodes", type=_above_zero, metavar="N", help="default: 100, with the keyboard 1")
    one.add_argument("--seed", type=int, default=0, help="of the first episode")
    one.add_argument(
        "--kwargs", type=_pair, nargs="+", default=[], metavar="KEY=VALUE", help="as env.registry.*.kwargs"
    )
    one.add_argument("--task", type=_pair, nargs="+", default=[], metavar="KEY=VALUE", help="what a row's task brings")
    one.add_argument(
        "--max-steps", type=_above_zero, default=100, metavar="N", help="turns after which an episode is left"
    )
    one.add_argument("--reset-timeout", type=float, default=60.0, metavar="SECONDS")
    one.add_argument("--step-timeout", type=float, default=60.0, metavar="SECONDS")
    one.add_argument("--memory-mb", type=_above_zero, default=8192, metavar="MIB", help="that the environment may use")
    one.add_argument("--show", action="store_true", help="print the first episode")
    one.add_argument("--json", action="store_true", help="print the report as JSON")
    one.add_argument("--strict", action="store_true", help="exit code 1 with warnings")
    some = commands.add_parser("list", help="names, options of one, or names that a package brings")
    some.add_argument("name", nargs="?")
    return parser


def _ask(observation: str) -> str | None:
    print(observation)
    try:
        return input("> ")
    except EOFError:
        return None


def main(words: list[str]) -> int:
    """Run ``verl env ...``; returns the exit code."""
    options = _parser().parse_args(words)
    if options.command == "list":
        try:
            print(_listed(options.name))
        except (ValueError, ImportError, AttributeError, OSError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    report = check(
        options.name,
        dict(options.kwargs),
        agent=options.agent,
        actions=options.actions,
        task=dict(options.task),
        episodes=options.episodes or (1 if options.agent == "keyboard" else 100),
        seed=options.seed,
        max_steps=options.max_steps,
        reset_timeout=options.reset_timeout,
        step_timeout=options.step_timeout,
        memory_mb=options.memory_mb,
        ask=_ask,
    )
    if options.json:
        found = {level: [asdict(one) for one in getattr(report, level).values()] for level in ("faults", "warnings")}
        print(json.dumps({"name": report.name, "refused": report.refused, **found, **report.numbers()}))
    else:
        print(text_of(report, options.show))
    return report.exit_code(options.strict)

"""The process of ``verl env check``: plays episodes twice, the second time while others run, reports what differs.

Started as ``main()`` with the number of an inherited socket (`verl.envs.check` is its parent). Imports no torch.
"""

import asyncio
import faulthandler
import inspect
import os
import pickle
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.envs.base import make
from verl.envs.worker import Answer, NotFinite, WrongAnswer, checked
from verl.sandbox.messages import encode, framed, receive
from verl.sandbox.outcomes import Failure, Outcome
from verl.sandbox.supervisor import Limits, enter
from verl.utils.import_utils import import_users_modules

ODD_TEXTS = ("", " \n", "\x00", "🦆" * 10, "<answer></answer>", "<answer>" * 500, "-1", "x" * 20_000)
"""What a policy may write as well: no environment may fail on it."""

_OWN = "Draw from a generator of the environment's own: numpy.random.default_rng(seed) in reset."
_UNSEEDED = "It reads what no seed sets: a random generator without a seed, a clock, the order of a set, a service."


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    setup = pickle.loads(receive(channel) or b"N.")
    if setup is None:
        return
    missing = enter(Limits(memory_mb=setup["memory_mb"]))
    faulthandler.register(signal.SIGUSR1, file=open(setup["stack_file"], "w"))  # open as long as the process is
    sys.path[:] = setup["sys_path"]
    # a namespace of its own gives the program a parent in there, which it then is below
    Probe(channel, setup, is_below_init=not any("process namespace" in one for one in missing)).run()
    os._exit(0)


class Stop(Exception):
    """The episode cannot go on; why is reported."""


@dataclass
class Played:
    """One episode."""

    seed: int
    actions: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    reset_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    ended: str = "failed"


class Probe:
    """Plays the episodes that a setup asks for, and sends messages about them.

    Messages: ``ready``; ``at``, what is called next; ``episode``; ``fault`` and ``warning``, each with the name of the
    check; ``ask``, answered with the next action; ``done``.
    """

    def __init__(self, channel: socket.socket, setup: dict[str, Any], is_below_init: bool = False):
        self.channel, self.setup = channel, setup
        self.seed, self.step = 0, 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.diagnosis: tuple[str, str] | None = None
        self.plays = 0
        self.instances: list[Any] = []
        self.send(ready=True, is_below_init=is_below_init)

    def send(self, **message: Any) -> None:
        self.channel.sendall(framed(encode(message)))

    def fault(self, check: str, text: str, trace: str = "") -> None:
        self.send(fault=check, text=text, trace=trace, seed=self.seed, step=self.step)

    def warning(self, check: str, text: str) -> None:
        self.send(warning=check, text=text, trace="", seed=self.seed, step=self.step)

    def run(self) -> None:
        try:
            first, second = self.made(), self.made()
        except Stop:
            self.send(done=True)
            return
        for number in range(self.setup["episodes"]):
            states = random.getstate(), np.random.get_state()
            played = self.played(first, self.setup["seed"] + number)
            self.send(episode=number, is_first=number == 0, **_summary(played))
            if played.ended != "failed":
                self.repeat(first, second, played, states)
        self.try_odd_texts(first)
        for environment in self.instances:
            self.closed(environment)
        self.send(done=True)

    # -- calls ----------------------------------------------------------------------------------------------------
    def made(self) -> Any:
        self.send(at="its constructor", limit="reset", seed=0, step=0)
        try:
            import_users_modules()
            environment = make(self.setup["kind"], **self.setup["kwargs"])
            lacks = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
            if lacks:
                raise TypeError(f"it has no method {' and '.join(lacks)}, which an environment must have.")
            self.instances.append(environment)
            return environment
        except BaseException as error:
            failure = Failure.of(error)
            # names, options and packages: what is wrong is before any environment
            self.send(refused=failure.cause, trace=failure.trace if isinstance(error, RuntimeError) else "")
            raise Stop from None

    def call(self, environment: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method, which must exist; reports what it raises, and what it does to global generators."""
        limit = "reset" if name == "reset" else "step"
        self.send(at=name, limit=limit, seed=self.seed, step=self.step)
        before = _global_states()
        start = time.perf_counter()
        try:
            result = getattr(environment, name)(*arguments, **keywords)
            if inspect.isawaitable(result):
                self.loop = self.loop or asyncio.new_event_loop()
                result = self.loop.run_until_complete(result)
        except BaseException as error:
            # from the environment's own first frame
            failure = Failure.of(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
            if failure.kind is Outcome.MEMORY:
                self.fault("memory", f"{name} took more memory than the process may use (--memory-mb).", failure.trace)
                raise Stop from None
            said = f" on the action {arguments[0][:80]!r}" if name == "step" else ""
            advice = "An environment answers every text, and tells a wrong one by info['valid_action']." if said else ""
            if name == "reset" and isinstance(error, TypeError) and "keyword argument" in str(error):
                advice = "Write it as def reset(self, *, seed, **task)."
            self.fault("raised", f"{name} raised {failure.cause}{said}. {advice}".strip(), failure.trace)
            raise Stop from None
        self.seconds = time.perf_counter() - start
        for used, was, now in zip(("random", "numpy.random"), before, _global_states(), strict=True):
            if was != now:
                text = f"{name} uses or seeds the global generator of {used}, which episodes of a process share."
                self.fault("global_random", f"{text} {_OWN}")
        return result

    def reset(self, environment: Any, seed: int) -> Answer:
        self.seed, self.step = seed, 0
        result = self.call(environment, "reset", seed=seed, **self.setup["task"])
        return self.answer(environment, result, is_reset=True)

    def act(self, environment: Any, action: str) -> Answer:
        self.step += 1
        return self.answer(environment, self.call(environment, "step", action), is_reset=False)

    def answer(self, environment: Any, result: Any, is_reset: bool) -> Answer:
        """Return a result as training takes it."""
        try:
            answer = checked(result, is_reset, getattr(environment, "state_id", None))
        except (WrongAnswer, NotFinite) as error:
            kind = Outcome.NOT_FINITE if isinstance(error, NotFinite) else Outcome.WRONG_TYPE
            self.fault(kind.value, str(error))
            raise Stop from None
        if answer.dropped:
            names = ", ".join(answer.dropped)
            self.warning("info", f"info has {names}: neither finite numbers nor short texts, which are left out.")
        for name in ("success", "valid_action"):
            if name in answer.info and not isinstance(answer.info[name], bool):
                self.fault("info", f"info[{name!r}] is {answer.info[name]!r}; it must be True or False.")
        return answer

    def look(self, environment: Any) -> None:
        """Ask for a frame, as validation does with ``env.render_save_dir``."""
        if callable(getattr(environment, "frame", None)):
            frame = self.call(environment, "frame")
            if not isinstance(frame, str):
                self.fault("wrong_type", f"frame returned {frame!r:.80}; it must return text.")

    def closed(self, environment: Any) -> None:
        if callable(getattr(environment, "close", None)):
            try:
                self.call(environment, "close")
            except Stop:
                return

    # -- episodes -------------------------------------------------------------------------------------------------
    def played(self, environment: Any, seed: int) -> Played:
        """Play an episode by the agent's actions."""
        played = Played(seed)
        try:
            answer = self.reset(environment, seed)
            played.reset_s = self.seconds
            self.look(environment)
            played.answers.append(answer)
            actions = self.agent(environment, played)
            while len(played.actions) < self.setup["max_steps"]:
                action = next(actions)
                answer = self.act(environment, action)
                played.actions.append(action)
                played.answers.append(answer)
                played.step_s.append(self.seconds)
                if answer.terminated or answer.truncated:
                    played.ended = "terminated" if answer.terminated else "truncated"
                    return played
            played.ended = "limit"
        except Stop:
            pass
        return played

    def agent(self, environment: Any, played: Played) -> Any:
        """Give the actions of an episode, one by one."""
        generator = np.random.default_rng([played.seed, 1])
        kind, given = self.setup["agent"], self.setup["actions"]
        while kind == "keyboard":
            self.send(ask=_text(played.answers[-1]))
            yield pickle.loads(receive(self.channel) or b"N.") or ""
        while kind == "solve":
            actions = self.call(environment, "solve")
            if not isinstance(actions, Sequence) or isinstance(actions, str) or not actions:
                self.fault("solve", f"solve() returned {actions!r:.80} in a state that is not the end of an episode.")
                raise Stop
            yield from actions
        while True:
            if given:
                yield str(given[int(generator.integers(len(given)))])
            elif hasattr(environment, "random_action"):
                action = self.call(environment, "random_action", generator)
                if not isinstance(action, str):
                    self.fault("wrong_type", f"random_action returned {action!r:.80}; it must return text.")
                    raise Stop
                yield action
            else:
                words = [*_text(played.answers[-1]).split()[:1000], "yes", "no", "0", "1"]
                yield words[int(generator.integers(len(words)))]

    def repeat(self, other: Any, environment: Any, played: Played, states: tuple) -> None:
        """Play an episode again: with other global generators, and with another episode between its turns."""
        difference = _first_difference(played.answers, self.again(environment, played, other))
        if difference is None:
            return
        text = f"played again, {difference}. Equal seeds and actions must give equal episodes."
        if self.diagnosis is None:
            try:
                self.diagnosis = self.diagnose(played, states)
            except Stop:
                return
        check, advice = self.diagnosis
        self.fault(check, f"{text} {advice}")

    def diagnose(self, played: Played, states: tuple) -> tuple[str, str]:
        """Return the name and the cause of a difference, found with new instances."""
        alone, again = (self.again(self.made(), played) for _ in range(2))
        if _first_difference(alone, again) is not None:
            one, two = (self.again(self.made(), played, states=states) for _ in range(2))
            is_global = _first_difference(one, two) is None
            return "deterministic", _OWN if is_global else _UNSEEDED
        interleaved = self.again(self.made(), played, other=self.made())
        if _first_difference(alone, interleaved) is not None:
            return "shared", "It differs where another instance plays at the same time. Keep all state in self."
        return "reset", "New instances repeat it: reset must set again all that an episode changes."

    def again(self, environment: Any, played: Played, other: Any = None, states: tuple | None = None) -> list[Answer]:
        """Play the same actions until the end or a failure.

        Args:
            other: plays another episode in between.
            states: of the global generators at the beginning. None: another one each time.
        """
        self.plays += 1
        random.seed(self.plays), np.random.seed(self.plays)
        if states is not None:
            random.setstate(states[0]), np.random.set_state(states[1])
        answers = []
        try:
            answers.append(self.reset(environment, played.seed))
            is_other_over = True
            for step, action in enumerate(played.actions):
                if other is not None:
                    is_other_over = self.disturb(other, played.seed + 1 + step, action, is_other_over)
                self.seed, self.step = played.seed, step
                answers.append(self.act(environment, action))
                if answers[-1].terminated or answers[-1].truncated:
                    break
        except Stop:
            pass
        return answers

    def disturb(self, other: Any, seed: int, action: str, is_over: bool) -> bool:
        """Play a turn of another episode, or begin one; returns whether it is over."""
        if is_over:
            self.reset(other, seed)
            return False
        answer = self.act(other, action)
        return answer.terminated or answer.truncated

    def try_odd_texts(self, environment: Any) -> None:
        for text in ODD_TEXTS:
            try:
                self.reset(environment, self.setup["seed"])
                self.act(environment, text)
            except Stop:
                continue


def _global_states() -> tuple[Any, Any]:
    state: Any = np.random.get_state()
    return random.getstate(), (state[1].tobytes(), *state[2:])


def _first_difference(some: list[Answer], others: list[Answer]) -> str | None:
    for one, other in zip(some, others, strict=False):
        if difference := _different(one, other):
            return difference
    return None if len(some) == len(others) else f"it has {len(others) - 1} turns where it had {len(some) - 1}"


def _different(one: Answer, other: Answer) -> str | None:
    for name in ("messages", "reward", "terminated", "truncated", "state_id", "info"):
        before, now = getattr(one, name), getattr(other, name)
        if before != now:
            if name == "messages":
                before, now = _text(one), _text(other)
            called = "observation" if name == "messages" else name
            return f"{called} is {now!r:.200} where it was {before!r:.200}"
    return None


def _text(answer: Answer) -> str:
    return "\n".join(message["content"] for message in answer.messages)


def _summary(played: Played) -> dict[str, Any]:
    answers = played.answers
    rewards = [answer.reward for answer in answers[1:]]
    valid = [answer.info["valid_action"] for answer in answers[1:] if "valid_action" in answer.info]
    last = answers[-1].info if answers else {}
    return {
        "seed": played.seed,
        "ended": played.ended,
        "turns": len(played.actions),
        "rewards": rewards,
        "valid": [sum(map(bool, valid)), len(valid)],
        "success": last.get("success"),
        "info": sorted({key for answer in answers for key in answer.info}),
        "characters": [len(_text(answer)) for answer in answers],
        "reset_s": played.reset_s,
        "step_s": played.step_s,
        "transcript": [_text(answer) for answer in answers[:20]],
        "actions": played.actions[:20],
    }

"""``verl``: one command in front of all others. Each is imported when it is asked for, so ``verl --help`` is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from verl.utils.distribution import warn_of_other_distribution


def _init(words: list[str]) -> int:
    from verl.init import main

    return main(words)


def _ppo(words: list[str]) -> None:
    from verl.trainer.main_ppo import main

    main(words)


def _sft(words: list[str]) -> None:
    from verl.trainer.sft_trainer import main

    main(words)


def _dpo(words: list[str]) -> None:
    from verl.trainer.dpo_trainer import main

    main(words)


def _rm(words: list[str]) -> None:
    from verl.trainer.rm_trainer import main

    main(words)


def _agentic(words: list[str]) -> None:
    from verl.trainer.main_agentic import main

    main(words)


def _generate(words: list[str]) -> None:
    from verl.trainer.main_generation import main

    main(words)


def _eval(words: list[str]) -> None:
    from verl.trainer.main_eval import main

    main(words)


def _chat(words: list[str]) -> None:
    from verl.trainer.main_chat import main

    main(words)


def _doctor(words: list[str]) -> int:
    from verl.preflight.command import doctor

    return doctor(words)


def _check(words: list[str]) -> int:
    from verl.preflight.command import check

    return check(words)


def _env(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        from verl.telemetry.diagnose import main
    else:
        from verl.envs.check import main

    return main(words)


def _cluster(words: list[str]) -> int:
    from verl.cluster import main

    return main(words)


def _selftest(words: list[str]) -> int:
    from verl.selftest.command import main

    return main(words)


def _config(words: list[str]) -> int:
    from verl.config.describe import main

    return main(words)


def _roll(words: list[str]) -> int:
    from verl.config.roll.command import main

    return main(words, _ppo)


def _trajectories(words: list[str]) -> int:
    from verl.view.trajectory_command import main

    return main(words)


def _view(words: list[str]) -> int:
    from verl.view.command import main

    return main(words)


def _report(words: list[str]) -> int:
    from verl.view.command import report

    return report(words)


def _replay(words: list[str]) -> int:
    from verl.trainer.ppo.replay import main

    return main(words)


def _merge(words: list[str]) -> int:
    from verl.model_merger.__main__ import main

    # verl's older script had the operation as its first word; without one, it is merge
    operation = words[0] if words and words[0] in ("merge", "test") else None
    return main(words if operation is None else words[1:], operation or "merge")


def _clean(words: list[str]) -> int:
    from verl.trainer.leftovers import main

    return main(words)


def _completion(words: list[str]) -> int:
    from verl.config.command_line import print_completion

    return print_completion(words, {name: command.about for name, command in COMMANDS.items()})


class Command(NamedTuple):
    """A word after ``verl``."""

    about: str
    run: Callable[[list[str]], int | None]
    """Gets the words behind it; returns the exit code."""


COMMANDS: dict[str, Command] = {
    "init": Command("make a folder to start from: configuration, reward, rows, the first command", _init),
    "ppo": Command("train: PPO, GRPO and their relatives, as python -m verl.trainer.main_ppo", _ppo),
    "sft": Command("supervised fine-tuning, as python -m verl.trainer.sft_trainer", _sft),
    "dpo": Command("learn from preference pairs, as python -m verl.trainer.dpo_trainer", _dpo),
    "rm": Command("train a reward model on preference pairs, as python -m verl.trainer.rm_trainer", _rm),
    "agentic": Command("train in environments, as python -m verl.trainer.main_agentic", _agentic),
    "generate": Command("responses of a model or a checkpoint to a data file: verl generate MODEL DATA", _generate),
    "eval": Command("score responses, or a model on data sets: verl eval RESPONSES, verl eval MODEL gsm8k", _eval),
    "chat": Command("talk to a model or a checkpoint in the terminal, tools included: verl chat MODEL", _chat),
    "doctor": Command("examine a configuration before a run: batches, memory, data, rewards", _doctor),
    "check": Command("look at data files, or at all a command line names, before a run does", _check),
    "env": Command("this machine, for a bug report; verl env check NAME plays an environment, verl env list", _env),
    "cluster": Command("verl cluster check: do the nodes of a Ray cluster fit together", _cluster),
    "selftest": Command("try this machine's devices, kernels and engines, and measure them", _selftest),
    "config": Command("options: their meaning and values, and how two configurations differ", _config),
    "roll": Command("train from a configuration written for ROLL, or show its command line", _roll),
    "trajectories": Command("show what the policy did: trajectories of a run as text or one page", _trajectories),
    "view": Command("show runs in a browser or as text: curves, options, warnings, samples", _view),
    "report": Command("write a run as one HTML file: verl report RUN", _report),
    "replay": Command("compute a recorded training step again, and find the row that breaks it", _replay),
    "merge": Command("make a Hugging Face folder of a run's newest checkpoint: verl merge RUN", _merge),
    "clean": Command("remove what a killed run left: processes, Ray's session, temporary folders", _clean),
    "completion": Command("completion for bash or zsh: source <(verl completion bash)", _completion),
}


def help_text() -> str:
    """Usage, and a line a command."""
    lines = [f"  {name:<12} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: verl COMMAND [arguments]", "", *lines, "", "verl COMMAND --help tells more."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``verl COMMAND ...``; returns the exit code."""
    from verl.utils.process import plain_ending

    warn_of_other_distribution()  # where the other project's files have replaced verl/__init__.py, nobody else does
    with plain_ending():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print(help_text())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        from verl.version import __version__

        print(__version__)
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        from verl.config.base import did_you_mean

        print(f"error: {name} is no command of verl{did_you_mean(name, COMMANDS)}\n\n{help_text()}", file=sys.stderr)
        return 2
    return COMMANDS[name].run(rest) or 0


if __name__ == "__main__":
    sys.exit(main())

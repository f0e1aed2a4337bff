"""Generation through rollout servers: ``python -m verl.trainer.main_generation_server key=value ...``

The entry point only. With ``data.path`` it is ``main_generation`` with ``rollout.mode=async``: requests go one by one
to servers in the workers, which generate for all that are under way. Without, it serves the model until it is stopped.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from verl.config.generation import GenerationConfig, long_words
from verl.config.load import run_from_command_line
from verl.config.ppo import PPOConfig
from verl.preflight.command import asks_for_help
from verl.telemetry.run_record import say_early
from verl.trainer.main_generation import examine_model, model_and_data, read_command, with_model
from verl.trainer.main_generation import main as generate
from verl.utils.process import plain_ending
from verl.version import __version__

HELP = """\
usage: python -m verl.trainer.main_generation_server MODEL [DATA] [key=value ...]

With DATA: verl generate, through rollout servers (rollout.mode=async). Without: serve MODEL, a model or the folder of
a run, by OpenAI's protocol (chat completions, completions, streams, tools) until Ctrl-C. Servers listen on loopback and
ask for the key in servers-PID.json, which only you can read.

Options are those of verl generate. Page: docs/generation.md.
"""

_CHECK_S = 2.0


def serve(config: PPOConfig, checkpoint: str | None = None, stop: threading.Event | None = None) -> None:
    """Serve the model until a signal, or ``stop``."""
    from verl.trainer.generation.generator import served

    config, stop = with_model(config, checkpoint), stop or threading.Event()
    path = Path(f"servers-{os.getpid()}.json")
    with served(config) as servers:
        try:
            servers.publish(path)
            for address in servers.addresses:
                print(f"serving {checkpoint or config.actor_rollout_ref.model.path} at {address}/v1", flush=True)
            print(f"model name policy, key in {path.absolute()}; Ctrl-C ends", flush=True)
            while not stop.wait(_CHECK_S):
                servers.check()
        finally:
            path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``MODEL [DATA] key=value ...``; None: the words of this process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["--help"], ["-h"]):
        print(HELP, end="")
        return
    with plain_ending():
        command = read_command(words, GenerationConfig.short_names, model_and_data)
    keys = {word.lstrip("+").partition("=")[0] for word in long_words(command.arguments, GenerationConfig.short_names)}
    if "data.val_files" in keys:
        generate([*words, "rollout.mode=async"])
        return
    if not asks_for_help(words):
        say_early(f"verl {__version__}: reading the configuration")
    run_from_command_line(
        lambda config: serve(config, command.checkpoint),
        ["trainer.val_only=false", "rollout.n=1", "rollout.mode=async", *command.arguments],
        config_name=GenerationConfig.config_name,
        root=GenerationConfig,
        examine=examine_model,
    )


if __name__ == "__main__":
    main()

"""Talk to a model in the terminal: ``verl chat MODEL`` or ``verl chat RUN``.

The entry point only: the model is behind a rollout server of this process (`verl.trainer.generation.generator.served`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.config.command_line import quoted
from verl.config.generation import GenerationConfig, long_words
from verl.config.load import run_from_command_line
from verl.config.ppo import PPOConfig
from verl.telemetry.run_record import say_early
from verl.telemetry.trajectories import visible
from verl.trainer.main_generation import examine_model, read_command, with_model
from verl.utils.process import plain_ending
from verl.version import __version__

EPILOG = """\
MODEL is a model in Hugging Face format, or the folder of a run: its newest checkpoint.

In the conversation: /reset forgets it, /system TEXT begins another with these instructions, /exit or Ctrl-D ends;
Ctrl-C stops an answer and takes the turn back. Where the input is no terminal, each line is a message.

key=value are options as of verl generate, for example
  rollout.temperature=0.7 rollout.response_length=512 trainer.seed=3 rollout.name=vllm trainer.device=cpu
  rollout.multi_turn.format=hermes       how the model writes its calls of tools
"""

_RESPONSE, _CONTEXT = 1024, 4096  # tokens, where the model does not say less


def parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    found = argparse.ArgumentParser(
        "verl chat",
        usage="verl chat MODEL [--system TEXT] [--tools FILE.py] [key=value ...]",
        description="Talk to a model or a checkpoint in the terminal.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--system", metavar="TEXT", help="instructions: the system message")
    found.add_argument("--tools", metavar="FILE.py", help="functions it may call: a training's function_tool_path")
    return found


def defaults(model: str) -> list[str]:
    """Options of a conversation on this machine; the user's come behind them."""
    from verl.utils.device import get_device_name

    device = get_device_name()
    engine = "vllm" if device == "cuda" and find_spec("vllm") else "hf"
    config = Path(model).expanduser() / "config.json"
    context = _CONTEXT
    if config.exists():
        context = min(context, json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings", context))
    response = min(_RESPONSE, context // 2)
    return [
        *(f"trainer.device={device}", "trainer.controller=local", "trainer.n_gpus_per_node=1"),
        *(f"rollout.name={engine}", f"rollout.dtype={'bfloat16' if device == 'cuda' else 'float32'}"),
        *(f"rollout.prompt_length={context - response}", f"rollout.response_length={response}"),
        *("trainer.val_only=false", "rollout.n=1", "rollout.top_k=-1", "rollout.top_p=1.0"),
    ]


def messages_of(stream: Any, prompt: str) -> Iterator[str]:
    """What the user types; of a stream that is no terminal, its lines."""
    if not stream.isatty():
        yield from (line.strip() for line in stream if line.strip())
        return
    import readline  # noqa: F401  (line editing and history for `input`)

    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("  (Ctrl-D or /exit ends)")
            continue
        if text:
            yield text


def talk(chat: Any, messages: Iterator[str]) -> None:
    """Answer messages until they end."""
    from verl.trainer.generation.chat import AnswerRefused

    loop = asyncio.new_event_loop()
    try:
        for text in messages:
            word, _, rest = text.partition(" ")
            if word in ("/exit", "/quit"):
                return
            if word == "/reset" or word == "/system":
                chat.reset(rest or None)
                print("(a new conversation)", flush=True)
                continue
            task = loop.create_task(chat.ask(text))
            try:
                loop.run_until_complete(task)
                print(flush=True)
            except AnswerRefused as refused:
                print(f"\n(no answer: {refused} The turn is taken back; /reset forgets the conversation)", flush=True)
            except KeyboardInterrupt:
                task.cancel()
                loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
                print("\n(stopped; the turn is taken back)", flush=True)
    finally:
        loop.close()


def run(config: PPOConfig, checkpoint: str | None, system: str | None) -> None:
    """Serve the model, and talk to it until the user ends."""
    from verl.tools.toolbox import RowToolbox, close_toolboxes, toolbox_of
    from verl.trainer.generation.chat import Chat
    from verl.trainer.generation.generator import served

    config = with_model(config, checkpoint)
    rollout = config.actor_rollout_ref.rollout
    options = rollout.multi_turn
    # before the model is loaded: what is wrong with the file is said at once
    has_tools = options.function_tool_path or options.tool_config_path
    toolbox = RowToolbox(toolbox_of(options), {}) if has_tools else None
    print(f"loading {checkpoint or config.actor_rollout_ref.model.path}", flush=True)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: rollout[name] for name in names} | {"max_tokens": rollout.response_length}
    if not rollout.do_sample:
        sampling["temperature"] = 0

    def write(text: str) -> None:
        print(visible(text), end="", flush=True)

    def note(text: str) -> None:
        print(f"\n{visible(text)}", flush=True)

    try:
        with served(config) as servers:
            chat = Chat(servers.addresses[0], servers.token, sampling, toolbox, system, write, note)
            if toolbox is not None:
                asyncio.run(toolbox.create())
                print(f"tools: {', '.join(toolbox.tools)}", flush=True)
            talk(chat, messages_of(sys.stdin, "> "))
    finally:
        close_toolboxes()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``MODEL [flags] key=value ...``; None: the words of this process."""
    with plain_ending():
        words = list(sys.argv[1:] if arguments is None else arguments)
        options, words = parser().parse_known_args(words)
        named = next((word for word in words if "=" not in word and not word.startswith("-")), None)
        keys = [word.partition("=")[0] for word in long_words(words, GenerationConfig.short_names)]
        if named is None and "actor_rollout_ref.model.path" not in keys:
            parser().error("name a model or a run: verl chat MODEL")
        say_early(f"verl {__version__}: reading the configuration")
        words = [word for word in words if word != named]
        if options.tools:
            words.append(f"rollout.multi_turn.function_tool_path={quoted(options.tools)}")
        model = [f"model.path={quoted(named)}"] if named else []
        command = read_command([*model, *words], GenerationConfig.short_names, lambda alone: alone)
        path = next(word for word in command.arguments if "model.path=" in word).partition("=")[2].strip("'\"")

    run_from_command_line(
        lambda config: run(config, command.checkpoint, options.system),
        [*defaults(path), *command.arguments],
        config_name=GenerationConfig.config_name,
        root=GenerationConfig,
        examine=examine_model,
    )


if __name__ == "__main__":
    main()

"""The words after ``python -m verl.trainer.main_ppo``: hydra's flags, without hydra's start-up."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from verl.config.base import Config, ConfigError
from verl.telemetry.run_record import say_early
from verl.utils.process import plain_ending

HELP = """\
usage: python -m {module} [flags] key=value [key=value ...]

Train as the configuration says. Most runs need at least
  actor_rollout_ref.rollout.name=hf                 the engine that samples (vllm unless given)
  actor_rollout_ref.model.path=DIR                  a model in Hugging Face format
  data.train_files=FILE data.val_files=FILE         prompts, parquet
  custom_reward_function.path=FILE.py               how responses are scored
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=N
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=N
  trainer.n_gpus_per_node=N [trainer.device=cpu]

key=value uses hydra's grammar: 1e-6, true, null, [a,b], {{a: 1}}, 'quoted text'. +key=value and ++key=value do the
same on known keys; free-form sections take new keys.

flags:
  --help [KEY ...]          this text, or all about an option or section: --help actor_rollout_ref.rollout
  --check                   check the configuration, model, data, rewards and machine, show the arithmetic, and stop
  --elsewhere               with --check, for a run on another machine: devices and packages here do not count
  --cfg job [--resolve]     print the composed configuration and stop; --package KEY for one section
  --config-path, -cp DIR    folder of your own YAML
  --config-name, -cn NAME   your YAML file, e.g. with `defaults: [ppo_trainer, _self_]`
  --config-dir, -cd DIR     another folder to search

The whole annotated tree: verl config; one option in full: verl config --explain KEY. Page: docs/keys.md.
"""

_WITH_VALUE = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--cfg": "cfg",
    "-c": "cfg",
    "--package": "package",
    "-p": "package",
}
_REFUSED = {
    "--multirun": "one command runs one configuration: loop in the shell",
    "-m": "one command runs one configuration: loop in the shell",
    "--info": "use --cfg job, or --check",
    "-i": "use --cfg job, or --check",
    "--shell-completion": "source <(verl completion bash) completes options, zsh likewise",
    "-sc": "source <(verl completion bash) completes options, zsh likewise",
}


class CommandLine(NamedTuple):
    """The command line, sorted."""

    flags: dict[str, Any]
    """help, check, resolve, elsewhere (bool); cfg, package, config_path, config_name, config_dir (text)."""
    words: list[str]
    """Everything else: overrides, or after ``--help`` the keys asked about."""


def parse(arguments: Sequence[str]) -> CommandLine:
    """Sort flags from overrides. Raises ConfigError for a flag that does not exist."""
    flags: dict[str, Any] = {}
    words: list[str] = []
    waiting = iter(arguments)
    for word in waiting:
        name, has_value, value = word.partition("=")
        if name in _WITH_VALUE:
            flags[_WITH_VALUE[name]] = value if has_value else next(waiting, None)
            if not flags[_WITH_VALUE[name]]:
                raise ConfigError([f"{name} needs a value. Flags: --help."])
        elif word in ("--help", "-h", "--hydra-help"):
            flags["help"] = True
        elif word in ("--check", "--resolve", "--elsewhere"):
            flags[word[2:]] = True
        elif word in ("--run", "-r"):
            continue
        elif name in _REFUSED:
            raise ConfigError([f"{name} is hydra's and has no counterpart here: {_REFUSED[name]}."])
        elif word.startswith("-"):
            raise ConfigError([f"{word} is no flag. Options are written key=value without dashes; flags: --help."])
        else:
            words.append(word)
    return CommandLine(flags, words)


Examine = Callable[[Any, dict[str, Any]], bool]
"""Looks at a composed command line and its flags: whether the run is to start; raises ConfigError if it cannot."""


def run_command(
    run: Callable[[Any], Any],
    arguments: Sequence[str] | None,
    config_name: str,
    config_path: str | None,
    root: type[Config],
    examine: Examine | None = None,
) -> Any:
    """See ``verl.config.load.run_from_command_line``."""
    with plain_ending():
        try:
            config = _config_to_run(
                sys.argv[1:] if arguments is None else list(arguments),
                config_name,
                config_path,
                root,
                run.__module__,
                examine,
            )
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return None if config is None else run(config)


def _config_to_run(
    arguments: list[str],
    config_name: str,
    config_path: str | None,
    root: type[Config],
    module: str,
    examine: Examine | None,
) -> Config | None:
    """The checked tree; None if the command line only asked for information, which is then on stdout."""
    from verl.config.load import load

    flags, words = parse(arguments)
    if flags.get("help"):
        _help(words, root, module)
        return None
    loaded = load(
        words,
        flags.get("config_path", config_path),
        flags.get("config_name", config_name),
        config_dir=flags.get("config_dir"),
        root=root,
    )
    if "cfg" in flags:
        _print_tree(loaded, flags)
        return None
    if not examine(loaded, flags) if examine is not None else _report_and_stop(loaded, bool(flags.get("check"))):
        return None
    if "trainer" in loaded.config:
        from verl.config.unused_options import remember_given

        remember_given(loaded.config, loaded.tree, loaded.given, loaded.warnings)
    return loaded.config


def _report_and_stop(loaded: Any, is_check: bool) -> bool:
    """Print the warnings and, with ``--check``, the batch arithmetic; return whether to stop there.

    Raises:
        ConfigError: with every problem, missing files included.
    """
    problems = [problem.text for problem in loaded.problems]
    if isinstance(loaded.config, Config) and "trainer" in loaded.config:
        from verl.config.files import missing_files

        problems += [problem.text for problem in missing_files(loaded.config)]
    if problems:
        raise ConfigError(problems)
    for message in loaded.warnings:
        say_early(f"note: {message}")
    if is_check:
        from verl.config.batch import batch_plan

        print(batch_plan(loaded.config))
    return is_check


def _help(words: list[str], root: type[Config], module: str) -> None:
    if not words:
        print(HELP.format(module="verl.trainer.main_ppo" if module == "__main__" else module), end="")
        return
    from verl.config.describe import describe
    from verl.config.overrides import locate, unknown_key

    for key in words:
        place = locate(root, key)
        if place.kind == "unknown":
            raise ConfigError([unknown_key(root, key, place)])
        print("\n".join(describe(root, place.reached)))


def _print_tree(loaded: Any, flags: dict[str, Any]) -> None:
    from omegaconf import OmegaConf

    if flags["cfg"] != "job":
        raise ConfigError(
            [f"--cfg={flags['cfg']} is not available: hydra's own settings have no effect. Use --cfg job."]
        )
    tree = OmegaConf.create(loaded.tree)
    if "package" in flags:
        tree = OmegaConf.select(tree, flags["package"])
        if not OmegaConf.is_config(tree):
            raise ConfigError([f"--package={flags['package']} is no section of the configuration."])
    print(OmegaConf.to_yaml(tree, resolve=bool(flags.get("resolve"))), end="")
    for problem in loaded.problems:
        print(f"note: this configuration cannot run: {problem.text}", file=sys.stderr)

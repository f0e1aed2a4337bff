"""The command ``python -m verl.data_check``: words of a command line to a preview, and its exit code.

    python -m verl.data_check train.parquet test.parquet model=Qwen/Qwen2.5-0.5B-Instruct
    python -m verl.data_check train.jsonl data.prompt_key=question custom_reward_function.path=my_reward.py

takes data files and the options of a training (docs/config.md), of which it reads those about data, tokenizer and
reward; ``model=`` is short for ``actor_rollout_ref.model.path=``. Without files it reads ``data.train_files`` and
``data.val_files``.

Exit codes: 0 the data can be trained on, 1 something is wrong with it, 2 the command line is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from verl.config.base import ConfigError
from verl.data_check.preview import Limits, preview

_SHORT = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "data.tokenizer",
    "reward": "custom_reward_function.path",
}
_READ = ("data.", "actor_rollout_ref.model.", "custom_reward_function.", "reward_model.")


def main(argv: Sequence[str] | None = None) -> int:
    """Check data files; returns the exit code."""
    parser = _parser()
    options, words = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    if unknown := [word for word in words if word.startswith("-")]:
        parser.error(f"{unknown[0]} is no flag; --help lists them. Options are written key=value without dashes.")
    files = [word for word in words if "=" not in word or os.path.exists(os.path.expanduser(word))]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        config, given = read_options([word for word in words if word not in files])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not files and not given & {"data.train_files", "data.val_files"}:
        parser.error("name data files, or give data.train_files=FILE")
    if not files:
        files = [path for key, paths in config.data.files.items() if key in given for path in paths]
    limits = Limits(options.prompts, None if options.all else options.tokens, options.score, options.patience)
    found = preview(config, files, limits)
    for key in sorted(given):
        if not key.startswith(_READ):
            found.warn(f"{key} has no effect on data: it was not looked at.")
    _write(found, options.json)
    return 1 if found.has_errors else 0


def read_options(words: Sequence[str]) -> tuple[Any, set[str]]:
    """The typed tree of ``key=value`` words, and the keys they set.

    Raises:
        ConfigError: an unknown key or a value that does not fit; names the nearest key.
    """
    import yaml

    from verl.config.build import build
    from verl.config.overrides import check_overrides
    from verl.config.ppo import PPOConfig

    words = [f"{_SHORT.get(key, key)}={value}" for key, _, value in (word.partition("=") for word in words)]
    checked = check_overrides(words, PPOConfig, lambda name: False)
    problems = list(checked.problems)
    tree: dict[str, Any] = {}
    for word in checked.overrides:
        key, _, text = word.lstrip("+~").partition("=")
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        try:
            section[last] = yaml.safe_load(text) if text else ""
        except yaml.YAMLError:  # a text with a colon, say
            section[last] = text
    config = build(PPOConfig(), tree, "", problems)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config, checked.given


def _write(found: Any, as_json: bool) -> None:
    from verl.data_check.report import show, to_json

    if as_json:
        print(json.dumps(to_json(found), ensure_ascii=False, indent=1, default=str))
        return
    from rich.console import Console

    show(found, Console(highlight=False, soft_wrap=not sys.stdout.isatty()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m verl.data_check",
        usage="%(prog)s [flags] FILE... [key=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    limits = Limits()
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--prompts", type=int, default=limits.prompts, help="prompts to show (default %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=limits.tokens, help="prompts whose tokens are counted (default %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="count the tokens of all prompts")
    parser.add_argument(
        "--score",
        type=int,
        default=limits.scored,
        help="rows scored of each data source (default %(default)s; 0: none)",
    )
    parser.add_argument(
        "--patience", type=float, default=limits.patience, help="seconds a reward may take (default %(default)s)"
    )
    return parser

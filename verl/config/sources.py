"""Configurations as they lie on a disk: YAML, a shell script that starts a run, what a checkpoint kept.

Nothing of a script is run: assignments, arrays and ``${NAME:-default}`` are followed, anything else is left out and
told.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import Config, ConfigError, leaves
from verl.config.compose import CONFIG_DIR, compose
from verl.config.load import LoadedConfig, interpret, load
from verl.config.ppo import PPOConfig
from verl.config.tree import overlay

CONFIG_FILE = "config.json"
"""Name of the options of a run in a step's folder."""


class Source(NamedTuple):
    """A configuration that was found in a file."""

    values: dict[str, Any]
    """Dotted key -> value, of every option."""
    notes: list[str]


def read_source(path: str) -> Source:
    """The options a file comes to: ``.yaml``, ``.json``, ``.sh``, a step's folder, or a folder of such.

    Raises:
        ConfigError: no such file, no command in it, or no configuration.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = _in_folder(file)
    if not file.is_file():
        raise ConfigError([f"{path} does not exist. Give YAML, a shell script, or the folder of a checkpoint."])
    if file.suffix == ".json":
        return _typed(_of_tree(json.loads(file.read_text(encoding="utf-8"))), [])
    if file.suffix in (".yaml", ".yml"):
        return _of_yaml(file)
    words, notes = words_of_script(file.read_text(encoding="utf-8"))
    if words is None:
        raise ConfigError([f"{path} has no command with main_ppo, or verl ppo."])
    overrides = [word for word in words if not word.startswith("-")]
    named = dict(word.split("=", 1) for word in words if word.startswith(("--config-path=", "--config-name=")))
    return _typed(load(overrides, named.get("--config-path"), named.get("--config-name", "ppo_trainer")), notes)


def _in_folder(folder: Path) -> Path:
    if (folder / CONFIG_FILE).is_file():
        return folder / CONFIG_FILE
    steps = [step for step in folder.glob("global_step_*") if (step / CONFIG_FILE).is_file()]
    if not steps:
        raise ConfigError([f"{folder} holds no {CONFIG_FILE}, which a checkpoint has."])
    return max(steps, key=lambda step: int(step.name.rpartition("_")[2])) / CONFIG_FILE


def _of_yaml(file: Path) -> Source:
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(tree, dict):
        raise ConfigError([f"{file} holds no mapping of keys to values."])
    if "defaults" in tree:
        return _typed(load([], str(file.parent), file.stem), [])
    return _typed(_of_tree(tree), [])


def _of_tree(values: dict) -> LoadedConfig:
    tree = compose([], [CONFIG_DIR], "ppo_trainer", PPOConfig)[1]
    overlay(tree, values)
    return interpret(tree, set())


def _typed(loaded: LoadedConfig, notes: list[str]) -> Source:
    if not isinstance(loaded.config, Config):
        raise ConfigError([problem.text for problem in loaded.problems])
    errors = [f"cannot run: {problem.text}" for problem in loaded.problems]
    return Source(dict(leaves(loaded.config)), notes + errors)


# --------------------------------------------------------------------------------------------------------- scripts

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)(\+?)=\((.*)$")
_SUM = re.compile(r"\$\(\(\s*\$?(\w+)\s*([-+*])\s*\$?(\w+)\s*\)\)")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:(:?-)([^{}]*))?\}|([A-Za-z_]\w*))")


def words_of_script(text: str) -> tuple[list[str] | None, list[str]]:
    """The words behind the last ``main_ppo`` of a script, None if there is none; and notes on words left out."""
    known: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    words: list[str] | None = None
    notes: list[str] = []
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        if found := _ARRAY.match(line):
            body = [found[3]]
            while "".join(body).count(")") <= "".join(body).count("("):
                body.append(next(lines, ")"))
            inside = "\n".join(body).rstrip()[:-1]
            arrays[found[1]] = (arrays.get(found[1], []) if found[2] else []) + _split(_summed(inside, known))
            continue
        found = _ASSIGNMENT.match(line)
        if found:
            known[found[1]] = _expanded(_unquoted(found[2]), known)
            continue
        if not re.search(r"\bmain_ppo\b|\bverl\s+ppo\b", line) or line.lstrip().startswith("#"):
            continue
        words, notes = [], []
        behind = re.split(r"\bmain_ppo(?:\.py)?\b|\bverl\s+ppo\b", line, maxsplit=1)[1]
        for word in _with_arrays(_split(_summed(behind, known)), arrays):
            full = _expanded(word, known)
            if word in ("$@", "$*"):
                continue
            if "$" in full.replace("${oc", "").replace("$$", "") and not re.search(r"=\$\{[\w.]+\}$", full):
                notes.append(f"{word} is left out: its value is known only when the script runs")
            elif "=" in full and not re.match(r"\d*[<>&|]", full):
                words.append(full)
    return words, notes


def _with_arrays(words: list[str], arrays: dict[str, list[str]]) -> Iterator[str]:
    for word in words:
        found = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
        yield from arrays.get(found[1], [word]) if found else [word]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError([f"the command cannot be read: {error}."]) from None


def _unquoted(text: str) -> str:
    found = _split(text.partition(";")[0])
    return found[0] if found else ""


def _expanded(text: str, known: dict[str, str]) -> str:
    def value(match: re.Match) -> str:
        name = match[1] or match[4]
        if known.get(name):
            return known[name]
        return match[3] if match[2] else known.get(name, match[0])

    for _ in range(5):
        text, before = _VARIABLE.sub(value, text), text
        if text == before:
            break
    return text


def _summed(text: str, known: dict[str, str]) -> str:
    """``$((A + B))`` of known whole numbers by their result; before words are split, for it may hold blanks."""

    def result(match: re.Match) -> str:
        left, right = (known.get(operand, operand) for operand in (match[1], match[3]))
        if not (left.isdecimal() and right.isdecimal()):
            return match[0]
        a, b = int(left), int(right)
        return str({"+": a + b, "-": a - b, "*": a * b}[match[2]])

    return _SUM.sub(result, text)

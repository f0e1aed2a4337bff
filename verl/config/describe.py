"""Explanations of options, read from where they stand: the docstring below each field."""

import argparse
import ast
import dataclasses
import json
import re
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import Config, ConfigError, get_path, leaves
from verl.config.command_line import check_overrides, locate, unknown_key
from verl.config.compose import CONFIG_DIR, compose
from verl.config.legacy import replacement
from verl.config.load import LoadedConfig, interpret, load
from verl.config.ppo import PPOConfig
from verl.config.tree import flatten, overlay, section_class, show, types_of

_WIDTH = 110


def explanation(cls: type[Config], name: str) -> str:
    """Docstring of an option, in one paragraph; the empty string if it has none."""
    # a user's section may inherit the option, and its docstring, from ours
    for base in cls.__mro__:
        text = _docstrings(base.__module__).get((base.__name__, name))
        if text is not None:
            return " ".join(text.split())
    return ""


@lru_cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> docstring of everything a module declares."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not file.endswith(".py"):
        return {}
    found = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                if isinstance(text.value, ast.Constant):
                    found[node.name, field.target.id] = str(text.value.value)
    return found


def describe(root: type[Config], key: str = "", tree: Mapping | None = None) -> Iterator[str]:
    """Lines of annotated YAML for an option or a section.

    Args:
        root: class of the whole tree.
        key: dotted key; "" for everything.
        tree: values to show, for example with interpolations unresolved. None: the defaults of the classes.
    """
    defaults = root()
    shown = defaults if tree is None else tree
    if not key:
        yield from _section(defaults, shown, "", 0)
        return
    parent, _, name = key.rpartition(".")
    holder = get_path(defaults, parent) if parent else defaults
    if holder is None:  # a section that is null by default
        holder = _class_at(root, parent)()
    values = _value(shown, parent) if parent else shown
    yield from _option(holder, name, values, parent, 0, path=True)


_PAPER = re.compile(r"arXiv:\d{4}\.\d{5}|https?://[^\s)]+[^\s).,]")

_BEFORE_AUTHORS = re.compile(r"Source: |; |: |\(|(?<!al)\. ")

_UNITS = (
    ("MiB", r"\bMiB\b"),
    ("seconds", r"\bSeconds\b"),
    ("training steps", r"\b[Tt]raining steps\b"),
    ("tokens", r"^Tokens\b|: tokens\b"),
    ("prompts", r"^Prompts\b"),
    ("responses", r"\b[Rr]esponses (?:of|per)\b"),
    ("reward points", r"\b[Rr]eward points\b"),
    ("bytes", r"\bBytes\b"),
    ("characters", r"^Characters\b"),
    ("processes", r"^(?:Worker )?[Pp]rocesses\b"),
    ("ranks", r"^Ranks (?:per|that)\b"),
)


def unit(cls: type[Config], name: str) -> str:
    """Unit of a number, as the option's docstring says it; empty if it says nothing, or is no number."""
    # ``int | None`` counts something, ``str`` does not
    kinds = typing.get_args(types_of(cls)[name]) or (types_of(cls)[name],)
    if not {int, float} & set(kinds):
        return ""
    text = explanation(cls, name)
    return next((word for word, pattern in _UNITS if re.search(pattern, text)), "")


def papers(cls: type[Config], name: str) -> list[str]:
    """Sources an option's docstring names: authors and year with arXiv number or address."""
    text, found = explanation(cls, name), []
    for match in _PAPER.finditer(text):
        authors = _BEFORE_AUTHORS.split(text[: match.start()].rstrip(" (,"))[-1]
        found.append(f"{authors} ({match[0]})" if re.search(r"[12]\d{3}$", authors) else match[0])
    return found


def explain(root: type[Config], key: str, tree: Mapping) -> Iterator[str]:
    """All that is known about one option, one thing a line; of a section, its annotated options.

    Args:
        tree: the composed tree, interpolations unresolved.
    """
    from verl.config.legacy import MOVED
    from verl.config.unused_options import readers

    parent, _, name = key.rpartition(".")
    cls = _class_at(root, parent) if parent else root
    if section_class(types_of(cls)[name]) is not None:
        yield from describe(root, key, tree)
        return
    yield key
    yield from textwrap.wrap(explanation(cls, name), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    default, value = cls()[name], _value(tree, key)
    lines = {
        "type": _kind(cls(), name) + _limits(key),
        "unit": unit(cls, name),
        "default": _yaml(default),
        "value": "" if value == default else _yaml(value),
        "source": "; ".join(papers(cls, name)),
        "older names": ", ".join(entry.old for entry in MOVED if key in entry.new),
        "read by": ", ".join(readers(key)[:4]) or "nothing: see the first lines",
    }
    yield from (f"  {label:<12} {text}" for label, text in lines.items() if text)


def keys_page(root: type[Config]) -> str:
    """The page docs/keys.md: every option with type, default, unit and meaning."""
    lines = [
        "# All options",
        "",
        "Made from the option classes in `verl/config` by `verl config --markdown > docs/keys.md`; a test compares. "
        "`verl config --explain KEY` adds who reads an option. What follows what: [config.md](config.md).",
    ]
    lines += _table(root(), "", root.__name__)
    return "\n".join(lines) + "\n"


def _table(section: Config, key: str, title: str) -> list[str]:
    own, inner = [], []
    for item in dataclasses.fields(section):
        name = f"{key}.{item.name}".lstrip(".")
        kind = section_class(types_of(type(section))[item.name])
        # a section that is null by default is described by its class
        if kind is not None:
            inner.append((name, section[item.name] if isinstance(section[item.name], Config) else kind()))
        if not isinstance(section[item.name], Config):
            counted = unit(type(section), item.name)
            columns = [
                f"`{item.name}`",
                _kind(section, item.name) + (f", {counted}" if counted else ""),
                f"`{_yaml(section[item.name])}`",
                explanation(type(section), item.name)
                + _limits(name).replace("; ", " *", 1)
                + "*" * bool(_limits(name)),
            ]
            own.append("| " + " | ".join(column.replace("|", "\\|") for column in columns) + " |")
    lines = ["", f"## `{key}`", "", "| option | type | default | meaning |", "|---|---|---|---|", *own] if own else []
    for name, value in inner:
        lines += _table(value, name, name)
    return lines


def _class_at(root: type[Config], key: str) -> type[Config]:
    cls = root
    for name in key.split("."):
        cls = section_class(types_of(cls)[name])
    return cls


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _section(config: Config, values: Any, key: str, depth: int) -> Iterator[str]:
    for item in dataclasses.fields(config):
        yield from _option(config, item.name, values, key, depth)


def _option(config: Config, name: str, values: Any, parent: str, depth: int, path: bool = False) -> Iterator[str]:
    indent, key = "  " * depth, f"{parent}.{name}".lstrip(".")
    default = config[name]
    for line in textwrap.wrap(explanation(type(config), name), _WIDTH - len(indent)):
        yield f"{indent}# {line}"
    label = key if path else name
    if isinstance(default, Config):
        yield f"{indent}{label}:"
        yield from _section(default, _value(values, name), key, depth + 1)
        return
    value = values.get(name, default) if isinstance(values, Mapping) else default
    yield f"{indent}{label}: {_yaml(value)}  # {_kind(config, name)}{_limits(key)}"
    inner = section_class(types_of(type(config))[name])
    if inner is not None and value is None:
        yield from (f"{indent}#   {line}" for line in _section(inner(), inner(), key, 0))


def _yaml(value: Any) -> str:
    import json

    if isinstance(value, dict | list) or value == "":
        return json.dumps(value)
    return show(value)


def _kind(config: Config, name: str) -> str:
    bounds = next(item for item in dataclasses.fields(config) if item.name == name).metadata.get("bounds")
    signs = zip((">", ">=", "<", "<="), bounds, strict=True) if bounds else ()
    limits = [f"{sign} {limit:g}" for sign, limit in signs if limit is not None]
    return " ".join([_type_name(types_of(type(config))[name]), *limits])


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"list of {_type_name(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "free-form"
    if isinstance(kind, type) and issubclass(kind, Config):
        return "section"
    return {type(None): "null", Any: "anything"}.get(kind) or kind.__name__


def _limits(key: str) -> str:
    from verl.config.checks.support import LIMITS, NAMES

    for names in NAMES:
        if names.key == key:
            return f"; built: {', '.join(names.built)}"
    for limit in LIMITS:
        if limit.key == key or (limit.key.endswith(".*") and key.startswith(limit.key[:-1])):
            works = f" than the default and {', '.join(map(str, limit.works))}" if limit.works else ""
            return f"; other values{works} not supported yet ({limit.what})"
    return ""


# -- ``verl config``: the options, what each is about, and how two configurations differ -----------------------------
_ABOUT = """\
Show options with their meaning, type, range and value.

  verl config                                      everything
  verl config actor_rollout_ref.rollout            a section or an option; also the beginning of a name
  verl config trainer trainer.seed=3               with other values; interpolations stay unresolved
  verl config --explain algorithm.lam              all that is known about one option, and who reads it
  verl config --diff a.yaml run.sh                 what differs once composed: YAML, shell scripts, checkpoints
"""


def main(arguments: Sequence[str]) -> int:
    """Print what ``arguments`` ask for; returns the exit code, 1 if ``--diff`` found differences."""
    parser = argparse.ArgumentParser(
        prog="verl config", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY | key=value", help="what to print; what to change")
    parser.add_argument("--explain", metavar="KEY", help="one option in full")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="two files or folders")
    parser.add_argument("--key-value", action="store_true", help="one `key: value` line per option")
    parser.add_argument("--markdown", action="store_true", help="the page docs/keys.md")
    options = parser.parse_args(arguments)
    try:
        if options.diff:
            return _diff(*options.diff)
        if options.markdown:
            print(keys_page(PPOConfig), end="")
            return 0
        changes = [word for word in options.words if "=" in word]
        tree = _tree(changes)
        if options.explain:
            print("\n".join(explain(PPOConfig, _place(options.explain), tree)))
            return 0
        keys = [key for word in options.words if "=" not in word for key in _matching(word)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.key_value:
        for key, value in flatten(tree):
            if not keys or any(key == shown or key.startswith(f"{shown}.") for shown in keys):
                print(f"{key}: {value}")
        return 0
    for place in keys or [""]:
        print("\n".join(describe(PPOConfig, place, tree)))
    return 0


def _tree(changes: Sequence[str]) -> dict[str, Any]:
    checked = check_overrides(changes, PPOConfig, lambda name: (CONFIG_DIR / name).is_dir())
    if checked.problems:
        raise ConfigError([problem.text for problem in checked.problems])
    return compose(checked.overrides, [CONFIG_DIR], "ppo_trainer", PPOConfig)[1]


def _place(key: str) -> str:
    """The option or section a name means. Raises ConfigError, with the nearest name or the new one."""
    place = locate(PPOConfig, key)
    if place.kind != "unknown":
        return place.reached
    old = replacement(key)
    raise ConfigError([old or unknown_key(PPOConfig, key, place)])


def _matching(word: str) -> list[str]:
    """The option or section of that name; else all options whose names begin with the word."""
    place = locate(PPOConfig, word)
    if place.kind == "unknown" and not replacement(word):
        last = word.rpartition(".")[2]
        begun = [name for name in place.names if name.startswith(last)]
        if begun and word == f"{place.reached}.{last}".lstrip("."):
            return [f"{place.reached}.{name}".lstrip(".") for name in begun]
    return [_place(word)]


def _diff(one: str, other: str) -> int:
    from verl.config.tree import show

    first, second = read_source(one), read_source(other)
    for path, source in ((one, first), (other, second)):
        for note in source.notes:
            print(f"note: {path}: {note}", file=sys.stderr)
    # the order of the first, then what only the second has: a root of the user's may have more sections
    keys = [key for key in dict.fromkeys([*first.values, *second.values])]
    differing = [key for key in keys if first.values.get(key) != second.values.get(key)]
    for key in differing:
        print(f"{key}: {show(first.values.get(key))} -> {show(second.values.get(key))}")
    if not differing:
        print("no option differs")
    return 1 if differing else 0


# -- Configurations as they lie on a disk: YAML, a shell script that starts a run, what a checkpoint kept ------------


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
        raise ConfigError([f"{path} has no command with main_ppo, main_agentic, verl ppo or verl agentic."])
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
    # a primary configuration of hydra's, with groups of its own; else plain keys and values
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


_COMMAND = re.compile(r"\bmain_(?:ppo|agentic)(?:\.py)?\b|\bverl\s+(?:ppo|agentic)\b")


def words_of_script(text: str) -> tuple[list[str] | None, list[str]]:
    """Words behind the last ``main_ppo`` or ``main_agentic`` of a script, None if there is none; notes on others."""
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
        command = None if line.lstrip().startswith("#") else _COMMAND.search(line)
        if command is None:
            continue
        words, notes = [], []
        behind = line[command.end() :]
        for word in _with_arrays(_split(_summed(behind, known)), arrays):
            full = _expanded(word, known)
            # words of the script's own command line, of which nothing is known here
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

    # a variable may hold another; five rounds, for one that holds itself would never end
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

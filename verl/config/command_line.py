"""The command line of a run: its flags, and its overrides checked against the tree of dataclasses, without hydra.

Only the key of an override is looked at here; values, with hydra's whole grammar, are hydra's. Group choices
(``actor@...=x``) and hydra's own keys pass through untouched.
"""

import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from verl.config.base import Config, ConfigError, Problem, did_you_mean
from verl.config.features import feature_of_backend, not_built
from verl.config.legacy import ALIASES, is_legacy, strip_prefix, today
from verl.config.ppo import PPOConfig
from verl.config.tree import section_of, types_of

_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=@\s]+)(?P<package>@[^=\s]*)?(?P<assign>=.*)?", re.DOTALL)

_HOME_PATH = re.compile(r"(?<=[=\[,\s])~/[^\s,\[\]'\"]*(?=\s*(?:[,\]]|$))")
"""A path that begins with ``~``, alone or in a list: hydra's grammar wants it in quotes."""


def quoted(text: str) -> str:
    """A text as a value of hydra's grammar, where a backslash counts as one only before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


class Place(NamedTuple):
    """End of a dotted key in the tree."""

    kind: Literal["option", "section", "free", "unknown"]
    reached: str
    """The part of the key that exists."""
    names: tuple[str, ...] = ()
    """For an unknown key: the names that stand where it went astray."""


class CheckedOverrides(NamedTuple):
    """Overrides as hydra is to get them, the keys they set, and what is wrong with them."""

    overrides: list[str]
    given: set[str]
    problems: list[Problem]
    stripped_prefix: bool


def check_overrides(arguments: Iterable[str], root: type[Config], is_group: Callable[[str], bool]) -> CheckedOverrides:
    """Refuse unknown keys; turn ``key=``, ``+key=`` and ``++key=`` on known and free-form keys into one form.

    Args:
        arguments: ``key=value`` words of the command line.
        root: class of the whole tree.
        is_group: is this name a folder of YAML files on the search path?
    """
    overrides, given, problems, stripped = [], set(), [], False
    for text in arguments:
        match = _OVERRIDE.fullmatch(text)
        if match is None or (match["assign"] is None and match["mark"] != "~"):
            rule = "write key=value, with quotes around values that hold spaces or commas. All options: --help."
            problems.append(Problem(text, f"{text!r} is no override: {rule}"))
            continue
        # hydra reads ``/`` in a group's path and ``.`` in a key; both may begin its own options
        key, mark = match["key"], match["mark"] or ""
        if re.split(r"[./]", key)[0] == "hydra":
            overrides.append(text)
            continue
        if match["package"] or "/" in key or is_group(key) or key == "model_engine":
            kept, wrong = _judge_group(text, key, (match["assign"] or "")[1:].strip("'\""), is_group)
            overrides += kept
            problems += wrong
            continue
        # ``backend_config.`` in front is read as the tree itself
        bare = strip_prefix(key)
        stripped |= bare != key
        is_ppo = issubclass(root, PPOConfig)
        place = locate(root, today(bare) if is_ppo else bare)
        is_old_name = is_legacy if is_ppo else getattr(root, "is_old_name", is_legacy)
        if place.kind == "unknown" and not is_old_name(bare):
            problems.append(Problem(key, unknown_key(root, bare, place)))
            continue
        if mark == "~" and place.kind == "unknown":
            continue  # nothing to delete
        if mark == "~" and place.kind != "free":
            problems.append(
                Problem(key, f"{text}: an option cannot be deleted. Leave it out for its default, or set it to null.")
            )
            continue
        given.add(bare)
        # ``++`` sets and adds: one form for hydra, whose other two depend on whether YAML has the key
        assign = _HOME_PATH.sub(r"'\g<0>'", match["assign"] or "")
        overrides.append(f"{mark if mark == '~' else '++'}{bare}{assign}")
    return CheckedOverrides(overrides, given, problems, stripped)


_ENGINES = ("dp", "fsdp", "fsdp2", "megatron")
_MEGATRON = (
    "actor@actor_rollout_ref.actor=megatron_actor", "critic=megatron_critic",
    "reward_model=megatron_reward_model",
)  # fmt: skip
"""Choices that ``model_engine=megatron`` stands for. The reference follows the actor."""

_GROUPS = {
    "model": "hf_model", "optim": "fsdp", "engine": "fsdp", "algorithm": "rollout_correction", "reward": "reward",
    "reward_manager": "reward_manager", "distillation": "distillation", "profiler": "profiler",
    "legacy_reward_impl": "", "reward_model": "dp_reward_loop",
}  # fmt: skip
"""Groups of verl's YAML that are not here, and what its releases choose of them."""


def _judge_group(
    text: str, group: str, choice: str, is_group: Callable[[str], bool]
) -> tuple[list[str], list[Problem]]:
    """The choice of a group of YAML files: as hydra is to get it, nothing for what verl chooses anyway; problems."""
    feature = feature_of_backend(choice, within=True)
    if feature:
        return [], [Problem(group, not_built(text, feature))]
    if group == "model_engine" and choice == "megatron":
        return list(_MEGATRON), []
    if group == "model_engine" and choice not in _ENGINES:
        return [], [
            Problem(
                group, f"{text} is not a known training backend; known are {', '.join(_ENGINES)}. Use model_engine=dp."
            )
        ]
    if group == "model_engine" or (group in _GROUPS and choice in ("", _GROUPS[group])):
        return [], []
    if not is_group(group):
        return [], [Problem(group, f"{text}: there is no folder {group} of YAML files. Set the options themselves.")]
    return [text], []


def unknown_key(root: type[Config], key: str, place: Place) -> str:
    """The sentence about a key that does not exist, with the nearest one that does."""
    near = nearest_key(root, key, place)
    there = ", ".join(place.names) or f"none below {place.reached}"
    hint = f"; did you mean {near!r}?" if near else f". Options there: {there}."
    return f"{key} is not an option{hint}"


@cache
def locate(root: type[Config], key: str) -> Place:
    """Follow a dotted key through the classes of the tree."""
    kind: Any = root
    reached: list[str] = []
    for name in key.split("."):
        kind = _section_or_free(kind)
        if kind is dict:
            return Place("free", ".".join(reached))
        if kind is None:
            return Place("unknown", ".".join(reached))
        if name == "_target_":
            reached.append(name)
            kind = str
            continue
        known = types_of(kind)
        if name not in known:
            return Place("unknown", ".".join(reached), tuple(known))
        reached.append(name)
        kind = known[name]
    leads_to = _section_or_free(kind)
    return Place("option" if leads_to is None else "free" if leads_to is dict else "section", key)


def _section_or_free(kind: Any) -> Any:
    """The section class, ``dict`` for free-form content, None for a plain value."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [_section_or_free(item) for item in typing.get_args(kind)]
        return next((item for item in inner if item is not None), None)
    if isinstance(kind, type) and issubclass(kind, Config):
        return kind
    return dict if kind is Any or kind is dict or typing.get_origin(kind) is dict else None


@lru_cache
def all_keys(root: type[Config]) -> tuple[str, ...]:
    """Every dotted key, sections included."""

    def walk(cls: type[Config], prefix: str) -> Iterator[str]:
        for name, kind in types_of(cls).items():
            yield f"{prefix}{name}"
            inner = _section_or_free(kind)
            if isinstance(inner, type) and issubclass(inner, Config):
                yield from walk(inner, f"{prefix}{name}.")

    return tuple(walk(root, ""))


def nearest_key(root: type[Config], key: str, place: Place) -> str | None:
    """The existing key most like ``key``: a sibling, the same name elsewhere, or a similar path."""
    from difflib import SequenceMatcher

    def alike(one: str, other: str) -> float:
        return SequenceMatcher(None, one, other).ratio()

    rest = key[len(place.reached) :].lstrip(".")
    wrong, _, below = rest.partition(".")
    scored: list[tuple[float, str]] = []
    for name in place.names:
        candidate = f"{place.reached}.{name}".lstrip(".")
        if below and locate(root, f"{candidate}.{below}").kind != "unknown":
            scored.append((alike(wrong, name) + 0.1, f"{candidate}.{below}"))
        scored.append((alike(wrong, name), candidate))
    last = key.rpartition(".")[2]
    # a name that many sections have (``enable``, ``path``) says nothing of the section that was meant
    is_common = sum(candidate.rpartition(".")[2] == last for candidate in all_keys(root)) > 2
    aliases = (alias for alias in ALIASES if locate(root, alias.rpartition(".")[0]).kind == "section")
    for candidate in (*all_keys(root), *aliases):
        if f".{candidate}".endswith(f".{key}"):
            scored.append((1.2, candidate))  # the section was left out
        elif candidate.rpartition(".")[2] == last and not is_common:  # ``name`` alone says nothing
            scored.append((0.8 + 0.2 * alike(key, candidate), candidate))
        elif alike(last, candidate.rpartition(".")[2]) >= 0.7:
            scored.append((alike(key, candidate) - 0.1, candidate))
    score, best = max(scored, key=lambda pair: pair[0], default=(0.0, None))
    # less alike than this, a suggestion would rather mislead
    return best if score >= 0.6 else None


# -- The words after ``python -m verl.trainer.main_ppo``: hydra's flags, without hydra's start-up --------------------
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


def print_help(words: list[str], root: type[Config], module: str) -> None:
    """Print the help of the command, or of the options that ``words`` name."""
    if not words:
        text = getattr(root, "_help", HELP)
        print(text.format(module="verl.trainer.main_ppo" if module == "__main__" else module), end="")
        return
    from verl.config.describe import describe

    for key in words:
        place = locate(root, key)
        if place.kind == "unknown":
            raise ConfigError([unknown_key(root, key, place)])
        print("\n".join(describe(root, place.reached)))


def print_tree(tree: dict, problems: Sequence[str], flags: dict[str, Any]) -> None:
    """Print the composed tree as ``--cfg``, ``--package`` and ``--resolve`` ask."""
    from omegaconf import OmegaConf

    if flags["cfg"] != "job":
        raise ConfigError(
            [f"--cfg={flags['cfg']} is not available: hydra's own settings have no effect. Use --cfg job."]
        )
    shown = OmegaConf.create(tree)
    if "package" in flags:
        shown = OmegaConf.select(shown, flags["package"])
        if not OmegaConf.is_config(shown):
            raise ConfigError([f"--package={flags['package']} is no section of the configuration."])
    print(OmegaConf.to_yaml(shown, resolve=bool(flags.get("resolve"))), end="")
    for problem in problems:
        print(f"note: this configuration cannot run: {problem}", file=sys.stderr)


# -- ``verl completion bash`` and ``zsh``: a script that completes subcommands, options, and the values they may have


_KEYED = ("ppo", "generate", "eval", "chat", "doctor", "check", "config", "roll")
"""Subcommands that take options of a run."""
_PLACES = "--config-path --config-name --config-dir"
_FLAGS = {
    "ppo": f"--help --check --elsewhere --cfg --resolve --package {_PLACES}",
    "generate": f"--help --check --cfg --resolve --package {_PLACES}",
    "eval": f"--help --check --cfg --resolve --package {_PLACES}",
    "chat": f"--help --system --tools {_PLACES}",
    "config": "--help --explain --diff --key-value --markdown",
    "roll": "--help --print --check --fields",
    "doctor": f"--help --gpu-mem --gpus --elsewhere --json --strict {_PLACES}",
    "check": "--help --json --prompts --tokens --all --score --patience",
    "env": "check list --help --json --quick",
    "init": "--help --task --model --data --val-data --prompt-column --answer-column --algorithm --gpus --yes",
    "trajectories": "--help --step --index --uid --sort --status --tag --best --worst --diff --limit --html --json",
}
"""Subcommand -> its flags; what completion offers after it."""

_BASH = """\
# Completion of verl for bash: source <(verl completion bash)
_verl_words='%(words)s'
_verl_values='%(values)s'
_verl() {
    local line=${COMP_LINE:0:COMP_POINT} current command choices
    current=${line##* }
    read -r _ command _ <<<"$line"
    if [ "${line#* }" = "$current" ]; then
        choices='%(commands)s'
    else
        case $command in
%(flags)s
            completion) choices='bash zsh' ;;
            *) choices='' ;;
        esac
        case $command in
            %(keyed)s)
                case $current in
                    *=*) choices=$_verl_values ;;
                    -*) ;;
                    *) choices="$choices $_verl_words" ;;
                esac ;;
        esac
    fi
    local IFS=$' \\n'
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
    if [ ${#COMPREPLY[@]} -eq 0 ] && [ "$line" != "verl $current" ]; then
        case $current in *=*) ;; *) COMPREPLY=($(compgen -f -- "$current")) ;; esac
    fi
    # bash breaks words at = and :, and expects what follows the last of them
    local behind=${current##*[=:]}
    local before=${current%%"$behind"}
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    [ ${#COMPREPLY[@]} -eq 1 ] && [[ ${COMPREPLY[0]} == *[.=] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o nospace -F _verl verl
"""

_ZSH = """\
#compdef verl
# Completion of verl for zsh: source <(verl completion zsh)
_verl_words=(%(words)s)
_verl_values=(%(values)s)
_verl() {
    local current=${words[CURRENT]} command=${words[2]}
    if (( CURRENT == 2 )); then
        local -a commands=(%(described)s)
        _describe command commands
        return
    fi
    local -a flags
    case $command in
%(flags)s
        completion) flags=(bash zsh) ;;
    esac
    case $command in
        %(keyed)s)
            if [[ $current == *=* ]]; then
                compadd -Q -- $_verl_values
            elif [[ $current != -* ]]; then
                compadd -Q -S '' -- $_verl_words
            fi ;;
    esac
    compadd -- $flags
    _files
}
(( $+functions[compdef] )) && compdef _verl verl
"""


def print_completion(arguments: Sequence[str], commands: Mapping[str, str]) -> int:
    """Print the script for a shell; returns the exit code.

    Args:
        commands: subcommand -> what it does.
    """
    scripts = {"bash": bash_script, "zsh": zsh_script}
    if len(arguments) == 1 and arguments[0] in scripts:
        print(scripts[arguments[0]](commands), end="")
        return 0
    shell = arguments[0] if arguments else ""
    if shell in ("--help", "-h"):
        print("usage: verl completion bash|zsh\n\nsource <(verl completion bash)   in ~/.bashrc, zsh likewise")
        return 0
    print(f"error: verl completion {shell}: known shells are bash, zsh{did_you_mean(shell, scripts)}", file=sys.stderr)
    return 2


def bash_script(commands: Mapping[str, str]) -> str:
    """Completion for bash."""
    return _BASH % {
        "words": " ".join(key_words()),
        "values": " ".join(value_words()),
        "commands": " ".join(commands),
        "flags": "\n".join(f"            {name}) choices='{flags}' ;;" for name, flags in _FLAGS.items()),
        "keyed": "|".join(_KEYED),
    }


def zsh_script(commands: Mapping[str, str]) -> str:
    """Completion for zsh."""
    described = (f"{name}:{about}".replace("'", "") for name, about in commands.items())
    return _ZSH % {
        "words": " ".join(f"'{word}'" for word in key_words()),
        "values": " ".join(f"'{word}'" for word in value_words()),
        "described": " ".join(f"'{text}'" for text in described),
        "flags": "\n".join(f"        {name}) flags=({flags}) ;;" for name, flags in _FLAGS.items()),
        "keyed": "|".join(_KEYED),
    }


def key_words() -> list[str]:
    """``key=`` of every option."""
    return [f"{key}=" for key in all_keys(PPOConfig) if locate(PPOConfig, key).kind != "section"]


def value_words() -> list[str]:
    """``key=value`` of every option with a choice of values, or a known name."""
    from verl.config.checks.support import NAMES  # not at the top: a misspelt key need not wait for the validators

    named = {names.key: names.built for names in NAMES}
    words = []
    for key in all_keys(PPOConfig):
        section, _, name = section_of(PPOConfig, key)
        if section is not None and locate(PPOConfig, key).kind == "option":
            words += [f"{key}={value}" for value in named.get(key) or _choices(types_of(section)[name])]
    return words


def _choices(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    parts = typing.get_args(kind)
    return [value for part in parts for value in _choices(part)] + ["null"] * (type(None) in parts)

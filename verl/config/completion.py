"""``verl completion bash`` and ``zsh``: a script that completes subcommands, options, and the values they may have.

The script holds all words itself: pressing TAB starts no Python.
"""

import sys
import typing
from collections.abc import Mapping, Sequence

from verl.config.base import did_you_mean
from verl.config.checks.support import NAMES
from verl.config.command_line import all_keys, locate
from verl.config.ppo import PPOConfig
from verl.config.tree import types_of

_KEYED = ("ppo", "doctor", "check", "config", "roll")
"""Subcommands that take options of a run."""
_FLAGS = {
    "ppo": (
        "--help",
        "--check",
        "--elsewhere",
        "--cfg",
        "--resolve",
        "--package",
        "--config-path",
        "--config-name",
        "--config-dir",
    ),
    "config": ("--help", "--explain", "--diff", "--key-value", "--markdown"),
    "roll": ("--help", "--print", "--check", "--fields"),
    "doctor": (
        "--help",
        "--gpu-mem",
        "--gpus",
        "--elsewhere",
        "--json",
        "--strict",
        "--config-path",
        "--config-name",
        "--config-dir",
    ),
    "check": ("--help", "--json", "--prompts", "--tokens", "--all", "--score", "--patience"),
}

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


def main(arguments: Sequence[str], commands: Mapping[str, str]) -> int:
    """Print the script for a shell; returns the exit code.

    Args:
        commands: subcommand -> what it does.
    """
    scripts = {"bash": bash_script, "zsh": zsh_script}
    if len(arguments) == 1 and arguments[0] in scripts:
        print(scripts[arguments[0]](commands), end="")
        return 0
    wanted = arguments[0] if arguments else ""
    if wanted in ("--help", "-h"):
        print("usage: verl completion bash|zsh\n\nsource <(verl completion bash)   in ~/.bashrc, zsh likewise")
        return 0
    print(
        f"error: verl completion {wanted}: known shells are bash, zsh{did_you_mean(wanted, scripts)}", file=sys.stderr
    )
    return 2


def bash_script(commands: Mapping[str, str]) -> str:
    """Completion for bash."""
    flags = "\n".join(f"            {name}) choices='{' '.join(words)}' ;;" for name, words in _FLAGS.items())
    return _BASH % {
        "words": " ".join(key_words()),
        "values": " ".join(value_words()),
        "commands": " ".join(commands),
        "flags": flags,
        "keyed": "|".join(_KEYED),
    }


def zsh_script(commands: Mapping[str, str]) -> str:
    """Completion for zsh."""
    flags = "\n".join(f"        {name}) flags=({' '.join(words)}) ;;" for name, words in _FLAGS.items())
    return _ZSH % {
        "words": " ".join(f"'{word}'" for word in key_words()),
        "values": " ".join(f"'{word}'" for word in value_words()),
        "described": " ".join("'" + f"{name}:{about}".replace("'", "") + "'" for name, about in commands.items()),
        "flags": flags,
        "keyed": "|".join(_KEYED),
    }


def key_words() -> list[str]:
    """``key=`` of every option."""
    return [f"{key}=" for key in all_keys(PPOConfig) if locate(PPOConfig, key).kind != "section"]


def value_words() -> list[str]:
    """``key=value`` of every option with a choice of values, or a known name."""
    named = {names.key: names.built for names in NAMES}
    words = []
    for key in all_keys(PPOConfig):
        if locate(PPOConfig, key).kind == "option":
            words += [f"{key}={value}" for value in named.get(key) or _choices(_declared(key))]
    return words


def _declared(key: str) -> typing.Any:
    kind: typing.Any = PPOConfig
    for name in key.split("."):
        inner = [kind, *typing.get_args(kind)]
        section = next(part for part in inner if hasattr(part, "__dataclass_fields__"))
        kind = types_of(section)[name]
    return kind


def _choices(kind: typing.Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    return [value for part in typing.get_args(kind) if part is not kind for value in _choices(part)] + (
        ["null"] if type(None) in typing.get_args(kind) else []
    )

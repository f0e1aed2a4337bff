"""Built-in advantage estimators and policy losses, and the options each reads, from their registrations.

The config must be read without torch, which the methods import. So their modules are not imported: the calls of
``register_adv_est``, ``register_policy_loss`` and ``builtin_policy_loss`` at the left margin are read as text, for the
names they are given and the ``options`` of their ``About``. A test compares the result with the registries.
"""

import ast
import re
from functools import cache
from pathlib import Path

_METHODS = Path(__file__).parents[2] / "algorithms"
# one line, or the lines up to a parenthesis at the left margin, as the formatter leaves them
_REGISTRATION = re.compile(
    r"^@?((?:register_adv_est|register_policy_loss|builtin_policy_loss)\((?:[^\n]*\)$|$(?s:.*?)^\)))", re.MULTILINE
)


@cache
def options_read(kind: str) -> dict[str, tuple[str, ...]]:
    """Return name -> full keys of the options it reads, of every method of a folder.

    Args:
        kind: ``advantages`` or ``losses``.
    """
    methods = {}
    for path in sorted((_METHODS / kind).glob("*.py")):
        for text in re.findall(_REGISTRATION, path.read_text(encoding="utf-8")):
            call = ast.parse(text.strip(), mode="eval").body
            keys = _option_keys(call)
            methods |= {name.value: keys for name in call.args if isinstance(name, ast.Constant)}
    return methods


def all_options(kind: str) -> tuple[str, ...]:
    """Return every option that some method of the folder reads."""
    return tuple(dict.fromkeys(key for keys in options_read(kind).values() for key in keys))


def full_keys(options: str) -> tuple[str, ...]:
    """Expand the ``options`` of an ``About``: ``section.{a,b}`` is two keys, ``actor.`` is actor_rollout_ref.actor."""
    keys = []
    for word in options.split():
        section, _, names = word.partition("{")
        keys += [section + name for name in names.rstrip("}").split(",")]
    return tuple(re.sub(r"^actor\.", "actor_rollout_ref.actor.", key) for key in keys)


def _option_keys(call: ast.Call) -> tuple[str, ...]:
    texts = [
        keyword.value.value
        for node in ast.walk(call)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "About"
        for keyword in node.keywords
        if keyword.arg == "options"
    ]
    return tuple(dict.fromkeys(key for text in texts for key in full_keys(text)))

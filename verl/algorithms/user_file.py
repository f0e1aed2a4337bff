"""A function the user named as FILE.py:NAME, in place of a registered name.

Only what the config names is run, as with ``custom_reward_function``. Imported by a registry when such a name is asked
for: the algorithms themselves need no file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_type, split_file_name


def load_user_function(key: str, name: str, check: Callable[[Callable], str | None]) -> Any:
    """The function behind ``key=name``, read from its file; a decorated one is the function it decorates.

    Args:
        name: ``path/to/file.py:function`` or ``pkg://package.module:function``.
        check: says what is wrong with the function's parameters and how they should be, or None.

    Raises:
        ValueError: no such file, no such name in it, or parameters by which it cannot be called.
        RuntimeError: the file fails while it runs; the cause is chained.
    """
    path, function_name = split_file_name(name)
    try:
        function = load_extern_type(copy_to_local(path), function_name)
    except FileNotFoundError as error:
        raise ValueError(
            f"{key}={name}: there is no file {path} (looked in {Path.cwd()}). It must be there on every node; give "
            "its full path."
        ) from error
    except AttributeError as error:
        raise ValueError(f"{key}={name}: {error} The name after the colon must be one of them; correct it.") from error
    wrong = check(function) if callable(function) else f"is a {type(function).__name__}. Name a function"
    if wrong:
        raise ValueError(f"{key}={name}: {function_name} {wrong}.")
    return function

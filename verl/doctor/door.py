"""``trainer.dry_run=true``: the main job's door, behind which the doctor waits. Loads him only when he is asked for."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from verl.config.load import run_from_command_line

_DRY = re.compile(r"\+{0,2}trainer\.dry_run=(true|yes|on|1)$", re.IGNORECASE)


def asks_for_a_run(arguments: Sequence[str]) -> bool:
    """Whether these words train, rather than ask for a text."""
    flags = [word for word in arguments if word.startswith("-") and not word.startswith(("--config", "-c"))]
    return not flags and not any(map(_DRY.match, arguments))


def run_or_examine(
    run: Callable[[Any], Any],
    arguments: Sequence[str],
    *,
    config_name: str = "ppo_trainer",
    config_path: str | None = None,
) -> Any:
    """What a door's ``main`` calls: ``run`` with the checked tree or, with ``trainer.dry_run=true``, the doctor.

    Raises:
        SystemExit: after a dry run with its exit code, and as ``run_from_command_line``.
    """
    if any(map(_DRY.match, arguments)):
        from verl.doctor.cli import main

        rest = [word for word in arguments if not _DRY.match(word)]
        raise SystemExit(main(rest, config_name=config_name, config_path=config_path))

    def run_unless_dry(config: Any) -> Any:
        if not config.trainer.dry_run:
            return run(config)
        from verl.doctor.cli import tell

        raise SystemExit(tell(config))

    run_unless_dry.__module__ = run.__module__  # --help names it
    return run_from_command_line(run_unless_dry, arguments, config_name=config_name, config_path=config_path)

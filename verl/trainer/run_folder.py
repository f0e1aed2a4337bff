"""The folder of a run (``trainer.default_local_dir``) from its first second, and the commands that start it again.

Knows configurations and command lines; neither torch nor a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl.config.load import check
from verl.config.ppo import PPOConfig
from verl.config.tree import build
from verl.telemetry.run_record import RunRecord, open_record, recorded
from verl.utils.config import typed_config
from verl.utils.process import explanation

_PLACES = (
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.log_dir",
    "trainer.tracker_kwargs",
    "ray_init.timeline_json_file",
    "actor_rollout_ref.rollout.trace.dir",
    "actor_rollout_ref.rollout.skip_dump_dir",
)
"""Options that name what a run writes."""


def recorded_run(config: Any, command_line: Sequence[str] | None) -> AbstractContextManager[RunRecord | None]:
    """Keep the record of a run of ``config`` while the block runs; see `verl.telemetry.run_record.recorded`."""
    config = typed_config(config)
    return recorded(config.trainer.default_local_dir, command_line, config.to_dict(), explanation)


def open_run_record(config: Any) -> RunRecord | None:
    """The record of a run whose trainer a script of the user's drives; None where there is one."""
    config = typed_config(config)
    return open_record(config.trainer.default_local_dir, None, config.to_dict(), is_scoped=False)


def words_of_config(config: Any) -> list[str]:
    """Return the arguments of ``main_ppo`` that start the run of a configuration made in Python."""
    folder = Path(config.trainer.default_local_dir).expanduser().absolute()
    return ["--config-path", str(folder), "--config-name", "config"]


def gpu_options(config: PPOConfig) -> list[str]:
    """Options that make a run of ``config`` the same run on a GPU, to stand behind its command line.

    The device changes, and every place the run writes to: in the old folder it would go on from the old checkpoint.

    Raises:
        ConfigError: such a run is refused; says why.
    """
    tree = config.to_dict()
    tree["trainer"]["device"] = "cuda"
    check(build(type(config)(), tree, "", []))  # what the tree holds was typed before: nothing new can be wrong with it
    old = config.trainer.default_local_dir.rstrip("/")
    moved = {key: f"{old}-gpu{value[len(old) :]}" for key, value in _written(tree) if value.startswith(f"{old}/")}
    new = {"trainer.device": "cuda", "trainer.default_local_dir": f"{old}-gpu", **moved}
    return [f"{key}={value}" for key, value in new.items()]


def _written(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _PLACES:
        value: Any = tree
        for name in key.split("."):
            value = value[name]
        yield from _texts(key, value)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(f"{key}.{name}", item)
    elif isinstance(value, str):
        yield key, value

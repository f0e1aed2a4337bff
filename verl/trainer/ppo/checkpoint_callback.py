"""Code of a user's that runs in the driver after each checkpoint: ``trainer.checkpoint_callback_class``."""

from __future__ import annotations

from typing import Any

from verl.config.base import ConfigError
from verl.utils.import_utils import load_class_from_fqn, load_extern_type, split_file_name

_KEY = "trainer.checkpoint_callback_class"


class CheckpointCallback:
    """Base class of callbacks; does nothing.

    Args:
        config: the whole tree, as the trainer has it.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Do something with a checkpoint that is complete: upload it, or register a version of the model.

        Called in the driver, once for each checkpoint, when all of it is on the disk and
        ``latest_checkpointed_iteration.txt`` names it, with ``checkpoint.async_save`` too. Training waits for it. An
        exception ends the run: a copy that was not made must not go unseen.

        Args:
            trainer: the trainer, whose ``global_steps`` may be a later step.
            global_step: the step that was saved.
            checkpoint_dir: its folder, ``.../global_step_N``.
            async_save: always False: nothing is still being written.
            kwargs: what later versions pass.
        """


def build_checkpoint_callback(config: Any) -> CheckpointCallback:
    """Return an instance of the class that ``trainer.checkpoint_callback_class`` names, of the base class without.

    Args:
        config: the whole tree.

    Raises:
        ConfigError: there is no such class, or it has no ``on_save``.
    """
    name = config.trainer.get("checkpoint_callback_class")
    if not name:
        return CheckpointCallback(config=config)
    write = "Write it as package.module.ClassName, importable where the driver runs, or as path/to/file.py:ClassName."
    try:
        cls = load_extern_type(*place) if (place := split_file_name(name)) else load_class_from_fqn(name, _KEY)
    except (ImportError, AttributeError, ValueError, FileNotFoundError) as error:
        raise ConfigError([f"{_KEY}={name} cannot be loaded: {error} {write}"]) from error
    if not isinstance(cls, type) or not callable(getattr(cls, "on_save", None)):
        raise ConfigError(
            [f"{_KEY}={name} is no class with a method on_save: inherit from {__name__}.CheckpointCallback."]
        )
    return cls(config=config)

"""Step bundle: all that a training step computed with, in a folder from which `verl replay` computes it again.

A folder ``steps/step_N`` below ``trainer.default_local_dir`` holds ``rows.safetensors`` (prompts, responses, rewards,
log-probabilities, advantages), ``step.json`` (metrics, the driver's state before the step, where the weights are, the
error that ended it), ``config.json``, and the weights where no checkpoint has them. Reading one runs no code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from verl.algorithms.advantages.common import NonFiniteError
from verl.checkpoint.rows_file import check_savable, save_rows
from verl.checkpoint.run_state import save_options, saved_groups, step_folder, write_durable
from verl.config.trainer import TrainerConfig
from verl.protocol import DataProto
from verl.single_controller.errors import WorkerGroupError
from verl.version import __version__

ROWS, STEP, FOLDER = "rows.safetensors", "step.json", "steps"


def bundle_folder(root: str | Path, step: int) -> Path:
    return Path(root).expanduser() / FOLDER / f"step_{step}"


class StepRecorder:
    """Writes the bundle of a step that ``trainer.dump_steps`` names, that an error ends, or without a finite gradient.

    Args:
        config: the section ``trainer``.
        say: prints a sentence for the user.

    Attributes:
        batch: rows of the step, as soon as they are known; stages add columns to them.
    """

    def __init__(self, config: TrainerConfig, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.batch: DataProto | None = None
        self._mask: Any = None
        self._state: dict[str, Any] = {}
        self._has_updated = False
        self._written: Path | None = None

    def take(self, batch: DataProto) -> None:
        """Remember the rows of the step, and their mask before the stages that take tokens out of it."""
        self.batch, self._mask = batch, batch.ragged("response_mask")

    @contextmanager
    def step(self, trainer: Any) -> Iterator[None]:
        """Write the bundle if an exception ends the block, or its metrics if it was written within."""
        self.batch, self._has_updated, self._written = None, False, None
        self._state = {
            "kl_ctrl_in_reward": trainer.kl_ctrl_in_reward.state_dict(),
            "running_scores": json.loads(json.dumps(trainer.shaping.state_dict())),
        }
        try:
            yield
        except Exception as error:
            if self.batch is not None:
                self._write_for(trainer, error)
            raise
        if self._written is not None:
            self._write_about(trainer, self._written)

    def before_update(self, trainer: Any) -> None:
        """Write the bundle of a step that ``trainer.dump_steps`` names, with the weights it begins with."""
        if trainer.global_steps in self.config.dump_steps:
            self.write(trainer)
            self.say(f"step {trainer.global_steps} is written: verl replay {self._written}")
        self._has_updated = True

    def without_gradient(self, trainer: Any, roles: list[str]) -> None:
        """Write the bundle of a step in which the gradient of ``roles`` was not finite; their updates were skipped."""
        if self.batch is None:
            return
        unchanged = all(trainer.metrics.get(f"{role}/nonfinite_steps") == 1 for role in roles)
        self.write(trainer, keeps_weights=unchanged and roles == list(saved_groups(trainer.worker_groups)))
        self.say(
            f"step {trainer.global_steps}: the gradient of {' and '.join(roles)} was not finite, and those optimizer "
            f"steps were skipped. To find the row: verl replay {self._written}"
        )

    def write(self, trainer: Any, error: BaseException | None = None, keeps_weights: bool = True) -> Path:
        """Write the bundle as the step is now.

        Args:
            keeps_weights: whether the workers still have the weights that the step began with.
        """
        assert self.batch is not None, "the step has no rows yet"
        step = trainer.global_steps
        folder = bundle_folder(self.config.default_local_dir, step).absolute()
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run through this step
        folder.mkdir(parents=True)
        self._written = folder
        rows = self.batch.select(deepcopy=False)
        rows.put("response_mask", self._mask)
        self._state["left_out"] = _drop_lost(rows) + _keep_savable(rows)
        save_rows(folder / ROWS, rows, {"step": step})
        save_options(folder, trainer.options.to_dict())
        self._state["weights"] = self._weights(trainer, folder, keeps_weights)
        self._write_about(trainer, folder, error)
        return folder

    def _write_for(self, trainer: Any, error: Exception) -> None:
        try:
            is_numeric = isinstance(error, (ArithmeticError, NonFiniteError))
            self.write(trainer, error, keeps_weights=is_numeric and not self._has_updated)
            self.say(f"step {trainer.global_steps} failed; its rows are written: verl replay {self._written}")
        except Exception as problem:  # of the disk, for example: the step's own error is the one to see
            self.say(f"step {trainer.global_steps} failed, and its rows could not be written: {problem}")

    def _weights(self, trainer: Any, folder: Path, keeps_weights: bool) -> dict[str, Any]:
        """Where the weights are that the step began with: a checkpoint, the model's own folder, or this bundle."""
        before = step_folder(self.config.default_local_dir, trainer.global_steps - 1).absolute()
        if trainer.checkpoints.last is not None and trainer.checkpoints.last == before and before.exists():
            return {"checkpoint": str(before)}
        if trainer.global_steps == 1:
            return {"initial": True}
        if not keeps_weights:
            return {"missing": "the step had begun to change them, or was not asked to keep them"}
        trainer.finish_saving()
        groups = saved_groups(trainer.worker_groups)
        for name, group in groups.items():
            group.save_checkpoint(str(folder / name), None, trainer.global_steps - 1)
        for group in trainer.checkpoints.in_background(groups):
            group.finish_saving()
        return {"bundle": True}

    def _write_about(self, trainer: Any, folder: Path, error: BaseException | None = None) -> None:
        about = {
            "version": __version__,
            "step": trainer.global_steps,
            "total_training_steps": trainer.total_training_steps,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "meta_info": {name: value for name, value in self.batch.meta_info.items() if _is_json(value)},
            "metrics": {name: value for name, value in trainer.metrics.items() if _is_json(value)},
            **self._state,
        }
        write_durable(folder / STEP, lambda path: path.write_text(json.dumps(about, indent=1)))


def _drop_lost(rows: DataProto) -> list[str]:
    """Take out of ``rows`` the columns that stayed with processes which have ended; returns their names."""
    lost = []
    for name in rows.keys():
        try:
            _ = rows.ragged(name).values if rows.is_remote(name) else None
        except WorkerGroupError:
            rows.pop([name])
            lost.append(name)
    return lost


def _keep_savable(rows: DataProto) -> list[str]:
    """Take out of ``rows`` the object columns that no file of rows holds; returns their names."""
    left_out = []
    for name, column in list(rows.non_tensor_batch.items()):
        plain = column
        if column.dtype == object:
            plain = np.empty(len(column), dtype=object)
            plain[:] = [_without_numpy(value) for value in column]
        rows.non_tensor_batch[name] = plain
        try:
            check_savable(rows.select(batch_keys=[], non_tensor_batch_keys=[name]))
        except ValueError:
            del rows.non_tensor_batch[name]
            left_out.append(name)
    return left_out


def _without_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _without_numpy(value.tolist())
    if isinstance(value, dict):
        return {key: _without_numpy(item) for key, item in value.items()}
    return [_without_numpy(item) for item in value] if type(value) is list else value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True

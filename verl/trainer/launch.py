"""The workers of a run: started on devices that this machine has, and stopped with the run, whatever ends it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl.config.base import ConfigError
from verl.config.trainer import TrainerConfig
from verl.telemetry.progress import stop_notice
from verl.utils.exit_codes import StoppedEarly
from verl.utils.process import Terminated, no_collection


@contextmanager
def running_workers(trainer: Any, config: Any, command_line: Sequence[str] | None, data: Any) -> Iterator[None]:
    """Start the workers of a trainer; at the block's end stop them. After an error or a stop, say how to go on.

    Args:
        data: what feeds the trainer, closed before the workers are stopped.

    Raises:
        StoppedEarly: a signal or a limit of time ended the block's training before its last step, with a checkpoint.
    """
    with stopped_at_end(trainer.controller):
        try:
            with no_collection():
                start_controller(trainer.controller, config.ray_init, batch_bytes(trainer, config))
                trainer.init_workers()
            yield
            if trainer.early_stop.reason and trainer.global_steps < trainer.total_training_steps:
                raise StoppedEarly
        except BaseException as error:
            # or a failed run would leave its bar, and no cursor, on the screen, and its last metrics unsent
            trainer.run_log.close(failed=True)
            if step := trainer.global_steps:
                total, newest = trainer.total_training_steps, trainer.last_checkpoint
                why = trainer.early_stop.reason if isinstance(error, StoppedEarly) else None
                trainer.run_log.progress.say(stop_notice(step, total, newest, list(command_line or ()), why))
            raise
        finally:
            data.close()


def batch_bytes(trainer: Any, config: Any) -> int:
    """Return the bytes of the largest batch of a run with Ray, its images included where the dataset tells of them."""
    if trainer.controller.name != "ray" or not hasattr(config, "batch_bytes"):
        return 0
    dataset = getattr(trainer, "train_dataset", None)
    return config.batch_bytes(dataset.image_bytes() if hasattr(dataset, "image_bytes") else 0)


@contextmanager
def stopped_at_end(controller: Any) -> Iterator[None]:
    """Stop the controller's processes at the block's end, and answer SIGTERM as before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        controller.stop()
        gc.unfreeze()
        set_sigterm(before)


def start_controller(controller: Any, options: Any, batch_bytes: int = 0) -> None:
    """Start a controller with ``ray_init``; from here on SIGTERM ends the run as Ctrl-C does."""
    controller.start(options, options.variables, batch_bytes)
    set_sigterm(stop_on_signal)  # Ray puts a handler of its own there


def set_sigterm(handler: Any) -> None:
    """Answer SIGTERM with ``handler``, where that can be set."""
    # None: one that was not set by Python. Python lets the main thread alone set handlers
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def stop_on_signal(number: int, frame: Any) -> None:
    """Answer SIGTERM as Ctrl-C is answered."""
    raise Terminated


def check_device(trainer: TrainerConfig, beside: Mapping[str, int] | None = None) -> None:
    """Refuse devices this machine does not have, before anything is loaded.

    Args:
        beside: who has devices of its own, and how many; as `PPOConfig.processes_beside`.
    """
    from verl.utils.device import count_cuda_devices, cuda_problem

    beside = beside or {}
    here = trainer.nnodes == 1 and not (trainer.controller == "ray" and "RAY_ADDRESS" in os.environ)
    if trainer.device == "cuda" and here:
        if problem := cuda_problem():
            raise ConfigError([f"trainer.device=cuda: {problem}"])
        devices = count_cuda_devices()
        if trainer.n_gpus_per_node > devices:
            text = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, but this machine has {devices} CUDA devices. "
            raise ConfigError([f"{text}Lower it to that number."])
        if trainer.n_gpus_per_node + sum(beside.values()) > devices:
            others = " and ".join(f"the {count} of the {name}" for name, count in beside.items())
            text = (
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} and {others} (nnodes x n_gpus_per_node of "
                f"actor_rollout_ref.rollout or distillation) are more than the {devices} CUDA devices of this machine. "
                "Lower one of them, or share devices with actor_rollout_ref.hybrid_engine=true and distillation.nnodes"
                "=0."
            )
            raise ConfigError([text])
    if trainer.device == "cpu":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

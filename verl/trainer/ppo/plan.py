"""What a run is about to do, in a few plain lines: the first thing on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from verl.config.batch import counted, optimizer_steps
from verl.models.scalar_head import stored_shapes, stores_head


def run_plan(trainer: Any) -> str:
    """The lines for a built trainer whose workers have not started yet."""
    return "\n".join(f"{label:<9}{text}" for label, text in _lines(trainer))


def _lines(trainer: Any) -> Iterator[tuple[str, str]]:
    config = trainer.config
    shared, keys = config.actor_rollout_ref, config.trainer
    yield "model", _model(shared.model.path)
    if trainer.use_critic:
        path, head = config.critic.model.path, {True: ", value head from there", False: ", new value head", None: ""}
        yield "critic", _model(path) + head[stores_head(path)]
    if trainer.use_rm:
        yield "rewards", _model(config.reward_model.model.path)
    prompts, held_out = counted(len(trainer.train_dataset), "prompt"), trainer.val_dataset
    yield "data", f"{prompts} to train on, " + (f"{len(held_out):,} to validate" if held_out else "none to validate")
    asked = f"{counted(config.prompts_per_update, 'prompt')} x {counted(shared.rollout.n, 'response')}"
    length = counted(config.data.max_response_length, "token")
    updates = counted(optimizer_steps(config, shared.actor), "optimizer step")
    yield "step", f"{asked} of up to {length}; {config.algorithm.adv_estimator}; {updates}"
    steps, epochs = trainer.total_training_steps, trainer.total_training_steps / trainer.steps_per_epoch
    validation = _often("validation", keys.test_freq if held_out else -1)
    checkpoint = _often("checkpoint", keys.save_freq)
    yield "run", f"{counted(steps, 'step')} ({epochs:.2g} epochs); {validation}, {checkpoint}"
    ranks = counted(keys.world_size, "rank")
    apart = f" and {counted(config.rollout_beside, 'rank')} to sample" if config.rollout_beside else ""
    sp = shared.actor.ulysses_sequence_parallel_size
    ranks += f", {sp} to a sequence" if sp > 1 else ""
    yield "on", f"{keys.device}, {ranks}{apart}, {shared.actor.strategy}, controller {keys.controller}"
    yield "results", str(keys.default_local_dir)


def _often(what: str, frequency: int) -> str:
    return f"{what} every {counted(frequency, 'step')}" if frequency > 0 else f"no {what}"


def _model(path: str) -> str:
    number = stored_parameters(path)
    return path if number is None else f"{path}, {_rounded(number)} parameters"


def _rounded(number: int) -> str:
    size, unit = next((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if number >= size)
    return f"{number / size:.3g}{unit}"


def stored_parameters(path: str) -> int | None:
    """Numbers in the safetensors files of a folder, from their headers alone; None if it has none."""
    return sum(map(prod, stored_shapes(path).values())) or None

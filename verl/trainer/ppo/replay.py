"""``verl replay DIR``: compute a recorded step again, from rewards to gradients, and compare every number.

DIR is a step bundle (`step_bundle`). Models, estimators and losses are those of the run, in worker processes of this
machine; nothing is generated and nothing of the run's folder is changed. On a CPU of the same kind, with the same
number of ranks, the numbers are equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl.checkpoint.rows_file import load_rows
from verl.checkpoint.run_state import saved_groups
from verl.config.describe import CONFIG_FILE
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.nonfinite import NonFiniteGuard, sample_name
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.step_bundle import ROWS, STEP
from verl.utils.config import typed_config

STAGES = {
    "rewards": ("token_level_scores",),
    "log-probs": ("old_log_probs", "ref_log_prob", "teacher_log_probs", "values", "rollout_is_weights"),
    "advantages": ("token_level_rewards", "advantages", "returns"),
}
"""Columns that each stage adds, in the order of the data flow."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Comparison(NamedTuple):
    """One number or column of the step, recorded and computed again."""

    stage: str
    name: str
    difference: float
    """The largest; 0 where all bits are equal."""
    text: str


class ReplayTrainer(RayPPOTrainer):
    """A trainer of one recorded step: it reads no data."""

    def _create_dataloader(self, *sources: Any) -> None:
        self.train_dataset = self.val_dataset = self.val_dataloader = None
        prompts: Any = _NoPrompts()
        self.train_dataloader = prompts
        self.total_training_steps = self.options.trainer.total_training_steps


class _NoPrompts:
    sampler = None

    def __len__(self) -> int:
        return 1


class ReplayJob(PPOJob):
    trainer_cls = ReplayTrainer


def replay_config(folder: Path, about: dict[str, Any], scratch: str, changes: dict[str, Any]) -> PPOConfig:
    """The configuration of the run, for one step on this machine without a rollout."""
    config: Any = typed_config(json.loads((folder / CONFIG_FILE).read_text()))
    has_cuda = torch.cuda.is_available()
    return config.with_values(
        {
            "trainer.controller": "local",
            "trainer.device": config.trainer.device if has_cuda else "cpu",
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": config.trainer.world_size,
            "trainer.logger": [],
            "trainer.default_local_dir": scratch,
            "trainer.default_hdfs_dir": None,
            "trainer.rollout_data_dir": None,
            "trainer.resume_mode": "disable",
            "trainer.total_training_steps": about["total_training_steps"],
            "trainer.progress_bar": False,
            "trainer.dump_steps": [],
            "trainer.on_nonfinite": "skip",
            "data.filter_overlong_prompts": False,
            "algorithm.filter_groups.enable": False,
            # rewards are compared before log-probs are computed
            "reward_model.launch_reward_fn_async": False,
            "reward_model.use_reward_loop": False,
            "actor_rollout_ref.hybrid_engine": True,
            "distillation.nnodes": 0,
            f"{_ROLLOUT}.name": "hf",  # never awake: the rows are there
            f"{_ROLLOUT}.mode": "sync",
            f"{_ROLLOUT}.max_staleness": 0,
            f"{_ROLLOUT}.over_sample_rate": 0.0,
            f"{_ROLLOUT}.partial_rollout": False,
            f"{_ROLLOUT}.skip_rollout": False,
            f"{_ROLLOUT}.canary_prompts": 0,
            f"{_ROLLOUT}.tensor_model_parallel_size": 1,
            f"{_ROLLOUT}.lora_sync": "merge",
            f"{_ROLLOUT}.load_format": "dummy_dtensor",
            **changes,
        }
    )


@contextmanager
def recorded_step(folder: Path, **changes: Any) -> Iterator[tuple[RayPPOTrainer, DataProto, dict[str, Any]]]:
    """A trainer with the weights and the state that the step began with, its rows, and its ``step.json``.

    Args:
        changes: options of the run to change, with ``__`` for dots.

    Raises:
        ValueError: the folder is no bundle, or its weights are not kept.
    """
    if not (folder / STEP).exists():
        raise ValueError(f"{folder} holds no {STEP}. Name a folder steps/step_N of a run (trainer.dump_steps).")
    about = json.loads((folder / STEP).read_text())
    rows, _ = load_rows(folder / ROWS)
    rows.meta_info.update(about["meta_info"])
    with tempfile.TemporaryDirectory() as scratch:
        config = replay_config(folder, about, scratch, {key.replace("__", "."): v for key, v in changes.items()})
        trainer = ReplayJob(config, []).build_trainer()
        try:
            trainer.controller.start(config.ray_init, config.ray_init.variables)
            trainer.init_workers()
            _load_weights(trainer, folder, about["weights"])
            trainer.kl_ctrl_in_reward.load_state_dict(about["kl_ctrl_in_reward"])
            trainer.shaping.load_state_dict(about["running_scores"])
            trainer.global_steps = about["step"]
            yield trainer, rows, about
        finally:
            trainer.buffer.close()
            trainer.controller.stop()


def _load_weights(trainer: RayPPOTrainer, folder: Path, weights: dict[str, Any]) -> None:
    if "missing" in weights:
        print(f"The weights of this step were not kept ({weights['missing']}): log-probs and gradients will differ.")
    if "initial" in weights or "missing" in weights:
        return
    source = folder if "bundle" in weights else Path(weights["checkpoint"])
    if not source.exists():
        raise ValueError(f"{source}, the checkpoint with the weights of this step, is gone. Put it back there.")
    trainer.checkpoints.load_groups(source, saved_groups(trainer.worker_groups))


def replay(folder: Path) -> tuple[list[Comparison], bool]:
    """Compute the step again; returns what was compared, and whether its gradient was finite."""
    with recorded_step(folder) as (trainer, batch, about):
        recorded = batch.select(deepcopy=False)
        made = {name for names in STAGES.values() for name in names if name in batch.keys()}
        batch.pop(batch_keys=list(made))
        trainer.divide_batch(batch)
        found: list[Comparison] = []
        for stage, run in (
            ("rewards", trainer.score),
            ("log-probs", trainer.evaluate),
            ("advantages", trainer.estimate_advantages),
        ):
            if lost := [name for name in STAGES[stage] if name in about.get("left_out", ())]:
                print(f"{stage}: {', '.join(lost)} had stayed with processes that ended, and cannot be compared")
            elif not any(name in made for name in STAGES[stage]):
                print(f"{stage}: the recorded step did not come so far")
            batch = run(batch)
            names = [name for name in STAGES[stage] if name in made and name in batch.keys()]
            found += [_compare(stage, name, recorded, batch) for name in names]
        trainer.metrics = {}
        trainer.improve(batch)
        if trainer.skips_old_log_probs and "old_log_probs" in made:  # the update's own
            found.append(_compare("update", "old_log_probs", recorded, batch))
        for name, value in trainer.metrics.items():
            if name.startswith(("actor/", "critic/")) and name in about["metrics"]:
                found.append(_compare_numbers(name, about["metrics"][name], value))
        return found, not NonFiniteGuard.roles_without_gradient(trainer.metrics)


def _compare(stage: str, name: str, recorded: DataProto, batch: DataProto) -> Comparison:
    """Compare a column on its valid tokens, bit for bit."""
    old, new = recorded.ragged(name).values, batch.ragged(name).values
    same = (old == new) | (old.isnan() & new.isnan())
    if bool(same.all()):
        return Comparison(stage, name, 0.0, "equal")
    worst = (old.double() - new.double()).abs().nan_to_num(math.inf)
    first = int(batch.ragged(name).layout.row_numbers[~same][0])
    text = f"differs in {int((~same).sum())} of {same.numel()} tokens, by up to {float(worst.max()):.3g}"
    return Comparison(stage, name, float(worst.max()), f"{text}; first in {sample_name(batch, first)}")


def _compare_numbers(name: str, old: float, new: float) -> Comparison:
    same = old == new or old != old and new != new
    difference = 0.0 if same else abs(old - new)
    return Comparison("update", name, difference, f"{new:.6g}" + (", equal" if same else f", recorded {old:.6g}"))


def row_gradients(folder: Path) -> list[tuple[float, str]]:
    """Norm of the actor's gradient of each row alone, NaN and the largest first, and the row's name.

    On one rank and with a learning rate of 0, so that every row meets the same weights.
    """
    changes = {"trainer__n_gpus_per_node": 1, "actor_rollout_ref__actor__optim__lr": 0.0}
    changes |= {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 1}
    with recorded_step(folder, **changes) as (trainer, batch, about):
        if "advantages" not in batch.keys():
            return []
        trainer.divide_batch(batch)
        if "ref_log_prob" in about.get("left_out", ()):
            batch = batch.union(trainer.ref_wg.compute_ref_log_prob(batch))
        norms = []
        for row in range(len(batch)):
            one = batch.select_idxs([row])
            trainer.divide_batch(one)
            one.meta_info["global_steps"] = trainer.global_steps
            (norm, *_) = trainer.actor_wg.update_actor(one).meta_info["metrics"]["actor/grad_norm"]
            norms.append((float(norm), sample_name(batch, row)))
    return sorted(norms, key=lambda pair: -math.inf if not math.isfinite(pair[0]) else -pair[0])


def main(words: Sequence[str] | None = None) -> int:
    """Run ``verl replay``; returns 0 where all is equal and finite, else 1."""
    parser = argparse.ArgumentParser(prog="verl replay", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder steps/step_N of a run")
    parser.add_argument("--rows", action="store_true", help="the norm of the gradient of every row alone")
    options = parser.parse_args(words)
    folder = options.folder.expanduser().absolute()
    try:
        found, is_finite = replay(folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for one in found:
        print(f"{one.stage:<11}{one.name:<24}{one.text}")
    differs = [one for one in found if one.difference]
    about = json.loads((folder / STEP).read_text())
    print(
        f"step {about['step']}: " + (f"{len(differs)} of {len(found)} differ" if differs else "all equal, bit for bit")
    )
    if about["error"]:
        print(f"the step had ended with {about['error']}")
    if not is_finite or options.rows:
        rows = row_gradients(folder)
        bad = [(norm, name) for norm, name in rows if not math.isfinite(norm)]
        for norm, name in rows if options.rows else bad:
            print(f"gradient   {name}: norm {norm:.4g} of this row alone")
        if not is_finite and not bad:
            print("gradient   every row alone has a finite one: their sum overflows")
    return 1 if differs or not is_finite else 0

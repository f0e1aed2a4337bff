"""SFTTrainer: the loop of supervised fine-tuning, driven from a single process.

The driver holds the examples; the model lives in a worker group. Every stage is a method to override: training that
compares examples, of preferences for example, brings another dataset and a worker with another loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan
from verl.checkpoint import run_state as checkpoint
from verl.checkpoint.run_state import RunCheckpoints
from verl.config.sft import SFTConfig
from verl.data.loader import build_train_loader
from verl.data.sft_dataset import build_examples, examples_to_batch
from verl.protocol import DataProto
from verl.telemetry.memory import MemoryReport, RunMemory
from verl.telemetry.metric import reduce_metrics
from verl.trainer.ppo.early_stop import EarlyStop
from verl.trainer.ppo.experience import row_cost
from verl.trainer.ppo.metric_utils import compute_throughout_metrics
from verl.trainer.ppo.nonfinite import NonFiniteGuard
from verl.trainer.ppo.placement import GLOBAL_POOL, ResourcePoolManager, start_groups
from verl.trainer.ppo.profiles import StepProfiles
from verl.trainer.ppo.run_log import RunLog
from verl.trainer.restarts import note_step
from verl.trainer.sft.health import ExamplesHealth
from verl.utils.py_functional import derive_seed
from verl.workers.supervised import SupervisedWorker

EXPORT = "huggingface"
"""Folder of the finished model in that of the run."""


class SFTTrainer:
    """Supervised fine-tuning on a worker group.

    Args:
        config: the whole tree.
        tokenizer: of the model.
        controller: what starts the ranks; see `verl.single_controller.get_controller`.
        train_dataset, val_dataset: examples. None: as ``data`` says.
        processor: of a vision-language model.
    """

    worker_cls: type[SupervisedWorker] = SupervisedWorker

    def __init__(
        self,
        config: SFTConfig,
        tokenizer: Any,
        controller: Any,
        train_dataset: Any = None,
        val_dataset: Any = None,
        processor: Any = None,
    ) -> None:
        self.config, self.tokenizer, self.controller, self.processor = config, tokenizer, controller, processor
        self.early_stop = EarlyStop(config.trainer)
        self.run_log = RunLog(config, tokenizer)  # type: ignore[arg-type]  # it reads what both trees have
        self.say = self.run_log.say
        data = config.data
        self.train_dataset: Any = train_dataset or self.read_examples(data.train_files)
        self.val_dataset: Any = val_dataset
        if val_dataset is None and data.has_validation:
            self.val_dataset = self.read_examples(data.val_files or [], is_train=False)
        self.loader = self.build_loader()
        self.num_examples = len(self.loader.sampler)
        self.steps_per_epoch = len(self.loader)
        trainer = config.trainer
        self.total_training_steps = trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs
        self.row_cost = row_cost(config.model.path) if trainer.balance_batch else None
        self.checkpoints = RunCheckpoints(config, self.say, self.timed)
        self.nonfinite_guard = NonFiniteGuard(trainer.nonfinite_tolerance, look_for="unusual examples")
        self.health = ExamplesHealth(trainer, self.total_training_steps)
        self.memory_report = MemoryReport(self.say)
        ledger = Path(trainer.default_local_dir).expanduser() / "memory.jsonl"
        self.run_memory = RunMemory(ledger if trainer.memory_ledger else None)
        self.profiles = StepProfiles(config.profile_plan, trainer.default_local_dir, self.say)
        self.global_steps = 0
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.metrics: dict[str, float] = {}
        self.timing: dict[str, float] = {}
        self.model_wg: Any = None

    def read_examples(self, files: str | list[str], is_train: bool = True) -> Any:
        """The dataset of ``files``, as ``data`` says."""
        return build_examples(self.config.data, files, self.tokenizer, is_train, self.processor)

    def build_loader(self) -> Any:
        """The loader of training batches; rows are in memory, so no other process reads them."""
        data, seed = self.config.data, self.config.trainer.seed
        options = {"train_batch_size": data.train_batch_size, "shuffle": data.shuffle, "seed": data.seed}
        options |= {"dataloader_num_workers": 0}
        return build_train_loader(options, self.train_dataset, self.collate, seed=derive_seed(seed, "sft"))

    def collate(self, items: list) -> DataProto:
        """Join examples into a batch."""
        return examples_to_batch(items)

    @property
    def last_checkpoint(self) -> Path | None:
        """Folder of the newest complete checkpoint."""
        return self.checkpoints.last

    @property
    def groups(self) -> dict[str, Any]:
        """Folder under that of a step -> worker group whose checkpoint it is."""
        return {"actor": self.model_wg}

    # -- the algorithm -----------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """One optimizer step a batch on the mean negative log-likelihood of its learned tokens."""
        self.start()
        for step, batch in self.batches():
            with self.profiles.step(step, self.groups), self.timed("step"):
                self.update(batch)
            self.finish_step(step, batch)
        self.stop()

    def update(self, batch: DataProto) -> None:
        """Take an optimizer step on the batch."""
        batch.partition_plan = self.partition_plan("update_model", MiniBatches(len(batch)))
        with self.timed("update_model"):
            result = self.model_wg.update_model(batch)
        self.metrics.update(reduce_metrics(result.meta_info["metrics"]))

    def validate(self) -> dict[str, float]:
        """Return ``val/loss``, the mean over all learned tokens of the validation examples."""
        nll, tokens = [], 0
        for batch in self.in_order(self.val_dataset):
            batch.partition_plan = self.partition_plan("measure_loss")
            measured = self.model_wg.measure_loss(batch)
            nll += measured.column("nll").tolist()
            tokens += int(measured.column("tokens").sum())
        metrics = {"val/loss": float(np.sum(nll)) / tokens}
        self.validations.append((self.global_steps, metrics))
        return metrics

    def in_order(self, dataset: Any) -> Iterator[DataProto]:
        """Yield all examples of a dataset in batches."""
        size = self.config.data.val_batch_size or self.config.data.train_batch_size
        for first in range(0, len(dataset), size):
            yield self.collate([dataset[row] for row in range(first, min(first + size, len(dataset)))])

    def partition_plan(self, method: str, mini_batches: MiniBatches | None = None) -> PartitionPlan:
        """How a call divides its rows among the ranks; by work, with ``trainer.balance_batch``."""
        by_tokens = self.config.data.use_dynamic_bsz
        return PartitionPlan({method: CallPlan(by_tokens, mini_batches)}, self.row_cost)

    # -- batches, start, saving, end ---------------------------------------------------------------------------------

    def batches(self) -> Iterator[tuple[int, DataProto]]:
        """Yield batches until ``total_training_steps``; each begins a step."""
        while self.global_steps < self.total_training_steps:
            for batch in self.loader:
                self.global_steps += 1
                note_step(self.global_steps)
                self.metrics, self.timing = {}, {}
                self.early_stop.begin_step()
                yield self.global_steps, batch
                if self.early_stop.reason is not None and self.global_steps in self.checkpoints.steps:
                    return
                if self.global_steps >= self.total_training_steps:
                    return

    def init_workers(self) -> None:
        """Start the ranks and load the model."""
        config, trainer = self.config, self.config.trainer
        self.checkpoints.describe_run(config, self.train_dataset)  # type: ignore[arg-type]
        pools = ResourcePoolManager({GLOBAL_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}, {})
        pools.create_resource_pool(self.controller)
        settings = {
            "device": trainer.device,
            "seed": trainer.seed,
            "total_training_steps": self.total_training_steps,
            "response_length": config.data.max_length,
            "sequence_length": config.data.max_length,
            "timeout_s": trainer.nccl_timeout,
            "tokenizer_path": config.model.tokenizer_path,
        }
        shared = config.actor_rollout_ref
        host = self.controller.ClassWithInitArgs(self.worker_cls, config=shared, role="actor", **settings)
        groups = start_groups({GLOBAL_POOL: {"actor": host}}, pools, self.controller, trainer, trainer.device, settings)
        self.model_wg = groups["actor"]
        self.model_wg.init_model()

    def start(self) -> None:
        """Open the loggers, resume, and validate once before training."""
        trainer = self.config.trainer
        self.run_log.open(self.total_training_steps)
        self.load_checkpoint()
        if self.global_steps >= self.total_training_steps and not trainer.val_only:
            self.say(
                f"nothing is left to train: {self.global_steps} steps are done, this run asks for "
                f"{self.total_training_steps}. Raise trainer.total_training_steps or trainer.total_epochs to go on."
            )
            return
        is_first = self.global_steps == 0 and trainer.val_before_train
        if (is_first or trainer.val_only) and self.val_dataset is not None:
            metrics = self.validate()
            self.run_log.log(self.global_steps, metrics)
            self.run_log.progress.validated(self.global_steps, metrics)
        if trainer.val_only:
            self.total_training_steps = self.global_steps

    def finish_step(self, step: int, batch: DataProto) -> None:
        """Validate and save when it is time, and log this step's numbers."""
        trainer, last = self.config.trainer, step >= self.total_training_steps
        self.nonfinite_guard.check(step, ["model"] if self.metrics.get("train/nonfinite_steps") else [])
        is_test = self.val_dataset is not None and (last or trainer.test_freq > 0 and step % trainer.test_freq == 0)
        is_test = is_test and (last or not self.early_stop.is_due())
        if is_test:
            with self.timed("testing"):
                validation = self.validate()
            self.metrics.update(validation)
            self.run_log.progress.validated(step, validation)
        self.finish_saving(wait=False)
        self.note_health(step)
        ends = self.early_stop.is_due() and not last
        if ends or trainer.save_freq > 0 and (last or step % trainer.save_freq == 0):
            with self.timed("save_checkpoint"):
                self.save_checkpoint()
            self.early_stop.saved(self.timing["save_checkpoint"])
        learned = int(batch.ragged("response_mask").values.sum())
        self.metrics |= {"training/global_step": step, "training/epoch": (step - 1) // self.steps_per_epoch}
        self.metrics |= {"train/lr(1e-3)": self.metrics["train/lr"] * 1e3, "train/learned_tokens": learned}
        self.metrics |= {f"timing_s/{name}": seconds for name, seconds in self.timing.items()}
        self.metrics |= compute_throughout_metrics(batch, self.timing, trainer.world_size)
        if last or ends or is_test or step % trainer.log_freq == 0:
            self.run_log.log(step, self.metrics)
        self.run_log.progress.update(step, self.metrics)
        self.health.check(step, self.last_checkpoint)

    def note_health(self, step: int) -> None:
        """Record the memory of the run's processes, and say which rules of ``trainer.health`` the step broke."""
        self.metrics.update(self.run_memory.note(step, self.groups))
        if self.config.trainer.memory_ledger:
            self.metrics.update(self.memory_report.metrics(self.groups.values()))
        own, free = self.run_memory.own_MiB, self.run_memory.free_MiB
        found = self.health.note(self.metrics, memory=own, free_memory=free)
        self.metrics.update(self.health.metrics)
        for sentence in found:
            self.say(f"step {step}: {sentence}")

    def stop(self) -> None:
        """Finish saving, write the model for other programs, and close the loggers."""
        self.profiles.end(self.global_steps)
        self.finish_saving()
        is_done = self.global_steps >= self.total_training_steps
        if self.config.trainer.export_model and not self.config.trainer.val_only and is_done:
            self.model_wg.export_model(str(self.export_folder))
        self.run_log.close()

    @property
    def export_folder(self) -> Path:
        """Where the finished model lies in Hugging Face format."""
        return Path(self.config.trainer.default_local_dir).expanduser().absolute() / EXPORT

    def save_checkpoint(self) -> None:
        """Write model, optimizer, the loader's position and the driver's state; complete once all is written."""
        self.finish_saving()
        folder = self.checkpoints.begin(self.global_steps, self.groups)
        state = {"validations": self.validations[:1] + self.validations[1:][-1:], "saved_steps": self.checkpoints.steps}
        state["health"] = self.health.state_dict()
        checkpoint.save_driver_state(folder, self.loader.state_dict(), state)
        checkpoint.save_options(folder, self.config.to_dict())
        self.checkpoints.unfinished = self.global_steps
        if not self.checkpoints.in_background(self.groups) or self.global_steps >= self.total_training_steps:
            self.finish_saving()

    def finish_saving(self, wait: bool = True) -> None:
        """Mark the last saved step complete; without ``wait`` only if all is written."""
        self.checkpoints.finish(self.groups, wait)

    def load_checkpoint(self) -> None:
        """Continue where ``trainer.resume_mode`` says, at the same example, weights and random numbers."""
        folder = checkpoint.folder_to_resume(self.config.trainer)  # type: ignore[arg-type]
        if folder is None:
            return
        folder = self.checkpoints.good_one(folder.absolute(), self.groups)
        self.checkpoints.compare(folder, self.config)  # type: ignore[arg-type]
        remarks = self.checkpoints.load_groups(folder, self.groups)
        state = checkpoint.load_driver_state(folder, self.loader)
        self.global_steps = checkpoint.step_of(folder)
        self.validations = [(step, metrics) for step, metrics in state.get("validations", [])]
        self.health.load_state_dict(state.get("health", {}))
        self.checkpoints.loaded(folder, state.get("saved_steps", []), self.groups)
        done = f"{self.global_steps} of {self.total_training_steps} steps are done"
        self.say(f"resumed from {folder}: {done}{''.join(remarks)}")

    def timed(self, name: str) -> Any:
        """Count the seconds of a block as ``timing_s/{name}``."""
        return self.run_log.timed(name, self.timing)

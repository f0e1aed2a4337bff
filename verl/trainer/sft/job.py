"""One run of supervised fine-tuning from a checked configuration to its closing summary, and its command line.

In ranks that torchrun started, rank 0 drives and the others answer its calls; elsewhere the run starts its own ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config.base import ConfigError
from verl.config.checks.batch import counted
from verl.config.load import LoadedConfig, load, run_from_command_line
from verl.config.sft import SFTConfig, plan
from verl.preflight.command import asks_for_help
from verl.single_controller.processes import torchrun_size
from verl.telemetry.run_record import COMMAND, LOG, say_early
from verl.trainer.run_folder import recorded_run
from verl.utils.exit_codes import exit_code
from verl.utils.process import no_collection
from verl.version import __version__

if TYPE_CHECKING:
    from verl.trainer.sft.trainer import SFTTrainer

_IMPORTED_AHEAD = ("verl.workers.supervised", "transformers.models.auto.modeling_auto")
"""What every rank imports."""


class SFTJob:
    """The run as users start it; a subclass trains otherwise, by the trainer and the configuration that it names.

    Args:
        config: the whole tree.
        command_line: the words that ``config`` came from. None: it was made in Python.
        controller: name of what starts the ranks. None: ``trainer.controller``.
    """

    root: ClassVar[type[SFTConfig]] = SFTConfig
    goes_on = "To go on with reinforcement learning: actor_rollout_ref.model.path={}"
    """Last line of the summary, for the folder of the finished model."""

    def __init__(
        self, config: SFTConfig, command_line: Sequence[str] | None = None, controller: str | None = None
    ) -> None:
        self.config, self.given_words = config, command_line
        self.command_line = list(command_line or ())
        self.controller = controller or config.trainer.controller

    def run(self) -> SFTTrainer:
        """Prepare, train, and print a summary; processes of the run never outlive this call.

        Raises:
            StoppedEarly: a signal or a limit of time ended it before its last step, with a checkpoint saved.
        """
        from verl.trainer.launch import check_device, running_workers

        begin, keys = time.monotonic(), self.config.trainer
        with recorded_run(self.config, self.given_words):
            check_device(keys)  # type: ignore[arg-type]
            with self.workers_ahead():
                with no_collection():
                    trainer = self.build_trainer()
                if keys.progress_bar:
                    print(self.lines(trainer), flush=True)
                with running_workers(trainer, self.config, self.command_line, trainer.loader):
                    with trainer.early_stop.signals():
                        trainer.fit()
            self.print_summary(trainer, time.monotonic() - begin)
        return trainer

    def workers_ahead(self) -> AbstractContextManager[None]:
        """With Ray, the ranks' processes start before the driver loads modules and data, and load side by side."""
        if self.controller != "ray":
            return nullcontext()
        from verl.trainer.ppo.placement import begun_workers

        keys = self.config.trainer
        pool = ([keys.n_gpus_per_node] * keys.nnodes, ["actor"])
        return begun_workers(self.config, [pool], _IMPORTED_AHEAD)

    def build_trainer(self) -> SFTTrainer:
        """Tokenizer and controller, as the configuration names them; the trainer reads the data."""
        from verl.single_controller import get_controller
        from verl.utils.fs import copy_to_local
        from verl.utils.import_utils import import_users_modules
        from verl.utils.tokenizer import hf_processor, hf_tokenizer

        model = self.config.model
        import_users_modules(model.external_lib)
        path = model.tokenizer_path or copy_to_local(model.path)
        reading: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
        tokenizer = hf_tokenizer(path, chat_template=model.custom_chat_template, **reading)
        processor = hf_processor(path, chat_template=model.custom_chat_template, **reading)
        return self.trainer_cls(self.config, tokenizer, get_controller(self.controller), processor=processor)

    @property
    def trainer_cls(self) -> type[SFTTrainer]:
        """The class of the trainer."""
        from verl.trainer.sft.trainer import SFTTrainer

        return SFTTrainer

    def lines(self, trainer: SFTTrainer) -> str:
        """The plan of the run: its first lines on the screen."""
        from verl.trainer.ppo.job import model_line

        config, keys = self.config, self.config.trainer
        steps, epochs = trainer.total_training_steps, trainer.total_training_steps / trainer.steps_per_epoch
        held_out = f"; {len(trainer.val_dataset):,} to validate" if trainer.val_dataset is not None else ""
        size = getattr(trainer.train_dataset, "summary", f"{trainer.num_examples:,} examples")
        checkpoint = f"checkpoint every {counted(keys.save_freq, 'step')}" if keys.save_freq > 0 else "no checkpoint"
        return "\n".join(
            [
                f"model    {model_line(config.model.path)}",
                f"data     {size}{held_out}",
                f"step     {plan(config).removeprefix('one optimizer step: ')}",
                f"run      {counted(steps, 'step')} ({epochs:.2g} epochs); {checkpoint}",
                f"on       {keys.device}, {counted(keys.world_size, 'rank')}, started by {self.controller}",
                f"results  {keys.default_local_dir}",
            ]
        )

    def print_summary(self, trainer: SFTTrainer, seconds: float) -> None:
        """Print what the run came to, and where it lies."""
        from verl.telemetry.progress import RunSummary, print_summary
        from verl.trainer.sft.trainer import EXPORT

        keys = self.config.trainer
        folder = Path(keys.default_local_dir).expanduser()
        has_export = keys.export_model and trainer.export_folder.exists() and not keys.val_only
        summary = RunSummary(
            steps=trainer.global_steps,
            seconds=seconds,
            validations=trainer.validations,
            places={
                "log": folder / LOG,
                **trainer.run_log.places,
                "checkpoint": trainer.last_checkpoint,
                "model": trainer.export_folder if has_export else None,
            },
            overrides=self.command_line,
            device=keys.device,
            can_resume=trainer.last_checkpoint is not None,
            again=folder / COMMAND if self.given_words is not None and (folder / COMMAND).exists() else None,
        )
        print_summary(summary)
        if has_export:
            print(f"\n{self.goes_on.format(folder / EXPORT)}", flush=True)


# -- the command line ------------------------------------------------------------------------------------------------


def run_sft(config: SFTConfig, command_line: Sequence[str] | None = None, job: type[SFTJob] = SFTJob) -> None:
    """Train as ``config`` says, in this process as the driver; returns when the run is complete."""
    if torchrun_size() is not None:
        from verl.single_controller.torchrun import join

        join(config.trainer.device, config.trainer.nccl_timeout)
        job(config, command_line, "torchrun").run()
    elif config.trainer.max_restarts:
        from verl.trainer.restarts import run_with_restarts

        run_with_restarts(config, lambda tree: _run_once(tree, command_line, job))
    else:
        _run_once(config, command_line, job)


def _run_once(config: SFTConfig, command_line: Sequence[str] | None, job: type[SFTJob]) -> None:
    job(config, command_line).run()


def main(
    arguments: Sequence[str] | None = None, module: str = "verl.trainer.sft_trainer", job: type[SFTJob] = SFTJob
) -> None:
    """Run ``key=value ...``; None: the words of this process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    help_asked = asks_for_help(words)
    if size := torchrun_size():
        if not help_asked:  # how many there are is torchrun's to say
            words += [f"trainer.nnodes={size[0]}", f"trainer.n_gpus_per_node={size[1]}"]
        if os.environ["RANK"] != "0":
            raise SystemExit(_serve(words, job.root))
    if not help_asked:
        say_early(f"verl {__version__}: reading the configuration")

    def run(config: SFTConfig) -> None:
        run_sft(config, [f"-m {module}", *words], job)  # which program it is goes into the commands that are kept

    run.__module__ = module
    run_from_command_line(run, words, config_name=job.root.config_name, root=job.root, examine=_examine)


def _examine(loaded: LoadedConfig, flags: dict[str, Any]) -> bool:
    """Print warnings and, with ``--check``, the batch arithmetic; return whether to go on after that.

    Raises:
        ConfigError: the run cannot succeed; lists every reason.
    """
    problems = [problem.text for problem in loaded.problems]
    if not problems:
        from verl.preflight.examples import missing  # what `verl doctor sft` says of files and models

        problems = [problem.text for problem in missing(loaded.config)]
    if problems:
        raise ConfigError(problems)
    for message in loaded.warnings:
        say_early(f"note: {message}")
    if flags.get("check"):
        print(plan(loaded.config))
        program, noun = loaded.config._schema, loaded.config.data.noun
        print(f"`verl doctor {program}` before the same words looks at the {noun}, the memory and the machine, too.")
    return not flags.get("check")


def _serve(words: Sequence[str], root: type[SFTConfig]) -> int:
    """A rank of torchrun's other than the first: do what that says; returns the exit code."""
    from verl.config.command_line import parse
    from verl.utils.process import plain_ending

    with plain_ending():
        flags, keys = parse(words)
        if flags.keys() & {"help", "check", "cfg"}:
            return 0
        try:
            name = flags.get("config_name", root.config_name)
            loaded = load(keys, flags.get("config_path"), name, config_dir=flags.get("config_dir"), root=root)
        except ConfigError as error:  # rank 0 says it
            return int(exit_code(error))
        if loaded.problems:
            return 2
        from verl.single_controller.torchrun import join, serve

        join(loaded.config.trainer.device, loaded.config.trainer.nccl_timeout)
        serve()
    return 0

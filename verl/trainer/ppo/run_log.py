"""Where a run tells what it does: the terminal, the loggers, and samples for a person to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.protocol import DataProto
from verl.trainer.ppo.samples import dump_batch, reward_columns, shown_samples
from verl.trainer.ppo.trace import open_rollout_trace, sample_records
from verl.trainer.run_folder import open_run_record
from verl.utils.config import typed_config
from verl.utils.progress import Progress
from verl.utils.tracking import Tracking, ValidationGenerationsLogger, check_backends


class RunLog:
    """What ``trainer.logger``, ``rollout.trace`` and the keys of samples ask for.

    Args:
        config: the whole tree.
        tokenizer: of the policy.

    Attributes:
        progress: the terminal.
        places: label -> where the loggers that write files put them.

    Raises:
        ImportError: a package that a logger or the trace needs is missing.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        check_backends(config.trainer.logger)
        self.config, self.tokenizer = config, tokenizer
        self.trace = open_rollout_trace(config)
        self.progress = Progress(0, enabled=False)
        self.places: dict[str, Any] = {}
        self._generations = ValidationGenerationsLogger()

    def open(self, total_steps: int) -> None:
        """Begin the line of progress, and start the loggers."""
        keys = self.config.trainer
        self._record = open_run_record(self.config)  # of a script that drives a trainer of its own
        self.progress = Progress(total_steps, enabled=keys.progress_bar)
        self._tracking = Tracking(
            keys.project_name,
            keys.experiment_name,
            default_backend=keys.logger,
            config=typed_config(self.config).to_dict(),
        )
        self._generations = ValidationGenerationsLogger(tracking=self._tracking)
        self.places = _places(self._tracking)

    def say(self, sentence: str) -> None:
        """Tell the user, above the line of progress."""
        self.progress.say(sentence)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the numbers of a step to the loggers."""
        self._tracking.log(metrics, step=step)

    def dump(self, step: int, batch: DataProto) -> None:
        """Write the samples of a step to ``trainer.rollout_data_dir``."""
        config = self.config
        dump_batch(config.trainer.rollout_data_dir, step, batch, self.tokenizer, config.data.reward_fn_key)

    def record(self, step: int, batch: DataProto, seconds: float) -> None:
        """Give the samples of a step, which took so long, to ``rollout.trace``."""
        wants_text = self.config.actor_rollout_ref.rollout.trace.token2text
        decode = self.tokenizer.batch_decode if wants_text else None
        self.trace.log(step, sample_records(batch, step, seconds, reward_columns(batch), decode))

    def show(self, step: int, samples: Sequence[tuple[str, str, float]]) -> None:
        """Show ``trainer.log_val_generations`` of the samples in the loggers, the same prompts every time."""
        if count := self.config.trainer.log_val_generations:
            self._generations.log(self.config.trainer.logger, shown_samples(samples, count), step)

    def close(self) -> None:
        """Finish all that is open."""
        if self.trace is not None:
            self.trace.finish()
        self._tracking.finish()
        self.progress.finish()
        if self._record is not None:
            self._record.close()


def _places(tracking: Tracking) -> dict[str, Any]:
    attributes = {"metrics": ("file", "path"), "tensorboard": ("tensorboard", "folder")}
    return {
        label: getattr(tracking.logger[name], attribute)
        for label, (name, attribute) in attributes.items()
        if name in tracking.logger
    }

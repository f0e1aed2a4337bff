"""OneStepOffTrainer: the next batch is drawn while one is trained on, with weights one training step old.

Two stages differ from `RayPPOTrainer`: prompts are read one step early, and sampling collects what was begun a step ago
and begins the next. Step k trains on responses of the weights after step k - 2, from the weights after step k - 1; the
first batch, which nothing precedes, is drawn with the newest weights. ``old_log_probs`` are computed anew at step k, so
the ratio a loss clips is that of the update; what the sampler thought is in ``rollout_log_probs``.

Source: Noukhovitch et al. 2024, Asynchronous RLHF (arXiv:2410.18252).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.checkpoint import run_state as checkpoint
from verl.data.sampler import AbstractCurriculumSampler
from verl.protocol import DataProto
from verl.trainer.buffer.disjoint import Drawing
from verl.trainer.buffer.rollout_buffer import join_generated
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


@dataclass
class Ahead:
    """A batch that is being drawn for a step that has not begun."""

    step: int
    prompts: DataProto
    rows: DataProto
    """The prompts, n times each."""
    drawing: Drawing


class OneStepOffTrainer(RayPPOTrainer):
    """One-step-off-policy training, as ``rollout.async_ratio=1`` asks for; arguments as of ``RayPPOTrainer``."""

    draws_ahead = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.train_dataloader.sampler, AbstractCurriculumSampler):
            raise ValueError(
                f"actor_rollout_ref.rollout.async_ratio=1 with the curriculum sampler "
                f"{type(self.train_dataloader.sampler).__name__}: prompts are read before it has heard of the last "
                "batch. Set async_ratio=0, or leave data.sampler alone."
            )
        self.ahead: Ahead | None = None
        self._saved: tuple[DataProto, dict[str, int]] | None = None

    # -- the two stages ------------------------------------------------------------------------------------------------

    def prompt_batches(self) -> Iterator[tuple[int, DataProto]]:
        """As ever, but each batch was read, and its responses begun, a step before."""
        self._coming = self.read_prompts()
        self.draw_next(steps_done=self.global_steps)
        while self.ahead is not None:
            self.begin_step(self.ahead.step)
            yield self.ahead.step, self.ahead.prompts

    def sample(self, prompts: DataProto, n: int) -> DataProto:
        """Collect the responses begun a step ago, and begin those of the next step with the newest weights."""
        ahead = self.ahead
        with self.timed("gen_wait"):
            generated = ahead.drawing.result()
        self.metrics["rollout/staleness"] = self.global_steps - 1 - ahead.drawing.steps_done
        if seconds := generated.meta_info.get("timing", {}).get("generate_sequences"):
            self.metrics["perf/rollout_overlap"] = max(0.0, 1 - self.timing["gen_wait"] / seconds)
        self.draw_next(steps_done=self.global_steps - 1)
        return join_generated(ahead.rows, generated)

    def draw_next(self, steps_done: int) -> None:
        """Read the next prompts and begin their responses; ``ahead`` is None if no step is left."""
        self._position = self.train_dataloader.state_dict()
        step, prompts = next(self._coming, (None, None))
        if step is None:
            self.ahead = None
            return
        n = self.config.actor_rollout_ref.rollout.n
        rows = prompts.repeat(n, interleave=True)
        request = self.rollout_request(rows, n, step)
        drawing = self._restored(step, len(rows))
        if drawing is None:
            drawing = self.sampler.start(request, steps_done)
            self.timing.update(drawing.timing)
        self.ahead = Ahead(step, prompts, rows, drawing)

    # -- checkpoints: responses of weights that are gone are kept ------------------------------------------------------

    def prompts_position(self) -> dict[str, Any]:
        """Before the prompts that were read early: a run that resumes reads them again."""
        return self._position

    def responses_ahead(self) -> tuple[DataProto, dict[str, int]] | None:
        """What was drawn for the next step; waits for it."""
        if self.ahead is None:
            return None
        drawing = self.ahead.drawing
        facts = {"step": self.ahead.step, "version": drawing.version, "steps_done": drawing.steps_done}
        return drawing.result(), facts

    def load_checkpoint(self) -> None:
        """As ever; responses saved for the next step are trained on as if the run had never stopped."""
        folder = checkpoint.folder_to_resume(self.config.trainer)
        self._saved = checkpoint.load_ahead(folder) if folder is not None else None
        super().load_checkpoint()

    def _restored(self, step: int, rows: int) -> Drawing | None:
        """The saved responses, if they are those of ``step``; they are used once."""
        saved, self._saved = self._saved, None
        if saved is None:
            return None
        responses, facts = saved
        if facts["step"] != step or len(responses) != rows:
            self.say(f"step {step} asks for other responses than were saved: they are drawn anew.")
            return None
        return Drawing(facts["version"], facts["steps_done"], finished=responses)

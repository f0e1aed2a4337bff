"""Rules of a run that learns from given examples: gradient, loss, validation loss.

What a rule looks at is a metric of the step (`verl.trainer.health`). A gradient that is not finite is counted by
``trainer.nonfinite_tolerance``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median

from verl.trainer.health import WINDOW, Cause, Health

_LEAST_LOSS = 0.1
"""Nats: a jump that ends below is no harm."""


class ExamplesHealth(Health):
    """`Health` of supervised fine-tuning and of what learns from examples as it does."""

    def causes(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Yield every cause for which a step taught nothing, or the next will."""
        yield from self._gradient(metrics)
        yield from self._loss(metrics)
        yield from self._validation(metrics)

    def _gradient(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        if metrics.get("train/grad_norm") == 0:
            yield Cause(
                "no_gradient",
                "no gradient",
                "train/grad_norm was 0, so nothing was learned: look whether the examples of a step have tokens to "
                "learn (train/learned_tokens), and whether anything of the model is trained",
            )
        spread, past, now = self.limits.constant_loss, self._past.get("loss"), metrics.get("train/loss")
        if spread is not None and past and now is not None and abs(now - past[-1]) <= spread:
            yield Cause(
                "constant_loss",
                "constant loss",
                f"the loss ({now:.4g}) was that of the step before: either every step has the same examples (duplicate "
                "rows in data.train_files, a data.custom_cls that returns one row), or nothing moves the weights "
                "(train/lr)",
            )

    def _loss(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        factor, usual, now = self.limits.loss_jump, list(self._past.get("loss", ())), metrics.get("train/loss")
        if factor is None or now is None or len(usual) < WINDOW:
            return
        before = abs(median(usual))
        if now > max(_LEAST_LOSS, factor * before):
            yield Cause(
                "loss_jump",
                "the loss jumped",
                f"train/loss jumped to {now:.3g}, where {before:.3g} was usual in the {len(usual)} steps before: look "
                "at the examples of this step (other language, other format, cut texts) and at train/grad_norm; lower "
                "optim.lr or optim.clip_grad, or go back to a checkpoint before it",
                is_trend=True,
            )

    def _validation(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        factor, past, now = self.limits.val_loss, self._past.get("validation", ()), metrics.get("val/loss")
        if factor is None or now is None:
            return
        if not math.isfinite(now):
            yield Cause("val_loss", "validation is not finite", f"val/loss was {now}: lower optim.lr", is_trend=True)
        elif past and now > factor * (best := min(past)) > 0:
            yield Cause(
                "val_loss",
                "validation rises",
                f"val/loss rose to {now:.4g}, where {best:.4g} was the least so far: the training examples are being "
                "learned by heart. Take the checkpoint with the least val/loss (trainer.save_freq, trainer.test_freq), "
                "and fewer trainer.total_epochs, a lower optim.lr or more examples",
                is_trend=True,
            )

    def remember(self, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Loss and validation loss."""
        return {"loss": metrics.get("train/loss"), "validation": metrics.get("val/loss")}

"""A sequence classifier on SGLang, in processes of its own: its embedding mode, whose embedding is the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from verl.models.heads import stored_shapes
from verl.workers.rollout.classifier import Classifier
from verl.workers.rollout.sglang.rollout import SGLangRollout


class SGLangClassifier(Classifier, SGLangRollout):
    """Scores texts with SGLang."""

    @property
    def kind(self) -> Mapping[str, Any]:
        sleeps = self.device.type == "cuda" and self.config.free_cache_engine
        return {"is_embedding": True} | ({"enable_weights_cpu_backup": True} if sleeps else {})

    def _start(self) -> None:
        super()._start()
        if "score.bias" not in (stored_shapes(self.spec.folder) or ()):
            self._on_leader(lambda: self.call_schedulers("zero_head_bias"))
        if self.config.free_cache_engine:
            self.sleep()

    def _change_memory(self, action: Literal["release", "resume"], tags: list[str]) -> None:
        on_cpu = self.device.type == "cpu"
        super()._change_memory(action, [tag for tag in tags if tag != "weights" or not on_cpu])

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        outputs = self._on_leader(lambda: self.engine.call("classify", [list(row) for row in rows]))
        self.monitor.tick()
        return [float(score) for [score] in outputs]

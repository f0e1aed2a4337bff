"""What is added to a save and a load by looking at what is saved: finite weights, checksums, exports read again.

``python -m benchmarks.checkpoints [--hidden 512] [--save]``: a random model of one process with Adam, on a disk in
memory (``/dev/shm``), so that the disk hides nothing; each save and load with the parts in question, and without. CPU
milliseconds of this process, and what they are of a save or load without.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import block_cost, report
from tests.support.losses import optim_section
from verl.checkpoint import checkpoint_manager, hf_folder, manifest, rank_files
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.models.loader import ModelSpec
from verl.utils.tiny_model import make_tiny_model
from verl.workers.engine import build_engine


class _NoHash:
    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


@contextmanager
def without(*names: tuple[Any, str, Any]) -> Iterator[None]:
    """Put ``value`` in the place of each ``module.name`` in this block."""
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


PARTS: dict[str, list[tuple[Any, str, Any]]] = {
    "checksums": [(manifest.xxhash, "xxh3_128", lambda *_: _NoHash())],
    "finite weights": [(checkpoint_manager, "check_finite", lambda *_: None)],
    "export read again": [(hf_folder, "_check_written", lambda *_: None)],
}


def rows_of(folder: Path, hidden: int) -> list[dict[str, Any]]:
    model = make_tiny_model(folder / "model", hidden_size=hidden, num_hidden_layers=12, vocab_size=32000)
    engine = build_engine("local", ModelSpec(model, compute_dtype=None), None, optim_section(), total_steps=10)
    for parameter in engine.module.parameters():  # Adam's moments are there after one step
        parameter.grad = parameter.detach().clone()
    engine.optimizer.step()
    manager = CheckpointManager(engine, save_contents=["model", "optimizer", "extra", "hf_model"])
    place = folder / "run" / "global_step_1" / "actor"

    def save() -> None:
        manager.save(place)

    def load() -> None:
        manager.load(place)

    def cost(block: Callable[[], Any]) -> float:
        return block_cost(block, repeat=5, warm_up=1)

    whole = cost(save)
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    rows: list[dict[str, Any]] = [{"parameters": parameters, "bytes": size, "save_ms": whole}]
    for name, parts in PARTS.items():
        with without(*parts):
            left = cost(save)
        rows.append({"of a save": name, "ms": whole - left, "share": (whole - left) / left})
    save()
    read = cost(load)
    with without((CheckpointManager, "_compare", lambda *_: ({}, {}))):
        left = cost(load)
    rows.append({"of a load": "checksums", "ms": read - left, "share": (read - left) / left, "load_ms": read})
    files, weights = _files(place), engine.state(["model"])["model"]
    hashing = cost(lambda: [manifest.digest(path) for path in files])
    checking = cost(lambda: rank_files.check_finite(weights))
    rows.append({"GB/s of checksums": size / 1e6 / hashing, "GB/s of finite": 4 * parameters / 1e6 / checking})
    return rows


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        report("checkpoints", rows_of(folder, options.hidden))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

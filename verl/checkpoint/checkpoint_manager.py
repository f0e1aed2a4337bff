"""Write an engine's state to a folder and read it back, in the layout that tools of verl know:

    model_world_size_{W}_rank_{r}.pt         this rank's weights (DTensors where sharded)
    optim_world_size_{W}_rank_{r}.pt         the optimizer's state by parameter name
    extra_state_world_size_{W}_rank_{r}.pt   learning-rate schedule, random generators, version
    fsdp_config.json                         {"FSDP_version": 2, "world_size": W, "layout": how tensors are cut}
    huggingface/                             config and tokenizer; with "hf_model", weights in safetensors too
    lora_adapter/                            of a LoRA run: what is trained, in peft's format
    manifest.json                            size and checksum of all of these; compared when they are read

An engine with a format of its own, as strategy=megatron, writes ``dist_ckpt/`` in place of the first two.

A LoRA run's model file holds what is trained on top of ``model.path``; the weights of ``huggingface/`` are merged.

A folder appears under its name only when all ranks have written all of it. It is read by any number of ranks, however
these cut their tensors. Knows an engine by ``state``, ``load_state``, ``layout`` and ``weights``; knows no training
loop.
"""

import hashlib
import logging
import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.checkpoint import rank_files
from verl.checkpoint.hf_folder import has_weights, write_config, write_safetensors
from verl.checkpoint.manifest import (
    MANIFEST,
    TRACKER,
    DamagedCheckpoint,
    Digest,
    damaged_files,
    manifest_of,
    read_manifest,
    versions,
)
from verl.checkpoint.rank_files import check_finite, full_disk_is_said, on_host, way_back, write_file
from verl.checkpoint.shards import Joined, join_optimizer
from verl.utils.distributed import all_gather_objects, barrier, get_rank, get_world_size, is_node_leader
from verl.utils.py_functional import derive_seed

# -- The state of every random generator a training step may draw from, in types that load without running code ------


def _numpy_state(state: Mapping[str, Any]) -> tuple[str, torch.Tensor, int, int, float]:
    # words as a tensor, since torch.load(weights_only=True) refuses numpy arrays
    words = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return state["bit_generator"], words, int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])


def random_state(device: torch.device) -> dict[str, Any]:
    """State of torch's, numpy's and Python's generators; with CUDA, of the current device's too."""
    numpy_state = _numpy_state(np.random.get_state(legacy=False))
    state = {"cpu": torch.get_rng_state(), "numpy": numpy_state, "random": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator to a ``state`` from `random_state`."""
    torch.set_rng_state(state["cpu"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def new_random_state(saved: dict[str, Any], rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Generators of a rank that the run had not before: seeded from the ``saved`` state of another and its place.

    The same for the same three, so resuming twice gives the same numbers.
    """
    digest = hashlib.blake2b(saved["cpu"].numpy().tobytes()).hexdigest()
    seed = derive_seed("new rank", digest, rank, world_size)
    state = {
        "cpu": torch.Generator().manual_seed(seed).get_state(),
        "numpy": _numpy_state(np.random.RandomState(seed % 2**32).get_state(legacy=False)),
        "random": random.Random(seed).getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return state


# -- One background call at a time; its error is raised where it is waited for ----------------------------------------
class Background:
    """One call at a time in a daemon thread: a process that ends without `wait` is not kept alive by it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work`` when the call before has ended; raises what that raised."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised again by wait()
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the call under way, if any; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


# -- A folder that appears under its name only when all ranks have written all of it ---------------------------------
def begin(final: Path) -> tuple[Path, bool]:
    """Make an empty folder to write to in place of ``final``; all ranks call it together.

    Returns:
        The folder, and whether this rank is the one to ``publish`` it.
    """
    if is_node_leader():
        final.parent.mkdir(parents=True, exist_ok=True)
    staged, leads = final.with_name(f"{final.name}.partial"), leads_its_disk(final.parent)
    if leads:
        # left by a save that was cut off
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
    barrier()
    return staged, leads


def leads_its_disk(folder: Path, group: dist.ProcessGroup | None = None) -> bool:
    """True on one of the ranks to which ``folder`` is the same place; all ranks call it together.

    Each node's leader leaves a file there, and looks which of the others' it sees.
    """
    token = f".{uuid.uuid4().hex}"
    tokens = all_gather_objects(token if is_node_leader() else None, group)
    if sum(name is not None for name in tokens) == 1:
        return is_node_leader()
    if is_node_leader():
        (folder / token).touch()
    barrier()
    # asked for by name: a listing of a network folder may be some seconds old
    seen = [rank for rank, name in enumerate(tokens) if is_node_leader() and name and (folder / name).exists()]
    barrier()
    if is_node_leader():
        (folder / token).unlink()
    # leaders that share this disk see the same tokens there, so they agree on the first of them
    return bool(seen) and seen[0] == get_rank()


def publish(staged: Path, final: Path) -> None:
    """Give ``staged`` its name, once everything in it is on the disk; what had the name is deleted."""
    for path in (*staged.rglob("*"), staged):  # folders, too: their entries are data of their own
        _flush(path)
    # two renames and no deletion between them: at every moment one whole checkpoint can be found again
    replaced = _replaced(final)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(final: Path) -> Path:
    return final.with_name(f"{final.name}.replaced")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


logger = logging.getLogger(__name__)

_ENDS = [f"{name}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP" for name in ("MLP", "SAGEMAKER")]

CONTENTS = ("model", "optimizer", "extra", "hf_model")

_SLOWEST_DISK = timedelta(hours=2)
"""Time limit of ranks that save in the background and wait for each other."""


class CheckpointManager:
    """Saves and loads one engine.

    Args:
        engine: whose state it is.
        tokenizer: saved next to the weights, or None.
        save_contents: which of ``model``, ``optimizer``, ``extra``, ``hf_model`` to write.
        load_contents: which of them to read; ``hf_model`` counts only without ``model``, which is more exact.
        in_background: ``save`` returns when model, optimizer and extra are copied to host memory; a thread writes them.

    Raises:
        ValueError: for unknown contents.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Any = None,
        save_contents: Sequence[str] = ("model", "optimizer", "extra"),
        load_contents: Sequence[str] | None = None,
        in_background: bool = False,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.save_contents = _checked("save_contents", save_contents)
        self.load_contents = _checked("load_contents", save_contents if load_contents is None else load_contents)
        self._saved: list[Path] = []
        self._verified: Path | None = None
        self._background = Background() if in_background else None
        # a group of its own: the main thread's collectives go on meanwhile
        has_group = in_background and get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=_SLOWEST_DISK) if has_group else None

    # -- save -----------------------------------------------------------------------------------------------------

    def save(self, local_path: str | os.PathLike, global_step: int = 0, max_to_keep: int | None = None) -> None:
        """Write the folder ``local_path``; all ranks call it together.

        Args:
            global_step: of the trainer, for the log only.
            max_to_keep: of the folders this manager has saved, delete all but the newest so many; None or 0: keep all.

        Raises:
            NonFiniteWeights: a weight is NaN or infinite; nothing is saved, and what was saved before stays.
        """
        self.finish_saving()
        final = Path(local_path).expanduser()
        # all ranks at once from here: each collective below has its partner on every other rank
        staged, is_publisher = begin(final)
        try:
            digests, write_later = self._write_parts(staged)
            self._write_exports(staged)
        except BaseException:
            _discard(staged, is_publisher)
            raise

        def finish() -> None:
            try:
                self._together(write_later)
                written = {name: one for rank in all_gather_objects(digests, self._group) for name, one in rank.items()}
                self._together(partial(self._publish, staged, final, global_step, written) if is_publisher else None)
            except BaseException:
                _discard(staged, is_publisher)
                raise
            logger.info("saved step %s to %s", global_step, final)
            # old folders go after the new one has its name: a run killed in between has one too many, and never none
            self._saved = [path for path in self._saved if path != final] + [final]
            if max_to_keep and max_to_keep > 0:
                old, self._saved = self._saved[:-max_to_keep], self._saved[-max_to_keep:]
                self.delete(old)

        if self._background is not None:
            self._background.start(finish)
        else:
            finish()

    def _write_parts(self, staged: Path) -> tuple[dict[str, Digest], Callable[[], None]]:
        """Write this rank's files, or copy what they will hold; returns their digests, and what is left to be done."""
        place = self.engine.topology
        later: list[tuple[Any, Path]] = []
        digests: dict[str, Digest] = {}
        buffers = {name for name, _ in self.engine.module.named_buffers()}

        def write(content: Any, path: Path) -> None:
            digests[path.name] = write_file(content, path)

        def write_later() -> None:
            for content, path in later:
                write(content, path)

        if own := self._own_parts(self.save_contents):
            with self.engine.on_device():
                self._together(partial(check_finite, self.engine.model_state() if "model" in own else {}, buffers))
            self._together(partial(self.engine.write_own_format, staged / self.engine.own_format, own))
        # part by part: the whole state of a large model would not fit twice
        for part in (part for part in self.save_contents if part in rank_files.PARTS and part not in own):
            for name, content in self.engine.state([part]).items():
                path = staged / rank_files.file_name(name, place.world_size, place.rank)
                if name == "model":
                    self._together(partial(check_finite, content, buffers))
                if self._background is not None:
                    later.append((on_host(content), path))
                else:
                    self._together(partial(write, content, path))
        return digests, write_later

    def _own_parts(self, contents: Sequence[str]) -> list[str]:
        """The parts of ``contents`` that the engine writes and reads in a format of its own."""
        if getattr(self.engine, "own_format", None) is None:
            return []
        is_trained = self.engine.optimizer is not None
        return [part for part in contents if part == "model" or (part == "optimizer" and is_trained)]

    def _write_exports(self, staged: Path) -> None:
        """Write what other programs read: the Hugging Face folder, the adapter."""
        # here even in_background: gathering weights is collective, and in a thread would meet collectives of training
        self.export(staged / "huggingface", has_weights="hf_model" in self.save_contents)
        if getattr(self.engine, "has_adapter", False):
            self.engine.save_adapter(staged / "lora_adapter", is_writer=self.engine.topology.rank == 0)

    def export(self, folder: Path, has_weights: bool = True) -> None:
        """Write config and tokenizer, and whole weights; all ranks call it together."""
        dtype, is_writer = self.export_dtype(), self.engine.topology.rank == 0
        if is_writer:  # ranks on other nodes write their shards; the model folder is written once
            generates = self.engine.spec.head == "lm"
            with full_disk_is_said(folder):
                write_config(self.engine.module, folder, dtype, self.tokenizer, generates)
        if has_weights:
            write_safetensors(self.engine.weights(dtype), folder, is_writer)

    def is_saving(self) -> bool:
        """Whether the last save is still being written."""
        return self._background is not None and not self._background.is_done()

    def finish_saving(self) -> None:
        """Wait until the last save is complete; raises what went wrong in it."""
        if self._background is not None:
            self._background.wait()

    def _together(self, work: Callable[[], Any] | None, verb: str = "write") -> None:
        """Do ``work`` and wait for all ranks to have done theirs; raises on all ranks if one failed.

        Args:
            verb: what could not be done, for the error on the other ranks.
        """
        error: Exception | None = None
        try:
            if work is not None:
                work()
        except Exception as problem:
            error = problem
        # on failure as well: a rank that raised before it would leave the others waiting here
        errors = all_gather_objects(None if error is None else str(error), self._group)
        if error is not None:
            raise error
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            raise RuntimeError(f"rank {rank} could not {verb} its part of the checkpoint: {text}")

    def _publish(self, staged: Path, final: Path, step: int, written: Mapping[str, Digest]) -> None:
        rank_files.write_layout(staged, self.engine.topology.world_size, self.engine.layout)
        about = {"step": step, "world_size": self.engine.topology.world_size, "versions": versions()}
        files = [path for path in staged.rglob("*") if path.is_file()]
        (staged / MANIFEST).write_text(manifest_of(staged, files, about, written), encoding="utf-8")
        publish(staged, final)

    def delete(self, folders: Sequence[str | os.PathLike]) -> None:
        """Delete the checkpoints in ``folders``, on every node; those that do not exist are no error."""
        if is_node_leader():
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def export_dtype(self) -> torch.dtype:
        """The precision the model came in, which its Hugging Face copy keeps."""
        return self.engine.source_dtype or torch.float32

    # -- load -----------------------------------------------------------------------------------------------------

    def load(self, local_path: str | os.PathLike, del_after: bool = False) -> str:
        """Continue from the folder ``local_path``; all ranks call it together.

        Args:
            del_after: delete the files once every rank has read them.

        Returns:
            A remark for the user where the files were cut for another set of ranks; empty where they were not.

        Raises:
            FileNotFoundError: if a file is missing, with what is there instead.
            DamagedCheckpoint: if a file is not what was saved; nothing was loaded.
            ValueError: if a file is of another model.
        """
        self.finish_saving()
        folder = self._found(local_path)
        # a caller that had every rank `verify` it has decided already
        damage = {} if self._verified == folder else self._compare(folder)[0]
        self._verified = None
        self._together(partial(_raise_damage, folder, damage) if damage else None, "verify")
        own = self._own_parts(self.load_contents)
        parts = [part for part in self.load_contents if part in rank_files.PARTS]
        if own:
            self._check_own_format(folder, own)
            self.engine.read_own_format(folder / self.engine.own_format, own)
        state = {part: self._read(folder, part) for part in parts if part not in own}
        if "model" in state and not (folder / MANIFEST).exists():  # of another program, which may not have looked
            buffers = {name for name, _ in self.engine.module.named_buffers()}
            self._together(partial(check_finite, state["model"], buffers, folder), "load")
        if "hf_model" in self.load_contents and "model" not in parts:  # weights in the precision they were exported in
            source = folder / "huggingface"
            if self.engine.topology.rank == 0 and not has_weights(source):
                raise FileNotFoundError(
                    f"checkpoint folder {folder} was saved without 'hf_model': {source} has no weights. Put model in "
                    f"place of hf_model in checkpoint.load_contents, or give a checkpoint whose save_contents had "
                    f"hf_model"
                )
            state["model"] = self.engine.pretrained_state(source)
        self.engine.load_state(state)
        # before the barrier, behind which the folder may be deleted
        remark = self._how_it_was_read(folder, parts)
        barrier()
        if del_after and is_node_leader():
            shutil.rmtree(folder, ignore_errors=True)
        return remark

    def verify(self, local_path: str | os.PathLike) -> tuple[dict[str, str], dict[str, str]]:
        """Compare the files of a checkpoint with its manifest, before they are loaded; all ranks call it together.

        A folder without a manifest is taken as it is.

        Returns:
            File -> what is wrong with it, of this rank's share of the files that `load` reads; and of the others.
        """
        folder = self._found(local_path)
        damage, unread = self._compare(folder) if folder.is_dir() else ({".": "is missing"}, {})
        self._verified = None if damage else folder
        return damage, unread

    def _found(self, local_path: str | os.PathLike) -> Path:
        folder = Path(local_path).expanduser()
        replaced = _replaced(folder)
        if is_node_leader() and not folder.exists() and replaced.exists():
            replaced.rename(folder)  # a save was cut off between its two renames
        barrier()
        return folder

    def _compare(self, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
        try:
            manifest = read_manifest(folder)
        except DamagedCheckpoint as error:
            return {MANIFEST: str(error)}, {}
        if manifest is None:
            return {}, {}
        place, contents = self.engine.topology, self.load_contents
        is_cut_alike = manifest.about.get("world_size") == place.world_size
        mine = set()
        for at, name in enumerate(sorted(manifest.files)):
            part, rank = rank_files.part_and_rank(name) or (None, None)
            if part is not None and part not in contents:
                continue
            # one file a rank, and the rest of each disk by one; files of other ranks lie in one folder, and go in turn
            alone = is_node_leader() if rank is None else rank == place.rank
            if alone if is_cut_alike else at % place.world_size == place.rank:
                mine.add(name)
        wrong = damaged_files(folder, manifest, mine.__contains__)
        exports = ("huggingface/", "lora_adapter/")
        is_export_read = "hf_model" in contents and "model" not in contents
        unread = {name for name in wrong if name.startswith(exports) and not is_export_read}
        return {name: wrong[name] for name in wrong if name not in unread}, {name: wrong[name] for name in unread}

    def _read(self, folder: Path, part: str) -> Any:
        place, size = self.engine.topology, rank_files.saved_world_size(folder, part)
        own = folder / rank_files.file_name(part, size, place.rank)
        if part == "extra":
            if place.rank < size:
                return rank_files.open_file(own)
            # schedule and version are the same on all ranks; random generators are each rank's own
            extra = rank_files.open_file(folder / rank_files.file_name(part, size, 0))
            return {**extra, "rng": new_random_state(extra["rng"], place.rank, place.world_size, self.engine.device)}
        layout = self.engine.layout
        # cut alike: each rank reads its own file alone; else each maps all files, and joins one tensor at a time
        if size == place.world_size and layout is not None and layout == rank_files.saved_layout(folder):
            return rank_files.open_file(own)
        ranks = [rank_files.open_file(path, mmap=True) for path in rank_files.files_of_all_ranks(folder, part)]
        return Joined(ranks) if part == "model" else join_optimizer(ranks)

    def _check_own_format(self, folder: Path, parts: Sequence[str]) -> None:
        if not (folder / self.engine.own_format).is_dir():
            there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else ""
            raise FileNotFoundError(
                f"checkpoint folder {folder} has no {self.engine.own_format}/ with {' and '.join(parts)}, but "
                f"{there or 'nothing'}. Resume with the strategy that saved it, or, if it was saved with hf_model, set "
                f"checkpoint.load_contents=[hf_model]. {way_back(folder)}"
            )

    def _how_it_was_read(self, folder: Path, parts: Sequence[str]) -> str:
        # in a format of its own the engine leaves no files that tell the number of ranks
        counted = [part for part in parts if part not in self._own_parts(parts)]
        if not counted:
            return ""
        size, here = rank_files.saved_world_size(folder, counted[0]), self.engine.topology.world_size
        layout = rank_files.saved_layout(folder)
        if size != here:
            new = f", of which those after the first {size} begin new random numbers" if here > size else ""
            return f"saved by {size} rank{'s' if size != 1 else ''}, read by {here}{new}"
        return "" if layout in (None, self.engine.layout) else f"saved as {layout}, read as {self.engine.layout}"


def _discard(staged: Path, is_publisher: bool) -> None:
    """Delete what a save that failed has written: the room it takes may be what was missing."""
    if is_publisher:
        shutil.rmtree(staged, ignore_errors=True)


def _raise_damage(folder: Path, damage: Mapping[str, str]) -> None:
    name, problem = next(iter(damage.items()))
    more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
    what = problem if name == MANIFEST else f"{folder / name} {problem}"
    raise DamagedCheckpoint(f"{what}{more}. Nothing of it was loaded. {way_back(folder)}")


def get_checkpoint_tracker_filename(root_path: str | os.PathLike) -> str:
    """The file that names the newest complete step of the checkpoints under ``root_path``."""
    return os.path.join(os.path.expanduser(root_path), TRACKER)


def find_latest_ckpt_path(path: str | os.PathLike | None, directory_format: str = "global_step_{}") -> str | None:
    """The folder of the newest complete checkpoint under ``path``; None where there is none.

    Raises:
        ValueError: the tracker file holds no step number.
        FileNotFoundError: it names a folder that is not there.
    """
    if path is None or not os.path.exists(tracker := get_checkpoint_tracker_filename(path)):
        return None
    text = Path(tracker).read_text().strip()
    if not text.isdigit():
        raise ValueError(
            f"{tracker} holds {text!r}, not a step number. Correct it, or pass trainer.resume_mode=resume_path "
            f"trainer.resume_from_path=<folder>."
        )
    folder = os.path.join(os.path.expanduser(path), directory_format.format(int(text)))
    if not os.path.exists(folder):
        raise FileNotFoundError(
            f"{tracker} names step {text}, but {folder} does not exist. Pass trainer.resume_mode=resume_path with "
            f"trainer.resume_from_path, or trainer.resume_mode=disable to start from the beginning."
        )
    return folder


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether the machine is taken away before another step and a save would be done; False where no time is set.

    The time stands in MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP or, for SageMaker,
    SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP, seconds since 1970.

    Args:
        max_steps_duration: seconds of the longest step so far.
        save_ckpt_duration: seconds of a save.
        redundant_time: seconds to be early.
    """
    end = next(filter(None, map(os.environ.get, _ENDS)), None)
    return end is not None and float(end) - time.time() <= max_steps_duration + save_ckpt_duration + redundant_time


def _checked(name: str, contents: Sequence[str]) -> list[str]:
    unknown = [part for part in contents if part not in CONTENTS]
    if unknown:
        raise ValueError(f"checkpoint.{name} has {unknown[0]!r}, which is none of {', '.join(CONTENTS)}")
    return list(contents)

"""Weights of a sharded checkpoint, joined over ranks, under their Hugging Face names.

Reads the files of every backend: each piece carries its own sharding. Starts no process group and no engine.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.checkpoint.hf_folder import Weights, is_weight_file, write_safetensors
from verl.checkpoint.rank_files import files_of_all_ranks, open_file
from verl.checkpoint.shards import Joined, check_names, fill
from verl.models.loader import LoRASpec, ModelSpec, empty_model, load_config, load_model
from verl.models.weight_names import checkpoint_tensors, plain_name, tied_duplicates
from verl.telemetry.progress import watched


@dataclass(frozen=True)
class Source:
    """A role's checkpoint, and the folder with its config and tokenizer."""

    local_dir: Path
    """``.../global_step_N/actor`` or ``critic``."""
    model_dir: str
    """Folder with config and tokenizer; by default ``huggingface/`` in the checkpoint."""
    trust_remote_code: bool = False
    is_value_model: bool = False
    has_own_base: bool = False
    """Whether the model below an adapter is that of ``model_dir``, rather than where the adapter says it was."""

    @classmethod
    def find(cls, local_dir: str, hf_model_path: str | None = None, **options: bool) -> Source:
        """Check the folders of a checkpoint and its model.

        Raises:
            ValueError: if one is missing or of another kind.
        """
        folder = Path(local_dir).expanduser()
        if not folder.is_dir():
            raise ValueError(
                f"--local_dir={local_dir} does not exist: give the folder of a role, .../global_step_N/actor"
            )
        inner = [name for name in ("actor", "critic") if (folder / name).is_dir()]
        if inner:
            raise ValueError(
                f"--local_dir={local_dir} holds the checkpoints of {' and '.join(inner)}, and one model is merged at a "
                f"time: give {folder / inner[0]}"
            )
        model_dir = os.path.expanduser(hf_model_path or folder / "huggingface")
        if not hf_model_path and not (folder / "huggingface" / "config.json").exists():
            raise ValueError(
                f"{model_dir} has no config.json to tell which model this is: pass --hf_model_path=<folder of the "
                f"model that the run began with>"
            )
        return cls(folder, model_dir, has_own_base=bool(hf_model_path), **options)

    def config(self) -> Any:
        """The model's Hugging Face config."""
        return load_config(ModelSpec(self.model_dir, trust_remote_code=self.trust_remote_code))

    def spec(self, path: str | None = None, lora: LoRASpec | None = None) -> ModelSpec:
        """Return the spec of the checkpoint's model."""
        architecture = (getattr(self.config(), "architectures", None) or [""])[0]
        return ModelSpec(
            path or self.model_dir,
            "value" if self.is_value_model or architecture.endswith("ForTokenClassification") else "lm",
            trust_remote_code=self.trust_remote_code,
            gradient_checkpointing=False,
            lora=lora,
        )

    def source_dtype(self) -> torch.dtype:
        """Return the dtype in the config, float32 if it has none."""
        config = self.config()
        return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32


def merged_weights(source: Source, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole weight once under its checkpoint name; only one is held, and with an adapter its base model.

    Raises:
        FileNotFoundError, ValueError: if the files are not those of all ranks of one save, or of another model.
    """
    if (source.local_dir / "dist_ckpt").is_dir():
        yield from _of_megatron(source, dtype)
        return
    ranks = [open_file(path, mmap=True) for path in files_of_all_ranks(source.local_dir, "model")]
    saved = Joined([{plain_name(name): piece for name, piece in rank.items()} for rank in ranks])
    # by name alone: looking at a tensor would join it
    if any(".lora_A." in name for name in saved):
        model, named = _with_adapter(source, saved)
    else:
        model, named = _without_adapter(source, saved)
    for name, tensor in checkpoint_tensors(model, named):
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _without_adapter(source: Source, saved: Mapping[str, Tensor]) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    # on the meta device: names and shapes, no memory
    model = empty_model(source.spec())
    duplicates = tied_duplicates(model)
    own = {plain_name(name): tensor for name, tensor in model.state_dict().items() if name not in duplicates}
    # names only: joining a tensor reads it
    check_names(own, {name: None for name in saved if name not in duplicates})

    def joined() -> Iterator[tuple[str, Tensor]]:
        for name, meta in own.items():
            tensor = saved[name]
            _check_shape(source, name, tensor, meta.shape)
            yield name, tensor

    return model, joined()


def _of_megatron(source: Source, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Read a distributed checkpoint of megatron-core, whose tensors are whole whatever ranks wrote them."""
    from verl.models.megatron.stored import StoredWeights

    spec, folder = source.spec(), source.local_dir / "dist_ckpt"
    saved = StoredWeights(folder, source.config(), "value" if spec.head == "value" else "lm")
    model = empty_model(spec)
    duplicates = tied_duplicates(model)
    own = ((name, tensor) for name, tensor in model.state_dict().items() if plain_name(name) not in duplicates)
    shapes = {name: tensor.shape for name, tensor in checkpoint_tensors(model, own)}
    check_names(shapes, saved)
    for name in saved:  # in the order of the layers, so that what is stored as one is read once
        tensor = saved[name]
        _check_shape(source, name, tensor, shapes[name])
        yield name, tensor.to(dtype)


def _check_shape(source: Source, name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} in {source.local_dir} and {tuple(shape)} by the config in "
            f"{source.model_dir}: they are different models. Pass --hf_model_path of the right one"
        )


def _with_adapter(source: Source, saved: Mapping[str, Tensor]) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """Load the base model and the saved adapter into it: the checkpoint holds only trained weights."""
    from verl.models.lora import merge_adapter

    path = source.local_dir / "lora_adapter" / "adapter_config.json"
    if not path.exists():
        raise ValueError(
            f"{source.local_dir} holds an adapter, and {path} does not exist: without rank, alpha and base model it "
            f"cannot be merged. Bring the checkpoint's lora_adapter/ back"
        )
    adapter = json.loads(path.read_text())
    lora = LoRASpec(adapter["r"], adapter["lora_alpha"], tuple(adapter["target_modules"]))
    base = source.model_dir if source.has_own_base else adapter["base_model_name_or_path"]
    model = load_model(source.spec(base, lora))
    trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    check_names(trained, saved)
    for name, parameter in trained.items():
        fill(parameter, saved[name], name)
    duplicates = tied_duplicates(model)
    state = ((name, tensor) for name, tensor in model.state_dict().items() if name not in duplicates)
    return model, merge_adapter(model, state)


# -- Write merged weights as a Hugging Face folder and verify it; compare folders; upload to the hub -----------------


class TensorInfo(NamedTuple):
    """Shape, dtype and checksum of a tensor, to verify what was written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sum: int


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Return shape, dtype and CRC-32 of a tensor."""
    # as bytes: numpy knows no bfloat16
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return TensorInfo(tuple(tensor.shape), tensor.dtype, zlib.crc32(raw.numpy().data))


def merge(source: Source, target_dir: str | os.PathLike, dtype: torch.dtype | None = None) -> dict[str, TensorInfo]:
    """Write ``source``'s model to ``target_dir`` and verify it by reading it back.

    Args:
        dtype: of the weights; None: what the model came in.

    Returns:
        The written tensors by name.

    Raises:
        RuntimeError: if the folder does not read back as it was written.
    """
    dtype, target = dtype or source.source_dtype(), Path(target_dir).expanduser()
    # written next to it: a merge that is cut off leaves no folder that looks whole
    staged = target.with_name(f"{target.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    _copy_config(Path(source.model_dir), staged, dtype)
    written: dict[str, TensorInfo] = {}

    def recorded() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in watched(merged_weights(source, dtype), "weights merged"):
            assert name not in written, f"{name} comes twice"
            written[name] = tensor_info(tensor)
            yield name, tensor

    write_safetensors(recorded(), staged)
    # before it has its name, so that a damaged one is never found under it
    _check(staged, written)
    adapter = source.local_dir / "lora_adapter"
    if adapter.is_dir():
        shutil.copytree(adapter, staged / adapter.name)
    _put_in_place(staged, target)
    return written


def _copy_config(model_dir: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy all files but the weights, with the new ``dtype`` in the config."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not is_weight_file(path):
            shutil.copy(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # its older name; two of them could disagree
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _check(folder: Path, written: dict[str, TensorInfo]) -> None:
    weights = Weights(folder)
    wrong = sorted(written.keys() ^ set(weights.names()))
    wrong += [name for name in written if name not in wrong and tensor_info(weights[name]) != written[name]]
    if wrong:
        raise RuntimeError(
            f"{folder} does not read back as it was written: {len(wrong)} of {len(written)} tensors differ, first "
            f"{wrong[0]}. The disk may be failing: merge to another one with --target_dir"
        )


def _put_in_place(staged: Path, target: Path) -> None:
    if not target.exists():
        staged.rename(target)
        return
    for path in target.iterdir():  # weights of an earlier merge would be read together with these
        if is_weight_file(path):
            path.unlink()
    # os.replace moves each file: both folders lie on one disk
    shutil.copytree(staged, target, dirs_exist_ok=True, copy_function=os.replace)
    shutil.rmtree(staged)


def compare(source: Source, test_hf_dir: str | os.PathLike) -> list[str]:
    """Return the differences between ``source``'s merged weights and a Hugging Face folder; empty if none.

    Numbers may differ by one rounding in the precision of ``test_hf_dir``.
    """
    reference = Weights(Path(test_hf_dir).expanduser())
    left, differences = set(reference.names()), []
    for name, tensor in merged_weights(source, source.source_dtype()):
        if name not in left:
            differences.append(f"{name}: not in {test_hf_dir}")
            continue
        left.remove(name)
        differences += _difference(name, tensor, reference[name])
    return differences + [f"{name}: only in {test_hf_dir}" for name in sorted(left)]


def _difference(name: str, ours: Tensor, theirs: Tensor) -> list[str]:
    if ours.shape != theirs.shape:
        return [f"{name}: shape {tuple(ours.shape)}, there {tuple(theirs.shape)}"]
    if not theirs.is_floating_point():
        return [] if torch.equal(ours, theirs) else [f"{name}: other numbers"]
    # saved in one precision and merged in another: the coarser one decides
    rounding = max(torch.finfo(dtype).eps for dtype in (ours.dtype, theirs.dtype))
    ours, theirs = ours.float(), theirs.float()
    allowed = rounding * theirs.abs().max() if theirs.numel() else 0.0
    # numbers near 0 have no relative precision: for them an eighth of a rounding of the largest
    if torch.allclose(ours, theirs, rtol=2 * rounding, atol=float(allowed) / 8, equal_nan=True):
        return []
    return [f"{name}: numbers differ by up to {(ours - theirs).abs().max():.3g}"]


def upload(folder: str | os.PathLike, repository: str, private: bool) -> str:
    """Upload ``folder`` to the Hugging Face hub; return its URL."""
    from huggingface_hub import HfApi

    hub = HfApi()
    place = hub.create_repo(repository, private=private, exist_ok=True)
    hub.upload_folder(folder_path=str(folder), repo_id=place.repo_id)
    return str(place)

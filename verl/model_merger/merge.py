"""Write merged weights as a Hugging Face folder and verify it; compare folders; upload to the hub."""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from verl.checkpoint.hf_folder import Weights, is_weight_file, write_safetensors
from verl.model_merger.merged import Source, merged_weights


class TensorInfo(NamedTuple):
    """Shape, dtype and checksum of a tensor, to verify what was written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sum: int


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Return shape, dtype and CRC-32 of a tensor."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return TensorInfo(tuple(tensor.shape), tensor.dtype, zlib.crc32(raw.numpy()))


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
    staged = target.with_name(f"{target.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    _copy_config(Path(source.model_dir), staged, dtype)
    written: dict[str, TensorInfo] = {}
    write_safetensors(_recorded(merged_weights(source, dtype), written), staged)
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
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _recorded(named: Iterable[tuple[str, Tensor]], written: dict[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        assert name not in written, f"{name} comes twice"
        written[name] = tensor_info(tensor)
        yield name, tensor


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
    rounding = max(torch.finfo(dtype).eps for dtype in (ours.dtype, theirs.dtype))
    ours, theirs = ours.float(), theirs.float()
    allowed = rounding * theirs.abs().max() if theirs.numel() else 0.0
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

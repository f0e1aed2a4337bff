"""How a sharded engine gets its weights: each rank reads its slices from the files, or rank 0 reads and hands out."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_model
from verl.models.loader import ModelSpec, load_model
from verl.utils import fs
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.fsdp1 import FSDP1Engine

BACKENDS = [FSDPEngine, FSDP1Engine]
FAMILIES = {"qwen2": {}, "mixtral": {"num_local_experts": 4}, "gemma2": {"tie_word_embeddings": False}}


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the storages of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = max(self.storages.get(storage._cdata, 0), storage.nbytes())
        return result


def _start(backend, spec):
    """Folders read by this rank; parameters that differ; buffers by name; the largest tensor made."""
    read = []
    load = PreTrainedModel.from_pretrained.__func__

    def noted(cls, folder, *args, **kwargs):
        read.append(str(folder))
        return load(cls, folder, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(noted)
    made = Largest()

    class Watched(backend):
        def _sharded_model(self, *args, **kwargs):
            with made:
                return super()._sharded_model(*args, **kwargs)

    engine = Watched(spec)
    PreTrainedModel.from_pretrained = classmethod(load)
    expected = load_model(spec, dtype=spec.compute_torch_dtype)
    whole = dict(expected.named_parameters())
    names = set(whole)
    odd = []
    for name, tensor in engine.full_tensors(None, ()):
        names.discard(name)
        if name in whole and not torch.equal(tensor, whole[name]):
            odd.append(name)
    buffers = dict(expected.named_buffers())
    for name, buffer in engine.module.named_buffers():
        name = name.replace("_fsdp_wrapped_module.", "")
        if buffer.dtype != buffers[name].dtype or not torch.equal(buffer, buffers[name]):
            odd.append(name)
    largest = max(tensor.numel() * tensor.element_size() for tensor in whole.values())
    return dist.get_rank(), read, odd, sorted(names), max(made.storages.values()), largest, _bytes(expected)


def _bytes(model):
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family, dtype", [*((family, "fp32") for family in FAMILIES), ("qwen2", "bf16")])
def test_no_rank_loads_the_model_and_all_have_it(tmp_path, backend, family, dtype):
    folder = make_tiny_model(tmp_path, family, num_hidden_layers=4, **FAMILIES[family])
    for _, read, odd, missing, made, largest, total in run_ranks(
        2, _start, backend, ModelSpec(folder, compute_dtype=dtype)
    ):
        assert not read and not odd and not missing
        # no rank holds more at once than a tensor, or in FSDP1 a unit
        assert made <= (largest if backend is FSDPEngine else total / 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0_reads_what_can_only_be_loaded_whole(tmp_path, backend):
    folder = make_tiny_model(tmp_path, "qwen2")
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    for rank, read, odd, missing, *_ in run_ranks(2, _start, backend, ModelSpec(folder, compute_dtype="fp32")):
        assert read == ([folder] if rank == 0 else [])
        assert not odd and not missing


def _refusals(nan, torn):
    def refusal(folder):
        with pytest.raises(ValueError) as caught:
            FSDPEngine(ModelSpec(folder))
        return str(caught.value)

    return refusal(nan), refusal(torn)


def test_every_rank_names_the_weight_that_one_refuses(tmp_path):
    for name in ("nan", "torn"):
        make_tiny_model(tmp_path / name)
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["model.norm.weight"][-1] = float("nan")  # a number of the last rank
    save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    with open(tmp_path / "torn" / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(file.name) - 4)
    for nan, torn in run_ranks(2, _refusals, *(str(tmp_path / name) for name in ("nan", "torn"))):
        assert "model.norm.weight has 1 NaN and 0 infinite of 32 numbers" in nan
        assert "model.safetensors ends within" in torn


def _start_from_shared_memory(folder, root):
    fs.SHM_ROOT = root
    copies, copy = [], fs._write_whole

    def slowly(target, write):
        copies.append(target)
        assert not os.path.exists(target)
        copy(target, write)

    fs._write_whole = slowly
    spec = ModelSpec(folder, compute_dtype="fp32", use_shm=True)
    engine = FSDPEngine(spec)
    return len(copies), spec.folder, {name: tensor.clone() for name, tensor in engine.weights()}


def test_ranks_share_one_copy_in_shared_memory(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    results = run_ranks(2, _start_from_shared_memory, folder, str(tmp_path / "shm"))
    assert sum(copies for copies, _, _ in results) == 1
    whole = dict(load_model(ModelSpec(folder)).named_parameters())
    for _, copy, weights in results:
        assert copy.startswith(str(tmp_path / "shm")) and os.path.basename(copy) == "model"
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights.items())

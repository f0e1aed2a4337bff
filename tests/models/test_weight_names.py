import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny_models import make_tiny_model
from verl.models.loader import ModelSpec, load_model
from verl.models.weight_names import checkpoint_tensors, plain_name, tied_duplicates


@pytest.mark.parametrize(
    "family, changes",
    [
        ("qwen2", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_names_and_tensors_are_those_of_the_checkpoint(tmp_path, family, changes):
    make_tiny_model(tmp_path, family, **changes)
    model = load_model(ModelSpec(str(tmp_path)))
    duplicates = tied_duplicates(model)
    named = ((name, tensor) for name, tensor in model.state_dict().items() if name not in duplicates)
    ours, saved = dict(checkpoint_tensors(model, named)), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)


def test_wrappers_leave_no_trace_in_names():
    assert plain_name("_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.w") == "model.layers.0.w"

import torch

from tests.support.tiny_models import make_tiny_model
from verl.models import activation_memory as recompute
from verl.models.loader import ModelSpec, load_model


def checkpointed(model):
    return {module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing")}


def test_small_micro_batches_keep_their_activations(tmp_path, monkeypatch):
    make_tiny_model(tmp_path)
    model = load_model(ModelSpec(str(tmp_path)))
    per_token = recompute.activation_bytes(model)
    assert per_token == 2 * (12 * 64 + 4 * 128) * 4
    monkeypatch.setattr(recompute, "KEEP_BELOW_BYTES", 100 * per_token)
    choice = recompute.Recompute(model, always=False)
    for tokens, expected in ((101, True), (100, False), (101, True)):
        if choice.is_on != (tokens > choice.most_kept_tokens):
            choice.switch()
        assert expected in checkpointed(model)


def test_accelerators_always_recompute(tmp_path):
    make_tiny_model(tmp_path)
    model = load_model(ModelSpec(str(tmp_path)))
    choice = recompute.Recompute(model, always=True)
    assert choice.is_on and choice.most_kept_tokens < 0
    assert True in checkpointed(model)


def test_a_model_without_checkpointing_stays_without(tmp_path):
    make_tiny_model(tmp_path)
    model = load_model(ModelSpec(str(tmp_path), gradient_checkpointing=False))
    choice = recompute.Recompute(model, always=False)
    choice.switch()
    choice.switch()
    assert checkpointed(model) == {False}


def test_the_estimate_is_near_what_autograd_keeps(tmp_path):
    make_tiny_model(tmp_path, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=32)
    model = load_model(ModelSpec(str(tmp_path), gradient_checkpointing=False)).train()
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.randint(4, 100, (2, 100)), use_cache=False)
    held = sum(size for pointer, size in kept.items() if pointer not in weights)
    assert 0.5 < 200 * recompute.activation_bytes(model) / held < 2

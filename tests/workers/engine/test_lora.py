"""Engines that train an adapter: the same numbers on every engine, nothing else moves, the base is the reference."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.images import MIXED, image_dataset, image_row, make_tiny_vl_model
from tests.support.images import make_batch as make_image_batch
from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine

SHARES = {1: [slice(0, 7)], 2: [slice(0, 2), slice(2, 7)]}
LORA = LoRASpec(rank=4, exclude_modules=("k_proj",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def engine_of(strategy, spec):
    return build_engine(strategy, spec, None, optim_section(lr=1e-2), total_steps=10, grad_clip=1.0, seed=1)


def share(engine):
    return make_batch(7, seed=5)[SHARES[engine.topology.dp_size][engine.topology.dp_rank]]


def three_steps(strategy, spec, loss, split):
    """Metrics of three steps on this rank's share, then all weights merged, those below, the adapter, and sizes."""
    engine = engine_of(strategy, spec)
    steps = [engine.train_step(share(engine), loss, split) for _ in range(3)]

    def copied(named):
        return {name: tensor.clone() for name, tensor in named}

    tensors = copied(engine.weights(torch.float32)), copied(engine.base_weights()), copied(engine.adapter_weights())
    return steps, tensors, engine.parameter_counts(), len(engine.optimizer.state)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_fsdp2_matches_the_local_engine(folder, head, monkeypatch):
    monkeypatch.setattr("verl.models.activation_memory.KEEP_BELOW_BYTES", 0)  # checkpoint in earnest
    spec = ModelSpec(folder, head, compute_dtype="fp32", gradient_checkpointing=head == "lm", lora=LORA)
    loss = value_loss() if head == "value" else ppo_loss()
    steps, tensors, sizes, states = three_steps("local", spec, loss, MicroBatching())
    results = run_ranks(2, three_steps, "fsdp2", spec, loss, MicroBatching(size=2))
    for theirs, their_tensors, *their_sizes in results:
        for one, other in zip(steps, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
        for ours, other in zip(tensors, their_tensors, strict=True):
            assert ours.keys() == other.keys()
            # AdamW divides by the size of a gradient, so rounding of the tiniest ones shows; a step is 1e-2
            assert all((tensor - other[name]).abs().max() < 1e-3 for name, tensor in ours.items())
        assert their_sizes == [sizes, states]


def seeing_steps(strategy, spec, batch, shares):
    """Metrics of two steps of a model that sees, and the adapter then."""
    engine = engine_of(strategy, spec)
    data = batch[shares[engine.topology.dp_rank]]
    steps = [engine.train_step(data, ppo_loss(), MicroBatching(size=2)) for _ in range(2)]
    return steps, {name: tensor.clone() for name, tensor in engine.adapter_weights()}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_that_sees_has_adapters_in_its_tower_unless_that_is_frozen(frozen, tmp_path):
    path = tmp_path / "images.parquet"
    pq.write_table(pa.Table.from_pylist([image_row(text, images) for text, images in MIXED]), path)
    folder = make_tiny_vl_model(tmp_path / "model", initializer_range=0.1)
    batch = make_image_batch(image_dataset(folder, str(path)))
    lora = LoRASpec(rank=4, leaves_vision_tower=frozen)
    spec = ModelSpec(folder, compute_dtype="fp32", lora=lora, freeze_vision_tower=frozen)
    steps, adapter = seeing_steps("local", spec, batch, [slice(0, 6)])
    moved = {name for name, tensor in adapter.items() if "lora_B" in name and tensor.abs().max() > 0}
    assert len(moved) == len(adapter) / 2
    assert any("visual" in name for name in moved) != frozen
    if not frozen:  # the second rank's rows have images in one micro-batch of two
        [(theirs, other), _] = run_ranks(2, seeing_steps, "fsdp2", spec, batch, [slice(0, 3), slice(3, 6)])
        for one, two in zip(steps, theirs, strict=True):
            assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
        assert all((tensor - other[name]).abs().max() < 1e-3 for name, tensor in adapter.items())


def test_bf16_compute_is_bit_equal_on_one_rank_and_keeps_the_base_in_bf16(folder):
    spec = ModelSpec(folder, compute_dtype="bf16", lora=LORA)
    steps, (merged, base, adapter), *_ = three_steps("local", spec, ppo_loss(), MicroBatching(size=3))
    [(theirs, their_tensors, *_)] = run_ranks(1, three_steps, "fsdp2", spec, ppo_loss(), MicroBatching(size=3))
    assert theirs == steps
    for ours, other in zip((merged, base, adapter), their_tensors, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in ours.items())
    assert {tensor.dtype for tensor in base.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_step_moves_the_adapter_and_nothing_below_it(folder, head):
    engine = engine_of("local", ModelSpec(folder, head, compute_dtype="fp32", lora=LORA))
    before = {name: parameter.clone() for name, parameter in engine.module.named_parameters()}
    engine.train_step(share(engine), value_loss() if head == "value" else ppo_loss())
    moved = {name for name, p in engine.module.named_parameters() if not torch.equal(p, before[name])}
    assert moved <= set(engine.parameter_names())
    assert {name.split(".")[-3] if "lora" in name else name for name in moved} >= {"lora_B"}
    assert ("score.weight" in moved) == (head == "value")
    assert all(parameter.grad is None for parameter in engine.module.parameters() if not parameter.requires_grad)
    assert len(engine.optimizer.state) == len(engine.parameter_names())


def reference_scores(strategy, spec):
    """Log-probs of a trained engine with its adapter off, and on, on this rank's share."""
    engine = engine_of(strategy, spec)
    data = share(engine)
    for _ in range(2):
        engine.train_step(data, ppo_loss())
    with engine.without_adapter():
        off = engine.infer(data, Want.LOG_PROBS).ragged("log_probs").values
    on = engine.infer(data, Want.LOG_PROBS).ragged("log_probs").values
    after = engine.train_step(data, ppo_loss())
    return off, on, after["grad_norm"]


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_without_its_adapter_the_engine_scores_as_the_base_model(folder, compute_dtype):
    base = build_engine("local", ModelSpec(folder, compute_dtype=compute_dtype))
    expected = base.infer(make_batch(7, seed=5), Want.LOG_PROBS).ragged("log_probs").values
    spec = ModelSpec(folder, compute_dtype=compute_dtype, lora=LORA)
    off, on, grad_norm = reference_scores("local", spec)
    assert torch.equal(off, expected) and (on - expected).abs().max() > 0.01 and grad_norm > 0
    if compute_dtype == "bf16":
        return
    results = run_ranks(2, reference_scores, "fsdp2", spec)
    torch.testing.assert_close(torch.cat([result[0] for result in results]), expected, rtol=0, atol=1e-5)
    assert results[0][2] == pytest.approx(grad_norm, rel=1e-4)


def test_an_engine_without_an_adapter_has_none_to_switch_off(folder):
    with pytest.raises(RuntimeError, match="no adapter to switch off"):
        build_engine("local", ModelSpec(folder)).without_adapter()


def stop_and_go_on(strategy, spec, path):
    """Metrics of a fourth step in one go, and of one after three steps, a checkpoint and a new engine."""
    engine = engine_of(strategy, spec)
    data = share(engine)
    for _ in range(3):
        engine.train_step(data, ppo_loss())
    contents = ("model", "optimizer", "extra", "hf_model")
    CheckpointManager(engine, save_contents=contents).save(path)
    weights = {name: tensor.clone() for name, tensor in engine.weights(torch.float32)}
    whole = engine.train_step(data, ppo_loss())
    again = engine_of(strategy, spec)
    CheckpointManager(again, save_contents=contents).load(path)
    return whole, again.train_step(data, ppo_loss()), weights


@pytest.mark.parametrize("strategy, ranks", [("local", 1), ("fsdp2", 2)])
def test_a_checkpoint_holds_the_adapter_and_training_goes_on_exactly(strategy, ranks, folder, tmp_path):
    spec = ModelSpec(folder, compute_dtype="fp32", lora=LORA)
    path = tmp_path / "actor"
    results = run_ranks(ranks, stop_and_go_on, strategy, spec, path)
    for whole, parts, _ in results:
        assert whole == parts
    saved = torch.load(path / f"model_world_size_{ranks}_rank_0.pt", weights_only=False)
    assert saved and all("lora_" in name for name in saved)
    merged = AutoModelForCausalLM.from_pretrained(path / "huggingface", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, path / "lora_adapter").eval()
    ids = torch.arange(4, 20).view(2, 8)
    with torch.no_grad():
        assert (theirs(ids).logits - merged(ids).logits).abs().max() < 1e-5
    state = merged.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in results[0][2].items())


def test_a_checkpoint_of_all_weights_is_not_taken_for_an_adapters(folder, tmp_path):
    CheckpointManager(engine_of("local", ModelSpec(folder, compute_dtype="fp32"))).save(tmp_path / "actor")
    engine = engine_of("local", ModelSpec(folder, compute_dtype="fp32", lora=LORA))
    with pytest.raises(ValueError, match="differ from this model"):
        CheckpointManager(engine).load(tmp_path / "actor")

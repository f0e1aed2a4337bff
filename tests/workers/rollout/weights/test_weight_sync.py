import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.rollout.conftest import rollout_config, weights_of
from verl.workers.rollout.base import Request, SamplingParams, StaleWeightsError, WeightSyncError
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.canary import (
    CanaryError,
    canary_prompts,
    compare_canaries,
    generate_canary,
    rounding_tolerance,
)
from verl.workers.rollout.weights.load import NO_MAP, WeightLoad
from verl.workers.rollout.weights.sync import LANES, buckets, checksum, compare_memory, mixed_sum, sync_weights

NAME = "model.layers.1.mlp.up_proj.weight"


class NoisyLine(HFRollout):
    """A rollout behind a line that changes, loses or adds tensors."""

    def update_weights(self, version, buckets):
        def on_the_way():
            for bucket in buckets:
                yield [pair for name, tensor in bucket for pair in self.noise(name, tensor)]

        return super().update_weights(version, on_the_way())


def noisy(model_folder, noise):
    rollout = NoisyLine(model_folder(), rollout_config())
    rollout.noise = noise
    rollout.wake()
    return rollout


def only(change):
    return lambda name, tensor: change(name, tensor.clone()) if name == NAME else [(name, tensor)]


def flip_a_bit(name, tensor):
    tensor.view(torch.int32)[5, 7] ^= 1
    return [(name, tensor)]


def swap_rows(name, tensor):
    return [(name, tensor[[1, 0, *range(2, len(tensor))]])]


FAULTS = {
    "a flipped bit": (only(flip_a_bit), "not what was sent"),
    "swapped rows": (only(swap_rows), "not what was sent"),
    "zeros": (only(lambda name, tensor: [(name, torch.zeros_like(tensor))]), "not what was sent"),
    "rounding": (only(lambda name, tensor: [(name, tensor.bfloat16())]), "not what was sent"),
    "a lost tensor": (only(lambda name, tensor: []), "ended without"),
    "a transposed tensor": (only(lambda name, tensor: [(name, tensor.T)]), r"shape \(64, 128\).*has \(128, 64\)"),
    "a flat tensor": (only(lambda name, tensor: [(name, tensor.view(-1))]), r"shape \(8192,\)"),
    "a tensor sent twice": (only(lambda name, tensor: [(name, tensor)] * 2), "sent twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_caught_with_the_tensors_name(fault, model_folder, reference):
    noise, message = FAULTS[fault]
    rollout = noisy(model_folder, noise)
    with pytest.raises(WeightSyncError, match=message) as caught:
        sync_weights(weights_of(reference()), rollout, version=3)
    assert NAME in str(caught.value)
    with pytest.raises(StaleWeightsError):
        rollout.generate([Request((5,), SamplingParams(1))], expect_version=3)
    rollout.noise = lambda name, tensor: [(name, tensor)]
    sync_weights(weights_of(reference()), rollout, version=3)
    assert rollout.version == 3


def test_a_tensor_exchanged_with_its_neighbour_is_caught(model_folder, reference):
    swapped = {
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate_proj.weight": "model.layers.0.mlp.up_proj.weight",
    }
    rollout = noisy(model_folder, lambda name, tensor: [(swapped.get(name, name), tensor.clone())])
    with pytest.raises(WeightSyncError, match="layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight"):
        sync_weights(weights_of(reference()), rollout, version=3)


def test_an_unknown_name_is_refused(model_folder, reference):
    rollout = noisy(model_folder, lambda name, tensor: [(name.replace("up_proj", "upproj"), tensor)])
    with pytest.raises(WeightSyncError, match="upproj.weight was sent, but the rollout's Qwen2ForCausalLM has no such"):
        sync_weights(weights_of(reference()), rollout, version=3)


def test_a_failing_sender_leaves_the_rollout_without_a_version(synced, reference):
    def breaks_off():
        yield next(weights_of(reference()))
        raise RuntimeError("lost a rank")

    rollout = synced()
    with pytest.raises(RuntimeError, match="lost a rank"):
        sync_weights(breaks_off(), rollout, version=2)
    assert rollout.version is None


def test_weights_cannot_reach_a_sleeping_rollout(model_folder, reference):
    with pytest.raises(WeightSyncError, match="asleep. Wake it first"):
        sync_weights(weights_of(reference()), HFRollout(model_folder(), rollout_config()), version=1)


@pytest.mark.parametrize("name", ["qwen2", "llama_untied", "qwen3_moe", "gemma3_window_5"])
def test_the_receipt_lists_every_tensor_that_was_sent(name, synced, model_folder, reference):
    rollout = synced(name)
    sent = dict(weights_of(reference(name)))
    receipt = sync_weights(sent.items(), rollout, version=4)
    assert receipt.version == rollout.version == 4
    assert receipt.checksums == {name: checksum(tensor) for name, tensor in sent.items()}
    assert receipt.num_bytes == sum(tensor.nbytes for tensor in sent.values())


def test_tied_weights_may_come_under_either_name_or_both(synced, reference):
    rollout = synced()
    sent = dict(weights_of(reference()))
    embedding = sent["model.embed_tokens.weight"]
    sync_weights((sent | {"lm_head.weight": embedding}).items(), rollout, version=2)
    other = {name: tensor for name, tensor in sent.items() if "embed" not in name} | {"lm_head.weight": embedding}
    sync_weights(other.items(), rollout, version=3)
    with pytest.raises(WeightSyncError, match="model.embed_tokens.weight"):
        sync_weights((sent | {"lm_head.weight": embedding + 1}).items(), rollout, version=4)


def test_floats_are_cast_to_what_the_rollout_holds(synced, reference):
    rollout = synced(dtype="bfloat16")
    sync_weights(weights_of(reference()), rollout, version=2)
    for name, tensor in weights_of(reference(), torch.bfloat16):
        assert torch.equal(dict(rollout.model.state_dict())[name], tensor)


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 40_000, 1 << 30])
def test_a_sync_keeps_at_most_one_bucket_alive(bucket_bytes, synced, reference):
    alive, peak = weakref.WeakSet(), 0

    class LiveTensors:
        def __iter__(self):
            nonlocal peak
            for name, tensor in reference().state_dict().items():
                if name != "lm_head.weight":
                    tensor = tensor.clone()
                    alive.add(tensor)
                    peak = max(peak, sum(t.nbytes for t in alive))
                    yield name, tensor
                    del tensor

    sync_weights(LiveTensors(), synced(), version=2, bucket_bytes=bucket_bytes)
    largest = max(tensor.nbytes for tensor in reference().state_dict().values())
    total = sum(t.nbytes for name, t in reference().state_dict().items() if name != "lm_head.weight")
    assert peak <= min(total, max(bucket_bytes, largest) + largest)
    assert not alive


def test_buckets_hold_every_tensor_once_in_order_and_stay_under_their_size():
    named = [(str(i), torch.zeros(size)) for i, size in enumerate([10, 20, 300, 1, 1, 50, 60])]
    cut = list(buckets(named, 400))
    assert [name for bucket in cut for name, _ in bucket] == [name for name, _ in named]
    assert [[tensor.numel() for _, tensor in bucket] for bucket in cut] == [[10, 20], [300], [1, 1, 50], [60]]


class Engine(torch.nn.Module):
    """Fuses, transposes and pads what it is sent; ``also`` is done with each weight besides."""

    def __init__(self, also):
        super().__init__()
        shapes = {"fused": (8, 4), "square": (4, 4), "padded": (8, 4)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, torch.nan), requires_grad=False))
        self.also, self.loads, self.kept = also, 0, {}

    def load_weights(self, weights):
        self.loads += 1
        for name, weight in weights:
            self.also(self, name, weight)
            if name == "padded":
                self.padded.zero_()
                self.padded[1:6].copy_(weight)
            elif name == "square":
                self.square.copy_(weight.t())
            else:
                self.fused[{"q": slice(0, 5), "k": slice(5, 8)}[name]].copy_(weight)


def load_twice(also):
    """Load other weights a second time, given the map of the first."""
    engine, shapes = Engine(also), {"q": (5, 4), "k": (3, 4), "square": (4, 4), "padded": (5, 4)}
    known = NO_MAP
    for _ in range(2):
        sent = {name: torch.randn(shape) for name, shape in shapes.items()}
        for parameter in engine.parameters():
            parameter.fill_(torch.nan)
        load = WeightLoad(engine, torch.device("cpu"), known=known)
        for bucket in buckets(iter(sent.items()), 1):
            load.load(bucket)
        load.check_all_written()
        assert load.find_problem([load.held_regions()]) is None
        assert load.checksums() == {name: checksum(tensor) for name, tensor in sent.items()}
        known = load.weight_map()
        assert torch.equal(engine.fused, torch.cat([sent["q"], sent["k"]])) and torch.equal(
            engine.square, sent["square"].t()
        )
        assert torch.equal(engine.padded, torch.nn.functional.pad(sent["padded"], (0, 0, 1, 2)))
    return engine


def keep_a_sum(engine, name, weight):
    engine.kept[name] = weight.sum()


def negate_twice(engine, name, weight):
    weight.neg_().neg_()


def scale_memory(engine, name, weight):
    engine.fused.mul_(1)


def test_a_load_is_repeated_without_the_loader_only_if_that_copied_and_padded_alone():
    assert load_twice(lambda engine, name, weight: None).loads == 4  # a bucket each, in the first load alone
    assert load_twice(lambda engine, name, weight: weight.view(-1)[1:].detach()).loads == 4
    for other in (keep_a_sum, negate_twice, scale_memory):
        assert load_twice(other).loads == 8


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 3, 7, 8, 9, 200, 8 * LANES - 1, 8 * LANES, 8 * LANES * 33 + 5]),
    place=st.floats(0, 0.999),
    change=st.integers(1, 255),
)
def test_any_changed_byte_changes_the_checksum(size, place, change):
    data = torch.arange(size).mul(37).to(torch.uint8)
    other = data.clone()
    other[int(place * size)] ^= change
    assert checksum(data) != checksum(other)
    assert mixed_sum(data) != mixed_sum(other)


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 9999), second=st.integers(0, 9999), sign_only=st.booleans())
def test_exchanging_two_values_changes_the_checksum(first, second, sign_only):
    data = torch.full((10_000,), 0.5, dtype=torch.bfloat16)
    data[first] = -0.5 if sign_only else 0.25
    other = data.clone()
    other[[first, second]] = data[[second, first]]
    assert (checksum(data) == checksum(other)) == (first == second)
    assert (mixed_sum(data.view(torch.uint8)) == mixed_sum(other.view(torch.uint8))) == (first == second)


def test_the_checksum_is_of_the_values_not_of_how_they_lie_in_memory():
    table = torch.randn(300, 70)
    assert checksum(table.T) == checksum(table.T.contiguous())
    assert checksum(table[1:]) == checksum(table[1:].clone())
    odd = torch.randn(31, dtype=torch.float32).to(torch.bfloat16)
    assert checksum(odd[1:]) == checksum(odd[1:].clone())
    assert checksum(torch.zeros(5)) != checksum(torch.zeros(6))
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0, 3))


def test_what_was_changed_in_memory_is_read_back_by_name(model_folder, reference):
    model, rollout = reference(), HFRollout(model_folder(), rollout_config())
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=1)
    assert compare_memory(weights_of(model), [rollout.read_back()] * 2, torch.float32) == ""
    rollout._weights[NAME][5, 7] += 1
    changed = [{}, rollout.read_back()]
    assert compare_memory(weights_of(model), changed, torch.float32).startswith(f"{NAME} in the memory of rank 1 (1 of")


def test_the_canary_allows_what_rounding_explains_and_no_more(model_folder, reference):
    prompts = canary_prompts(lambda text: [4 + ord(c) % 90 for c in text], 8, 64)
    rollout = HFRollout(model_folder(), rollout_config(dtype="bfloat16"))
    rollout.wake()
    model = reference()
    allowed = rounding_tolerance({torch.bfloat16, torch.float32}, 2, model.config.vocab_size)

    def score(batch):
        with torch.no_grad():
            ids = zip(batch.ragged("input_ids").rows(), batch.ragged("responses").rows(), strict=True)
            return [model(row[None, :-1]).logits[0, -1].log_softmax(-1)[token].item() for row, token in ids]

    sync_weights(weights_of(model), rollout, version=1)
    good = generate_canary(rollout, prompts, version=1)
    assert 0 < compare_canaries([good], score, allowed) < allowed / 3 and 0.05 < allowed < 0.08
    with torch.no_grad():
        rollout._weights["model.layers.0.mlp.down_proj.weight"].zero_()
    with pytest.raises(CanaryError, match=r"rank 1 does not compute with the weights of version 1"):
        compare_canaries([good, generate_canary(rollout, prompts, version=1)], score, allowed)
    for layers, vocabulary, tolerance in ((28, 152_000, 0.353), (80, 128_000, 0.589)):
        assert rounding_tolerance({torch.bfloat16}, layers, vocabulary) == pytest.approx(tolerance, abs=5e-4)
    assert rounding_tolerance({torch.float32}, 80, 128_000) == 0.002

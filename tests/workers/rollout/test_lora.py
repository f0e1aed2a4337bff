"""A LoRA policy in every engine, merged or as an adapter: the rollout computes what the trainer computes."""

import pytest
import torch

from tests.support.images import MIXED, asked, make_tiny_vl_model
from tests.support.losses import optim_section
from tests.workers.rollout.conftest import rollout_config
from tests.workers.rollout.test_contract import mixed_requests, only, processed_log_probs, tokens_of
from verl.models.loader import LoRASpec, ModelSpec, load_config
from verl.utils.tokenizer import hf_processor
from verl.workers.engine import build_engine
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import StaleWeightsError, WeightSyncError
from verl.workers.rollout.vllm.weights import lora_unsupported_reason
from verl.workers.rollout.weights.sync import sync_adapter, sync_weights

ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]
LORA = LoRASpec(rank=6, alpha=9.0, exclude_modules=("layers.0.mlp.down_proj",))
SENT = "model.layers.1.self_attn.k_proj.lora_B.weight"


@pytest.fixture(scope="module")
def trainer(model_folder):
    """family -> engine whose adapter has left its starting point."""
    engines = {}

    def build(family="tied"):
        if family not in engines:
            spec = ModelSpec(model_folder(family), compute_dtype="fp32", lora=LORA)
            engines[family] = build_engine("local", spec, None, optim_section())
            shift(engines[family], seed=1)
        return engines[family]

    return build


def shift(engine, seed):
    """Move every trained number, as an optimizer step would."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


@pytest.fixture(scope="module")
def built(model_folder):
    rollouts = {}

    def build(name, family="tied", lora=LORA):
        if (name, family, lora) not in rollouts:
            config = rollout_config(max_num_seqs=32, max_num_batched_tokens=512)
            extra = {"lora": lora} if lora else {}
            rollouts[name, family, lora] = get_rollout_class(name)(model_folder(family), config, **extra)
        return rollouts[name, family, lora]

    return build


def send_adapter(engine, rollout, version):
    return sync_adapter(engine.adapter_weights(torch.float32), engine.base_weights, rollout, version)


@pytest.fixture(params=ENGINES)
def ready(request, built, trainer):
    """A rollout that holds the trainer's adapter as version 1, apart from its weights."""

    def make(family="tied"):
        rollout = built(request.param, family)
        rollout.wake()
        send_adapter(trainer(family), rollout, 1)
        return rollout

    return make


def assert_log_probs_are_the_trainers(engine, rollout, version):
    requests = mixed_requests()
    for request, completion in zip(requests, rollout.generate(requests, version), strict=True):
        expected = processed_log_probs(engine.module.eval(), request, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["tied", "untied"])
@pytest.mark.parametrize("name", ENGINES)
def test_merged_weights_give_the_trainers_log_probs(name, family, built, trainer):
    rollout, engine = built(name, family, lora=None), trainer(family)
    rollout.wake()
    sync_weights(engine.weights(torch.float32), rollout, version=1)
    assert_log_probs_are_the_trainers(engine, rollout, 1)


@pytest.mark.parametrize("family", ["tied", "untied"])
def test_an_adapter_apart_gives_the_trainers_log_probs(family, ready, trainer):
    assert_log_probs_are_the_trainers(trainer(family), ready(family), 1)


def test_base_weights_travel_once_and_a_new_adapter_changes_the_output(ready, trainer):
    rollout, engine = ready(), trainer()
    assert rollout.holds_base
    before = tokens_of(rollout, mixed_requests())
    saved = engine.model_state()
    saved = {name: tensor.clone() for name, tensor in saved.items()}
    try:
        shift(engine, seed=2)
        receipt, num_bytes = send_adapter(engine, rollout, 2)
        assert num_bytes == receipt.num_bytes == sum(t.nbytes for _, t in engine.adapter_weights(torch.float32))
        assert_log_probs_are_the_trainers(engine, rollout, 2)
        assert tokens_of(rollout, mixed_requests(), 2) != before
    finally:
        engine.load_model_state(saved)


def test_requests_that_come_one_by_one_are_answered_with_the_adapter(ready):
    rollout, requests = ready(), mixed_requests()
    request_ids = [rollout.submit(request, 1) for request in requests]
    done = {}
    while len(done) < len(request_ids):
        done |= rollout.step()
    assert [done[request_id].token_ids for request_id in request_ids] == tokens_of(rollout, requests)


def test_an_adapter_that_was_not_sent_cannot_be_sampled_with(ready):
    rollout = ready()
    with pytest.raises(StaleWeightsError, match="wants weights of version 2, but the rollout holds version 1"):
        rollout.generate(mixed_requests(), 2)


def test_a_nap_keeps_what_is_below_the_adapter_and_a_sleep_does_not(ready, trainer):
    rollout, engine = ready(), trainer()
    rollout.sleep(level=1)
    with pytest.raises(StaleWeightsError):
        rollout.generate(mixed_requests(), 1)
    rollout.wake()
    assert rollout.holds_base
    receipt, num_bytes = send_adapter(engine, rollout, 3)
    assert num_bytes == receipt.num_bytes
    assert_log_probs_are_the_trainers(engine, rollout, 3)
    rollout.sleep(level=2)
    rollout.wake()
    assert not rollout.holds_base
    assert send_adapter(engine, rollout, 4)[1] > receipt.num_bytes
    assert_log_probs_are_the_trainers(engine, rollout, 4)


FAULTS = {
    "a changed number": (lambda n, t: [(n, t + 1)], SENT),
    "zeros": (lambda n, t: [(n, torch.zeros_like(t))], SENT),
    "a lost tensor": (lambda n, t: [], "k_proj"),
    "a tensor sent twice": (lambda n, t: [(n, t)] * 2, f"{SENT} was sent twice"),
    "a layer without a place": (lambda n, t: [(n, t), (n.replace("k_proj", "z_proj"), t)], "z_proj"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_caught(fault, ready, trainer):
    change, message = FAULTS[fault]
    rollout, engine = ready(), trainer()
    update, noise = rollout.update_adapter, only(SENT, change)

    def over_the_line(version, buckets):
        return update(version, ([pair for item in bucket for pair in noise(*item)] for bucket in buckets))

    rollout.update_adapter = over_the_line
    try:
        with pytest.raises(WeightSyncError, match=message):
            send_adapter(engine, rollout, 5)
    finally:
        del rollout.update_adapter
    assert rollout.version is None
    send_adapter(engine, rollout, 5)
    assert_log_probs_are_the_trainers(engine, rollout, 5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["experts", "images"])
def test_hf_holds_an_adapter_of_experts_and_of_models_that_see(kind, model_folder, tmp_path):
    folder = model_folder("qwen3_moe") if kind == "experts" else make_tiny_vl_model(tmp_path, initializer_range=0.1)
    engine = build_engine("local", ModelSpec(folder, compute_dtype="fp32", lora=LoRASpec(4)), None, optim_section())
    inputs = {"input_ids": torch.arange(4, 20).view(2, 8)}
    if kind == "images":
        inputs = asked(hf_processor(folder), *MIXED[2])[1]
    before = engine.module.eval()(**inputs).logits
    shift(engine, seed=1)
    expected = engine.module(**inputs).logits
    assert (expected - before).abs().max() > 0.01
    config = rollout_config()
    merged, adapter = (get_rollout_class("hf")(folder, config, **more) for more in ({}, {"lora": LoRASpec(4)}))
    for rollout in (merged, adapter):
        rollout.wake()
    sync_weights(engine.weights(torch.float32), merged, version=1)
    send_adapter(engine, adapter, 1)
    for rollout in (merged, adapter):
        torch.testing.assert_close(rollout.model(**inputs).logits, expected, rtol=0, atol=1e-4)


def test_vllm_is_not_asked_to_hold_an_adapter_it_could_not_compute_with(model_folder, tmp_path):
    for folder, why in (
        (model_folder("tied"), None),
        (model_folder("qwen3_moe"), "experts"),
        (make_tiny_vl_model(tmp_path), "takes images"),
    ):
        found = lora_unsupported_reason(load_config(ModelSpec(folder)))
        assert found == why or why in found


def test_an_engine_built_without_an_adapter_says_so(built, trainer):
    rollout = built("hf", lora=None)
    rollout.wake()
    with pytest.raises(WeightSyncError):
        send_adapter(trainer(), rollout, 1)


@pytest.mark.vllm
def test_vllm_notices_weights_that_changed_below_the_adapter_while_it_slept(built, trainer):
    rollout = built("vllm")
    rollout.wake()
    send_adapter(trainer(), rollout, 1)
    rollout.sleep(level=1)
    rollout.wake()
    rollout.model.model.layers[1].mlp.down_proj.base_layer.weight.view(torch.int32)[3, 4] ^= 1
    with pytest.raises(WeightSyncError, match="changed while the engine slept: model.layers.1.mlp.down_proj.weight"):
        send_adapter(trainer(), rollout, 2)
    assert not rollout.holds_base
    send_adapter(trainer(), rollout, 2)
    assert_log_probs_are_the_trainers(trainer(), rollout, 2)


@pytest.mark.vllm
def test_vllms_slot_holds_nothing_besides_the_adapter(built, trainer, monkeypatch):
    rollout = built("vllm")
    rollout.wake()
    send_adapter(trainer(), rollout, 1)
    layer = rollout.model.model.layers[0].mlp.gate_up_proj
    reset = type(layer).set_lora

    def sets_and_spoils(self, index, *tensors):
        reset(self, index, *tensors)
        self.lora_a_stacked[0][0, 0, -1, 0] = 1.0  # a row beyond the adapter's rank

    monkeypatch.setattr(type(layer), "set_lora", sets_and_spoils)
    with pytest.raises(WeightSyncError, match="slot has .* numbers that are not zero"):
        send_adapter(trainer(), rollout, 2)


@pytest.mark.vllm
def test_vllm_without_the_policys_adapter_refuses_to_answer_as_the_base_model(built, trainer):
    rollout = built("vllm", "untied")  # which has no more use afterwards: its requests never end
    rollout.wake()
    send_adapter(trainer("untied"), rollout, 1)
    rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager.remove_all_adapters()
    with pytest.raises(Exception, match="lies in no folder"):
        rollout.generate(mixed_requests(), 1)

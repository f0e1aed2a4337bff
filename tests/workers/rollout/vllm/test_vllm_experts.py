"""vLLM's mixtures of experts and latent attention: layers that compute with another form of what is loaded."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.test_contract import a_noisy_line, flip_a_bit, mixed_requests, only, processed_log_probs
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import StaleWeightsError, WeightSyncError
from verl.workers.rollout.weights.sync import sync_weights

pytestmark = pytest.mark.vllm

COMMON = {"initializer_range": 0.12, "hidden_size": 128, "head_dim": 32}
QWEN = {"family": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {"qwen3_moe": QWEN, "mixtral": {"family": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False}}
LATENT = {
    "family": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "head_dim": 64, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip


def start(folder, **changes):
    return get_rollout_class("vllm")(str(folder), rollout_config(**{"max_num_seqs": 32, **changes}))


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request, tmp_path_factory):
    """An engine with a mixture of experts, and the model whose weights it is to get."""
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), **{**COMMON, **FAMILIES[request.param]})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return start(folder), model.eval()


def move(model, seed=7):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)


def agree(rollout, model, version):
    requests = mixed_requests()
    for request, completion in zip(requests, rollout.generate(requests, version), strict=True):
        expected = processed_log_probs(model, request, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_experts_compute_with_the_newest_weights_after_each_sync_and_nap(mixture):
    rollout, model = mixture
    for version in (1, 2):
        rollout.wake()
        receipt = sync_weights(weights_of(model), rollout, version=version, bucket_bytes=50_000)
        assert receipt.num_bytes == sum(tensor.nbytes for _, tensor in weights_of(model))
        agree(rollout, model, version)
        rollout.sleep(level=2)
        move(model)


def test_a_fault_in_one_expert_is_caught(mixture):
    rollout, model = mixture
    rollout.wake()
    name = next(name for name, _ in weights_of(model) if "experts.2" in name)
    for noise in (flip_a_bit, lambda n, t: [], lambda n, t: [(n.replace("experts.2", "experts.1"), t)]):
        with a_noisy_line(rollout, only(name, noise)), pytest.raises(WeightSyncError):
            sync_weights(weights_of(model), rollout, version=3)
        with pytest.raises(StaleWeightsError):
            rollout.generate(mixed_requests(), 3)
    sync_weights(weights_of(model), rollout, version=3)
    agree(rollout, model, 3)


def test_experts_that_the_cpu_build_pads_are_refused(tmp_path):
    folder = make_tiny_model(tmp_path, **{**COMMON, **QWEN, "moe_intermediate_size": 48})
    with pytest.raises(ValueError, match=r"pads its experts from 48 numbers to 64. Their size per rank .*name=hf"):
        start(folder)


def test_latent_attention_of_a_size_without_kernels_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(ValueError, match=r"caches 320 numbers a token .*kernel for 576 only.*name=hf"):
        start(make_tiny_model(tmp_path, **{**COMMON, **LATENT, "kv_lora_rank": 256}))


@pytest.fixture(params=["this CPU", "a CPU with AMX"])
def cpu(request, monkeypatch):
    """vLLM chooses how it packs weights by what torch says of the CPU."""
    if request.param == "a CPU with AMX":
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


@pytest.mark.numerics
def test_latent_attention_gives_the_log_probs_of_the_model_after_each_sync(cpu, tmp_path):
    folder = make_tiny_model(tmp_path, **{**COMMON, **LATENT})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rollout = start(folder)
    for version in (1, 2):
        rollout.wake()
        sync_weights(weights_of(model), rollout, version=version)
        agree(rollout, model, version)
        rollout.sleep(level=2)
        move(model)


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_latent_attention_derives_from_its_weights_follows_a_sync(dtype, tmp_path):
    """Against an engine that read the same weights from disk: bit for bit."""
    folder = make_tiny_model(tmp_path / "old", **{**COMMON, **LATENT})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rollout = start(folder, dtype=dtype)
    rollout.wake()
    sync_weights(weights_of(model, rollout.weights_dtype), rollout, version=1)
    before = [completion.log_probs for completion in rollout.generate(mixed_requests(), 1)]
    model = model.to(rollout.weights_dtype)
    move(model)
    make_tiny_model(tmp_path / "new", **{**COMMON, **LATENT})
    model.save_pretrained(tmp_path / "new")
    sync_weights(weights_of(model, rollout.weights_dtype), rollout, version=2)
    read = start(tmp_path / "new", dtype=dtype, load_format="auto")
    expected = read.generate(mixed_requests(), 0)
    assert rollout.generate(mixed_requests(), 2) == expected
    assert [completion.log_probs for completion in expected] != before

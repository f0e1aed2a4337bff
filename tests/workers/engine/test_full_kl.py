"""A KL loss over the whole vocabulary: equal to that of whole logits, on every engine and however rows are cut."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import verl.models.activation_memory
from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_siblings, make_tiny_model
from verl.algorithms.kl import kl_full
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import MicroBatching, Reference, build_engine
from verl.workers.engine.fsdp1 import FSDP1Engine
from verl.workers.roles import ReferenceRole

TEMPERATURE = 0.7
KL_ALONE = ppo_loss(kl_loss_type="full", kl_loss_coef=1.0, entropy_coeff=0.0)
WITH_ALL = ppo_loss(kl_loss_type="full", kl_loss_coef=0.5)
PACKED = {"remove_padding": True, "share_prompts": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The policy's model, and a reference of another family, width and last layer."""
    root = tmp_path_factory.mktemp("models")
    policy = make_tiny_model(root / "policy", initializer_range=0.1)
    other = {"hidden_size": 32, "final_logit_softcapping": 2.0, "initializer_range": 0.3}
    return policy, make_tiny_model(root / "reference", "gemma2", seed=7, **other)


def spec_of(folder, **changes):
    return ModelSpec(folder, compute_dtype="fp32", **changes)


def engine_of(spec, strategy="local", train=True, **options):
    optim = {"optim_config": optim_section(lr=1e-2), "total_steps": 9, "grad_clip": 1.0} if train else {}
    if strategy == "fsdp1":  # which a CPU run would not take
        return FSDP1Engine(spec, **optim, **options)
    return build_engine(strategy, spec, **optim, **options)


def without_advantages(data):
    advantages = data.ragged("advantages")
    data.put("advantages", advantages.like(torch.zeros_like(advantages.values)))
    return data


def with_last_tokens_masked(data):
    mask = data.ragged("response_mask")
    lasts = mask.layout.lengths.cumsum(0) - 1
    data.put("response_mask", mask.like(mask.values.index_fill(0, lasts, 0)))
    return data


def dense(folders, data):
    """Mean KL over unmasked response tokens from whole logits, and the norm of its gradient."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).double() for f in folders)
    parts, rows = [], (data.ragged(name).rows() for name in ("input_ids", "responses", "response_mask"))
    for ids, response, mask in zip(*rows, strict=True):
        logits = policy(input_ids=ids[None]).logits / TEMPERATURE
        with torch.no_grad():
            ref_logits = reference(input_ids=ids[None]).logits / TEMPERATURE
        kl = kl_full(logits, ref_logits)[0, len(ids) - len(response) - 1 : -1]
        parts.append(kl[mask.bool()])
    mean = torch.cat(parts).mean()
    gradients = torch.autograd.grad(mean, list(policy.parameters()))
    return mean.item(), torch.cat([g.flatten() for g in gradients]).norm().item()


@pytest.mark.parametrize("split", [MicroBatching(), MicroBatching(size=2)])
@pytest.mark.parametrize("rows", [{}, PACKED])
def test_value_and_gradient_are_those_of_whole_logits(folders, rows, split):
    data = with_last_tokens_masked(without_advantages(make_siblings(seed=5)))
    kl, norm = dense(folders, data)
    policy = engine_of(spec_of(folders[0], **rows))
    reference = Reference.of(build_engine("local", spec_of(folders[1], **rows)), policy)
    metrics = policy.train_step(data, KL_ALONE, split, TEMPERATURE, reference)
    assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert kl > 0.1


def test_the_base_of_an_adapter_is_the_reference_that_a_second_copy_would_be(folders):
    spec, data, found = spec_of(folders[0], lora=LoRASpec(rank=4)), make_siblings(seed=5), []
    for borrows in (True, False):
        policy = engine_of(spec, seed=1)
        copy = build_engine("local", replace(spec, lora=None))
        reference = Reference.of_base_model(policy) if borrows else Reference.of(copy, policy)
        found.append([policy.train_step(data, WITH_ALL, MicroBatching(size=3), 1.0, reference) for _ in range(3)])
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    assert found[0][0]["actor/kl_loss"] == 0.0 < found[0][2]["actor/kl_loss"]


CASES = [
    # strategy, stage of ZeRO, ranks to a sequence, rank of an adapter
    ("fsdp2", None, 2, 0),
    ("fsdp2", None, 1, 4),
    ("fsdp1", None, 1, 0),
    ("fsdp1", None, 1, 4),
    ("deepspeed", 1, 1, 4),
    ("deepspeed", 3, 1, 0),
    ("deepspeed", 3, 1, 4),
]


def two_steps(folders, strategy, stage, sp_size, rank):
    lora = LoRASpec(rank=rank) if rank else None
    rows = PACKED if sp_size > 1 else {"gradient_checkpointing": strategy != "local"}
    options = {"sp_size": sp_size} | ({} if stage is None else {"backend_config": {"zero_stage": stage}})
    policy = engine_of(spec_of(folders[0], lora=lora, **rows), strategy, seed=1, **options)
    if rank:
        reference = Reference.of_base_model(policy)
    else:
        frozen = engine_of(spec_of(folders[1], **rows), strategy, train=False, **options)
        reference = Reference.of(frozen, policy)
    place, data = policy.topology, make_siblings(seed=5)
    data = data[slice(0, 2) if place.dp_rank == 0 else slice(2, None)] if place.dp_size > 1 else data
    return [policy.train_step(data, WITH_ALL, MicroBatching(size=3), 1.0, reference) for _ in range(2)]


def steps_of_all(folders):
    verl.models.activation_memory.KEEP_BELOW_BYTES = 0  # recompute in earnest; this process ends with the measurements
    return [two_steps(folders, *case) for case in CASES]


def test_every_engine_finds_the_same(folders):
    results = run_ranks(2, steps_of_all, folders, timeout_s=200)
    plain = {rank: two_steps(folders, "local", None, 1, rank) for rank in (0, 4)}
    for number, case in enumerate(CASES):
        for theirs in (result[number] for result in results):
            for place, (one, other) in enumerate(zip(plain[case[-1]], theirs, strict=True)):
                # AdamW divides by the size of a gradient, so rounding of the tiniest ones shows after a step
                rel = 1e-2 if place else 2e-5
                for name in ("actor/pg_loss", "actor/kl_loss", "grad_norm"):
                    assert other[name] == pytest.approx(one[name], rel=rel, abs=1e-5), (case, place, name)


def test_a_reference_in_other_processes_is_refused():
    role = ReferenceRole.__new__(ReferenceRole)
    role.actor, role.fused_worker_dict = SimpleNamespace(has_adapter=False), {}
    with pytest.raises(ValueError, match="not in the actor's processes.*Role.RefPolicy.*low_var_kl"):
        role.comparison().__enter__()


def test_another_vocabulary_and_logits_of_another_kind_are_refused(folders, tmp_path):
    policy = engine_of(spec_of(folders[0]))
    larger = make_tiny_model(tmp_path / "larger", tokenizer="byte")
    with pytest.raises(ValueError, match="vocabulary of 100 and the reference .* one of 2.*low_var_kl"):
        Reference.of(build_engine("local", spec_of(larger)), policy)
    biased = make_tiny_model(tmp_path / "biased", "phi")
    with pytest.raises(ValueError, match="not the product of hidden states and a weight.*low_var_kl"):
        Reference.of(build_engine("local", spec_of(biased)), policy)

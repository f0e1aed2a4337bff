"""A teacher's likeliest tokens as columns, and the step they cause, against the same over the whole vocabulary."""

import pytest
import torch

from tests.support.losses import optim_section
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS, DistillationLoss
from verl.batch import WHOLE
from verl.config.actor import ActorConfig
from verl.config.distillation import DistillationLossConfig
from verl.models.distributions import TopTokens
from verl.models.loader import ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine
from verl.workers.engine.train_step import Reference

VOCAB, TEMPERATURE = 100, 0.8
TOP = Want.LOG_PROBS | Want.TOP_LOG_PROBS | Want.TOP_IDS


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [make_tiny_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def teacher(folders):
    return build_engine("local", ModelSpec(folders[1], "lm", compute_dtype="fp32"))


def student(folders, **spec):
    spec = ModelSpec(folders[0], "lm", compute_dtype="fp32", **spec)
    return build_engine("local", spec, None, optim_section(), total_steps=10, grad_clip=1.0)


def scored(teacher, k, split=WHOLE):
    data = make_batch(7, seed=5)
    found = teacher.infer(data, TOP, split, TEMPERATURE, TopTokens(k, VOCAB))
    names = ["log_probs", "top_log_probs", "top_ids"]
    return data.union(found.rename(names, [TEACHER_LOG_PROBS, TOP_LOG_PROBS, TOP_IDS]))


def step(engine, data, mode, reference=None, split=WHOLE, **options):
    options = DistillationLossConfig(loss_mode=mode, use_task_rewards=False, **options)
    loss = DistillationLoss(ActorConfig(), options, 16)
    metrics = engine.train_step(data, loss, split, TEMPERATURE, reference)
    return metrics, torch.cat([tensor.flatten() for _, tensor in engine.weights()])


@pytest.mark.parametrize("split", [WHOLE, MicroBatching(size=2)])
def test_the_likeliest_tokens_are_those_of_a_plain_forward_pass(folders, teacher, split):
    data = scored(teacher, 6, split)
    ids, mask = data.column("input_ids"), data.column("attention_mask")
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = teacher.module(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 11:-1]
    expected = (logits / TEMPERATURE).log_softmax(-1).topk(6)
    real = data.column("response_mask").bool()
    torch.testing.assert_close(data.column(TOP_LOG_PROBS)[real], expected.values[real], rtol=1e-4, atol=1e-5)
    assert torch.equal(data.column(TOP_IDS)[real].long(), expected.indices[real])
    # packed by valid tokens, 8 bytes an entry
    packed = [data.ragged(name).values for name in (TOP_LOG_PROBS, TOP_IDS)]
    assert sum(values.nbytes for values in packed) == 8 * 6 * int(real.sum())


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_step_over_all_tokens_is_that_over_the_whole_vocabulary(folders, teacher, kind):
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.4}[kind]
    topk, topk_weights = step(student(folders), scored(teacher, VOCAB), f"{kind}_topk", topk=VOCAB, jsd_beta=0.4)
    engine = student(folders)
    reference = Reference.of(teacher, engine, beta=beta)
    full, full_weights = step(engine, make_batch(7, seed=5), f"{kind}_full", reference, jsd_beta=0.4)
    assert topk["distill/loss"] == pytest.approx(full["distill/loss"], rel=1e-4) and full["distill/loss"] > 1e-3
    assert topk["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-4)
    assert topk["distill/topk_mass"] == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(topk_weights, full_weights, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("mode", ["forward_kl_topk", "k3"])
def test_the_step_does_not_depend_on_how_the_mini_batch_is_split_or_packed(folders, teacher, mode):
    data = scored(teacher, 5)
    whole, _ = step(student(folders), data, mode, topk=5)
    cuts = (MicroBatching(size=1), False), (MicroBatching(max_tokens=60), False), (WHOLE, True)
    for split, packed in cuts:
        other, _ = step(student(folders, remove_padding=packed), data, mode, split=split, topk=5)
        assert other == pytest.approx(whole, rel=1e-4, abs=1e-5)


CASES = [("fsdp2", {}), ("fsdp2", {"sp_size": 2}), ("deepspeed", {"backend_config": {"zero_stage": 3}})]


def steps_on_ranks(folders):
    """Each case: a teacher scores the first rank's rows alone, then both ranks', and a student learns from them."""
    found = []
    for strategy, options in CASES:
        specs = [ModelSpec(one, compute_dtype="fp32", remove_padding="sp_size" in options) for one in folders]
        optim = {"optim_config": optim_section(), "total_steps": 10, "grad_clip": 1.0}
        pupil, master = (
            build_engine(strategy, specs[0], **optim, **options),
            build_engine(strategy, specs[1], **options),
        )
        data, place = make_batch(7, seed=5), pupil.topology
        if place.dp_size > 1:
            lone = data if place.dp_rank == 0 else data.select_idxs([])
            assert len(master.infer(lone, TOP, WHOLE, TEMPERATURE, TopTokens(5))) == len(lone)
            data = data.select_idxs(range(3) if place.dp_rank == 0 else range(3, 7))
        names = ["log_probs", "top_log_probs", "top_ids"]
        columns = master.infer(data, TOP, MicroBatching(size=3), TEMPERATURE, TopTokens(5, VOCAB))
        data = data.union(columns.rename(names, [TEACHER_LOG_PROBS, TOP_LOG_PROBS, TOP_IDS]))
        found.append(step(pupil, data, "forward_kl_topk", split=MicroBatching(size=3), topk=5)[0])
    return found


@pytest.mark.ranks
def test_every_engine_finds_the_same(folders, teacher):
    whole, _ = step(student(folders), scored(teacher, 5), "forward_kl_topk", topk=5)
    for rank in run_ranks(2, steps_on_ranks, folders, timeout_s=200):
        for case, found in zip(CASES, rank, strict=True):
            for name in ("distill/loss", "distill/kl", "distill/topk_mass", "grad_norm"):
                assert found[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), (case, name)


def test_rows_of_another_rank_only_are_no_error(teacher):
    none = teacher.infer(make_batch(3).select_idxs([]), TOP, WHOLE, 1.0, TopTokens(4))
    assert len(none) == 0

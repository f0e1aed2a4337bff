"""Vision-language models: which tokens they never draw, and log-probs that are those of transformers' own forward."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, Qwen2Config

from tests.support.images import MIXED, image_dataset, image_row, make_batch, make_tiny_vl_model
from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from verl.models.loader import ModelSpec
from verl.models.multimodal import image_token, modality_tokens, token_kinds
from verl.models.token_outputs import LogitTransform, chunked_log_probs, full_log_probs
from verl.workers.engine import MicroBatching, Want, build_engine

SPLITS = [MicroBatching(size=6), MicroBatching(size=1), MicroBatching(size=4), MicroBatching(max_tokens=110)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vl_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


@pytest.fixture(scope="module")
def batch(folder, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "a.parquet")
    pq.write_table(pa.Table.from_pylist([image_row(text, images) for text, images in MIXED]), path)
    return make_batch(image_dataset(folder, path))


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def spec(folder, **changes):
    return ModelSpec(folder, **{"compute_dtype": "fp32", "gradient_checkpointing": False, **changes})


def expected_scores(model, batch):
    """Log-probs and entropies of every row alone by transformers, the modality tokens left out."""
    log_probs, entropies = [], []
    rows = zip(batch.ragged("input_ids").rows(), batch.ragged("responses").rows(), strict=True)
    for number, (ids, response) in enumerate(rows):
        inputs = batch.non_tensor_batch["multi_modal_inputs"][number]
        ids = ids[None]
        model.base_model.rope_deltas = None
        kinds = token_kinds(model.config, ids).int()
        with torch.no_grad():
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **inputs)
        logits = out.logits[0, -len(response) - 1 : -1].double()
        logits[:, list(modality_tokens(model.config))] = -torch.inf
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(1, response[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1))
    return torch.cat(log_probs).float(), torch.cat(entropies).float()


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_scores_are_those_of_transformers_with_each_row_alone(folder, batch, model, split):
    engine = build_engine("local", spec(folder))
    scored = engine.infer(batch, Want.LOG_PROBS | Want.ENTROPY, split)
    log_probs, entropies = expected_scores(model, batch)
    assert (scored.ragged("log_probs").values - log_probs).abs().max() < 1e-5
    assert (scored.ragged("entropy").values - entropies).abs().max() < 1e-4


def a_step(strategy, the_spec, batch, split, rows=None):
    engine = build_engine(strategy, the_spec, None, optim_section(), total_steps=10, grad_clip=1.0, seed=1)
    data = batch if rows is None else batch[rows[engine.topology.dp_rank]]
    metrics = engine.train_step(data, ppo_loss(), split)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return metrics, weights, engine.infer(data, Want.LOG_PROBS, split).ragged("log_probs").values


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_the_gradient_does_not_depend_on_how_rows_are_cut(folder, batch, split):
    whole, one_by_one = (a_step("local", spec(folder), batch, cut) for cut in (MicroBatching(), split))
    assert whole[0] == pytest.approx(one_by_one[0], rel=1e-4, abs=1e-6)


def test_weights_leave_under_the_names_of_the_checkpoint(folder, batch):
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        names = set(file.keys())
    _, weights, _ = a_step("local", spec(folder), batch, MicroBatching())
    assert weights.keys() == names and any(name.startswith("visual.") for name in names)


@pytest.mark.parametrize("rows", [[slice(0, 1), slice(1, 2)], [slice(1, 2), slice(2, 6)], [slice(0, 5), slice(5, 6)]])
def test_ranks_may_hold_unequal_images_or_none(folder, batch, rows):
    """Row 1 has no image: its rank shows the vision tower a dummy, which changes nothing."""
    data = batch[rows[0].start : rows[1].stop]
    metrics, weights, log_probs = a_step("local", spec(folder), data, MicroBatching())
    shares = [slice(part.start - rows[0].start, part.stop - rows[0].start) for part in rows]
    results = run_ranks(2, a_step, "fsdp2", spec(folder), data, MicroBatching(size=2), shares)
    for theirs, their_weights, _ in results:
        assert theirs == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        assert their_weights.keys() == weights.keys()
        # AdamW divides by the size of a gradient, so rounding of the tiniest ones shows; a step moves weights by 1e-3
        assert max((their_weights[name] - weights[name]).abs().max() for name in weights) < 2e-4
    torch.testing.assert_close(torch.cat([result[2] for result in results]), log_probs, rtol=1e-3, atol=1e-3)


def test_a_frozen_vision_tower_stays_as_it_is(folder, batch, model):
    _, weights, _ = a_step("local", spec(folder, freeze_vision_tower=True), batch, MicroBatching())
    before = {name: tensor.clone() for name, tensor in build_engine("local", spec(folder)).weights()}
    moved = {name for name in before if not torch.equal(before[name], weights[name])}
    assert moved and not any(name.startswith("visual.") for name in moved)


def test_features_without_their_tokens_are_refused_by_row(folder, batch):
    engine = build_engine("local", spec(folder))
    lost = batch.select()
    lost.non_tensor_batch = {}
    with pytest.raises(ValueError, match="row 0 has 4 image tokens and its images have 0 features"):
        engine.infer(lost, Want.LOG_PROBS)
    swapped = batch.select()
    inputs = swapped.non_tensor_batch["multi_modal_inputs"].copy()
    inputs[[0, 3]] = inputs[[3, 0]]
    swapped.non_tensor_batch["multi_modal_inputs"] = inputs
    with pytest.raises(ValueError, match="row 0 has 4 image tokens and its images have 16 features"):
        engine.infer(swapped, Want.LOG_PROBS)


def test_a_model_of_text_has_no_modality_tokens(model):
    assert modality_tokens(Qwen2Config()) == ()
    assert image_token(model.config) in modality_tokens(model.config) and len(modality_tokens(model.config)) == 4


@pytest.mark.parametrize(
    "maths", [LogitTransform(0.7, excluded_tokens=(3, 5)), LogitTransform(1.0, 0.5, 8.0, excluded_tokens=(0,))], ids=str
)
def test_tokens_never_sampled_have_no_probability_and_no_gradient(maths):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=draw, requires_grad=True)
    weight = torch.randn(11, 6, generator=draw, requires_grad=True)
    targets = torch.tensor([1, 2, 4, 6, 7, 8, 9, 10, 1])
    found = chunked_log_probs(hidden, weight, targets, maths, want_entropy=True)
    grads = torch.autograd.grad(found[0].sum() + 0.3 * found[1].sum(), (hidden, weight))
    logits = hidden @ weight.t() * maths.scale
    logits = maths.softcap * torch.tanh(logits / maths.softcap) if maths.softcap else logits
    keep = torch.tensor([token for token in range(11) if token not in maths.excluded_tokens])
    plain = full_log_probs(logits[:, keep], torch.searchsorted(keep, targets), maths.temperature, want_entropy=True)
    expected = torch.autograd.grad(plain[0].sum() + 0.3 * plain[1].sum(), (hidden, weight))
    for one, other in zip((*found, *grads), (*plain, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not grads[1][list(maths.excluded_tokens)].any()

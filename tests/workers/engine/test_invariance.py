"""Loss, gradient and scores do not depend on where rows lie, how they are cut, or over which ranks they are spread.

Of all combinations of the ways below, so many are run that every two of them meet in one.
"""

import functools
import itertools
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import verl.models.activation_memory
from tests.support.images import MIXED, image_dataset, image_row, make_tiny_vl_model
from tests.support.images import make_batch as make_image_batch
from tests.support.losses import Section, optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_siblings, make_tiny_model
from verl.models.loader import ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine

MODELS = {
    "llama": {"num_key_value_heads": 1},  # fewer than ranks that share a sequence
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 7},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_5_vl": None,
}
STRATEGIES = {"local": 1, "fsdp2": 4, "zero1": 4, "zero2": 4, "zero3": 4}
"""Name -> ranks it can have; zeroN is DeepSpeed's stage N."""
SPLITS = {
    "one row at a time": MicroBatching(size=1),
    "two rows": MicroBatching(size=2),
    "a token budget": MicroBatching(max_tokens=70),
}
ROWS = {"padded": {}, "packed": {"remove_padding": True}, "sharing": {"remove_padding": True, "share_prompts": True}}
LOSSES = {
    "ppo": ppo_loss(),
    "gspo": ppo_loss(policy_loss=Section(loss_mode="gspo"), loss_agg_mode="seq-mean-token-mean"),
    "value": value_loss(),
}


class Case(NamedTuple):
    model: str
    loss: str = "ppo"
    strategy: str = "local"
    rows: str = "padded"
    dp: int = 1
    sp: int = 1
    split: str = "two rows"
    recompute: bool = False

    @property
    def ranks(self):
        return self.dp * self.sp

    @property
    def is_possible(self):
        has_head = self.loss != "value" or self.model not in ("qwen2_5_vl", "gemma3_text")
        return has_head and self.ranks <= STRATEGIES[self.strategy] and (self.sp == 1 or self.rows != "padded")

    def pairs(self):
        return set(itertools.combinations(enumerate(self), 2))

    def __str__(self):
        how = f"{self.strategy} dp{self.dp} sp{self.sp} {self.rows} by {self.split}"
        return f"{self.model} {self.loss} {how}{' recomputed' * self.recompute}"


def covering(cases):
    """Few of ``cases`` in which every pair of settings is met that is met in some."""
    pairs = {case: case.pairs() for case in cases}
    left = set().union(*pairs.values())
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        yield best
        left -= pairs[best]


EVERY = itertools.product(MODELS, LOSSES, STRATEGIES, ROWS, [1, 2], [1, 2], SPLITS, [False, True])
CASES = list(covering([case for case in itertools.starmap(Case, EVERY) if case.is_possible]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model -> its folder."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_vl_model(root / name, initializer_range=0.1)
        if changes is None
        else make_tiny_model(root / name, name, initializer_range=0.1, **changes)
        for name, changes in MODELS.items()
    }


@pytest.fixture(scope="module")
def batches(folders, tmp_path_factory):
    """Model -> rows of unequal length, for the one that sees with images in some."""
    path = tmp_path_factory.mktemp("rows") / "images.parquet"
    pq.write_table(pa.Table.from_pylist([image_row(text, images) for text, images in MIXED]), path)
    seen = make_image_batch(image_dataset(folders["qwen2_5_vl"], str(path)))
    return {name: seen if name == "qwen2_5_vl" else make_siblings(seed=5) for name in MODELS}


def measure(case, folder, data):
    """Scores of this rank's share of the rows, and metrics of two steps."""
    is_value = case.loss == "value"
    spec = ModelSpec(
        folder,
        "value" if is_value else "lm",
        compute_dtype="fp32",
        gradient_checkpointing=case.recompute,
        **ROWS[case.rows],
    )
    options = {"total_steps": 9, "grad_clip": 1.0, "sp_size": case.sp}
    strategy = case.strategy
    if strategy.startswith("zero"):
        strategy, options["backend_config"] = "deepspeed", {"zero_stage": int(case.strategy[-1])}
    engine = build_engine(strategy, spec, None, optim_section(), **options)
    place = engine.topology
    rows = slice(0, 2) if place.dp_rank == 0 else slice(2, None)
    data = data[rows] if place.dp_size > 1 else data
    want, split = Want.VALUES if is_value else Want.LOG_PROBS | Want.ENTROPY, SPLITS[case.split]
    found = engine.infer(data, want, split)
    scores = torch.stack([found.ragged(name).values for name in found.keys()])
    steps = [engine.train_step(data, LOSSES[case.loss], split) for _ in range(2)]
    # one is there with shared prompts alone
    steps = [{name: step[name] for name in step if "prefix" not in name} for step in steps]
    return scores, steps, (place.dp_rank, place.is_output_rank)


def measure_all(cases, folders, batches):
    verl.models.activation_memory.KEEP_BELOW_BYTES = 0  # recompute in earnest; this process ends with the measurements
    return [measure(case, folders[case.model], batches[case.model]) for case in cases]


@pytest.fixture(scope="module")
def measured(folders, batches):
    """Number of ranks -> case -> what every rank found; each number of ranks starts once."""

    @functools.cache
    def on_ranks(ranks):
        cases = [case for case in CASES if case.ranks == ranks]
        results = run_ranks(ranks, measure_all, cases, folders, batches, timeout_s=300)
        return dict(zip(cases, zip(*results, strict=True), strict=True))

    return on_ranks


@pytest.fixture(scope="module")
def plain(folders, batches):
    """(model, loss) -> padded rows all at once in one process."""
    return functools.cache(lambda model, loss: measure(Case(model, loss), folders[model], batches[model]))


def test_every_two_ways_meet():
    assert len(CASES) < 40
    assert any(case.strategy == "fsdp2" and (case.rows, case.dp, case.sp) == ("packed", 2, 2) for case in CASES)


@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case.ranks), ids=str)
def test_numbers_are_those_of_padded_rows_in_one_process(case, measured, plain):
    scores, steps, _ = plain(case.model, case.loss)
    results = measured(case.ranks)[case]
    shares = sorted((place, theirs) for theirs, _, place in results if place[1])
    torch.testing.assert_close(torch.cat([theirs for _, theirs in shares], 1), scores, rtol=1e-4, atol=2e-5)
    for _, their_steps, _ in results:
        first, second = zip(steps, their_steps, strict=True)
        assert first[0] == pytest.approx(first[1], rel=2e-5, abs=1e-6)
        # AdamW divides by the size of a gradient, so rounding of the tiniest ones shows after a step
        assert second[0] == pytest.approx(second[1], rel=1e-3, abs=1e-5)

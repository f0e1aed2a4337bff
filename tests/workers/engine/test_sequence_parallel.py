"""Sequence parallelism gives the results of one rank."""

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_siblings, make_tiny_model
from verl.models.attention.sequence_parallel import all_gather_uneven, heads_to_tokens, tokens_to_heads
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import MicroBatching, Topology, Want, build_engine

MODELS = {
    "qwen2": {},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 6},  # sinks of each head
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    },  # values of another width than keys
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(root / name, name, initializer_range=0.1, **MODELS[name]) for name in MODELS}


def step(folder, strategy, sp_size, config=None, lora=None):
    """Scores and metrics of one step on this rank's rows."""
    spec = ModelSpec(folder, compute_dtype="fp32", remove_padding=sp_size > 1, share_prompts=sp_size > 1, lora=lora)
    engine = build_engine(strategy, spec, config, optim_section(), total_steps=9, grad_clip=1.0, sp_size=sp_size)
    place, data = engine.topology, make_siblings(seed=5)
    data = data[place.dp_rank :: place.dp_size]
    scores = engine.infer(data, Want.LOG_PROBS, MicroBatching(size=5)).ragged("log_probs").values
    return (
        scores,
        engine.train_step(data, ppo_loss(), MicroBatching(size=5)),
        place._replace(dp_group=None, sp_group=None),
    )


def steps(folders, *args):
    return [step(folder, *args) for folder in folders.values()]


def test_four_ranks_share_the_two_heads_of_keys_of_a_model(folders):
    results = run_ranks(4, steps, folders, "fsdp2", 4)
    for number, folder in enumerate(folders.values()):
        scores, metrics, _ = step(folder, "local", 1)
        for theirs, their_metrics, _ in (result[number] for result in results):
            torch.testing.assert_close(theirs, scores, rtol=1e-4, atol=1e-5)
            for name, value in metrics.items():
                assert their_metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("config, lora", [({"fsdp_size": 2}, None), (None, LoRASpec(rank=4))])
def test_replicas_and_adapters_go_with_shared_sequences(folders, config, lora):
    _, metrics, _ = step(folders["qwen2"], "local", 1, None, lora)
    for _, theirs, place in run_ranks(4, step, folders["qwen2"], "fsdp2", 2, config, lora):
        assert theirs["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=2e-5)
        assert theirs["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=2e-5)
        dp_rank, sp_rank = divmod(place.rank, 2)
        assert (place.dp_rank, place.dp_size, place.sp_rank, place.sp_size) == (dp_rank, 2, sp_rank, 2)
        assert place.is_output_rank == (sp_rank == 0)


def exchange():
    """Tokens to heads and back; what rank 0 holds of four heads; a gather of unequal parts, and its gradient."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    whole = torch.arange(6 * 4 * 3.0).view(6, 4, 3)
    mine = whole[rank * 3 : rank * 3 + 3].clone().requires_grad_()
    heads = tokens_to_heads(mine, group)
    back = heads_to_tokens(heads, group)
    (heads * (rank + 1)).sum().backward()
    part = torch.full((rank * 2,), float(rank), requires_grad=True)
    joined = all_gather_uneven(part, [0, 2], group)
    (joined * torch.tensor([5.0, 7.0])).sum().backward()
    same = torch.equal(heads, whole[:, rank * 2 : rank * 2 + 2]) and torch.equal(back, mine)
    return same, mine.grad[0, :, 0].tolist(), joined.tolist(), part.grad.tolist()


def test_exchanges_move_heads_and_gradients_to_their_ranks():
    for rank, (same, gradient, joined, part) in enumerate(run_ranks(2, exchange)):
        assert same and gradient == [1.0, 1.0, 2.0, 2.0]  # two heads went to each rank, which weighs them by its number
        assert joined == [1.0, 1.0] and part == [[], [5.0, 7.0]][rank]


def refusals(folder):
    """What is said to settings that cannot be."""
    said = []
    for sp_size, packed in ((3, True), (2, False)):
        spec = ModelSpec(folder, compute_dtype="fp32", remove_padding=packed)
        with pytest.raises(ValueError) as error:
            build_engine("fsdp2", spec, sp_size=sp_size)
        said.append(str(error.value))
    return said


def test_sizes_that_cannot_be_are_refused(folders):
    for uneven, padded in run_ranks(2, refusals, folders["qwen2"]):
        assert uneven == "ulysses_sequence_parallel_size=3 does not divide the 2 ranks: use a divisor"
        assert "Set model.use_remove_padding=true, or the size to 1" in padded
    with pytest.raises(ValueError, match="cannot be sharded over one process"):
        build_engine("local", ModelSpec(folders["qwen2"], remove_padding=True), sp_size=2)


def test_one_process_has_a_place_of_its_own():
    assert Topology().sp_size == 1 and Topology().is_output_rank

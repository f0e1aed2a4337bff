"""The sharded engine on one and two ranks does what the local one does."""

import os

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.algorithms.losses import PPOLoss
from verl.config.actor import ActorConfig
from verl.config.engine import FSDPConfig, ModelSizes
from verl.models.loader import ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine

SHARES = {1: [slice(0, 7)], 2: [slice(0, 2), slice(2, 7)], 3: [slice(0, 1), slice(1, 3), slice(3, 7)]}


SHARDINGS = [
    {"fsdp_size": 1, "reduce_once": False},
    {"reshard_after_forward": False, "gather_once": False},
    {"fsdp_size": 2, "offload_policy": True},
    {"forward_prefetch": True, "reduce_once": False, "gather_once": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def three_steps(strategy, spec, loss, split, config=None):
    """Loss and gradient norm of three steps on this rank's share, its scores after, and all weights."""
    engine = build_engine(strategy, spec, config, optim_section(), total_steps=10, grad_clip=1.0, seed=1)
    data = make_batch(7, seed=5)
    data = data[SHARES[engine.topology.dp_size][engine.topology.dp_rank]]
    steps = []
    for _ in range(3):
        steps.append(engine.train_step(data, loss, split))
        engine.step_schedule()
    want = Want.VALUES if spec.head == "value" else Want.LOG_PROBS
    scores = engine.infer(data, want, split)
    weights = torch.cat([tensor.float().flatten() for _, tensor in engine.weights()])
    return steps, scores.ragged(scores.keys()[0]).values, weights, engine.version


@pytest.mark.parametrize(
    "head, ranks, split",
    [
        ("lm", 1, MicroBatching(size=8)),
        ("lm", 2, MicroBatching(size=8)),
        ("lm", 2, MicroBatching(max_tokens=60)),
        ("lm", 3, MicroBatching(size=2)),
        ("value", 2, MicroBatching(size=2)),
    ],
)
def test_fsdp2_matches_the_local_engine(folder, head, ranks, split):
    spec = ModelSpec(folder, head, compute_dtype="fp32", gradient_checkpointing=ranks == 2)
    loss = value_loss() if head == "value" else ppo_loss()
    steps, scores, weights, version = three_steps("local", spec, loss, MicroBatching())
    results = run_ranks(ranks, three_steps, "fsdp2", spec, loss, split)
    for theirs, _, their_weights, their_version in results:
        for one, other in zip(steps, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
        # AdamW divides by the size of a gradient, so rounding of the tiniest ones shows; a step moves weights by 1e-3
        assert (their_weights - weights).abs().max() < 1e-4
        assert their_version == version
    torch.testing.assert_close(torch.cat([result[1] for result in results]), scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_tokens_are_compared_over_all_ranks(folder, loss_mode):
    options = {"clip_cov_lb": 0.0, "clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1, "ppo_kl_coef": 10.0}
    policy_loss = {f"policy_loss.{name}": value for name, value in options.items()}
    loss = PPOLoss(ActorConfig().with_values({"policy_loss.loss_mode": loss_mode, **policy_loss}))
    spec = ModelSpec(folder, compute_dtype="fp32")
    [first, *_], *_ = three_steps("local", spec, loss, MicroBatching())
    for [theirs, *_], *_ in run_ranks(2, three_steps, "fsdp2", spec, loss, MicroBatching(size=2)):
        assert first == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def _norms_of_the_l2_term_alone(strategy, spec, coef):
    engine = build_engine(strategy, spec, None, optim_section(), total_steps=10, grad_clip=1.0, l2_coef=coef)
    data = make_batch(4, seed=3)
    advantages = data.ragged("advantages")
    data.put("advantages", advantages.like(torch.zeros_like(advantages.values)))
    size = sum(weight.double().square().sum() for _, weight in engine.weights()).sqrt().item()
    return size, engine.train_step(data, PPOLoss(ActorConfig()))["grad_norm"]


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("fsdp2", 2)])
def test_the_gradient_of_the_l2_term_is_its_coefficient_times_the_weights(folder, strategy, ranks):
    for size, norm in run_ranks(ranks, _norms_of_the_l2_term_alone, strategy, ModelSpec(folder), 0.5):
        assert norm == pytest.approx(0.5 * size, rel=1e-5)
    assert _norms_of_the_l2_term_alone("local", ModelSpec(folder), 0.0)[1] == 0


def test_an_engine_that_cannot_add_the_l2_term_says_so(folder):
    with pytest.raises(ValueError, match="l2_coef=0.1 with strategy=deepspeed.*Use optim.weight_decay"):
        build_engine("deepspeed", ModelSpec(folder), None, optim_section(), l2_coef=0.1)


def test_responses_are_weighed_over_all_ranks(folder):
    loss, spec = (
        PPOLoss(ActorConfig().with_values({"length_loss_weight": True})),
        ModelSpec(folder, compute_dtype="fp32"),
    )
    [first, *_], *_ = three_steps("local", spec, loss, MicroBatching())
    for [theirs, *_], *_ in run_ranks(2, three_steps, "fsdp2", spec, loss, MicroBatching(size=2)):
        assert first == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def _layouts(folder):
    def layout(**engine):
        return build_engine("fsdp2", ModelSpec(folder), engine, optim_section(), total_steps=10).layout

    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")  # as on two nodes
    found = [layout(), layout(fsdp_size=2), layout(offload_policy=True)]
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=os.environ["RANK"])
    return [*found, layout()]


def test_nodes_hold_replicas_of_a_small_model_where_the_user_does_not_say(folder):
    expected = ["fsdp2 2x1", "fsdp2 2", "fsdp2 2", "fsdp2 2"]
    assert run_ranks(2, _layouts, folder) == [expected, expected]


@pytest.mark.parametrize("config", SHARDINGS)
def test_how_weights_are_sharded_changes_no_number(folder, config):
    spec = ModelSpec(folder, compute_dtype="fp32")
    steps, *_ = three_steps("local", spec, ppo_loss(), MicroBatching())
    for theirs, *_ in run_ranks(2, three_steps, "fsdp", spec, ppo_loss(), MicroBatching(size=2), config):
        for one, other in zip(steps, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_bf16_compute_on_one_rank_is_bit_equal_to_the_local_engine(folder):
    spec = ModelSpec(folder, compute_dtype="bf16")
    steps, scores, weights, _ = three_steps("local", spec, ppo_loss(), MicroBatching(size=3))
    results = run_ranks(1, three_steps, "fsdp2", spec, ppo_loss(), MicroBatching(size=3))
    assert results[0][0] == steps
    assert torch.equal(results[0][1], scores) and torch.equal(results[0][2], weights)


def _steps_with_collectives(spec, config):
    """`three_steps`, and how many units were gathered for them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    gathers, plain = [], groups.foreach_all_gather
    groups.foreach_all_gather = lambda *args, **options: gathers.append(1) or plain(*args, **options)
    steps, scores, weights, _ = three_steps("fsdp2", spec, ppo_loss(), MicroBatching(size=1), config)
    return steps, scores, weights, len(gathers)


def test_weights_gathered_once_a_mini_batch_give_the_same_bits(folder):
    spec = ModelSpec(folder, compute_dtype="bf16")
    found = [run_ranks(2, _steps_with_collectives, spec, {"gather_once": once})[0] for once in (False, True)]
    (plain, *tensors, often), (once, *same, seldom) = found
    assert once == plain and all(map(torch.equal, tensors, same))
    assert 0 < 3 * seldom < often


def _as_on_a_device(spec, gigabytes):
    """The sizes that decide what is done once a mini-batch, and whether the engine does it, with ``gigabytes`` a rank
    where the memory decides as it does on CUDA."""
    plain, given = FSDPConfig.once_a_mini_batch, []

    def decide(self, device, ranks, sizes, memory):
        given.append((ranks, sizes))
        return plain(self, "cuda", ranks, sizes, gigabytes << 30)

    FSDPConfig.once_a_mini_batch = decide
    engine = build_engine("fsdp2", spec, {"fsdp_size": 2}, optim_section(), total_steps=10)
    engine.train_step(make_batch(4), ppo_loss(), MicroBatching(size=1))
    return engine.parameter_counts(), given, (engine._gather_once, engine._reduce_once)


@pytest.mark.parametrize("gigabytes", [0, 1])
def test_the_memory_decides_with_the_sizes_of_the_model(folder, gigabytes):
    spec, decision = ModelSpec(folder, compute_dtype="bf16"), (bool(gigabytes), bool(gigabytes))
    for (trained, numbers), given, found in run_ranks(2, _as_on_a_device, spec, gigabytes):
        assert trained == numbers and found == decision
        assert given == [(2, ModelSizes(16 * numbers, 2 * numbers, 4 * numbers))]


def _nan_on_rank_one(spec):
    engine = build_engine("fsdp2", spec, None, optim_section(), total_steps=10, grad_clip=1.0)
    data = make_batch(4, seed=engine.topology.rank)
    if engine.topology.rank == 1:
        advantages = data.ragged("advantages")
        data.put("advantages", advantages.like(torch.full_like(advantages.values, float("nan"))))
    metrics = engine.train_step(data, ppo_loss())
    return metrics["nonfinite_steps"], engine.version


def test_a_bad_gradient_on_one_rank_stops_the_step_on_all(folder):
    assert run_ranks(2, _nan_on_rank_one, ModelSpec(folder)) == [(1.0, 0), (1.0, 0)]


def _some_masked(spec):
    engine = build_engine("fsdp2", spec, None, optim_section(), total_steps=10, grad_clip=1.0)
    data = make_batch(4, seed=3)
    if engine.topology.rank == 1:
        mask = data.ragged("response_mask")
        data.put("response_mask", mask.like(torch.zeros_like(mask.values)))
    return engine.train_step(data, ppo_loss())


def test_a_rank_of_masked_tokens_only_adds_nothing(folder):
    local = build_engine("local", ModelSpec(folder, compute_dtype="fp32"), None, optim_section(), grad_clip=1.0)
    expected = local.train_step(make_batch(4, seed=3), ppo_loss())
    for metrics in run_ranks(2, _some_masked, ModelSpec(folder, compute_dtype="fp32")):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


def _tokens_of_forwards(spec):
    engine = build_engine("fsdp2", spec, None, optim_section(), total_steps=10, grad_clip=1.0)
    data, tokens, score = make_batch(7, seed=5), [], engine._score
    share = data[:1] if engine.topology.rank == 0 else data[1:]
    engine._score = lambda micro, *rest: tokens.append(micro.input_ids.numel()) or score(micro, *rest)
    engine.infer(share, Want.LOG_PROBS, MicroBatching(size=2))
    engine.train_step(share, ppo_loss(), MicroBatching(size=2))
    return tokens, int(share.ragged("input_ids").layout.lengths[0])


def test_a_rank_of_one_long_row_does_not_run_it_again_while_others_go_on(folder):
    (tokens, longest), (others, _) = run_ranks(2, _tokens_of_forwards, ModelSpec(folder))
    assert len(others) == len(tokens) == 6 and min(others) > 2
    assert tokens == [longest, 2, 2] * 2


def _moe_weights(spec):
    engine = build_engine("fsdp2", spec, None, None)
    return {name: tensor.clone() for name, tensor in engine.weights()}


def test_experts_leave_a_sharded_engine_one_by_one(tmp_path):
    from safetensors.torch import load_file

    folder = make_tiny_model(tmp_path, "mixtral", num_local_experts=4)
    saved = load_file(f"{folder}/model.safetensors")
    for found in run_ranks(2, _moe_weights, ModelSpec(folder, compute_dtype="fp32")):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_group_that_does_not_divide_the_ranks_is_refused(folder):
    with pytest.raises(RuntimeError, match="fsdp_size=2 does not divide the 3 ranks"):
        run_ranks(3, three_steps, "fsdp2", ModelSpec(folder), ppo_loss(), MicroBatching(), {"fsdp_size": 2})


def test_layers_that_do_not_exist_cannot_be_wrapped(folder):
    config = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    with pytest.raises(RuntimeError, match="Qwen2ForCausalLM has none of them"):
        run_ranks(1, three_steps, "fsdp2", ModelSpec(folder), ppo_loss(), MicroBatching(), config)


def _units(spec, config):
    from verl.utils.fsdp_utils import fsdp_modules

    return len(fsdp_modules(build_engine("fsdp2", spec, config, None).module))


def test_units_follow_the_wrap_policy(folder):
    spec = ModelSpec(folder)
    assert run_ranks(1, _units, spec, None) == [3]  # two layers and the rest
    assert run_ranks(1, _units, spec, {"wrap_policy": {"min_num_params": 30_000}}) == [3]
    assert run_ranks(1, _units, spec, {"wrap_policy": {"min_num_params": 20_000}}) == [3]  # the two mlps
    assert run_ranks(1, _units, spec, {"wrap_policy": {"min_num_params": 10**9}}) == [1]


def _local_among_two(spec):
    build_engine("local", spec)


def test_the_local_engine_refuses_company(folder):
    with pytest.raises(RuntimeError, match="strategy=local is for one process, and 2 were started"):
        run_ranks(2, _local_among_two, ModelSpec(folder))


def _backend_names(spec):
    return [type(build_engine(strategy, spec)).__name__ for strategy in ("fsdp", "fsdp2", "fsdp1")]


def test_fsdp_is_fsdp2_and_fsdp1_is_named(folder):
    assert run_ranks(2, _backend_names, ModelSpec(folder)) == [["FSDPEngine", "FSDPEngine", "FSDP1Engine"]] * 2


def _on_policy(folder):
    engine = build_engine("fsdp2", ModelSpec(folder, compute_dtype="fp32"), None, optim_section(), total_steps=9)
    data = make_batch(4, seed=engine.topology.rank)
    data.put("old_log_probs", engine.infer(data, Want.LOG_PROBS).ragged("log_probs"))
    return engine.train_step(data, ppo_loss(use_kl_loss=False), MicroBatching(size=2))["actor/ppo_kl"]


def test_a_sharded_model_that_is_random_in_train_mode_is_mended_alike_on_all_ranks(tmp_path):
    folder = make_tiny_model(tmp_path, "phimoe", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.5)
    assert all(abs(kl) < 1e-6 for kl in run_ranks(2, _on_policy, folder))

"""ZeRO at every stage does what the local engine does, on one rank and on two; and what it saves can be resumed."""

import gc
import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.config.engine import DEEPSPEED_KEYS, DeepSpeedConfig
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine
from verl.workers.engine import deepspeed as zero
from verl.workers.engine.deepspeed import deepspeed_settings

SHARES = {1: [slice(0, 7)], 2: [slice(0, 2), slice(2, 7)]}


@pytest.fixture(scope="module", autouse=True)
def library():
    """Imported once, so that forked ranks need not: Muon alone brings the whole of torch.compile, seconds a rank."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def build(stage, spec, seed=1, sharding=None, **options):
    """The engine at ``stage``, of which no weight stays whole; at None the local one."""
    common = {"total_steps": 10, "grad_clip": 1.0, "seed": seed}
    if stage is None:
        return build_engine("local", spec, sharding, optim_section(), **common)
    config = {"zero_stage": stage, "stage3_param_persistence_threshold": 0, **options}
    return build_engine("deepspeed", spec, sharding, optim_section(), backend_config=config, **common)


def share(engine):
    return make_batch(7, seed=5)[SHARES[engine.topology.dp_size][engine.topology.dp_rank]]


def steps(engine, loss, split=MicroBatching(size=2), times=3):  # noqa: B008
    taken = []
    for _ in range(times):
        taken.append(engine.train_step(share(engine), loss, split))
        engine.step_schedule()
    return taken


def weights(engine, dtype=None):
    return torch.cat([tensor.float().flatten() for _, tensor in engine.weights(dtype)])


def _loads_whole(*args, **kwargs):
    raise AssertionError("a rank loads the whole model")


def three_steps(stage, spec, options=None):
    if stage and spec.load:
        zero.load_model = _loads_whole
    engine = build(stage, spec, **(options or {}))
    want, loss = (Want.VALUES, value_loss()) if spec.head == "value" else (Want.LOG_PROBS, ppo_loss())
    taken = steps(engine, loss)
    scores = engine.infer(share(engine), want, MicroBatching(size=2))
    return taken, scores.ragged(scores.keys()[0]).values, weights(engine), engine.version


def assert_same(local, ranks, scores=1e-4):
    for taken, _, their_weights, version in ranks:
        for one, other in zip(local[0], taken, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
        # a step moves a weight by 1e-3 along its gradient's sign, which rounding turns where that is nearly zero
        assert (their_weights - local[2]).abs().mean() < 1e-6
        assert version == local[3]
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), local[1], rtol=scores, atol=scores)


@pytest.mark.parametrize(
    "stage, ranks, head, options",
    [
        (0, 2, "lm", {}),
        (1, 2, "lm", {}),
        (2, 2, "lm", {}),
        (3, 2, "lm", {}),
        (3, 1, "lm", {"offload_optimizer": True, "offload_param": True}),
        (2, 2, "lm", {"offload_optimizer": True, "reduce_bucket_size": 1000}),
        (3, 2, "value", {}),
    ],
)
def test_every_stage_matches_the_local_engine(folder, stage, ranks, head, options):
    spec = ModelSpec(folder, head, compute_dtype="fp32")
    assert_same(three_steps(None, spec), run_ranks(ranks, three_steps, stage, spec, options))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_compute_keeps_fp32_weights_and_sums(folder, stage):
    # stage 2 without files: rank 0 makes the whole model and hands it out
    spec = ModelSpec(folder, compute_dtype="bf16", load=stage != 2)
    # a weight that rounding moved the other way changes a unit in bf16 by its last bit, 2^-8 of it, and so the scores
    assert_same(three_steps(None, spec), run_ranks(1, three_steps, stage, spec), scores=2**-8)


def _recomputed(stage, spec):
    from verl.models import activation_memory as recompute

    recompute.KEEP_BELOW_BYTES = 0
    return three_steps(stage, spec)


def test_an_adapter_and_recomputed_activations_change_nothing(folder):
    spec = ModelSpec(folder, compute_dtype="fp32", lora=LoRASpec(4))
    assert_same(three_steps(None, spec), run_ranks(2, _recomputed, 3, spec))


def _moved_between_phases(stage, spec):
    gc.freeze()  # DeepSpeed collects garbage whenever something leaves, and this process is large
    zero.has_own_memory = lambda device: True  # there is no other memory here; the moves are the same
    engine = build(stage, spec, sharding={"param_offload": True, "optimizer_offload": True})
    taken = []
    for _ in range(2):
        with engine.on_device():
            engine.infer(share(engine), Want.LOG_PROBS)
        with engine.on_device(optimizer=True):
            taken += steps(engine, ppo_loss(), times=1)
        before = weights(engine)
    assert engine._offload.offloaded == {"weights", "state"}
    return taken, before


@pytest.mark.parametrize("stage", [2, 3])
def test_what_leaves_the_device_comes_back(folder, stage):
    spec = ModelSpec(folder, compute_dtype="fp32")
    local = build(None, spec)
    expected = steps(local, ppo_loss(), times=2)
    [(taken, found)] = run_ranks(1, _moved_between_phases, stage, spec)
    assert all(one == pytest.approx(other, rel=1e-5, abs=1e-6) for one, other in zip(expected, taken, strict=True))
    assert (found - weights(local)).abs().max() < 1e-4


def _nan_on_the_last_rank(stage, spec):
    engine = build(stage, spec)
    data = share(engine)
    if engine.topology.rank == 1:
        advantages = data.ragged("advantages")
        data.put("advantages", advantages.like(torch.full_like(advantages.values, float("nan"))))
    before = weights(engine)
    found = engine.train_step(data, ppo_loss())["nonfinite_steps"], engine.version, torch.equal(before, weights(engine))
    return found, steps(engine, ppo_loss())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bad_gradient_on_one_rank_stops_the_step_on_all(folder, stage):
    spec = ModelSpec(folder, compute_dtype="fp32")
    expected = steps(build(None, spec), ppo_loss())
    for found, after in run_ranks(2, _nan_on_the_last_rank, stage, spec):
        assert found == (1.0, 0, True)
        assert all(one == pytest.approx(other, rel=1e-5, abs=1e-6) for one, other in zip(expected, after, strict=True))


def _save_and_go_on(stage, spec):
    engine = build(stage, spec)
    # this rank's numbers begin and end within a row of the files
    assert torch.equal(weights(build(stage, replace(spec, compute_dtype="bf16"))), weights(engine))
    steps(engine, ppo_loss(), times=2)
    file = io.BytesIO()
    torch.save(engine.state(), file)
    return file.getvalue(), steps(engine, ppo_loss(), times=2), weights(engine)


def _whole(pieces):
    """The tensor that ranks' pieces make."""
    pieces = [piece for piece in pieces if piece is not None]
    if not isinstance(pieces[0], dict):
        return pieces[0]
    whole = torch.full((torch.Size(pieces[0]["shape"]).numel(),), float("nan"))
    for piece in pieces:
        whole[piece["start"] : piece["start"] + piece["flat"].numel()] = piece["flat"]
    return whole.view(piece["shape"])


def _joined(states):
    """What a reader makes of all ranks' files for another number of ranks."""
    entries = [state["optimizer"]["state"] for state in states]
    names = {name for entry in entries for name in entry}
    keys = ("step", "exp_avg", "exp_avg_sq")
    optimizer = {name: {key: _whole([e[name][key] for e in entries if name in e]) for key in keys} for name in names}
    model = {name: _whole([state["model"][name] for state in states]) for name in states[0]["model"]}
    groups = states[0]["optimizer"]["param_groups"]
    return {**states[0], "model": model, "optimizer": {"state": optimizer, "param_groups": groups}}


def _resume(stage, spec, files, join):
    engine = build(stage, spec, seed=7)
    steps(engine, ppo_loss(), MicroBatching(), times=1)  # overwrites what it was before
    states = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    engine.load_state(_joined(states) if join else states[engine.topology.rank])
    return steps(engine, ppo_loss(), times=2), weights(engine)


@pytest.mark.parametrize("stage, other", [(1, None), (2, 3), (3, 2)])
def test_a_run_goes_on_where_it_was_saved(folder, stage, other):
    spec = ModelSpec(folder, compute_dtype="fp32")
    saved = run_ranks(2, _save_and_go_on, stage, spec)
    files = [file for file, _, _ in saved]
    for taken, found in run_ranks(2, _resume, stage, spec, files, False):
        assert taken == saved[0][1] and torch.equal(found, saved[0][2])
    [(taken, found)] = run_ranks(1, _resume, other, spec, files, True)  # of another stage, and as many ranks as one
    for one, then in zip(saved[0][1], taken, strict=True):
        assert one == pytest.approx(then, rel=1e-5, abs=1e-6)
    assert (found - saved[0][2]).abs().max() < 1e-5


def _reference(stage, spec):
    engine = build_engine("deepspeed", spec, backend_config={"zero_stage": stage})
    return type(engine).__name__, engine.infer(share(engine), Want.LOG_PROBS).ragged("log_probs").values


def test_a_reference_is_whole_or_in_slices_and_scores_the_same(folder):
    spec = ModelSpec(folder, compute_dtype="fp32")
    local = build_engine("local", spec).infer(make_batch(7, seed=5), Want.LOG_PROBS).ragged("log_probs").values
    for stage, kind in ((2, "ReplicaEngine"), (3, "DeepSpeedEngine")):
        found = run_ranks(2, _reference, stage, spec)
        assert [name for name, _ in found] == [kind] * 2
        torch.testing.assert_close(torch.cat([scores for _, scores in found]), local)


def test_what_verl_decides_is_not_taken_from_free_entries():
    arguments = torch.device("cpu"), torch.bfloat16, torch.float32, 1.0, 1000
    made = deepspeed_settings(
        DeepSpeedConfig(config={"zero_optimization": {"round_robin_gradients": True}}), *arguments
    )
    assert made["zero_optimization"]["round_robin_gradients"] and made["zero_optimization"]["stage"] == 2
    for entries in ({"gradient_clipping": 2.0}, {"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": False}}):
        with pytest.raises(ValueError, match="is decided by verl: set "):
            deepspeed_settings(DeepSpeedConfig(config=entries), *arguments)


def test_every_option_of_ours_is_known_as_decided():
    options = set(DeepSpeedConfig()) - {"zero_stage", "config"}
    assert {f"zero_optimization.{name}" for name in options} <= set(DEEPSPEED_KEYS)


def test_without_the_library_the_error_says_how_to_get_it(folder):
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from verl.workers.engine import ModelSpec, build_engine\n"
        f"build_engine('deepspeed', ModelSpec({folder!r}), backend_config={{'zero_stage': 3}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "strategy=deepspeed needs the package deepspeed" in done.stderr
    assert "pip install -e '.[deepspeed]'" in done.stderr


def test_settings_that_cannot_be_had_are_refused(folder):
    with pytest.raises(ValueError, match="deepspeed.zero_stage=4 is not a stage of ZeRO"):
        build_engine("deepspeed", ModelSpec(folder), backend_config={"zero_stage": 4})
    with pytest.raises(ValueError, match="the sharded optimizer keeps the weights in fp32"):
        build(2, ModelSpec(folder, param_dtype="bf16"))

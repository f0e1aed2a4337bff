"""A rollout on devices of its own: the same numbers as on shared ones, and one batch ahead where asked."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from tests.support.learning import check_learned
from tests.support.runs import main_ppo, make_task, overrides, read_metrics, run_job
from tests.support.waiting import wait_for
from tests.trainer.test_resume import assert_equal_trees, checkpoint_files, numbers
from tests.workers.rollout.conftest import COMMON
from verl.config.load import load_ppo_config
from verl.trainer.buffer.disjoint import DisjointRollout
from verl.trainer.main_ppo import main
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.placement import Role, default_pools, default_roles
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.hf.rollout import HFRollout

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
ROLLOUT = "actor_rollout_ref__rollout"
APART = {"actor_rollout_ref__hybrid_engine": False, f"{ROLLOUT}__n_gpus_per_node": 1}
AHEAD = {**APART, f"{ROLLOUT}__async_ratio": 1}
SHARDED = {
    "trainer__n_gpus_per_node": 2,
    "actor_rollout_ref__actor__strategy": "fsdp2",
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4,
}
WAYS = {
    "one rank each": ({}, APART),
    "two ranks train, two sample": (SHARDED, {**APART, f"{ROLLOUT}__n_gpus_per_node": 2}),
}
RUN = {
    "trainer__logger": "[file]",
    "trainer__total_training_steps": 4,
    "trainer__test_freq": 2,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    f"{ROLLOUT}__calculate_log_probs": True,
}


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Runs that several tests look at, made when they are first asked for: name, settings -> (folder, metrics)."""
    folder, made = tmp_path_factory.mktemp("once"), {}

    def get(name, **settings):
        if name not in made:
            with pytest.MonkeyPatch.context() as monkeypatch:
                made[name] = run(folder, name, monkeypatch, **settings)
        return folder, made[name]

    return get


def run(folder, name, monkeypatch, **settings):
    """The metrics of a small run, by step; its samples are in ``folder/name``."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / f"{name}.jsonl"))
    settings = {**RUN, "trainer__rollout_data_dir": folder / name, **settings}
    run_job(overrides(make_task(folder / "task", rows=12), **settings))
    return {row["step"]: row["data"] for row in read_metrics(folder / f"{name}.jsonl")}


def compared(row):
    """What must be equal; the rollout's log-probs may round otherwise where a rank generates other rows together."""
    rounded = ("training/rollout_", "rollout_corr/")
    return {name: number for name, number in numbers(row).items() if not name.startswith(rounded)}


def samples(folder, step):
    return [json.loads(line)["output"] for line in (folder / f"{step}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("way", WAYS)  # on Ray: tests/faults/test_on_ray.py
def test_a_rollout_apart_gives_exactly_the_numbers_of_one_that_shares(way, once, tmp_path, monkeypatch):
    common, apart = WAYS[way]
    folder, together = once("sharded" if common else "plain", **common)
    alone = run(tmp_path, "alone", monkeypatch, **common, **apart)
    assert "val-core/digits/reward/mean@1" in together[2] and "timing_s/sync_weights" in alone[2]
    assert [compared(row) for row in together.values()] == [compared(row) for row in alone.values()]
    assert max(row["training/rollout_probs_diff_max"] for row in alone.values()) < 1e-6
    assert samples(folder / ("sharded" if common else "plain"), 4) == samples(tmp_path / "alone", 4)


def test_step_k_trains_on_what_the_weights_after_step_k_minus_2_drew(tmp_path, monkeypatch):
    begun, start = [], DisjointRollout.start

    def noting(self, request, steps_done):
        call = start(self, request, steps_done)
        begun.append((request.meta_info["global_steps"], steps_done, call.version))
        return call

    monkeypatch.setattr(DisjointRollout, "start", noting)
    ahead = run(tmp_path, "ahead", monkeypatch, **AHEAD)
    assert begun == [(1, 0, 0), (2, 0, 0), (3, 1, 2), (4, 2, 4)]  # two optimizer steps a training step
    assert [ahead[step]["rollout/staleness"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    drift = [ahead[step]["training/rollout_probs_diff_max"] for step in (1, 2)]
    assert drift[0] < 1e-5 < drift[1]
    frozen = run(tmp_path, "frozen", monkeypatch, actor_rollout_ref__actor__optim__lr="1e-30")
    newest = run(tmp_path, "newest", monkeypatch)
    generated = {name: [samples(tmp_path / name, step) for step in (1, 2)] for name in ("ahead", "frozen", "newest")}
    assert generated["ahead"] == generated["frozen"] and generated["ahead"][1] != generated["newest"][1]
    assert numbers(newest[1])["actor/pg_loss"] == ahead[1]["actor/pg_loss"]
    assert frozen[2]["critic/score/mean"] == ahead[2]["critic/score/mean"]


def test_servers_generate_ahead_what_batches_do(tmp_path, monkeypatch):
    two = {f"{ROLLOUT}__n_gpus_per_node": 2}
    batches = run(tmp_path, "batches", monkeypatch, **{**AHEAD, **two})
    resumable = {"trainer__save_freq": 1, "trainer__default_local_dir": tmp_path / "run"}
    served = run(tmp_path, "served", monkeypatch, **{**AHEAD, **two, f"{ROLLOUT}__mode": "async", **resumable})
    for step in (1, 2, 3, 4):
        assert samples(tmp_path / "served", step) == samples(tmp_path / "batches", step)
        assert served[step]["rollout/staleness"] == batches[step]["rollout/staleness"]
        assert served[step]["actor/grad_norm"] == pytest.approx(batches[step]["actor/grad_norm"], rel=1e-4)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run(tmp_path, "resumed", monkeypatch, **{**AHEAD, **two, f"{ROLLOUT}__mode": "async", **resumable})
    assert sorted(resumed) == [3, 4] and numbers(resumed[3]) == numbers(served[3])


def test_servers_apart_draw_request_by_request_what_colocated_ones_do(tmp_path, monkeypatch):
    tails = {f"{ROLLOUT}__mode": "async", f"{ROLLOUT}__max_running_requests": 3}
    colocated = run(tmp_path, "colocated", monkeypatch, **tails)
    apart = run(tmp_path, "apart", monkeypatch, **{**APART, **tails})
    for step, row in colocated.items():
        assert samples(tmp_path / "apart", step) == samples(tmp_path / "colocated", step)
        assert apart[step]["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-4)


def test_validation_in_between_changes_nothing_and_sees_the_newest_weights(tmp_path, monkeypatch):
    quiet = run(tmp_path, "quiet", monkeypatch, **AHEAD, trainer__test_freq=-1)
    shown = run(tmp_path, "shown", monkeypatch, **AHEAD, trainer__test_freq=1)
    on_policy = run(tmp_path, "on_policy", monkeypatch, trainer__test_freq=1)
    for step, row in quiet.items():
        assert numbers(row).items() <= numbers(shown[step]).items()
    validation = [name for name in shown[1] if name.startswith("val-")]
    assert validation and all(shown[1][name] == on_policy[1][name] for name in validation)  # equal until then


def test_the_next_batch_is_generated_while_a_step_trains(tmp_path, monkeypatch):
    """Each step stands still before its update until the rollout has generated all of the next batch."""
    generated, trained = tmp_path / "generated", []
    generated.touch()

    def noting(self, requests, *arguments, generate=HFRollout.generate, **named):
        result = generate(self, requests, *arguments, **named)
        if len(requests) == 16:  # fewer are a trial of new weights
            with generated.open("a") as file:
                file.write("batch\n")
        return result

    def waiting(self, batch, improve=RayPPOTrainer.improve):
        ahead = min(self.global_steps + 1, 4)  # no batch follows that of the last step
        wait_for(lambda: generated.read_text().count("batch") >= ahead, f"batch {ahead}")
        trained.append(self.global_steps)
        improve(self, batch)

    monkeypatch.setattr(HFRollout, "generate", noting)  # in the workers, too: they are forked
    monkeypatch.setattr(RayPPOTrainer, "improve", waiting)
    steps = run(tmp_path, "ahead", monkeypatch, **AHEAD, trainer__test_freq=-1)
    assert trained == [1, 2, 3, 4] and generated.read_text().count("batch") == 4
    assert all("perf/rollout_overlap" in steps[step] for step in (2, 3, 4))


RESUMABLE = {**AHEAD, "trainer__total_training_steps": 5, "trainer__save_freq": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where the run that never stops keeps its checkpoints."""
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("step", [2, 3])  # an epoch has three steps: the batch ahead is of this or of the next
def test_a_resumed_run_equals_the_run_that_never_stopped(step, once, saved, tmp_path, monkeypatch):
    _, whole = once("whole", **RESUMABLE, trainer__default_local_dir=saved)
    resume = {
        "trainer__default_local_dir": tmp_path / "resumed",
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": saved / f"global_step_{step}",
    }
    resumed = run(tmp_path, "resumed_", monkeypatch, **{**RESUMABLE, **resume})
    assert sorted(resumed) == list(range(step + 1, 6))
    assert all(numbers(resumed[s]) == numbers(whole[s]) for s in resumed)
    ends = saved / "global_step_5", tmp_path / "resumed" / "global_step_5"
    for name in checkpoint_files(ends[0]):
        assert_equal_trees(*(torch.load(end / name, weights_only=True) for end in ends), str(name))
    assert not (ends[0] / "ahead.safetensors").exists()  # nothing was left to generate


def test_going_on_with_the_newest_weights_leaves_no_prompt_out(tmp_path, monkeypatch):
    folder = {"trainer__default_local_dir": tmp_path / "run", "trainer__save_freq": 2, "data__shuffle": False}
    run(tmp_path, "ahead", monkeypatch, **AHEAD, **folder)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    on_policy = {**folder, **APART, f"{ROLLOUT}__max_staleness": 0, "trainer__resume_allow_changes": True}
    run(tmp_path, "after", monkeypatch, **on_policy)
    inputs = [json.loads(line)["input"] for line in (tmp_path / "after" / "3.jsonl").read_text().splitlines()]
    assert len(set(inputs)) == 4
    before = [json.loads(line)["input"] for line in (tmp_path / "ahead" / "3.jsonl").read_text().splitlines()]
    assert sorted(inputs) == sorted(before)
    assert not (tmp_path / "run" / "global_step_4" / "ahead.safetensors").exists()


def job(tmp_path, **settings):
    return PPOJob(load_ppo_config(overrides(make_task(tmp_path / "task"), **settings)))


def test_roles_and_pools_of_a_rollout_apart(tmp_path):
    config = job(tmp_path, **{**APART, f"{ROLLOUT}__n_gpus_per_node": 3, "algorithm__use_kl_in_reward": True,
                              "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8}).config  # fmt: skip
    roles = default_roles(config)
    pools = default_pools(config, roles)
    assert set(roles) == {Role.Actor, Role.Rollout, Role.RefPolicy}
    assert pools.resource_pool_spec == {"global_pool": [1], "rollout_pool": [3]} and pools.get_n_gpus() == 4
    assert pools.mapping[Role.Rollout] == "rollout_pool" and pools.mapping[Role.RefPolicy] == "global_pool"


def test_a_trainer_that_cannot_generate_ahead_is_refused(tmp_path):
    class Own(RayPPOTrainer):
        pass

    class OwnJob(PPOJob):
        trainer_cls = Own

    with pytest.raises(
        ValueError, match="max_staleness=1: Own generates each batch when it is needed.*OneStepOffTrainer"
    ):
        OwnJob(job(tmp_path, **AHEAD).config).build_trainer()


def test_the_recipe_is_the_main_job_with_three_options(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = importlib.import_module("recipe.one_step_off_policy.main_ppo").RECIPE
    arguments = overrides(
        make_task(tmp_path / "task"),
        trainer__total_training_steps=3,
        trainer__save_freq=2,
        trainer__default_local_dir=tmp_path / "run",
        rollout__nnodes=1,
        rollout__n_gpus_per_node=2,
    )
    main(arguments, recipe)
    config = load_ppo_config(arguments, recipe.config_path, recipe.config_name)
    shared = config.actor_rollout_ref
    assert (shared.hybrid_engine, shared.rollout.max_staleness, shared.rollout.calculate_log_probs) == (False, 1, True)
    assert config.rollout_processes == [2]
    script = (tmp_path / "run" / "resume.sh").read_text()
    assert f"-m {recipe.program}" in script and "verl.trainer.main_ppo" not in script


@pytest.mark.learning
def test_one_step_off_learns_as_on_policy_does(tmp_path, monkeypatch):
    from tests.trainer.test_learning import TINY, rewards_of

    check_learned("one step off", rewards_of(tmp_path, monkeypatch, **TINY | AHEAD))


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]
)
def test_an_engine_over_two_ranks_gets_the_weights_of_a_sharded_actor(engine, tmp_path, monkeypatch):
    task = make_task(tmp_path / "task")
    task["actor_rollout_ref.model.path"] = make_tiny_model(tmp_path / "heads_of_32", **COMMON["tied"])
    settings = {**RUN, **SHARDED, **APART, "trainer__total_training_steps": 3, "trainer__test_freq": -1}
    settings |= {f"{ROLLOUT}__name": engine, f"{ROLLOUT}__tensor_model_parallel_size": 2}
    done = main_ppo(
        overrides(task, **{**settings, f"{ROLLOUT}__n_gpus_per_node": 2}),
        VERL_FILE_LOGGER_PATH=str(tmp_path / "metrics.jsonl"),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(steps) == 3 and all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert steps[0]["critic/score/mean"] != steps[2]["critic/score/mean"]

"""How the driver divides a batch: even work for the ranks, the same optimizer steps for any number of them."""

import json

import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.batch.partition import RowCost
from verl.trainer.ppo.experience import row_cost

pytestmark = pytest.mark.ranks

CRITIC = {
    "algorithm__adv_estimator": "gae",
    "critic__strategy": "fsdp2",
    "critic__optim__lr": "1e-3",
    "critic__model__fsdp_config__mixed_precision__param_dtype": "fp32",
}
DRAWN = {  # 4 prompts x 2 responses, in epochs of four mini-batches of two rows: a third rank has none
    **CRITIC,
    "actor_rollout_ref__rollout__n": 2,
    "actor_rollout_ref__actor__strategy": "fsdp2",
    "actor_rollout_ref__actor__ppo_mini_batch_size": 1,
    "actor_rollout_ref__actor__ppo_epochs": 2,
    "actor_rollout_ref__actor__shuffle": True,
    "actor_rollout_ref__actor__use_dynamic_bsz": True,
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 200,
}
ONE_STEP = {
    "actor_rollout_ref__rollout__calculate_log_probs": True,
    "actor_rollout_ref__actor__entropy_coeff": 0.01,
    "trainer__total_training_steps": 3,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """``job(**settings)``: a run of two steps; returns the trainer and each step's metrics."""
    folder = tmp_path_factory.mktemp("balance")
    task, count = make_task(folder / "task"), iter(range(100))

    def do(**settings):
        log = folder / f"{next(count)}.jsonl"
        given = {"trainer__logger": "[file]", "trainer__total_training_steps": 2, "trainer__resume_mode": "disable"}
        given["trainer__default_local_dir"] = str(folder / "run")
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            trainer = run_job(overrides(task, **{**given, **settings}))
        return trainer, [row["data"] for row in read_metrics(log)]

    return do


@pytest.fixture(scope="module")
def one_rank(job):
    return job(**DRAWN)[1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_shuffled_mini_batches_and_their_order_do_not_depend_on_the_ranks(ranks, one_rank, job):
    _, steps = job(**DRAWN, trainer__n_gpus_per_node=ranks)
    names = {"critic/score/mean": 0, "actor/pg_loss": 1e-3, "actor/grad_norm": 1e-3, "critic/vf_loss": 1e-3}
    for name, tolerance in {**names, "critic/grad_norm": 1e-3, "actor/entropy": 1e-4}.items():
        expected = [step[name] for step in one_rank]
        assert [step[name] for step in steps] == pytest.approx(expected, rel=tolerance, abs=2e-6), name
    assert steps[0]["global_seqlen/cost_max_over_mean"] >= 1
    if ranks == 3:  # two rows at a time
        assert steps[0]["global_seqlen/balanced_cost_max_over_mean"] >= 1.5


def weights(trainer):
    [worker] = trainer.actor_wg._hosts._host._workers.values()
    return {name: tensor.clone() for name, tensor in worker.actor.weights()}


@pytest.mark.parametrize("loss", ["vanilla", "clip_cov", "tis"])
def test_without_a_pass_for_old_log_probs_the_same_is_learned(loss, job):
    settings = {**ONE_STEP, "actor_rollout_ref__actor__policy_loss__loss_mode": loss}
    plain, with_pass = job(**settings, actor_rollout_ref__actor__skip_old_log_probs=False)
    other, without = job(**settings)
    for (name, one), two in zip(weights(plain).items(), weights(other).values(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6, msg=name)
    clocks = ("timing", "perf/", "rollout/engine/")
    for one, two in zip(with_pass, without, strict=True):
        assert "timing_s/old_log_prob" in one and "timing_s/old_log_prob" not in two
        assert {name for name in one if not name.startswith(clocks)} == {n for n in two if not n.startswith(clocks)}
        for name in ("actor/entropy", "actor/grad_norm", "training/rollout_probs_diff_mean"):
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6), name
        assert two["actor/ppo_kl"] == 0


def test_the_update_hands_its_log_probs_back_in_order_from_several_ranks(job):
    ranks = {"trainer__n_gpus_per_node": 3, "actor_rollout_ref__actor__strategy": "fsdp2"}
    skip = {"actor_rollout_ref__actor__skip_old_log_probs": True}
    cut = {key: DRAWN[key] for key in DRAWN if "dynamic" in key or "max_token" in key}
    _, alone = job(**ONE_STEP, **skip)
    _, several = job(**ONE_STEP, **skip, **ranks, **cut)
    for name in ("actor/entropy", "training/rollout_probs_diff_max", "training/rollout_probs_diff_std"):
        assert [s[name] for s in several] == pytest.approx([s[name] for s in alone], rel=1e-3, abs=1e-6), name


def test_while_only_the_critic_learns_the_pass_is_made_for_its_numbers(job):
    critic = {**CRITIC, "critic__strategy": "local", "critic__ppo_micro_batch_size_per_gpu": 8}
    skip = {"actor_rollout_ref__actor__skip_old_log_probs": True, "trainer__critic_warmup": 1}
    _, (warming, learning) = job(**critic, **skip)
    assert "timing_s/old_log_prob" in warming and "timing_s/old_log_prob" not in learning
    assert warming["actor/entropy"] > 0 and learning["actor/entropy"] > 0


def test_an_estimator_that_reads_old_log_probs_is_refused_at_the_start(job):
    from verl.algorithms.advantages import register_adv_est

    @register_adv_est("test_reads_old_log_probs")
    def estimator(token_level_rewards, response_mask, old_log_probs):
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="skip_old_log_probs=true with .*the estimator reads old_log_probs"):
        job(algorithm__adv_estimator="test_reads_old_log_probs", actor_rollout_ref__actor__skip_old_log_probs=True)


def test_the_cost_of_a_row_comes_from_the_model(tmp_path):
    assert row_cost(str(tmp_path)) == RowCost() == row_cost("some/hub-id")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**shape, "vocab_size": 104}}))
    weights_in_use = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 104 * 64
    assert row_cost(str(tmp_path)).break_even == round(6 * weights_in_use / (12 * 64 * 2))

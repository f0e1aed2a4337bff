"""``algorithm.rollout_correction`` in whole runs: weights reach the loss once, rejected tokens reach no update."""

import numpy as np
import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.batch.ragged import Ragged
from verl.protocol import DataProto
from verl.trainer.ppo import rollout_correction
from verl.trainer.ppo.rollout_correction import reject_tokens, weigh_tokens

CORRECTION, ROLLOUT = "algorithm__rollout_correction__", "actor_rollout_ref__rollout__"
ACTOR = "actor_rollout_ref__actor__"
ANOTHER_SAMPLER = {f"{ROLLOUT}top_k": 4}
"""Its probabilities are larger than the actor's: r is below 1."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """``job(**settings)``: a run of two steps; returns the trainer and each step's metrics."""
    folder = tmp_path_factory.mktemp("correction")
    task, count = make_task(folder / "task"), iter(range(100))

    def do(**settings):
        log = folder / f"{next(count)}.jsonl"
        given = {"trainer__logger": "[file]", "trainer__total_training_steps": 2, "trainer__resume_mode": "disable"}
        given |= {f"{ROLLOUT}calculate_log_probs": True, "trainer__default_local_dir": str(folder / "run")}
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            trainer = run_job(overrides(task, **{**given, **settings}))
        return trainer, [row["data"] for row in read_metrics(log)]

    return do


@pytest.fixture(scope="module")
def plain(job):
    return job(actor_rollout_ref__actor__skip_old_log_probs=False)


def weights(trainer):
    [worker] = trainer.actor_wg._hosts._host._workers.values()
    return {name: tensor.clone() for name, tensor in worker.actor.weights()}


def numbers(step):
    clocks = ("timing", "perf/", "rollout/engine/", "rollout_corr/rollout_rs")
    return {name: value for name, value in step.items() if not name.startswith(clocks)}


def test_bounds_nothing_is_beyond_give_exactly_the_run_without(plain, job):
    other, steps = job(**{f"{CORRECTION}rollout_rs": "token", f"{CORRECTION}rollout_rs_threshold": 2})
    assert [step.pop("rollout_corr/rollout_rs_masked_fraction") for step in steps] == [0, 0]
    assert [numbers(step) for step in steps] == [numbers(step) for step in plain[1]]
    for one, two in zip(weights(plain[0]).values(), weights(other).values(), strict=True):
        assert one.equal(two)


def test_weights_reach_the_policy_loss_exactly_once(plain, job, monkeypatch):
    def twice(old, rollout, mask, *options):
        return 2.0 * mask.float(), {}

    monkeypatch.setattr(rollout_correction, "importance_weights", twice)
    _, (step, _) = job(**{f"{CORRECTION}rollout_is": "token"})
    assert step["actor/grad_norm"] == pytest.approx(2 * plain[1][0]["actor/grad_norm"], rel=1e-4)


def test_rollout_mismatch_is_weighted_and_the_split_of_the_batch_does_not_matter(job):
    settings = {**ANOTHER_SAMPLER, f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_rs": "token"}
    settings[f"{CORRECTION}rollout_rs_threshold_lower"] = 0.0725
    runs = [job(**settings, **{f"{ACTOR}ppo_micro_batch_size_per_gpu": size})[1] for size in (1, 8)]
    assert 0 < runs[0][0]["rollout_corr/rollout_is_mean"] < 0.9
    assert 0 < runs[0][0]["rollout_corr/rollout_rs_masked_fraction"] < 1
    for one, two in zip(*runs, strict=True):
        assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-3)


def test_what_is_rejected_as_a_whole_moves_nothing(plain, job):
    options = {"rollout_rs": "sequence", "rollout_rs_threshold": 1e-6, "rollout_rs_threshold_lower": 1e-7}
    trainer, steps = job(**{f"{CORRECTION}{name}": value for name, value in options.items()})
    assert [step["rollout_corr/rollout_rs_seq_masked_fraction"] for step in steps] == [1, 1]
    assert [step["actor/grad_norm"] for step in steps] == [0, 0]
    assert steps[0]["critic/score/mean"] == plain[1][0]["critic/score/mean"]


def test_the_samplers_log_probs_stand_for_the_old_ones(plain, job):
    trainer, steps = job(**{f"{CORRECTION}bypass_mode": True})
    for one, two in zip(plain[1], steps, strict=True):
        assert "timing_s/old_log_prob" in one and "timing_s/old_log_prob" not in two
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
    for one, two in zip(weights(plain[0]).values(), weights(trainer).values(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_a_bypass_measures_the_distance_to_the_sampler_in_the_loss(job):
    _, (step, _) = job(**ANOTHER_SAMPLER, **{f"{CORRECTION}bypass_mode": True})
    assert step["actor/ppo_kl"] > 0.1


def test_functions_that_cannot_do_it_are_refused_at_the_start(job):
    from verl.algorithms.advantages import register_adv_est
    from verl.algorithms.losses import register_policy_loss

    @register_policy_loss("test_takes_no_weights")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
        raise AssertionError("never called")

    @register_adv_est("test_reads_entropys")
    def estimator(token_level_rewards, response_mask, entropys):
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="rollout_is=token with .*loss_mode=test_takes_no_weights"):
        job(**{f"{CORRECTION}rollout_is": "token", f"{ACTOR}policy_loss__loss_mode": "test_takes_no_weights"})
    with pytest.raises(ValueError, match="bypass_mode=true with .*reads entropys"):
        job(**{f"{CORRECTION}bypass_mode": True, "algorithm__adv_estimator": "test_reads_entropys"})


def test_columns_are_put_where_their_tokens_are():
    from verl.config.algorithm import RolloutCorrectionConfig

    def column(rows):
        return Ragged.from_rows([np.log(row).tolist() for row in rows], 8, dtype=torch.float32)

    batch = DataProto.from_ragged(
        {
            "responses": Ragged.from_rows([[1, 2], [3], [4, 5, 6]], 8),
            "response_mask": Ragged.from_rows([[1, 1], [1], [1, 0, 1]], 8),
            "rollout_log_probs": column([[0.2, 0.4], [0.5], [0.8, 0.3, 0.25]]),
            "old_log_probs": column([[0.8, 0.2], [0.5], [0.1, 0.9, 0.5]]),
        }
    )
    options = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token", rollout_rs_threshold=2.5)
    weigh_tokens(batch, options), reject_tokens(batch, options)
    found = [row.tolist() for row in batch.ragged("rollout_is_weights").rows()]
    assert [x for row in found for x in row] == pytest.approx([2, 0.5, 1, 0.125, 0, 2])
    assert [row.tolist() for row in batch.ragged("response_mask").rows()] == [[0, 1], [1], [0, 0, 1]]
    other = DataProto.from_ragged({"responses": Ragged.from_rows([[1]], 8)})
    with pytest.raises(ValueError, match="rollout_is=token needs the column 'rollout_log_probs'"):
        weigh_tokens(other, options)

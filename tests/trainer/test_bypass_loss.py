"""``loss_mode=bypass_mode`` in whole runs."""

import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job

CORRECTION, ROLLOUT = "algorithm__rollout_correction__", "actor_rollout_ref__rollout__"
ACTOR = "actor_rollout_ref__actor__"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """``job(**settings)``: two steps on text another distribution drew; each step's metrics."""
    folder = tmp_path_factory.mktemp("bypass")
    task, count = make_task(folder / "task"), iter(range(100))

    def do(**settings):
        log = folder / f"{next(count)}.jsonl"
        given = {"trainer__logger": "[file]", "trainer__total_training_steps": 2, "trainer__resume_mode": "disable"}
        given |= {f"{ROLLOUT}calculate_log_probs": True, f"{ROLLOUT}top_k": 4, f"{CORRECTION}bypass_mode": True}
        given |= {"trainer__default_local_dir": str(folder / "run"), f"{ACTOR}policy_loss__loss_mode": "bypass_mode"}
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_job(overrides(task, **{**given, **settings}))
        return [row["data"] for row in read_metrics(log)]

    return do


def test_weights_and_rejection_act_in_the_loss_and_the_cut_of_the_batch_does_not_matter(job):
    settings = {f"{CORRECTION}loss_type": "reinforce", f"{CORRECTION}rollout_is": "token"}
    settings |= {f"{CORRECTION}rollout_rs": "token", f"{CORRECTION}rollout_rs_threshold": "'0.0725_2.0'"}
    runs = [job(**settings, **{f"{ACTOR}ppo_micro_batch_size_per_gpu": size}) for size in (1, 8)]
    first = runs[0][0]
    assert 0 < first["rollout_corr/rollout_is_mean"] < 0.9, "the sampler's probabilities are larger than the actor's"
    assert 0 < first["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert "actor/entropy" not in first and first["actor/ppo_kl"] != 0, "the pass before the update is left out"
    for one, two in zip(*runs, strict=True):
        assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-3)

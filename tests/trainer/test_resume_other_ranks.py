"""A run that is resumed by another number of ranks goes on as the run that was not stopped."""

import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job

ACTOR, MODEL = "actor_rollout_ref__actor", "actor_rollout_ref__model"
RUN = {
    f"{ACTOR}__strategy": "fsdp2",
    f"{ACTOR}__ppo_mini_batch_size": 2,
    f"{ACTOR}__ppo_micro_batch_size_per_gpu": 4,
    "trainer__total_training_steps": 4,
    "trainer__logger": "[file]",
}
PPO = {
    f"{MODEL}__lora_rank": 4,
    f"{MODEL}__lora_alpha": 8,
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref__ref__strategy": "fsdp2",
    "critic__ppo_micro_batch_size_per_gpu": 4,
    "critic__strategy": "fsdp2",
}
SAME = (
    "critic/score/mean",
    "response_length/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/lr",
    "critic/vf_loss",
    "critic/grad_norm",
    "actor/reward_kl_penalty",
    "actor/reward_kl_penalty_coeff",
)


def run(tmp_path, monkeypatch, name, **settings):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.jsonl"))
    task = make_task(tmp_path / "task", rows=12)
    run_job(overrides(task, **{**RUN, "trainer__default_local_dir": str(tmp_path / "saved"), **settings}))
    return {row["step"]: row["data"] for row in read_metrics(tmp_path / f"{name}.jsonl")}


def test_two_ranks_save_and_one_goes_on_with_adapter_and_critic(tmp_path, monkeypatch, capsys):
    whole = run(tmp_path, monkeypatch, "whole", trainer__save_freq=2, trainer__n_gpus_per_node=2, **PPO)
    resume = {
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": str(tmp_path / "saved" / "global_step_2"),
    }
    alone = run(tmp_path, monkeypatch, "resumed", trainer__save_freq=-1, **PPO, **resume)
    assert sorted(alone) == [3, 4]
    for step in (3, 4):
        expected = {name: whole[step][name] for name in SAME}
        assert {name: alone[step][name] for name in SAME} == pytest.approx(expected, rel=2e-3, abs=1e-5)
    said = capsys.readouterr().out
    assert "actor: saved by 2 ranks, read by 1" in said and "critic: saved by 2 ranks, read by 1" in said

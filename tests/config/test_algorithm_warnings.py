"""Combinations of estimators and losses in which a setting changes nothing."""

import pytest

from .helpers import notes

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
GIGPO = ("algorithm.adv_estimator=gigpo", f"{ROLLOUT}.n=4")
KEPT = f"{ROLLOUT}.calculate_log_probs=true"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*GIGPO], "gigpo with actor_rollout_ref.rollout.mode=sync: every response is one turn"),
        ([*GIGPO, "algorithm.gigpo.episode_weight=0", "algorithm.gigpo.step_weight=0"], "nothing is learned"),
        ([*GIGPO, "algorithm.step_gamma=0.9"], "step_gamma=0.9 has no effect: with"),
        ([*GIGPO, "algorithm.gamma=0.9"], "algorithm.gamma=0.9 has no effect: algorithm.adv_estimator=gigpo does not"),
        (["algorithm.gigpo.mode=mean_norm"], "gigpo.mode=mean_norm has no effect: algorithm.adv_estimator=gae"),
        (["algorithm.adv_estimator=agentic_reinforce", "algorithm.gamma=0.9"], "gamma=0.9 has no effect: with"),
        (
            ["critic.cliprange_value=0.3", "critic.ppo_mini_batch_size=8"],
            "cliprange_value=0.3 has no effect: with one optimizer step per batch",
        ),
        (["algorithm.filter_groups.low=0.1"], "filter_groups.low=0.1 has no effect"),
        (
            [KEPT, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0",
             f"{CORRECTION}.rollout_is_mode=truncate"],
            "rollout_is_mode=truncate has no effect: algorithm.rollout_correction.rollout_is_threshold=0.5_5.0 has",
        ),
        (
            [KEPT, f"{CORRECTION}.rollout_rs=token_k3", f"{CORRECTION}.rollout_rs_threshold=0.1",
             f"{CORRECTION}.rollout_rs_threshold_lower=0.5"],
            "rollout_rs=token_k3 has no lower bound",
        ),
    ],
)  # fmt: skip
def test_a_combination_in_which_a_setting_changes_nothing_is_said(words, said):
    assert said in notes(*words)


def test_what_does_change_something_is_not_mentioned():
    assert "cliprange_value" not in notes("critic.cliprange_value=0.3"), "two steps: the second meets the bound"
    bounded = ("algorithm.reward_shaping.norm.mean=batch", "algorithm.reward_shaping.clip_range=[-1,3]")
    grpo = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")
    assert "norm.mean" in notes(*grpo, bounded[0]) and "norm.mean" not in notes(*grpo, *bounded)

"""Names under which releases of verl asked for the rollout correction, old and new."""

import pytest

from verl.config.algorithm import DIVERGENCES, Rejection, RolloutCorrectionConfig

from .helpers import loaded_with, notes, problems

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION, LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss.loss_mode"
KEPT, BYPASS = f"{ROLLOUT}.calculate_log_probs=true", f"{CORRECTION}.bypass_mode=true"


@pytest.mark.parametrize(
    ("words", "meant", "said"),
    [
        (
            [f"+{ACTOR}.tis_imp_ratio_cap=3"],
            {"rollout_is": "token", "rollout_is_threshold": 3.0},
            "tis_imp_ratio_cap is now algorithm.rollout_correction.rollout_is=token",
        ),
        ([f"{ACTOR}.tis_imp_ratio_cap=-1"], {}, "tis_imp_ratio_cap=-1 is off"),
        (
            ["algorithm.rollout_is=true", "algorithm.rollout_is_threshold=4", "algorithm.rollout_is_level=sequence",
             "algorithm.rollout_is_mode=truncate", "algorithm.rollout_is_veto_threshold=1e-4"],
            {"rollout_is": "sequence", "rollout_is_threshold": 4.0, "rollout_token_veto_threshold": 1e-4},
            "algorithm.rollout_is_level",
        ),
        (
            ["algorithm.rollout_is_threshold=2", "algorithm.rollout_is_mode=mask",
             "algorithm.rollout_is_level=geometric", "algorithm.rollout_is_threshold_lower=0.4"],
            {"rollout_rs": "geometric", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.4},
            "became algorithm.rollout_correction: rollout_rs=geometric",
        ),
        (["algorithm.rollout_is_threshold=null", "algorithm.rollout_is=false"], {}, "nothing is corrected"),
        (
            [BYPASS, f"{LOSS}=bypass_mode", f"{CORRECTION}.use_policy_gradient=true"],
            {"bypass_mode": True, "loss_type": "reinforce"},
            "use_policy_gradient=true is now algorithm.rollout_correction.loss_type=reinforce",
        ),
    ],
)  # fmt: skip
def test_what_older_releases_asked_for_is_understood_and_said(words, meant, said):
    loaded = loaded_with(KEPT, *words)
    assert not loaded.problems, loaded.problems
    assert said in "\n".join(loaded.warnings)
    expected = RolloutCorrectionConfig().with_values(meant)
    assert loaded.config.algorithm.rollout_correction == expected
    assert loaded.config.actor_rollout_ref.actor.policy_loss.rollout_correction == expected, "it follows"


def test_old_and_new_name_that_disagree_are_refused():
    said = problems(KEPT, f"{CORRECTION}.rollout_is_threshold=3", f"{ACTOR}.tis_imp_ratio_cap=2")
    assert "rollout_is_threshold=3 and older names of the same (2) disagree" in said


@pytest.mark.parametrize(
    ("options", "rejections"),
    [
        ({"rollout_rs": "token"}, [Rejection("token", 2.0, 0.5)]),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.25_2.0"}, [Rejection("sequence", 2.0, 0.25)]),
        (
            {"rollout_rs": "seq_mean_k1, seq_max_k2", "rollout_rs_threshold": "1.25,3"},
            [Rejection("geometric", 1.25, 0.8), Rejection("seq_max_k2", 3.0, None)],
        ),
        (
            {"rollout_rs": "token_k3,seq_mean_k3", "rollout_rs_threshold": 0.5},
            [Rejection("token_k3", 0.5, None), Rejection("seq_mean_k3", 0.5, None)],
        ),
        ({}, []),
    ],
)
def test_ways_to_reject_and_their_bounds(options, rejections):
    assert RolloutCorrectionConfig(**options).rejections == rejections
    assert len(DIVERGENCES) == 8


def test_two_bounds_in_one_text_are_icepop():
    assert RolloutCorrectionConfig(rollout_is_threshold="0.5_5.0").weighting == (5.0, 0.5, "mask")
    assert RolloutCorrectionConfig(rollout_is_threshold="3").weighting == (3.0, None, "truncate")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{LOSS}=bypass_mode"], "loss_mode=bypass_mode with algorithm.rollout_correction.bypass_mode=false"),
        ([f"{CORRECTION}.loss_type=reinforce"], "policy_loss.loss_mode=vanilla: only bypass_mode reads it"),
        (
            [BYPASS, f"{LOSS}=bypass_mode", f"{CORRECTION}.rollout_is_batch_normalize=true"],
            "would depend on how batches are cut",
        ),
        (
            [BYPASS, f"{LOSS}=bypass_mode", f"{ACTOR}.policy_loss.rollout_correction.rollout_is=token"],
            "rollout_correction.rollout_is=token is not algorithm.rollout_correction.rollout_is=null, which it follows",
        ),
        ([f"{CORRECTION}.rollout_rs=seq_max_k2"], "seq_max_k2 has one bound, from above, of its own"),
        ([f"{CORRECTION}.rollout_rs=tokens"], "'tokens' is no way to reject; there are token, sequence"),
        ([f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold='2,3'"], "2 thresholds for 1 ways"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0"], "is no threshold: 0.0 is neither"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(words, said):
    assert said in problems(KEPT, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([BYPASS, f"{LOSS}=bypass_mode", f"{CORRECTION}.rollout_is=token"], "the clipped ratio is already that"),
        (
            [BYPASS, f"{LOSS}=bypass_mode", f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.clip_ratio=0.3"],
            "clip_ratio=0.3 has no effect: algorithm.rollout_correction.loss_type=reinforce does not clip",
        ),
    ],
)
def test_what_the_bypassing_loss_does_not_read_is_said(words, said):
    assert said in notes(KEPT, *words)

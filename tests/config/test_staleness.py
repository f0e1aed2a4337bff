"""Old weights bring what they need: engines that generate all the time, and importance weights of their tokens."""

import pytest

from verl.config.base import get_path
from verl.config.ppo import ROLLOUT

from .helpers import notes, typed

BOUND, APART = f"{ROLLOUT}.max_staleness=2", "actor_rollout_ref.hybrid_engine=false"
WEIGHTS = "algorithm.rollout_correction.rollout_is"
ACTOR = "actor_rollout_ref.actor"
DEFERRED = (
    *(f"{ROLLOUT}.mode=async", f"{ROLLOUT}.over_sample_rate=0.5", f"{ROLLOUT}.partial_rollout=true"),
    f"{ROLLOUT}.calculate_log_probs=true",
)


def test_more_than_one_step_ahead_sets_the_four_options_that_it_needs_and_says_so():
    config = typed(BOUND)
    rollout = config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.generates_continuously and rollout.mode == "async" and rollout.calculate_log_probs
    assert "hybrid_engine=false, actor_rollout_ref.rollout.mode=async" in notes(BOUND)
    given = (APART, f"{ROLLOUT}.mode=async", f"{ROLLOUT}.partial_rollout=true", f"{ROLLOUT}.calculate_log_probs=true")
    assert "all the time" not in notes(BOUND, *given)


def test_deferred_prompts_of_shared_devices_have_a_bound_of_their_own():
    config = typed(*DEFERRED, f"{ROLLOUT}.max_staleness=3")
    assert config.actor_rollout_ref.hybrid_engine and not config.actor_rollout_ref.generates_ahead


@pytest.mark.parametrize(
    "words",
    [[BOUND], DEFERRED, ["async_training.staleness_threshold=0.5"], ["trainer.v1.trainer_mode=separate_async"]],
)
def test_tokens_of_several_versions_are_weighed_unless_the_user_says_otherwise(words):
    config = typed(*words)
    assert get_path(config, WEIGHTS) == "token" and not config.skips_old_log_probs
    assert config.actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is == "token"
    assert f"{WEIGHTS}=token is used" in notes(*words)
    assert get_path(typed(*words, f"{WEIGHTS}=sequence"), WEIGHTS) == "sequence"
    for off in ("null", "false"):
        assert get_path(typed(*words, f"{WEIGHTS}={off}"), WEIGHTS) is None
        assert "tokens of earlier weights are trained on as if" in notes(*words, f"{WEIGHTS}={off}")


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.rollout_correction.bypass_mode=true"],
        ["algorithm.rollout_correction.rollout_rs=token"],
        [f"{ACTOR}.policy_loss.loss_mode=tis"],
        [f"{ACTOR}.rl_loss_coef=0", f"{ACTOR}.sft_loss_coef=1"],
    ],
)
def test_a_correction_of_another_kind_is_left_alone(words):
    assert get_path(typed(BOUND, *words), WEIGHTS) is None
    assert "tokens of earlier weights" not in notes(BOUND, *words)


@pytest.mark.parametrize(
    "words",
    [
        [f"{ACTOR}.policy_loss.loss_mode={{file}}:mine"],
        [f"{ACTOR}.skip_old_log_probs=true", f"{ACTOR}.ppo_mini_batch_size=8"],
    ],
)
def test_where_weights_may_not_be_possible_none_are_switched_on_and_a_warning_says_so(words, tmp_path):
    (tmp_path / "loss.py").write_text("def mine(old_log_prob, log_prob, advantages, response_mask): ...")
    words = [word.replace("{file}", str(tmp_path / "loss.py")) for word in words]
    assert get_path(typed(BOUND, *words), WEIGHTS) is None
    assert "tokens of earlier weights are trained on as if" in notes(BOUND, *words)


def test_one_step_ahead_a_batch_of_several_optimizer_steps_is_said_to_be_uncorrected():
    words, sentence = [APART, f"{ROLLOUT}.max_staleness=1"], "which the ratio to old_log_probs does not show"
    assert get_path(typed(*words), WEIGHTS) is None
    assert "2 optimizer steps a batch" in notes(*words) and sentence in notes(*words)
    assert sentence not in notes(*words, f"{ACTOR}.ppo_mini_batch_size=8")
    assert sentence not in notes(*words, f"{WEIGHTS}=null")
    assert sentence not in notes(*words, f"{ROLLOUT}.calculate_log_probs=true", f"{WEIGHTS}=token")


def test_without_old_weights_nothing_changes():
    for words in ([], [f"{ROLLOUT}.max_staleness=0"], [f"{ROLLOUT}.calculate_log_probs=true"]):
        assert get_path(typed(*words), WEIGHTS) is None and "max_staleness" not in notes(*words)

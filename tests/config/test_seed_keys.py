"""Every option that a user guide of verl names is understood: as it is, or under its new name."""

from pathlib import Path

import pytest

from tests.support.composing import load_over
from verl.config.checks import find
from verl.config.checks.support import LIMITS
from verl.config.command_line import locate
from verl.config.features import feature_of_key
from verl.config.legacy import MOVED, REMOVED, RemovedOption, entry_of, is_legacy
from verl.config.load import load
from verl.config.ppo import PPOConfig
from verl.config.unused_options import readers

from .helpers import RUNNABLE, notes, problems

SEEDS = [line for line in (Path(__file__).parent / "seed_keys.txt").read_text().split("\n") if line and line[0] != "#"]
REFUSED = {key for limit in LIMITS for key in limit.options(PPOConfig())}
REWRITTEN = {
    f"{place}.{name}"
    for place, name in (
        ("actor_rollout_ref.actor", "ppo_micro_batch_size"),
        ("actor_rollout_ref.rollout", "log_prob_micro_batch_size"),
        ("actor_rollout_ref.ref", "log_prob_micro_batch_size"),
        ("critic", "ppo_micro_batch_size"),
        ("critic", "forward_micro_batch_size"),
        ("reward_model", "micro_batch_size"),
    )
}
"""Sizes over all ranks, which become sizes per rank while the tree is read."""
ALL_WARNINGS = find(load(list(RUNNABLE)).config, "warning", is_given=lambda key: True)


def test_there_are_210_keys_in_the_guides():
    assert len(SEEDS) == len(set(SEEDS)) == 210


@pytest.mark.parametrize("key", SEEDS)
def test_a_key_of_the_guides_is_understood(key):
    key = key.removesuffix(".*")
    assert locate(PPOConfig, key).kind != "unknown" or is_legacy(key)


@pytest.mark.parametrize("key", SEEDS)
def test_a_key_of_the_guides_has_a_reader_or_a_word_on_why_not(key):
    """The option it is, or has become, is read in verl/, refused by name, reported to have no effect, or removed."""
    key = key.removesuffix(".*")
    entry = entry_of(key) if locate(PPOConfig, key).kind == "unknown" else None
    if entry is None and locate(PPOConfig, key).kind == "unknown":
        assert feature_of_key(key).feature.instead
        return
    if isinstance(entry, RemovedOption):
        assert entry.why
        return
    for name in entry.new if entry else [key]:
        if name in REFUSED or name in REWRITTEN or locate(PPOConfig, name).kind in ("section", "free"):
            continue
        is_named = any(name in warning.text for warning in ALL_WARNINGS)
        assert readers(name) or is_named, f"nothing reads {name}, and nothing says so"


def test_new_names_of_old_options_exist():
    for entry in MOVED:
        assert locate(PPOConfig, entry.old).kind == "unknown", f"{entry.old} is not old"
        for new in entry.new:
            assert locate(PPOConfig, new).kind != "unknown", new
    for entry in REMOVED:
        assert locate(PPOConfig, entry.old).kind == "unknown", f"{entry.old} still exists"


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("+trainer.val_generations_to_log_to_wandb=3", "trainer.log_val_generations", 3),
        ("+trainer.remove_previous_ckpt_in_save=True", "trainer.max_critic_ckpt_to_keep", 1),
        ("trainer.remove_previous_ckpt_in_save=False", "trainer.max_actor_ckpt_to_keep", None),
        ("+actor_rollout_ref.rollout.seed=7", "trainer.seed", 7),
        ("actor_rollout_ref.actor.checkpoint.contents=[model]", "actor_rollout_ref.actor.checkpoint.save_contents",
         ["model"]),
        ("actor_rollout_ref.actor.fsdp_config.min_num_params=5",
         "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params", 5),
        ("af_output_dir=/out", "trainer.default_local_dir", "/out"),
        ("trainer.logger=[console,tracking]", "trainer.logger", ["console", "wandb"]),
        ("backend_config.trainer.total_epochs=5", "trainer.total_epochs", 5),
    ],
)  # fmt: skip
def test_an_old_name_sets_the_new_option_and_warns_once(word, key, value):
    loaded = load_over(RUNNABLE, [word])
    assert not loaded.problems
    found = loaded.config
    for name in key.split("."):
        found = found[name]
    assert found == value
    assert sum("old names were understood" in warning for warning in loaded.warnings) == 1


def test_old_contents_also_decide_what_is_loaded():
    loaded = load([*RUNNABLE, "actor_rollout_ref.actor.checkpoint.contents=[model,extra]"])
    assert loaded.config.actor_rollout_ref.actor.checkpoint.load_contents == ["model", "extra"]


def test_all_old_names_are_in_one_warning():
    words = ["+trainer.val_generations_to_log_to_wandb=3", "+actor_rollout_ref.rollout.seed=7"]
    assert len([line for line in notes(*words).splitlines() if "old names" in line]) == 1


def test_old_and_new_name_may_agree_but_not_disagree():
    old = "+actor_rollout_ref.rollout.seed=7"
    assert problems(old, "trainer.seed=7") == ""
    assert "rollout.seed=7 and trainer.seed=8 disagree" in problems(old, "trainer.seed=8")


def test_a_gone_option_is_ignored_where_harmless_and_refused_where_not():
    assert "grad_offload no longer exists and is ignored" in notes(
        "+actor_rollout_ref.actor.fsdp_config.grad_offload=False"
    )
    refusal = problems("+trainer.wandb_proxy=http://proxy")
    assert "trainer.wandb_proxy=http://proxy no longer exists" in refusal and "HTTPS_PROXY" in refusal


def test_an_old_name_is_understood_and_an_unbuilt_feature_refused():
    turns = notes("+actor_rollout_ref.rollout.multi_turn.max_turns=4")
    assert "actor_rollout_ref.rollout.multi_turn.max_assistant_turns" in turns
    assert "actor_rollout_ref.actor.veomni.param_offload=true asks for the VeOmni backend" in problems(
        "actor_rollout_ref.actor.veomni.param_offload=True"
    )

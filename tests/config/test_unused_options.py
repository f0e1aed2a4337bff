"""Reads of an option are recorded and unread ones reported; copying and printing are no reads."""

import copy
import dataclasses
import pickle

import pytest

from tests.support.composing import load_over
from verl.config.base import READ, ConfigError, leaves, watch
from verl.config.checks.support import LIMITS
from verl.config.legacy import REMOVED
from verl.config.load import load
from verl.config.ppo import PPOConfig
from verl.config.unused_options import check_unused_options, readers, remember_given, unused_in_run, unused_in_source

from .helpers import RUNNABLE

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def nothing_read_yet():
    """What this process has read, empty at first."""
    saved = dict(READ)
    READ.clear()
    yield READ
    READ.clear()
    READ.update(saved)


def given(*words):
    """The configuration as the command keeps it."""
    loaded = load_over(RUNNABLE, words)
    assert not loaded.problems, loaded.problems
    return remember_given(loaded.config, loaded.tree, loaded.given, loaded.warnings)


def test_the_first_reader_of_an_option_is_recorded(nothing_read_yet):
    config = watch(PPOConfig())
    assert nothing_read_yet == {}
    assert config.trainer.save_freq == -1 and config.data.get("shuffle") is True and config.trainer["seed"] == 1
    assert {"trainer.save_freq", "data.shuffle", "trainer.seed"} <= set(nothing_read_yet)
    assert nothing_read_yet["trainer.save_freq"].startswith("tests.config.test_unused_options:")


def test_a_property_reads_on_behalf_of_who_asks(nothing_read_yet):
    config = watch(PPOConfig())
    assert config.uses_critic and config.actor_rollout_ref.actor.update_split
    assert nothing_read_yet["critic.enable"].startswith("tests.config.test_unused_options:")
    assert f"{ACTOR}.use_dynamic_bsz" in nothing_read_yet


def test_copying_printing_and_checking_are_no_reading(nothing_read_yet):
    config = given()
    before = PPOConfig()
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert str(config) and repr(config.trainer) and config != before
    assert dataclasses.asdict(config)["trainer"]["seed"] == 1 and config.to_dict()["data"]["shuffle"] is True
    assert dict(leaves(config)) and config.with_values({"trainer.seed": 4}) and dataclasses.replace(config.data)
    assert [key for key in nothing_read_yet if key.count(".")] == []


def test_copies_record_too(nothing_read_yet):
    config = watch(PPOConfig())
    copies = [pickle.loads(pickle.dumps(config)), copy.deepcopy(config), config.with_values({"trainer.seed": 2})]
    names = ("save_freq", "test_freq", "project_name")
    for other, name in zip(copies, names, strict=True):
        assert other.trainer[name] is not None
    assert {f"trainer.{name}" for name in names} <= set(nothing_read_yet)


def test_a_watched_section_is_as_read_only_as_any():
    config = watch(PPOConfig())
    for _ in range(2):  # before and after its first reading
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.trainer.seed = 3
        assert config.trainer.seed == 1


def test_an_option_that_was_set_and_never_read_is_named_with_the_nearest_that_was():
    config = given(f"{ROLLOUT}.max_num_batched_tokens=4096", "trainer.experiment_name=x")
    key, everything = f"{ROLLOUT}.max_num_batched_tokens", {name for name, _ in leaves(PPOConfig())}
    (problem,) = unused_in_run(config, everything - {key})
    assert problem.key == key and f"{key}=4096 was read by nothing" in problem.text
    assert f"the nearest option that is read is {ROLLOUT}.max_num" in problem.text
    assert "trainer.unread_keys=warn" in problem.text
    assert unused_in_run(config, everything) == []


def test_an_option_that_others_follow_is_read_with_them():
    config = given("actor_rollout_ref.model.use_remove_padding=true", f"{ACTOR}.clip_ratio=0.3")
    names = {problem.key for problem in unused_in_run(config, set())}
    assert {"actor_rollout_ref.model.use_remove_padding", f"{ACTOR}.clip_ratio"} <= names
    read = {f"{ACTOR}.use_remove_padding", f"{ACTOR}.clip_ratio_low"}
    names = {problem.key for problem in unused_in_run(config, read)}
    assert not {"actor_rollout_ref.model.use_remove_padding", f"{ACTOR}.clip_ratio"} & names


@pytest.mark.parametrize(
    "word",
    [
        "trainer.save_freq=5",  # its reader waits for a save
        f"{ROLLOUT}.val_kwargs.top_k=5",  # for a validation
        "trainer.seed=1",  # the default
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",  # not with those of RUNNABLE
        f"{ROLLOUT}.enforce_eager=false",  # reported already: hf has no such knob
    ],
)
def test_an_option_read_later_already_reported_or_default_is_not_named(word):
    config, plain = given(word), given()
    names = {problem.key for problem in unused_in_run(config, set())}
    assert names <= {problem.key for problem in unused_in_run(plain, set())} | {f"{ACTOR}.ppo_micro_batch_size_per_gpu"}


def test_unread_keys_stop_warn_or_pass():
    said = []
    key = f"{ROLLOUT}.max_num_batched_tokens"
    everything = {name for name, _ in leaves(PPOConfig())} - {key}
    for mode in ("warn", "off"):
        check_unused_options(given(f"{key}=9", f"trainer.unread_keys={mode}"), everything, said.append)
    assert len(said) == 1 and said[0].startswith(f"warning: {key}=9")
    with pytest.raises(ConfigError, match="max_num_batched_tokens=9 was read by nothing"):
        check_unused_options(given(f"{key}=9"), everything, said.append)


# ------------------------------------------------------------------------------------------------- in the source

NOBODY = {
    "ppo_micro_batch_size", "log_prob_micro_batch_size", "forward_micro_batch_size", "micro_batch_size",
    "entropy_from_logits_with_chunking", "entropy_checkpointing", "buffer_dtype", "multi_stage_wake_up",
    "layered_summon", "use_legacy_worker_impl", "use_mbridge", "vanilla_mbridge", "forward_only",
    "weight_decay_incr_style", "use_checkpoint_opt_param_scheduler",
}  # fmt: skip
"""Options accepted for what they say, which holds either way, or that become others while the tree is read."""


def test_every_option_has_a_reader_outside_the_configuration():
    refused = {key for limit in LIMITS for key in limit.options(PPOConfig())}
    if "megatron" not in LIMITS[0].works:  # the engine that reads them is refused itself
        refused |= {
            key for key, _ in leaves(PPOConfig()) if ".megatron." in key or key.endswith("override_optimizer_config")
        }
    never_read = (
        "trainer.controller_nsight_options",
        "trainer.npu_profile.options",
        "global_profiler.global_tool_config.torch_memory.stack_depth",
    )  # and said to be
    for key, _ in leaves(PPOConfig()):
        if key.rpartition(".")[2] not in NOBODY and key not in refused and key not in never_read:
            assert readers(key), f"nothing in verl/ reads {key}"


def test_options_that_are_never_read_are_reported():
    """Each of ``NOBODY`` is a setting without effect that a notice or a rewriting speaks of."""
    for name in ("multi_stage_wake_up", "layered_summon"):
        assert f"{ROLLOUT}.{name}" in "\n".join(load([*RUNNABLE, f"{ROLLOUT}.{name}=true"]).warnings)


def test_the_doctor_can_ask_before_a_run():
    config = load([*RUNNABLE, f"{ROLLOUT}.layered_summon=true", "trainer.seed=3"]).config
    (problem,) = unused_in_source(config, ["trainer.seed", f"{ROLLOUT}.layered_summon"])
    assert problem.key == f"{ROLLOUT}.layered_summon"
    assert all(entry.why for entry in REMOVED)

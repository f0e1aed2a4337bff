"""Command lines and YAML of verl v0.6 to v0.9 and its Megatron trainer followed or refused with what replaces them."""

import pytest

from tests.support.composing import load_over
from verl.config.base import get_path
from verl.config.command_line import locate
from verl.config.load import load
from verl.config.ppo import PPOConfig

from .helpers import RUNNABLE, notes, problems, typed

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("ray_kwargs.ray_init.num_cpus=4", "ray_init.num_cpus", 4),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.A=b", "ray_init.runtime_env", {"env_vars": {"A": "b"}}),
        ("ray_kwargs.timeline_json_file=t.json", "ray_init.timeline_json_file", "t.json"),
        (f"{A}.use_rollout_log_probs=true", "algorithm.rollout_correction.bypass_mode", True),
        (f"{A}.fsdp_config.dtype=fp16", f"{A}.fsdp_config.mixed_precision.param_dtype", "fp16"),
        (f"{A}.optim.clip_grad=0.5", f"{A}.grad_clip", 0.5),
        (f"{R}.checkpoint_engine.update_weights_bucket_megabytes=64", f"{R}.update_weights_bucket_megabytes", 64),
        (f"{R}.skip.enable=true", f"{R}.skip_rollout", True),
        ("actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora_rank", 8),
        ("reward.reward_manager.name=batch", "reward_model.reward_manager", "batch"),
        ("reward.num_workers=3", "reward_model.sandbox.workers", 3),
        ("reward_model.num_workers=3", "reward_model.sandbox.workers", 3),
        ("+reward_model.max_concurrent=3", "reward_model.router.max_concurrent", 3),
        ("+reward_model.max_rpm=60", "reward_model.router.requests_per_minute", 60.0),
        ("+reward_model.max_tpm=5000", "reward_model.router.tokens_per_minute", 5000.0),
        ("+reward.max_tpm=5000", "reward_model.router.tokens_per_minute", 5000.0),
        ("+reward_model.timeout=30", "reward_model.sandbox.timeout_s", 30.0),
        ("reward.reward_model.enable_resource_pool=true", "reward_model.enable_resource_pool", True),
        ("reward.reward_model.rollout.dtype=float32", "reward_model.rollout.dtype", "float32"),
        ("reward.custom_reward_function.path=a.py", "custom_reward_function.path", "a.py"),
        ("trainer.rpc_timeout=60", "trainer.worker_timeout", 60.0),
        ("+trainer.logger_kwargs.wandb.tags=[a]", "trainer.tracker_kwargs", {"wandb": {"tags": ["a"]}}),
    ],
)
def test_a_moved_key_sets_the_new_one(word, key, value):
    loaded = load_over(RUNNABLE, [f"{R}.calculate_log_probs=true", word])
    found = get_path(loaded.config, key)
    assert found == value
    alias = word.lstrip("+").startswith("trainer.")
    section = key.rpartition(".")[0]
    warned = [warning for warning in loaded.warnings if "old names were understood" in warning]
    assert alias or any(key in warning or section in warning for warning in warned)


@pytest.mark.parametrize(
    "word",
    [
        f"{A}.profiler.tool_config.torch.step_start=0",
        f"{A}.megatron.use_megatron_fsdp=false",
        f"{A}.megatron.router_replay.mode=disabled",
        f"{A}.router_replay.mode=disabled",
        "trainer.use_v1=false",
        "transfer_queue.enable=false",
        f"{R}.prometheus.enable=false",
    ],
)
def test_a_feature_that_is_not_built_and_off_is_left_out_with_a_word(word):
    loaded = load_over(RUNNABLE, [word])
    assert not loaded.problems
    key = word.partition("=")[0]
    assert any("not built, and not asked for" in warning and key in warning for warning in loaded.warnings)


@pytest.mark.parametrize(
    ("word", "way_out"),
    [
        (f"{A}.megatron.dynamic_context_parallel=true", "context_parallel_size"),
        (f"{A}.strategy=mindspeed", "fsdp2"),
        ("critic.strategy=veomni", "fsdp2"),
        (f"{R}.quantization=fp8", "rollout.dtype"),
        ("transfer_queue.enable=true", "shared memory"),
        ("actor_rollout_ref.model.lora.merge=true", "lora_sync=merge"),
    ],
)
def test_a_feature_that_is_asked_for_is_named_with_what_to_do_instead(word, way_out):
    text = problems(word)
    assert f"{word} asks for " in text and "not built" in text and way_out in text
    assert "no longer exists" not in text


JUDGED = ("reward_model.server_urls=[http://judge:8000]", "custom_reward_function.path=judge.py")


@pytest.mark.parametrize(
    ("name", "now"),
    [("rate_limited", "router.max_concurrent"), ("limited", "router.max_concurrent"), ("remote", "sandbox.workers")],
)
def test_managers_of_the_reward_loop_are_naive_with_limits_of_their_own(name, now):
    words = (f"reward_model.reward_manager={name}", *JUDGED)
    assert typed(*words).reward_model.reward_manager == "naive"
    assert f"{name} is called naive" in notes(*words) and now in notes(*words)


def test_a_manager_of_the_users_keeps_a_name_of_the_reward_loop(monkeypatch):
    from verl.rewards.managers import rule

    monkeypatch.setitem(rule.REWARD_MANAGER_REGISTRY, "remote", rule.AbstractRewardManager)
    loaded = load_over(RUNNABLE, ["reward_model.reward_manager=remote", "trainer.seed=3"])
    assert not loaded.problems and loaded.config.reward_model.reward_manager == "remote"


def test_limits_of_the_router_that_no_request_passes_are_said():
    words = ("+reward_model.max_rpm=60", "+reward_model.estimated_tokens_per_request=2000")
    said = notes(*words)
    assert "router.requests_per_minute=60.0 has no effect: there are no servers" in said
    assert "what a reward function asks elsewhere does not pass the router" in said
    assert "estimated_tokens_per_request=2000 has no effect: it is for one estimate" in said
    assert "router.requests_per_minute=60.0 has no effect" not in notes(*words, *JUDGED)


def test_a_launchers_tree_is_understood_whole():
    words = ["backend_config." + word for word in RUNNABLE]
    words += ["backend_config.trainer.total_epochs=5", "af_output_dir=/home/ma-user/verl"]
    words += ["engine_kwargs.vllm.disable_mm_preprocessor_cache=True"]
    loaded = load(words)
    assert not loaded.problems
    assert loaded.config.trainer.default_local_dir == "/home/ma-user/verl" and loaded.config.trainer.total_epochs == 5
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache is True


def test_no_old_name_hides_an_option():
    from verl.config.features import features
    from verl.config.legacy import MOVED, SECTIONS

    old = [entry.old for entry in MOVED] + list(SECTIONS)
    unbuilt = [key for feature in features() for key in feature.keys if not key.endswith(".profiler")]
    for key in (*old, *unbuilt):
        assert locate(PPOConfig, key).kind == "unknown", key

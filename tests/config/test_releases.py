"""Every key of every release of verl is followed, or refused by the name of what is not built; never guessed at."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.release_keys import KINDS, PAGE, another_value, filled, verdict
from tests.support.composing import load_over
from verl.config.base import ConfigError, get_path
from verl.config.command_line import locate
from verl.config.features import feature_of_config, feature_of_module, features
from verl.config.legacy import MOVED, RELEASES, REMOVED, release_keys
from verl.config.load import load
from verl.config.ppo import PPOConfig

from .helpers import RUNNABLE, notes, problems, typed

A, R, M, O = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "model", "rollout"))  # noqa: E741
ROOT = Path(__file__).parents[2]


def word_of(key, value):
    """``+key=value`` in hydra's grammar."""
    return f"+{key}={_written(value)}"


def _written(value):
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_written(item)}' for name, item in value.items())}}}"
    return (
        f"'{value}'"
        if isinstance(value, str)
        else {None: "null", True: "true", False: "false"}.get(value, value)
        if value is None or isinstance(value, bool)
        else str(value)
    )


# ------------------------------------------------------------------------------------------------- the table of keys


def test_the_table_holds_1100_keys_of_six_releases():
    table = release_keys()
    assert len(table) == 1100 and all(len(row) == len(RELEASES) == 6 for row in table.values())
    assert table["trainer.use_v1"][3] is None and table["trainer.use_v1"][4].value is True
    assert table[f"{A}.megatron.param_offload"][0].megatron and not table[f"{A}.grad_clip"][0].megatron


def test_every_key_is_accepted_with_every_default_of_a_release():
    for key, row in release_keys().items():
        for default in {repr(item.value): item.value for item in row if item is not None}.values():
            found = verdict(key, default)
            assert found.kind == "accepted", f"{key}={default}: {found.text}"


def test_every_key_with_another_value_is_followed_or_refused_by_the_name_of_a_feature():
    for key, row in release_keys().items():
        default = next(item for item in row if item is not None).value
        value = another_value(key, default)
        found = verdict(key, value)
        assert found.kind in KINDS[:2], f"{key}={value}: {found.text}"
        assert "did you mean" not in found.text and "no longer exists:" not in found.text
        if found.kind == "named feature" and "not supported yet" not in found.text:
            assert any(feature.name in found.text and feature.instead[:20] in found.text for feature in features())


def test_null_false_and_empty_ask_for_nothing_whatever_the_key():
    for key in release_keys():
        for value in (None, {}, False):
            found = verdict(key, value)
            asks = value is False and "asks for" in found.text and key.endswith((".load_weight", ".checkpoint.strict"))
            assert found.kind == "accepted" or asks, f"{key}={value}: {found.text}"


@pytest.mark.parametrize("column", range(len(RELEASES)), ids=RELEASES)
def test_a_whole_release_is_accepted_as_one_command_line(column):
    rows = {key: row[column].value for key, row in release_keys().items() if row[column] is not None}
    sections = {key.rpartition(".")[0] for key in rows}
    words = [word_of(key, value) for key, value in rows.items() if key not in sections and value != "???"]
    sizes = [f"{A}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2",
             "critic.forward_micro_batch_size_per_gpu=2", f"{O}.log_prob_micro_batch_size_per_gpu=2"]  # fmt: skip
    assert not load([*words, *sizes]).problems


REWARD_MODEL = ("reward_model.enable=true", "data.return_raw_chat=true", "reward_model.rollout.name=vllm")


@pytest.mark.parametrize("pool", [False, True], ids=["on the devices of training", "on its own"])
@pytest.mark.parametrize("column", range(len(RELEASES)), ids=RELEASES)
@pytest.mark.parametrize("section", ["reward_model.rollout", "reward.reward_model.rollout"])
def test_a_reward_model_takes_all_defaults_of_a_release_for_its_engine(section, column, pool):
    rows = {key: row[column] for key, row in release_keys().items() if key.startswith(f"{section}.")}
    words = [word_of(key, row.value) for key, row in rows.items() if row is not None and not key.endswith(".name")]
    own = [f"reward_model.{name}" for name in ("enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=2")]
    loaded = load_over(RUNNABLE, [*REWARD_MODEL, *words, *own * pool])
    assert not loaded.problems
    said = [text for text in loaded.warnings if "is now called" not in text and "null keeps the default" not in text]
    assert said == ["reward_model.rollout.free_cache_engine=true has no effect: its devices are its own"] * bool(
        pool and words and "+reward_model.rollout.free_cache_engine=null" not in words
    )


def test_a_teacher_takes_all_defaults_of_a_release_for_its_engine():
    section = "distillation.teacher_models.teacher_model"
    rows = {key: row[4].value for key, row in release_keys().items() if key.startswith(f"{section}.inference.")}
    words = [word_of(key, value) for key, value in rows.items() if not key.endswith(".name")]
    apart = ["distillation.enabled=true", f"{section}.model_path=a", "distillation.nnodes=1",
             "distillation.n_gpus_per_node=2", f"{section}.inference.name=vllm"]  # fmt: skip
    assert notes(*apart, *words) == notes(*apart) and len(words) == 21
    assert "data, expert and pipeline" in problems(*apart, f"{section}.inference.data_parallel_size=2")


def with_reward_engine(entries):
    return (*REWARD_MODEL[:2], f"reward_model.rollout={{name: vllm, {entries}}}")


@pytest.mark.parametrize(
    ("entries", "name"),
    [
        ("full_determinism: true", "full determinism"),
        ("quantization: fp8", "quantization by a key of its own"),
        ("mtp: {enable: true}", "multi-token prediction"),
        ("disaggregation: {enabled: true}", "prefill and decoding on different devices"),
        ("data_parallel_size: 2", "data, expert and pipeline parallelism"),
        ("expert_parallel_size: 2", "data, expert and pipeline parallelism"),
    ],
)
def test_the_engine_of_a_reward_model_is_refused_what_the_policys_is(entries, name):
    text = problems(*with_reward_engine(entries))
    assert f"reward_model.rollout.{entries.split(': ')[0]}" in text and f"asks for {name}" in text


def test_old_names_of_a_reward_models_engine_are_followed_and_what_it_does_not_read_is_said():
    words = with_reward_engine("cudagraph_capture_sizes: [1,2], scheduling_policy: priority, seed: 7, n: 4, "
                               "limit_images: 3, layered_summon: true, max_num_seqs: null")  # fmt: skip
    options = typed(*words).reward_model.engine_options()
    assert options.engine_kwargs["vllm"] == {"cudagraph_capture_sizes": [1, 2], "scheduling_policy": "priority"}
    assert options.max_num_seqs == 1024
    said = notes(*words)
    assert "reward_model.rollout.seed=7 has no effect: trainer.seed is for all" in said
    assert "reward_model.rollout: null keeps the default of max_num_seqs" in said
    assert all(f"reward_model.rollout.{name}" in said for name in ("n=4", "limit_images=3", "layered_summon=true"))


def test_arguments_of_another_engine_are_said_of_a_reward_model_too():
    words = [*REWARD_MODEL[:2], "reward_model.rollout={name: sglang, enable_prefix_caching: false}"]
    assert "engine_kwargs.vllm={'enable_prefix_caching': False} has no effect" in notes(*words)


@pytest.mark.parametrize("place", ["actor_rollout_ref.rollout", "reward_model.rollout"])
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("engine_kwargs=text", "engine_kwargs=text must be a mapping, written {name: value}."),
        ("engine_kwargs.vllm=5", " holds vllm=5, which must be a mapping, written {name: value}."),
        ("engine_kwargs.sglang=text", " holds sglang=text, which must be a mapping, written {name: value}."),
    ],
)
def test_arguments_of_an_engine_that_are_no_mapping_are_refused(place, entry, said):
    text = problems(*REWARD_MODEL, f"{place}.{entry}")
    assert f"{place}.engine_kwargs=" in text and said in text


def test_a_reward_engine_on_devices_of_its_own_never_sleeps():
    words = [f"reward_model.{name}" for name in ("enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=2")]
    shared, own = (typed(*with_reward_engine("free_cache_engine: true"), *pool) for pool in ([], words))
    assert shared.reward_model.engine_options().free_cache_engine
    assert not own.reward_model.engine_options().free_cache_engine


def test_no_feature_is_named_twice_and_no_key_has_two():
    keys = [key for feature in features() for key in feature.keys]
    assert len(keys) == len(set(keys)) and len({feature.name for feature in features()}) == len(features())
    assert not set(keys) & {entry.old for entry in (*MOVED, *REMOVED)}


def test_the_page_lists_what_is_not_built():
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text, "make docs"


# ------------------------------------------------------------------------------------------------- switched on


@pytest.mark.parametrize(
    ("word", "name"),
    [
        (f"{A}.fsdp_config.qat.enable=true", "quantization-aware training"),
        (f"{M}.mtp.enable=true", "multi-token prediction"),
        (f"{M}.tiled_mlp.enabled=true", "tiled MLPs"),
        (f"{O}.disaggregation.enable=true", "prefill and decoding on different devices"),
        (f"{O}.disaggregation.enabled=True", "prefill and decoding on different devices"),
        (f"{O}.full_determinism=true", "full determinism"),
        (f"{O}.full_determinism=1", "full determinism"),
        (f"{A}.megatron.use_megatron_fsdp=true", "Megatron's sharding of weights by FSDP"),
        (f"{A}.optim.use_precision_aware_optimizer=true", "formats of Megatron's optimizer"),
        ("critic.fsdp.qat.enable=true", "quantization-aware training"),
        (f"{A}.router_replay.mode=R3", "replay of expert routing"),
        (f"{A}.load_weight=false", "models with random weights"),
        (f"{A}.profiler.tool_config.torch.schedule.active=2", "profiles of parts of a call"),
        ("actor_rollout_ref.teacher.server_ip=10.0.0.1", "a teacher behind the servers of verl's recipe"),
        ("backend_config.transfer_queue.enable=true", "TransferQueue"),
    ],
)
def test_an_option_switched_on_is_refused_by_the_name_of_its_feature(word, name):
    text = problems(f"+{word}")
    assert f"asks for {name}" in text and "is not built" in text and "no longer exists" not in text


@pytest.mark.parametrize(
    "word",
    [
        f"{O}.full_determinism=0",
        f"{A}.qat._target_=verl.workers.config.QATEngineConfig",
        f"{M}.mtp.enable='false'",
        "skip.rollout.x=null",
    ],
)
def test_an_option_switched_off_in_other_words_is_accepted(word):
    assert problems(f"+{word}") == ""


def test_settings_of_a_feature_that_is_off_are_said_to_have_no_effect():
    said = notes(f"{A}.fsdp_config.qat.mode=w4a8")
    assert "qat.mode=w4a8 has no effect" in said and "quantization-aware training" in said
    assert "asks for" in problems(f"{A}.fsdp_config.qat.mode=w4a8", f"{A}.fsdp_config.qat.enable=true")


def test_harmless_values_belong_to_each_key():
    """16 is the default of a group size, and a request anywhere else."""
    assert problems(f"{A}.megatron.qat.group_size=16") == ""
    assert "context parallelism" in problems(f"{A}.megatron.max_seqlen_per_dp_cp_rank=16")


# ------------------------------------------------------------------------------------------------- other names


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("critic.fsdp.param_offload=true", "critic.model.fsdp_config.param_offload", True),
        ("critic.fsdp.wrap_policy.min_num_params=5", "critic.model.fsdp_config.wrap_policy.min_num_params", 5),
        ("critic.fsdp.ulysses_sequence_parallel_size=1", "critic.ulysses_sequence_parallel_size", 1),
        (f"{A}.policy_loss.tau_pos=2", f"{A}.tau_pos", 2.0),
        (f"{A}.fsdp_config.entropy_checkpointing=true", f"{A}.entropy_checkpointing", True),
        (f"{R}.fsdp_config.use_torch_compile=false", f"{R}.use_torch_compile", False),
        (f"{A}.rollout_n=4", f"{O}.n", 4),
        ("critic.model.lora.rank=8", "critic.model.lora_rank", 8),
        (f"{M}.lora.target_modules=[linear_qkv,linear_proj]", f"{M}.target_modules",
         ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (f"{M}.lora.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]", f"{M}.target_modules",
         "all-linear"),
        ("reward_manager.name=dapo", "reward_model.reward_manager", "dapo"),
        ("sandbox_fusion.url=http://x", "reward_model.sandbox_fusion.url", "http://x"),
        ("reward.sandbox_fusion.max_concurrent=3", "reward_model.sandbox_fusion.max_concurrent", 3),
        ("skip.rollout.enable=true", f"{O}.skip_rollout", True),
        (f"{O}.scheduling_policy=priority", f"{O}.engine_kwargs.vllm.scheduling_policy", "priority"),
        (f"{A}.optim.optimizer=adam", f"{A}.optim.optimizer", "AdamW"),
        (f"{A}.optim.lr_decay_style=WSD", f"{A}.optim.warmup_style", "wsd"),
    ],
)  # fmt: skip
def test_another_name_of_an_option_sets_it(word, key, value):
    found = load_over(RUNNABLE, [f"++{word}"]).config
    for name in key.split("."):
        found = found[name]
    assert found == value


def test_the_default_of_another_name_gives_way_to_what_the_user_set():
    config = typed(f"{A}.optim.lr_scheduler_type=constant", f"{A}.optim.warmup_style=cosine", f"{A}.grad_clip=0.5",
                   f"+{A}.optim.clip_grad=1.0")  # fmt: skip
    assert config.actor_rollout_ref.actor.optim.warmup_style == "cosine"
    assert config.actor_rollout_ref.actor.grad_clip == 0.5


COMPOSED = """
defaults: [ppo_trainer, _self_]
critic:
  fsdp:
    _target_: verl.workers.config.FSDPEngineConfig
    ulysses_sequence_parallel_size: ${critic.ulysses_sequence_parallel_size}
    seed: ${oc.select:trainer.seed,42}
    strategy: ${critic.strategy}
    param_offload: ${critic.model.fsdp_config.optimizer_offload}
actor_rollout_ref:
  actor:
    fsdp_config:
      entropy_checkpointing: ${oc.select:actor_rollout_ref.actor.entropy_checkpointing,False}
      pad_to_length: ${oc.select:actor_rollout_ref.actor.pad_to_length,False}
    megatron: {_target_: verl.workers.config.McoreEngineConfig, tensor_model_parallel_size: 1}
  rollout:
    mtp: ${oc.select:actor_rollout_ref.model.mtp, null}
    skip_tokenizer_init: ${actor_rollout_ref.rollout.nowhere}
reward: {num_workers: 8, custom_reward_function: {path: null, name: compute_score}}
global_profiler: {_target_: verl.telemetry.profiler.ProfilerConfig, tool: null, steps: null}
"""


def test_a_composed_tree_of_a_release_is_read_from_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(COMPOSED)
    loaded = load([*RUNNABLE, "critic.model.fsdp_config.optimizer_offload=true"], str(tmp_path), "mine")
    assert not loaded.problems
    assert loaded.config.critic.model.fsdp_config.param_offload is True


# ------------------------------------------------------------------------------------------------- nothing asked for


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("custom_reward_function.name=null", "custom_reward_function.name", "compute_score"),
        ("trainer.test_freq=false", "trainer.test_freq", 0),
        ("trainer.save_freq=False", "trainer.save_freq", 0),
        ("algorithm.filter_groups.metric=null", "algorithm.filter_groups.metric", "seq_reward"),
        ("trainer.resume_from_path=false", "trainer.resume_from_path", None),
        ("trainer.total_epochs=null", "trainer.total_epochs", 30),
        ("data.custom_cls=null", "data.custom_cls.path", None),
        (f"{A}.optim.warmup_style=null", f"{A}.optim.warmup_style", "constant"),
    ],
)
def test_a_value_that_asks_for_nothing_means_what_it_meant(word, key, value):
    assert get_path(typed(word), key) == value


def test_a_null_that_keeps_a_default_is_said():
    assert "trainer.total_epochs=null (30)" in notes("trainer.total_epochs=null")


def test_the_rollout_engine_is_vllm_unless_named():
    words = [word for word in RUNNABLE if not word.startswith(f"{O}.name")]
    assert load([*words, f"{O}.tensor_model_parallel_size=1"]).config.actor_rollout_ref.rollout.name == "vllm"


def test_a_missing_engine_says_how_to_install_it_and_what_to_use_without(monkeypatch):
    from verl.workers.rollout import get_rollout_class

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="rollout.name=hf"):
        get_rollout_class("vllm")


def test_an_adapter_brings_rank_scale_and_layers(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]}')
    word = f"{M}.lora_adapter_path={tmp_path}"
    model = typed(word).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32, ["q_proj"])
    assert typed(f"{M}.lora_alpha=4", word).actor_rollout_ref.model.lora_alpha == 4


def test_several_greedy_answers_to_a_validation_prompt_are_warned_of():
    assert "val_kwargs.n=4 with actor_rollout_ref.rollout.val_kwargs.do_sample=false" in notes(f"{O}.val_kwargs.n=4")
    assert "equal answers" not in notes(f"{O}.val_kwargs.n=4", f"{O}.val_kwargs.do_sample=true",
                                        f"{O}.val_kwargs.temperature=1")  # fmt: skip


def test_servers_of_several_nodes_listen_where_they_can_be_reached():
    words = (f"{O}.mode=async", "trainer.nnodes=2", f"{A}.ppo_micro_batch_size_per_gpu=1",
             "critic.ppo_micro_batch_size_per_gpu=1")  # fmt: skip
    assert typed(*words).actor_rollout_ref.rollout.server_host == "0.0.0.0"
    assert typed(f"{O}.mode=async").actor_rollout_ref.rollout.server_host == "127.0.0.1"
    assert "server_host=127.0.0.1" in problems(*words, f"{O}.server_host=127.0.0.1")


# --------------------------------------------------------------------------------- configurations, backends, programs


@pytest.mark.parametrize("word", ["model_engine=dp", "model_engine=fsdp", f"model@{M}=hf_model", "~trainer.v1",
                                  "~reward_model.rollout", "distillation@distillation=distillation"])  # fmt: skip
def test_choices_that_verl_makes_anyway_are_accepted(word):
    assert problems(word) == ""


@pytest.mark.parametrize(
    ("words", "name", "feature"),
    [
        (["model_engine=mindspeed"], "ppo_trainer", "MindSpeed"),
        (["model_engine=veomni"], "ppo_trainer", "the VeOmni backend"),
        (["model_engine=torchtitan"], "ppo_trainer", "the TorchTitan backend"),
        ([f"actor@{A}=veomni_actor"], "ppo_trainer", "the VeOmni backend"),
        ([], "dapo_megatron_trainer", "a Megatron trainer of another kind"),
        ([], "dapo_megatron_trainer.yaml", "a Megatron trainer of another kind"),
    ],
)
def test_a_backend_or_configuration_of_verl_is_refused_by_its_feature(words, name, feature):
    with pytest.raises(ConfigError, match=f"asks for {feature}.*is not built"):
        load([*RUNNABLE, *words], config_name=name)


def test_an_unknown_configuration_says_where_it_was_looked_for():
    with pytest.raises(ConfigError, match="nothere is not in .*there are .*ppo_trainer.*--config-path"):
        load(list(RUNNABLE), config_name="nothere")


@pytest.mark.parametrize(
    ("module", "feature"),
    [
        ("verl.workers.rollout.schemas", "schedulers and callbacks"),
        ("recipe.spo.main_spo", "a recipe of verl's"),
    ],
)
def test_a_missing_module_is_refused_by_its_feature(module, feature):
    assert feature in feature_of_module(module).name
    with pytest.raises(ModuleNotFoundError, match=f"asks for {feature}.*is not built"):
        __import__(module)


def test_a_program_that_is_not_here_says_so_on_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "verl.utils.npu"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode and "Ascend NPUs" in done.stderr and "Traceback" not in done.stderr


def test_no_module_or_configuration_that_is_here_is_called_missing():
    for feature in features():
        for name in feature.configs:
            assert not (ROOT / "verl" / "trainer" / "config" / f"{name}.yaml").exists()
    assert feature_of_config("ppo_trainer") is None and feature_of_module("verl.trainer.main_ppo") is None


# ------------------------------------------------------------------------------------------------- nearest names


def test_a_name_that_many_sections_have_is_no_hint():
    with pytest.raises(ConfigError) as error:
        load([*RUNNABLE, "reward_model.foo.name=x"])
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("key", ["reward.reward_model.rollout.n", f"{A}.qat.mode", f"{A}.qat.nane"])
def test_a_key_of_another_release_is_never_guessed_at(key):
    assert locate(PPOConfig, key).kind == "unknown"
    assert "did you mean" not in verdict(key, "x").text

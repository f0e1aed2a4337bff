"""Rows of ``keys.yaml`` are whole: one kind each, options that exist, functions that are there, sentences that help."""

import inspect
import re

import pytest

from tests.config.test_tables import options_in
from verl.config.command_line import locate
from verl.config.ppo import PPOConfig
from verl.config.roll import environments, keys
from verl.config.roll.table import Row, listed, read_yaml, rows, translator
from verl.config.roll.translate import translate

TABLES = ("top", "worker", "data", "generation", "strategy", "vllm", "sglang", "megatron",
          "megatron_training", "env_manager", "env", "env_sokoban", "env_frozen_lake", "reward")  # fmt: skip
LISTS = (
    "places",
    "engines",
    "settings",
    "schedules",
    "templates",
    "rules",
    "pipelines",
    "presets",
    "shapes",
    "classes",
)
KINDS = ("to", "sets", "if_true", "by", "read", "no_effect", "not_built")
ROWS = [(table, key, row) for table in TABLES for key, row in rows(table).items()]


def is_option(key: str) -> bool:
    return locate(PPOConfig, key).kind != "unknown"


def test_the_file_has_these_tables_and_no_others():
    tables = read_yaml("keys.yaml")
    assert tuple(tables) == (*TABLES, *LISTS)
    for table in TABLES:
        for pattern, entry in tables[table].items():
            assert entry.keys() <= set(Row._fields) - {"sections"}, (table, pattern)
            assert len(entry.keys() & set(KINDS)) == 1, (table, pattern)
    worker = [key for table in ("worker", "data", "generation", "strategy") for key in rows(table)]
    assert len(worker) == len(set(worker)), "a key stands in two tables of the same sections"


@pytest.mark.parametrize(("table", "key", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_row_names_what_is_there(table, key, row):
    for option in row.to:
        assert is_option(option), option
    for option in {**row.sets, **row.if_true}:
        names = re.findall(r"\{(\w+)\}", option)
        places = [place for place in listed("places").values() if all(name in place for name in names)]
        assert places and all(is_option(option.format(**place)) for place in places), option
    for text in row.instead:
        option = text.format(key=key).partition("=")[0]
        assert option == key or is_option(option), text
    for option in options_in("; ".join(filter(None, (row.not_built, row.no_effect, row.read, row.note)))):
        assert is_option(option), option
    if row.by:
        wanted = list(inspect.signature(translator(row.by[0])).parameters)[3:]
        if row.by[0] != "roll_class":  # names of classes
            assert len(row.by) - 1 == len(wanted) and all(map(is_option, row.by[1:])), row.by


@pytest.mark.parametrize(("table", "key", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_key_without_an_option_has_a_reason_and_a_way_out(table, key, row):
    assert row.kind == "translated" or row.described()
    assert row.not_built is None or (len(row.not_built.split()) >= 3 and row.instead)
    assert row.no_effect is None or len(row.no_effect.split()) >= 2
    assert not row.described().startswith((" ", ";")) and not row.described().endswith(".")


def test_a_function_that_no_row_names_is_gone():
    named = {row.by[0] for _, _, row in ROWS if row.by}
    functions = {**vars(environments), **vars(keys)}
    public = {name for name, value in functions.items() if inspect.isgeneratorfunction(value) and name[0] != "_"}
    assert public - {"environments", "section_outcomes"} == named


def test_the_note_on_reward_workers_names_every_rule():
    note = rows("reward")["worker_cls"].described()
    for worker, rule in listed("rules").items():
        assert f"{worker} `{rule}`" in note


def test_the_places_of_roles_are_sections_and_options_that_exist():
    for places in listed("places").values():
        for kind, name in places.items():
            assert locate(PPOConfig, name).kind == ("option" if kind == "dtype" else "section"), name


def test_settings_of_engines_and_schedules_exist():
    actor, settings = "actor_rollout_ref.actor", listed("settings")
    assert all(is_option(f"{actor}.fsdp_config.{name}") for name in settings["fsdp"])
    assert all(is_option(f"{actor}.deepspeed.{name}") for name in settings["zero"])
    assert set(listed("engines")["training"].values()) <= {None, "megatron", "fsdp", "fsdp2", "deepspeed"}
    assert set(listed("schedules").values()) == {"linear", "cosine", "constant"}


def test_a_pipeline_that_is_not_built_has_a_way_out():
    for pipeline in listed("pipelines").values():
        assert pipeline.keys() == {"name", "instead", "keys"}
        assert pipeline["instead"][0].isupper() and not pipeline["instead"].endswith(".")
        assert all(map(is_option, options_in(pipeline["instead"])))


def test_target_modules_may_be_a_list():
    tree = {"actor_train": {"model_args": {"lora_target": ["q_proj", "v_proj"]}}}
    assert "actor_rollout_ref.model.target_modules=[q_proj,v_proj]" in translate(tree).words


def test_a_sampling_key_without_effect_is_told_so():
    assert rows("generation")["generating_args.max_length"].kind == "no effect"
    tree = {"actor_infer": {"generating_args": {"max_length": 99}}}
    assert any("actor_infer" not in note and "*.generating_args.max_length" in note for note in translate(tree).notes)


def test_a_reference_that_is_to_be_saved_sets_nothing_since_it_is_never_trained():
    training = {"training_args": {"save_hf_model": True}}
    words = translate({"use_kl_loss": True, "reference": training, "actor_train": training}).words
    assert [word.partition("=")[0] for word in words if "save_contents" in word] == [
        "actor_rollout_ref.actor.checkpoint.save_contents"
    ]


def test_auto_is_a_number_in_files_of_deepspeed_only():
    settings = {"strategy_name": "deepspeed_train", "strategy_config": {"gradient_accumulation_steps": "auto"}}
    assert not translate({"zero": {"gradient_accumulation_steps": "auto"}, "critic": {"strategy_args": settings}},
                         referred=["zero"]).refusals  # fmt: skip
    (refusal,) = translate({"num_return_sequences_in_group": "auto"}).refusals
    assert "num_return_sequences_in_group=auto: is a whole number from 1 on" in refusal

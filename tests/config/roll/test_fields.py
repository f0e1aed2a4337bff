"""All fields of ROLL's configuration classes, at two releases, are known here, and their own defaults are accepted."""

import ast

import pytest

from tests.config.roll.shapes import SHAPES, shape
from verl.config.command_line import locate
from verl.config.ppo import PPOConfig
from verl.config.roll.command import fields, main
from verl.config.roll.translate import read_roll, translate
from verl.config.tree import put_key

PLACES = {
    "base_config.ScheduleConfig": "",
    "base_config.BaseConfig": "",
    "base_config.PPOConfig": "",
    "rlvr_config.RLVRConfig": "",
    "rlvr_config.DatasetFilterConfig": "dataset_filter.",
    "rlvr_config.RewardConfig": "rewards.math_rule.",
    "worker_config.WorkerConfig": "actor_train.",
    "worker_config.RouterReplayConfig": "actor_train.router_replay.",
    "worker_config.SequencePackingConfig": "actor_train.sequence_packing_args.",
    "model_args.LoraArguments": "actor_train.model_args.",
    "model_args.ModelArguments": "actor_train.model_args.",
    "data_args.DataArguments": "actor_train.data_args.",
    "generating_args.GeneratingArguments": "actor_infer.generating_args.",
    "training_args.TrainingArguments": "actor_train.training_args.",
    "base_config.RouterArguments": "router_args.",
    "base_config.TransferBackendArguments": "transfer_backend.",
    "base_config.RolloutMockConfig": "rollout_mock.",
}


def test_every_field_of_both_releases_has_a_verdict():
    rows = fields()
    assert len(rows) == 440 and len({(one.section, one.name) for one in rows}) == 440
    assert {one.kind for one in rows} == {"translated", "no effect", "not built"}
    assert all(one.text for one in rows)
    assert all(one.first != "-" or one.latest != "-" for one in rows)
    assert sum(one.first != "-" for one in rows) == 273 and sum(one.latest != "-" for one in rows) == 359


def test_options_that_the_table_names_exist():
    for one in fields():
        for text in one.text.split("`")[1::2]:
            if text.startswith(("trainer.", "algorithm.", "data.", "actor_rollout_ref.", "reward_model.")):
                option = text.partition("=")[0].partition("{")[0].rstrip(".")
                assert locate(PPOConfig, option).kind != "unknown", (one.name, option)


def defaults():
    for one in fields():
        for default in {one.first, one.latest} - {"-"}:
            try:
                value = ast.literal_eval(default)
            except (ValueError, SyntaxError):
                continue  # a class, or a function that makes one
            if one.section in PLACES:
                yield f"{PLACES[one.section]}{one.name}", value


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    import yaml

    path = tmp_path_factory.mktemp("roll") / "file.yaml"
    path.write_text(yaml.safe_dump(shape(SHAPES["deepspeed"][0])))
    return read_roll(str(path))[0]


def test_rolls_own_defaults_are_accepted_whatever_the_field(tree):
    import copy

    refused = {}
    for key, value in defaults():
        changed = copy.deepcopy(tree)
        put_key(changed, key, value)
        if found := [text for text in translate(changed).refusals if text.startswith(f"{key}=")]:
            refused[key, value] = found
    assert refused == {}


def test_the_command_prints_the_table(capsys):
    assert main(["--fields"], run=None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 441 and lines[-1].endswith("440 fields")
    assert "rlvr_config.RLVRConfig.max_len_mask: translated: `algorithm.sample_mask.drop_truncated`" in lines

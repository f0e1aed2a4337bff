"""Sections are read-only, read like mappings, travel between processes, and explain themselves."""

import copy
import dataclasses
import importlib
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass

import pytest

from verl.batch import MicroBatching
from verl.config import BaseConfig
from verl.config.base import Config, FreeDict, leaves
from verl.config.command_line import all_keys
from verl.config.describe import describe, explanation
from verl.config.engine import FSDPConfig, ModelSizes
from verl.config.ppo import PPOConfig

from .helpers import typed


def test_attribute_and_mapping_access_agree():
    config = typed()
    assert config.data.train_files == config["data"]["train_files"] == config.get("data").get("train_files")
    assert "data" in config and "dat" not in config and config.get("dat", 3) == 3
    assert set(config.keys()) == {item.name for item in dataclasses.fields(config)}
    assert dict(config.ray_init.items()) == dict(**config.ray_init)
    with pytest.raises(KeyError):
        config["world_size"]


def test_a_tree_cannot_be_changed():
    config = typed("+reward_model.reward_kwargs.a=1")
    for change in (
        lambda: setattr(config.trainer, "seed", 3),
        lambda: setattr(config.trainer, "sede", 3),
        lambda: delattr(config.trainer, "seed"),
        lambda: setattr(config, "trainer", None),
    ):
        with pytest.raises(FrozenInstanceError):
            change()
    for change in (
        lambda: config.reward_model.reward_kwargs.update(a=2),
        lambda: config.reward_model.reward_kwargs.__setitem__("a", 2),
        lambda: setattr(config.reward_model.reward_kwargs, "a", 2),
    ):
        with pytest.raises(TypeError):
            change()


def test_a_changed_copy_leaves_the_tree_alone():
    config = typed()
    changed = config.with_values({"trainer.seed": 9, "reward_model.reward_kwargs.a": 1, "data.seed": 4})
    assert (changed.trainer.seed, changed.data_seed, changed.reward_model.reward_kwargs) == (9, 4, {"a": 1})
    assert (config.trainer.seed, config.data_seed, config.reward_model.reward_kwargs) == (1, 1, {})
    with pytest.raises(KeyError, match="did you mean 'seed'"):
        config.with_values({"trainer.sede": 1})


def test_a_misspelt_read_names_the_nearest_option():
    with pytest.raises(AttributeError, match="did you mean 'train_batch_size'"):
        _ = typed().data.train_bach_size


def test_a_tree_survives_pickle_and_copy():
    config = typed("+reward_model.reward_kwargs.a.b=1")
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config
        assert other.reward_model.reward_kwargs.a.b == 1


def test_to_dict_gives_plain_containers():
    tree = typed("+reward_model.reward_kwargs.a=1").to_dict()
    tree["trainer"]["seed"] = 5
    assert type(tree["reward_model"]["reward_kwargs"]) is dict and tree["reward_model"]["reward_kwargs"] == {"a": 1}


def test_free_form_content_reads_as_attributes():
    free = FreeDict({"a": FreeDict({"b": 1})})
    assert free.a.b == 1 and {**free} == {"a": {"b": 1}}
    with pytest.raises(AttributeError, match="no key 'c'"):
        _ = free.c


def test_a_users_dataclass_inherits_and_keeps_its_mutable_fields():
    @dataclass
    class Mine(BaseConfig):
        _mutable_fields = {"count"}
        name: str = "x"
        count: int = 0

    mine = Mine(name="y")
    mine.count = 3
    assert (mine["name"], mine.count) == ("y", 3)
    with pytest.raises(FrozenInstanceError):
        mine.name = "z"


def test_a_subclass_of_the_root_may_add_sections():
    from verl.config.base import section
    from verl.config.load import load_ppo_config

    from .helpers import RUNNABLE

    @dataclass
    class Filter(Config):
        enable: bool = False

    @dataclass
    class Mine(PPOConfig):
        filter_groups: Filter = section(Filter)

    assert load_ppo_config([*RUNNABLE, "filter_groups.enable=true"], root=Mine).filter_groups.enable is True
    assert load_ppo_config(RUNNABLE) == typed()


def test_every_option_explains_itself():
    def walk(config, path):
        for item in dataclasses.fields(config):
            text = explanation(type(config), item.name)
            assert len(text) > 8 and text[-1] in ".?!", f"{path}{item.name} has no docstring: {text!r}"
            if isinstance(config[item.name], Config):
                walk(config[item.name], f"{path}{item.name}.")

    walk(PPOConfig(), "")


def test_the_description_holds_every_option():
    text = "\n".join(describe(PPOConfig))
    assert text.count("\n") > len(all_keys(PPOConfig))
    for key, _ in leaves(PPOConfig()):
        assert f"{key.rpartition('.')[2]}: " in text, key
    assert next(describe(PPOConfig, "trainer.seed")).startswith("# Seed of the run")
    assert list(describe(PPOConfig, "actor_rollout_ref.ref.model.path"))[-1].startswith(
        "actor_rollout_ref.ref.model.path: null"
    )


def test_micro_batching_follows_the_switch():
    actor = typed("actor_rollout_ref.actor.use_dynamic_bsz=true").actor_rollout_ref.actor
    assert actor.update_split == MicroBatching(None, 16384)
    assert typed().critic.forward_split == MicroBatching(2, None)


def test_sections_import_neither_torch_nor_hydra():
    code = (
        "import sys, verl.config, verl.trainer.config, verl.workers.config, verl.base_config, verl.utils.config\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'ray', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_lead_to_the_classes():
    from verl.trainer.config import AlgoConfig, CheckpointConfig, KLControlConfig
    from verl.utils.config import omega_conf_to_dataclass

    algorithm = omega_conf_to_dataclass({"_target_": "verl.trainer.config.AlgoConfig", "gamma": 0.5})
    assert type(algorithm) is AlgoConfig and algorithm.gamma == 0.5 and type(algorithm.kl_ctrl) is KLControlConfig
    assert omega_conf_to_dataclass({"save_contents": ["model"]}, CheckpointConfig).save_contents == ["model"]
    assert type(PPOConfig().actor_rollout_ref.actor) is importlib.import_module("verl.workers.config").FSDPActorConfig
    with pytest.raises(ValueError, match="gama is not an option; did you mean 'gamma'"):
        omega_conf_to_dataclass({"gama": 0.5}, AlgoConfig)


def test_a_model_is_sharded_within_a_node_where_it_fits_a_third_of_the_devices():
    gib, own = 1 << 30, FSDPConfig()
    fits = {"world": 16, "per_node": 8, "state_bytes": 8 * 20 * gib, "device_bytes": 60 * gib}
    assert own.group_size(**fits) == 8
    assert own.group_size(**{**fits, "state_bytes": 8 * 20 * gib + 1}) == 16
    assert own.group_size(**{**fits, "device_bytes": None}) == 16
    for per_node in (16, 0, 6):  # one node; nodes of different sizes; not all of a node's
        assert own.group_size(**{**fits, "per_node": per_node}) == 16
    assert own.with_values({"fsdp_size": 4}).group_size(**fits) == 4
    assert own.with_values({"fsdp_size": 32}).group_size(**fits) == 16
    assert own.with_values({"offload_policy": True}).group_size(**fits) == 16


GIB = 1 << 30
# 1 Gi numbers: bf16 weights of fp32 masters, AdamW, sums in fp32
TRAINED = ModelSizes(state=16 * GIB, weights=2 * GIB, gradients=4 * GIB)
FROZEN = ModelSizes(state=2 * GIB, weights=2 * GIB, gradients=0)


@pytest.mark.parametrize(
    ("device", "ranks", "sizes", "memory", "options", "expected"),
    [
        ("cuda", 1, TRAINED, 54 * GIB, {}, (True, True)),  # one rank: 16 + 2, and nothing to reduce
        ("cuda", 1, TRAINED, 54 * GIB - 3, {}, (False, True)),
        ("cuda", 1, TRAINED, 47 * GIB, {}, (False, False)),
        ("cuda", 8, TRAINED, 24 * GIB, {}, (True, True)),  # 2 + 2 + 3.5
        ("cuda", 8, TRAINED, 22 * GIB, {}, (True, False)),
        ("cuda", 8, TRAINED, 11 * GIB, {}, (False, False)),
        ("cuda", 8, TRAINED, 17 * GIB, {"gather_once": False}, (False, True)),
        ("cuda", 8, TRAINED, 17 * GIB, {"reduce_once": True}, (False, True)),
        ("cuda", 8, TRAINED, 1 * GIB, {"gather_once": True, "reduce_once": True}, (True, True)),
        ("cuda", 8, TRAINED, 80 * GIB, {"gather_once": False, "reduce_once": False}, (False, False)),
        ("cuda", 8, TRAINED, 80 * GIB, {"offload_policy": True}, (False, False)),
        ("cuda", 8, TRAINED, None, {}, (False, False)),
        ("cuda", 8, TRAINED, None, {"gather_once": True}, (True, False)),
        ("cuda", 2, FROZEN, 9 * GIB, {}, (True, True)),
        ("cuda", 2, FROZEN, 8 * GIB, {}, (False, True)),
        ("cpu", 8, TRAINED, 1 * GIB, {}, (True, True)),
        ("cpu", 8, TRAINED, None, {"gather_once": False}, (False, True)),
    ],
)  # fmt: skip
def test_weights_are_gathered_and_gradients_reduced_once_where_a_third_of_the_device_holds_them(
    device, ranks, sizes, memory, options, expected
):
    own = FSDPConfig().with_values(options)
    assert own.once_a_mini_batch(device, ranks, sizes, memory) == expected
    text = own.copies(device, ranks, sizes, memory)
    decides = device == "cuda" and memory is not None and not own.offload_policy
    for name, is_on in zip(("gather_once", "reduce_once"), expected, strict=True):
        is_said = decides and name not in options
        assert (f"{name}=null means {str(is_on).lower()}" in text) == is_said


def test_the_numbers_behind_copies_are_named():
    assert FSDPConfig().copies("cuda", 8, TRAINED, 24 * GIB) == (
        "fsdp_config: gather_once=null means true and reduce_once=null means true. A rank's part of weights, gradients "
        "and optimizer state is 2.00 GiB; whole weights to compute with are 2.00 GiB more, sums of whole gradients "
        "3.50 GiB; all may be 8.00 GiB, a third of a device."
    )

"""Whole ROLL files, put together from the keys of its guides, become command lines that are checked as any other."""

import shlex
from pathlib import Path

import pytest
import yaml

from tests.support.composing import load_over
from verl.config.roll.command import command_line, main
from verl.config.roll.translate import read_roll, translate

HERE = Path(__file__).parent
RLVR, AGENTIC = str(HERE / "rlvr.yaml"), str(HERE / "agentic.yaml")


def config_of(translation, *words):
    """The typed tree of a translation; data files need not be there."""
    loaded = load_over((), [*translation.words, *words])
    assert not loaded.problems, loaded.problems
    return loaded.config


def test_an_rlvr_file_is_reported_in_full():
    translation = translate(*read_roll(RLVR))
    assert translation.refusals == []
    config = config_of(translation)
    shared = config.actor_rollout_ref
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.seed) == (2, 8, 42)
    assert (shared.rollout.name, shared.rollout.n, config.data.train_batch_size) == ("vllm", 8, 64)
    assert shared.actor.deepspeed.zero_stage == 2 and shared.actor.deepspeed.reduce_bucket_size == 500_000_000
    assert shared.rollout.engine_kwargs.vllm.block_size == 16
    # 1 per device x 32 accumulated x 16 ranks = 512 samples = 64 prompts of 8: one optimizer step a rollout
    assert shared.actor.ppo_mini_batch_size == 64 and shared.actor.ppo_micro_batch_size_per_gpu == 1
    assert shared.actor.optim.lr_warmup_steps == 20 and shared.actor.shuffle


def test_an_agentic_file_trains_in_environments():
    translation = translate(*read_roll(AGENTIC))
    assert translation.refusals == []
    config = config_of(translation)
    train, val = config.env.train, config.env.val
    assert (train.tags, train.n_groups, train.group_size, train.format_penalty) == (["SimpleSokoban"], 8, 8, -0.15)
    assert (val.tags, val.n_groups, val.groups_per_tag) == (["SimpleSokoban", "FrozenLake"], 64, [32, 32])
    sokoban, lake = config.env.tag("SimpleSokoban"), config.env.tag("FrozenLake")
    assert (sokoban.type, sokoban.max_steps, sokoban.max_tokens_per_step) == ("Sokoban", 10, 64)
    assert sokoban.kwargs["dim_room"] == [6, 6] and lake.type == "FrozenLake"
    assert config.actor_rollout_ref.rollout.mode == "async" and config.data.train_batch_size == 8
    assert config.algorithm.reward_shaping.clip_range == [-1, 3] and config.env.render_save_dir == "/data/output/render"


def test_an_agentic_file_of_newer_roll_refers_to_known_environments(tmp_path):
    tree = yaml.safe_load(Path(AGENTIC).read_text())
    template = "Turn {turn_idx}:\n{observation}\n{actions_left} left, {max_response_length} tokens."
    lake = {"env_type": "frozen_lake", "agent_template": template, "env_config": {"action_pattern": "^(.*)$"}}
    tree |= {
        "defaults": ["../config/traj_envs@_here_", "../config/deepspeed_zero@_here_"],
        "rollout_batch_size": 1024,
        "val_batch_size": 1024,
        "max_tokens_per_step": 64,
        "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
        "train_env_manager": {"max_env_num_per_worker": 16, "num_env_groups": 128, "group_size": 8,
                              "tags": ["FrozenLake"], "num_groups_partition": [128], "format_penalty": -0.15},
        "val_env_manager": {"num_env_groups": 1024, "group_size": 1, "tags": ["LargerSokoban", "Mine"],
                            "num_groups_partition": [512, 512]},
        "custom_envs": {"FrozenLake": "${custom_env.FrozenLake}", "LargerSokoban": "${custom_env.LargerSokoban}",
                        "Mine": lake},
    }  # fmt: skip
    tree["actor_train"]["strategy_args"] = {"strategy_name": "fsdp2_train", "strategy_config": {}}
    (tmp_path / "agent_val_frozen_lake.yaml").write_text(yaml.safe_dump(tree))
    translation = translate(*read_roll(str(tmp_path / "agent_val_frozen_lake.yaml")))
    assert translation.refusals == []
    config = config_of(translation)
    assert (config.env.train.n_groups, config.data.train_batch_size, config.env.val.n_groups) == (128, 128, 1024)
    assert (
        config.env.tag("FrozenLake").max_tokens_per_step == 64 and config.env.tag("FrozenLake").format_penalty == -0.01
    )
    assert config.env.tag("LargerSokoban").kwargs["dim_room"] == [10, 10]
    mine = config.env.tag("Mine")
    assert (
        mine.kwargs["answer"] == "plain" and "Turn {turn}:\n{observation}\n{turns_left} left, 128" in mine.turn_template
    )
    assert config.env.reward_normalization.grouping == "state"
    assert "--check" not in " ".join(translation.words) and "main_agentic" in command_line(translation.words)


def changed(tmp_path, **changes):
    """The RLVR file with other values; ``__`` for dots."""
    tree = yaml.safe_load(Path(RLVR).read_text())
    tree["defaults"] = [f"{HERE}/config/envs@_here_", f"{HERE}/config/deepspeed_zero2@_here_", "deepspeed_zero3@_here_"]
    for key, value in changes.items():
        *path, last = key.split("__")
        node = tree
        for name in path:
            node = node[name]
        node[last] = value
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(tree))
    return translate(*read_roll(str(tmp_path / "changed.yaml")))


@pytest.mark.parametrize(
    ("accumulated", "words"),
    [(64, "an optimizer step takes 1024 samples, a rollout brings 512"), (20, "no multiple of the 320")],
)
def test_batches_that_roll_would_cut_are_refused(tmp_path, accumulated, words):
    (refusal,) = changed(tmp_path, actor_train__training_args__gradient_accumulation_steps=accumulated).refusals
    assert words in refusal and "ppo_mini_batch_size" in refusal


def test_warm_up_counts_optimizer_steps(tmp_path):
    translation = changed(tmp_path, actor_train__training_args__gradient_accumulation_steps=8)
    config = config_of(translation)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 16, "four optimizer steps a rollout"
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == 5
    assert any("counts optimizer steps" in note for note in translation.notes)


def test_megatron_ranks_share_a_sample_as_the_guide_counts(tmp_path):
    strategy = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}}
    translation = changed(tmp_path, actor_train__strategy_args=strategy)
    words = dict(word.split("=", 1) for word in translation.words)
    assert words["actor_rollout_ref.actor.ppo_mini_batch_size"] == "32", "1 x 32 x 16 / 2 / 8"


def test_print_shows_a_command_that_says_the_same(capsys):
    assert main([RLVR, "--print", "trainer.seed=5"], run=None) == 0
    shown, notes = capsys.readouterr()
    words = shlex.split(shown.replace("\\\n", ""))
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"] and words[-1] == "trainer.seed=5"
    assert words[3:] == translate(*read_roll(RLVR), words=["trainer.seed=5"]).words
    assert "note: " in notes


def test_a_file_that_asks_for_what_is_not_there_is_not_run(tmp_path, capsys):
    ran = []
    tree = yaml.safe_load(Path(AGENTIC).read_text())
    tree["actor_train"]["model_args"]["moe_aux_loss_coef"] = 0.1
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    assert main([str(tmp_path / "a.yaml")], run=ran.append) == 2
    assert not ran and "moe_aux_loss_coef=0" in capsys.readouterr().err


def test_a_reference_that_leads_nowhere_is_named(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("exp_name: ${nobody}\n")
    assert main([str(tmp_path / "a.yaml")], run=None) == 2
    assert "nobody" in capsys.readouterr().err


def test_the_page_holds_the_tables():
    from verl.config.roll.command import tables_page

    page = (Path(__file__).parents[3] / "docs" / "roll.md").read_text(encoding="utf-8")
    assert tables_page() in page, "put what verl.config.roll.command.tables_page() gives into docs/roll.md"

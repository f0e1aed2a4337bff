"""Training on CUDA packs its rows and splits them by tokens: in the recipes, and in the commands of the pages."""

import re

import pytest

from tests.docs.test_code_blocks import BLOCKS, COMMANDS, overrides_of
from tests.examples.test_clusters import JOB, run_with_stubs
from tests.examples.test_sft_recipes import FOLDERS, SCRIPTS
from tests.support.commands import ROOT, calls_of, training_call
from tests.support.composing import Start, load_over
from verl.config.load import load
from verl.config.preference import DPOConfig, RewardTrainConfig
from verl.config.sft import SFTConfig

RECIPES = sorted(path for folder in ("examples", "recipe") for path in (ROOT / folder).rglob("run_*.sh"))
RECIPES = [path for path in RECIPES if path not in SCRIPTS]
SUPERVISED = {"verl.trainer.sft_trainer": SFTConfig}
SUPERVISED |= {f"verl.trainer.{root.config_name}": root for root in (DPOConfig, RewardTrainConfig)}


def padded(config):
    """Options of a run of PPO on CUDA that leave rows padded or split them by count."""
    if config.trainer.device != "cuda":
        return []
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    on = {
        "actor_rollout_ref.model.use_remove_padding": policy.actor.use_remove_padding,
        "actor_rollout_ref.actor.use_dynamic_bsz": policy.actor.use_dynamic_bsz,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": policy.rollout.log_prob_use_dynamic_bsz,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": policy.ref.log_prob_use_dynamic_bsz,
    }
    if config.uses_critic:
        on["critic.model.use_remove_padding"] = critic.model.use_remove_padding
        on["critic.use_dynamic_bsz"] = critic.use_dynamic_bsz
    if reward.enable and not reward.server_urls and not reward.rollout:  # on the training engine
        on["reward_model.model.use_remove_padding"] = reward.model.use_remove_padding
        on["reward_model.use_dynamic_bsz"] = reward.use_dynamic_bsz
    return [key for key, value in on.items() if not value]


def padded_supervised(config):
    """The same of supervised fine-tuning and of preferences."""
    on = {
        "model.use_remove_padding": config.model.use_remove_padding,
        "data.use_dynamic_bsz": config.data.use_dynamic_bsz,
    }
    return [key for key, value in on.items() if config.trainer.device == "cuda" and not value]


def unexplained(keys, text):
    """Those of ``keys`` that no comment of a script names, with ``=false`` and the reason behind it."""
    return [key for key in keys if not re.search(rf"^ *# .*\b{key.rpartition('.')[2]}=false: \w", text, re.MULTILINE)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_on_cuda_packs_rows_or_says_why_not(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    start, words = training_call(calls_of(recipe, tmp_path))
    assert not unexplained(padded(load_over((), words, start).config), recipe.read_text())


@pytest.mark.parametrize("recipe", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_of_supervised_training_on_cuda_packs_rows_or_says_why_not(recipe, tmp_path):
    (call,) = calls_of(recipe, tmp_path)
    at = next(place for place, word in enumerate(call) if word.startswith("verl.trainer."))
    root = FOLDERS.get(recipe.parent.name, SFTConfig)
    config = load(call[at + 1 :], config_name=root.config_name, root=root).config
    assert not unexplained(padded_supervised(config), recipe.read_text())


def test_a_job_of_several_nodes_packs_rows(tmp_path):
    script = str(ROOT / "examples" / "slurm" / "ray_on_slurm.slurm")
    [words], done, _ = run_with_stubs(["bash", script], tmp_path, **JOB)
    assert done.returncode == 0 and not padded(load_over((), words).config)


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_command_of_a_page_on_cuda_packs_rows(block):
    for words in overrides_of(block.text):
        assert not padded(load_over((), words).config)


def test_commands_of_supervised_training_on_cuda_pack_rows():
    for program, root in SUPERVISED.items():
        commands = [words for block in BLOCKS for words in overrides_of(block.text, program)]
        assert commands
        for words in commands:
            assert not padded_supervised(load(words, config_name=root.config_name, root=root).config)


def test_what_is_padded_is_named():
    words = ["algorithm.adv_estimator=gae", "critic.model.use_remove_padding=true", "critic.use_dynamic_bsz=true"]
    found = padded(load_over((), words, Start()).config)
    assert found[:2] == ["actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.actor.use_dynamic_bsz"]
    assert not [key for key in found if key.startswith("critic")] and len(found) == 4
    assert not padded(load_over((), [*words, "trainer.device=cpu"]).config)
    text = "    # use_remove_padding=false: its layers are recurrent\n# use_dynamic_bsz=true\n"
    assert unexplained(found, text) == found[1:]

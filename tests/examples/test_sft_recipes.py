"""Recipes of supervised fine-tuning and of preference training set options that compose without a contradiction."""

import pytest

from tests.support.commands import ROOT, calls_of
from verl.config.load import load
from verl.config.preference import DPOConfig, RewardTrainConfig
from verl.config.sft import SFTConfig

FOLDERS = {"dpo_trainer": DPOConfig, "rm_trainer": RewardTrainConfig}
SCRIPTS = [*sorted((ROOT / "examples" / "sft").glob("run_*.sh")), *sorted((ROOT / "recipe").glob("*/sft_*.sh"))]
SCRIPTS += [script for folder in FOLDERS for script in sorted((ROOT / "examples" / folder).glob("run_*.sh"))]


@pytest.mark.parametrize("recipe", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_composes(recipe, tmp_path):
    (call,) = calls_of(recipe, tmp_path, "trainer.seed=7", environment={"GPUS": "8"})
    at = next(place for place, word in enumerate(call) if word.startswith("verl.trainer."))
    root = FOLDERS.get(recipe.parent.name, SFTConfig)
    assert root is SFTConfig or call[at] == f"verl.trainer.{recipe.parent.name}"
    loaded = load(call[at + 1 :], config_name=root.config_name, root=root)
    assert loaded.problems == [] and loaded.config.trainer.seed == 7
    assert not [text for text in loaded.warnings if "no effect" in text]

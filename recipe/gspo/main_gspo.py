"""GSPO: ``python -m recipe.gspo.main_gspo key=value ...``

The main job with the settings of Zheng et al. 2025 (arXiv:2507.18071) to start from.
"""

from pathlib import Path

from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.gspo.main_gspo",
    config_path=str(Path(__file__).parent / "config"),
    config_name="gspo_trainer",
)

if __name__ == "__main__":
    main(recipe=RECIPE)

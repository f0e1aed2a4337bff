"""DAPO: ``python -m recipe.dapo.main_dapo key=value ...``

The main job with the settings of Yu et al. 2025 (arXiv:2503.14476) to start from; any of them can be changed.
"""

from pathlib import Path

from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.dapo.main_dapo",
    config_path=str(Path(__file__).parent / "config"),
    config_name="dapo_trainer",
)

if __name__ == "__main__":
    main(recipe=RECIPE)

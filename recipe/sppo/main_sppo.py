"""SPPO: ``python -m recipe.sppo.main_sppo key=value ...``

The main job with the loss and the win rates of Wu et al. 2024 (arXiv:2405.00675) to start from.
"""

from pathlib import Path

from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.sppo.main_sppo",
    config_path=str(Path(__file__).parent / "config"),
    config_name="sppo_trainer",
)

if __name__ == "__main__":
    main(recipe=RECIPE)

"""Clip-Cov and KL-Cov: ``python -m recipe.entropy.main_entropy key=value ...``

The main job with the settings of Cui et al. 2025, The Entropy Mechanism (arXiv:2505.22617), to start from.
"""

from pathlib import Path

from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.entropy.main_entropy",
    config_path=str(Path(__file__).parent / "config"),
    config_name="entropy_trainer",
)

if __name__ == "__main__":
    main(recipe=RECIPE)

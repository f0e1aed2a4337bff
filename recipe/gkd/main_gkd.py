"""On-policy distillation (GKD): ``python -m recipe.gkd.main_gkd key=value ...``

The main job with the settings of Agarwal et al. 2023 (arXiv:2306.13649) to start from; any of them can be changed.
"""

from pathlib import Path

from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.gkd.main_gkd",
    config_path=str(Path(__file__).parent / "config"),
    config_name="on_policy_distill_trainer",
)

if __name__ == "__main__":
    main(recipe=RECIPE)

"""One-step-off-policy training: ``python -m recipe.one_step_off_policy.main_ppo key=value ...``

The main job with another configuration to start from; the stages that differ are in `OneStepOffTrainer`.
"""

from pathlib import Path

from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.one_step_off_policy.main_ppo",
    config_path=str(Path(__file__).parent / "config"),
    config_name="one_step_off_ppo_trainer",
)

if __name__ == "__main__":
    main(recipe=RECIPE)

"""Online DPO: ``python -m recipe.spin.main_spin key=value ...``

The main job with another loss and a reference that follows the policy; what differs is in `spin_trainer`.
"""

from pathlib import Path

from recipe.spin.options import SpinConfig
from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.spin.main_spin",
    config_path=str(Path(__file__).parent / "config"),
    config_name="spin_trainer",
    job="recipe.spin.spin_trainer:SpinJob",
    root=SpinConfig,
)

if __name__ == "__main__":
    main(recipe=RECIPE)

"""PPO on two pools of devices: ``python3 -m examples.split_placement.main_ppo_split key=value ...``"""

from pathlib import Path

from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="examples.split_placement.main_ppo_split",
    config_path=str(Path(__file__).parent / "config"),
    config_name="split_ppo_trainer",
    job="examples.split_placement.split_trainer:SplitJob",
)

if __name__ == "__main__":
    main(recipe=RECIPE)

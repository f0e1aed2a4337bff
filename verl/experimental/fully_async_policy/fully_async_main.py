"""Fully asynchronous training: ``python -m verl.experimental.fully_async_policy.fully_async_main key=value ...``

The main job with another configuration to start from (``fully_async_ppo_trainer``). Described in docs/disjoint.md.
"""

from verl.config.compose import CONFIG_DIR
from verl.trainer.main_ppo import Recipe
from verl.trainer.main_ppo import main as main_ppo

RECIPE = Recipe(
    program="verl.experimental.fully_async_policy.fully_async_main",
    config_path=str(CONFIG_DIR),
    config_name="fully_async_ppo_trainer",
)


def main() -> None:
    """Run the words of this process."""
    main_ppo(recipe=RECIPE)


if __name__ == "__main__":
    main()

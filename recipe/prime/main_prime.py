"""PRIME: ``python -m recipe.prime.main_prime key=value ...``

The main job with a process reward model beside the policy; what differs is in `prime_trainer`.
"""

from pathlib import Path

from recipe.prime.options import PrimeConfig
from verl.trainer.main_ppo import Recipe, main

RECIPE = Recipe(
    program="recipe.prime.main_prime",
    config_path=str(Path(__file__).parent / "config"),
    config_name="prime_trainer",
    job="recipe.prime.prime_trainer:PrimeJob",
    root=PrimeConfig,
)

if __name__ == "__main__":
    main(recipe=RECIPE)

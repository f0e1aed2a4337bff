"""Fully asynchronous training: ``python -m recipe.fully_async_policy.fully_async_main key=value ...``"""

from verl.experimental.fully_async_policy.fully_async_main import RECIPE, main

__all__ = ["RECIPE", "main"]

if __name__ == "__main__":
    main()

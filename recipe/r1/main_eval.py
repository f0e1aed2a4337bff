"""Figures of a file of responses: ``python -m recipe.r1.main_eval data.path=RESPONSES``, the same as ``verl eval``."""

from verl.trainer.main_eval import main

if __name__ == "__main__":
    main()

"""``python -m verl.doctor KEY=VALUE ...``: what a run would do, and what would go wrong, before anything starts.

Composes the very command line of ``verl.trainer.main_ppo``; opens no model, imports no torch; only the reward
function is called, in a sandbox.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Examine a command line, print what there is to say, and return the exit code; ``None``: this process's words."""
    from verl.doctor.cli import main as examine_and_print

    return examine_and_print(argv)

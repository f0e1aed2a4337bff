"""Show the samples of a run in the terminal: ``verl trajectories``.

python scripts/rollout_viewer.py runs/x/samples --step last --best 3
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.cli import main

if __name__ == "__main__":
    sys.exit(main(["trajectories", *sys.argv[1:]]))

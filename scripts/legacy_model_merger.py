"""The older address of ``python -m verl.model_merger``; takes the same words."""

import sys
from pathlib import Path

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.model_merger.__main__ import main
from verl.utils.process import plain_ending

if __name__ == "__main__":
    with plain_ending():
        sys.exit(main())

"""``python -m verl``: as the command ``verl``."""

import sys

from verl.cli import main

if __name__ == "__main__":
    sys.exit(main())

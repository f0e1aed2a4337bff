"""``python -m verl.data_check``."""

import sys

from verl.data_check.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

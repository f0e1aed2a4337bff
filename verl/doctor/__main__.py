"""``python -m verl.doctor``: see ``cli.py``."""

import sys

from verl.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

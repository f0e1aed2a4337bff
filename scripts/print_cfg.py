"""Print the configuration tree with the meaning, type and range of every option: as ``verl config``.

    python scripts/print_cfg.py                               everything
    python scripts/print_cfg.py actor_rollout_ref.rollout     a section or an option
    python scripts/print_cfg.py --key-value                   bare `key: value` lines, as in `--cfg job`

Values are verl's defaults, interpolations unresolved; key=value words change them.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.config.describe import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Print versions, devices, engines and limits of this machine for a bug report: ``verl env``. No secrets, no names.

python scripts/diagnose.py            --json, --quick
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.telemetry.diagnose import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

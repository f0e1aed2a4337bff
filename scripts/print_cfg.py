"""Print the configuration tree with the meaning, type and range of every option.

    python scripts/print_cfg.py                               everything
    python scripts/print_cfg.py actor_rollout_ref.rollout     a section or an option
    python scripts/print_cfg.py --key-value                   bare `key: value` lines, as in `--cfg job`

Values are verl's defaults, interpolations unresolved; key=value words change them.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.config.base import ConfigError
from verl.config.compose import CONFIG_DIR, compose
from verl.config.describe import describe
from verl.config.overrides import check_overrides, locate, unknown_key
from verl.config.ppo import PPOConfig
from verl.config.tree import flatten


def main(arguments: list[str]) -> int:
    """Print what ``arguments`` ask for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY | key=value", help="what to print; what to change")
    parser.add_argument("--key-value", action="store_true", help="one `key: value` line per option")
    options = parser.parse_args(arguments)
    changes = [word for word in options.words if "=" in word]
    keys = [word for word in options.words if "=" not in word]
    try:
        checked = check_overrides(changes, PPOConfig, lambda name: (CONFIG_DIR / name).is_dir())
        wrong = [problem.text for problem in checked.problems]
        places = {key: locate(PPOConfig, key) for key in keys}
        wrong += [unknown_key(PPOConfig, key, place) for key, place in places.items() if place.kind == "unknown"]
        if wrong:
            raise ConfigError(wrong)
        tree = compose(checked.overrides, [CONFIG_DIR], "ppo_trainer", PPOConfig)[1]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.key_value:
        for key, value in flatten(tree):
            if not keys or any(key == wanted or key.startswith(f"{wanted}.") for wanted in keys):
                print(f"{key}: {value}")
        return 0
    for place in [places[key].reached for key in keys] or [""]:
        print("\n".join(describe(PPOConfig, place, tree)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

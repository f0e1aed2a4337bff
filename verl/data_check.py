"""``python -m verl.data_check``: the command ``verl check``."""

from verl.preflight.command import check as main

if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m verl.doctor``: the command ``verl doctor``."""

from verl.preflight.command import doctor as main

if __name__ == "__main__":
    raise SystemExit(main())

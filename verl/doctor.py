"""``python -m verl.doctor``: see ``verl.preflight``."""

from verl.preflight.command import doctor as main

if __name__ == "__main__":
    raise SystemExit(main())

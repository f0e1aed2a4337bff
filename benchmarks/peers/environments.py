"""A virtual environment for each peer, made from the package index and kept.

Nothing of a peer is installed beside this project: ``verl`` of the index has the same import name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "verl",
    "accelerate",
    "datasets",
    "numpy",
    "ray",
    "tensordict",
    "tokenizers",
)


OF_VERL = ("numpy==1.26.4", "pyarrow==21.0.0", "datasets==5.0.1", "transformers==4.57.6", "tensordict==0.9.1")
OF_VERL += ("accelerate==1.15.0", "peft==0.21.2", "pandas==3.0.6", "wandb==0.31.0")
"""The newest that verl 0.5 runs with: it asks for numpy 1 and imports what only transformers 4 has. Without them pip
searches for an hour.
"""


def requirements(peer: str, release: str) -> list[str]:
    """Return what pip is asked for: the peer, and the torch of this environment, so that both compute alike.

    A torch named without its build would be the one for CUDA, gigabytes that are not used here.
    """
    torch = f"torch=={version('torch')}"
    if peer == "trl":
        return [torch, f"transformers=={version('transformers')}", f"trl=={release}"]
    if peer == "verl":
        return [torch, f"ray[default]=={version('ray')}", *OF_VERL, f"verl=={release}"]
    raise ValueError(f"unknown peer {peer!r}; known: trl, verl")


def interpreter(peer: str, release: str, folder: Path) -> Path:
    """Return the Python of the peer's environment under ``folder``; makes it at the first call, in some minutes."""
    home = (folder / f"{peer}-{release}").absolute()
    stamp, wanted = home / "installed.json", requirements(peer, release)
    python = home / "bin" / "python"
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return python
    print(f"making {home} with {', '.join(wanted)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    done = subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted])
    if done.returncode:
        raise SystemExit(
            f"pip could not install {' '.join(wanted)} (exit code {done.returncode}; its message is above). "
            f"torch is asked for in the build that runs here: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name where it is."
        )
    stamp.write_text(json.dumps(wanted))
    return python


def versions(python: Path | str, cwd: Path) -> dict[str, str]:
    """Return the versions of the packages that matter in an environment."""
    done = subprocess.run(
        [str(python), "-I", "-c", PROBE, *PACKAGES], check=True, capture_output=True, text=True, cwd=cwd
    )
    return json.loads(done.stdout)

"""Manifest of a checkpoint: size and xxh3-128 of each of its files, by which what is damaged or foreign is noticed.

A role's folder has one, of the files that its ranks wrote; the folder of a step has one of the driver's files and of
the manifests below it. ``manifest.json`` has a checksum of its own, so no byte of a checkpoint can change unseen.
"""

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from verl.version import __version__

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""File of a run's folder that names its newest complete step."""

_FORMAT = "verl-manifest-1"
_PACKAGES = ("torch", "transformers", "safetensors", "peft", "vllm", "sglang")
_PIECE = 1 << 22


class DamagedCheckpoint(ValueError):
    """Files of a checkpoint are missing, cut off, altered, or of another save."""


class Digest(NamedTuple):
    """What is known of a file's content."""

    size: int
    """In bytes."""
    xxh3: str
    """xxh3-128, in hexadecimal."""


class DigestingFile:
    """A file that is written, and the digest of what was meant to be written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._size = file, xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> Digest:
        return Digest(self._size, self._hash.hexdigest())


def digest(path: Path) -> Digest:
    """The digest of the file at ``path``."""
    with open(path, "rb") as file:
        return digest_of(iter(lambda: file.read(_PIECE), b""))


def digest_of(pieces: Iterable[bytes]) -> Digest:
    """The digest of a content that comes in ``pieces``."""
    state, size = xxhash.xxh3_128(), 0
    for piece in pieces:
        state.update(piece)
        size += len(piece)
    return Digest(size, state.hexdigest())


def fingerprint(value: Any) -> str:
    """A hash of JSON values that does not depend on the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def versions() -> dict[str, str]:
    """Versions of verl, Python and the packages that write or read weights."""
    found = {"verl": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Manifest(NamedTuple):
    """Content of a ``manifest.json``."""

    files: dict[str, Digest]
    """By their paths in the folder."""
    about: dict[str, Any]
    """JSON values: step, versions, fingerprints."""


def _rendered(content: Mapping[str, Any]) -> str:
    checksum = fingerprint(content)
    return json.dumps({**content, "checksum": checksum}, indent=1, sort_keys=True) + "\n"


def manifest_of(
    folder: Path, paths: Iterable[Path], about: Mapping[str, Any], known: Mapping[str, Digest] | None = None
) -> str:
    """Return the text of the manifest of ``paths``, files below ``folder``.

    Args:
        known: path in the folder -> digest of what was meant to be written there; other files are read.

    Raises:
        OSError: a file is shorter or longer than what was meant to be written.
    """
    files = {}
    for path in sorted(paths):
        name = path.relative_to(folder).as_posix()
        meant, size = (known or {}).get(name), path.stat().st_size
        if meant is not None and meant.size != size:
            raise OSError(
                f"{path} has {size:,} bytes after {meant.size:,} were written: its disk has lost some. Look at the "
                f"disk and its quota, or point trainer.default_local_dir to another one"
            )
        files[name] = meant or digest(path)
    plain = json.loads(json.dumps(about, default=str))
    return _rendered({"format": _FORMAT, "files": {name: list(files[name]) for name in files}, "about": plain})


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in ``folder``; None where there is none: a checkpoint of another program, or of verl before 0.5.

    Raises:
        DamagedCheckpoint: it is not as it was written.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        content.pop("checksum")
        # rendered again, so that a space that became a tab is noticed as well
        is_whole = text == _rendered(content) and content["format"] == _FORMAT
        files = {name: Digest(size, xxh3) for name, (size, xxh3) in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from error
    if not is_whole:
        raise DamagedCheckpoint(f"{path} is damaged: it does not agree with its own checksum")
    return Manifest(files, content["about"])


def damaged_files(folder: Path, manifest: Manifest, takes: Callable[[str], bool] = lambda name: True) -> dict[str, str]:
    """Name -> what is wrong with it, for every file of ``manifest`` that is not in ``folder`` as it was written.

    Args:
        takes: whether a file is looked at; all by default.
    """
    wrong = {}
    for name, written in manifest.files.items():
        if not takes(name):
            continue
        path = folder / name
        try:
            size = path.stat().st_size
            if size != written.size:
                wrong[name] = f"has {size:,} bytes and was written with {written.size:,}"
            elif digest(path).xxh3 != written.xxh3:
                wrong[name] = "does not hold what was written: it is damaged, or of another save"
        except FileNotFoundError:
            wrong[name] = "is missing"
        except OSError as error:  # a disk that cannot read a sector
            wrong[name] = f"cannot be read ({error.strerror})"
    return wrong

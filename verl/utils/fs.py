"""Bring a path named in the config to this machine: from a remote store into a cache folder, or into shared memory.

Whoever fills a place does it under a lock and another name: no process ever sees half of a file.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl.utils import hdfs_io
from verl.utils.hdfs_io import copy, exists, makedirs  # noqa: F401  users import them from here too

logger = logging.getLogger(__name__)

SHM_ROOT = "/dev/shm/verl-cache"


def is_non_local(path: str) -> bool:
    """True if a path names a remote store: ``hdfs://``, ``s3://``, ``gs://`` and what else fsspec knows."""
    return hdfs_io.is_remote(path)


def list_remote(pattern: str) -> list[str]:
    """The remote files that fit a glob, sorted, as whole paths."""
    return hdfs_io.find(pattern)


def local_mkdir_safe(path: str) -> str:
    """Make a local folder (relative paths count from the working directory) and return its absolute path."""
    path = os.path.abspath(os.path.expanduser(path))
    os.makedirs(path, exist_ok=True)
    return path


def get_local_temp_path(hdfs_path: str, cache_dir: str) -> str:
    """Return the path of the local copy: its own name in a folder named by a hash of the whole path."""
    hdfs_path = hdfs_path.rstrip("/")
    return os.path.join(cache_dir, hashlib.md5(hdfs_path.encode()).hexdigest(), os.path.basename(hdfs_path))


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """A local path that holds what ``src`` names.

    A remote path is downloaded once into ``cache_dir`` (default: a folder of the system's temporary directory), and
    again when the store says that it has changed (of ``hdfs://`` by command this is not asked). A path with ``~`` is
    expanded. Anything else, a hub id such as ``Qwen/Qwen2.5-0.5B`` included, is returned as is.

    Args:
        filelock: name of the lock file beside the copy; processes that want the same path wait for one download.
        always_recopy: download again although a copy exists.
        use_shm: afterwards copy it to ``/dev/shm``, so that many processes of the node read it from memory.
    """
    path = copy_local_path_from_hdfs(src, cache_dir, filelock, verbose, always_recopy)
    return copy_to_shm(path) if use_shm else path


def copy_local_path_from_hdfs(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
) -> str:
    """:func:`copy_to_local` without shared memory."""
    if not is_non_local(src):
        return os.path.expanduser(src) if src.startswith("~") else src
    cache_dir = os.path.expanduser(cache_dir) if cache_dir else os.path.join(tempfile.gettempdir(), "verl-cache")
    src = src.rstrip("/")
    target = get_local_temp_path(src, cache_dir)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with _locked(os.path.join(os.path.dirname(target), filelock)):
        stamp = _stamp_of(src, target)
        if os.path.exists(target) and (always_recopy or stamp != _read(f"{target}.stamp")):
            _remove(target)
        if not os.path.exists(target):
            if verbose:
                print(f"Copy from {src} to {target}")
            _copy_whole(src, target)
            _write(f"{target}.stamp", stamp)
    return target


def _stamp_of(src: str, target: str) -> str:
    """Return the store's stamp of ``src``; of an unreachable store, the stamp of the copy."""
    try:
        return hdfs_io.stamp(src)
    except (OSError, ImportError) as error:
        if isinstance(error, FileNotFoundError) or not os.path.exists(target):
            raise
        logger.warning("%s cannot be reached (%s): its copy %s is used as it is.", src, error, target)
        return _read(f"{target}.stamp")


def _read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def written_once(target: str, write: Callable[[str], None]) -> str:
    """The path ``target``, which ``write(path)`` fills if it is not there yet; processes that want it wait for one.

    Raises:
        OSError: it cannot be written, the disk is full for example.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with _locked(f"{target}.lock"):
        if not os.path.exists(target):
            partial = f"{target}.partial"
            _remove(partial)
            try:
                write(partial)
            except BaseException:
                _remove(partial)
                raise
            os.rename(partial, target)
    return target


def copy_to_shm(src: str) -> str:
    """A copy of a local file or folder under ``/dev/shm``; the path itself, with a warning, if that cannot hold it."""
    src = os.path.expanduser(src)
    if not os.path.exists(src):
        logger.warning("use_shm=True has no effect for %s: it is not a local path.", src)
        return src
    target = get_local_temp_path(os.path.realpath(src), SHM_ROOT)
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with _locked(os.path.join(os.path.dirname(target), ".file.lock")):
            if not _is_current_copy(src, target):
                _remove(target)
                needed, free = _size(src), shutil.disk_usage(os.path.dirname(target)).free
                if needed > free:
                    raise OSError(f"it takes {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free")
                _copy_whole(src, target)
    except OSError as error:
        logger.warning(
            "use_shm=True has no effect for %s: copying it to %s failed (%s). It is read where it is; make room in "
            "/dev/shm (docker run --shm-size, or delete old copies), or set use_shm=False.",
            src,
            target,
            error,
        )
        return src
    return target


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _copy_whole(src: str, target: str) -> None:
    """Copy under another name first: a copy that was cut off is never taken for the whole."""
    partial = f"{target}.partial"
    _remove(partial)
    hdfs_io.copy(src, partial)
    os.rename(partial, target)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


def _files(path: str) -> dict[str, os.stat_result]:
    if os.path.isfile(path):
        return {"": os.stat(path)}
    names = (os.path.join(root, name) for root, _, names in os.walk(path) for name in names)
    return {os.path.relpath(name, path): os.stat(name) for name in names}


def _size(path: str) -> int:
    return sum(stat.st_size for stat in _files(path).values())


def _is_current_copy(src: str, target: str) -> bool:
    if not os.path.exists(target):
        return False
    old, new = _files(src), _files(target)
    return old.keys() == new.keys() and all(
        old[name].st_size == new[name].st_size and old[name].st_mtime <= new[name].st_mtime for name in old
    )

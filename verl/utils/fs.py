"""Paths of this machine and of remote stores (``hdfs://``, ``s3://``, ``gs://``, ...): exists, makedirs, copy, find.

Also a local copy of what a remote path names, in a cache folder or in shared memory. Whoever fills a place does it
under a lock and another name: no process ever sees half of a file. HDFS is reached through the ``hdfs`` (or ``hadoop``)
command where there is one; all else through fsspec, which needs the package of the store: ``s3fs`` for ``s3://``,
``gcsfs`` for ``gs://``.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat as stat_module
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_OWN_CACHE = f"verl-cache-{os.getuid()}"
SHM_ROOT = f"/dev/shm/{_OWN_CACHE}"
HDFS_PREFIX = "hdfs://"
_PIECE = 4 << 20
# pkg:// names a Python module
_URL = re.compile(r"(?!pkg:)[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "oss": "ossfs"}


def is_hdfs(path: str) -> bool:
    return str(path).startswith(HDFS_PREFIX)


def is_remote(path: str) -> bool:
    """True if a path is a URL; ``pkg://``, which names a Python module, is none."""
    return _URL.match(str(path)) is not None


def exists(path: str, **kwargs) -> bool:
    """True if a file or folder exists."""
    if not is_remote(path):
        return os.path.exists(os.path.expanduser(path))
    if _by_command(path):
        return _hdfs("-test", "-e", path, check=False).returncode == 0
    store, place = _store(path)
    return store.exists(place)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs) -> None:
    """Make a folder and its parents. In a remote store an existing folder is always fine and ``mode`` is its affair."""
    if not is_remote(name):
        os.makedirs(os.path.expanduser(name), mode=mode, exist_ok=exist_ok)
    elif _by_command(name):
        _hdfs("-mkdir", "-p", name)
    else:
        store, place = _store(name)
        store.makedirs(place, exist_ok=True)


def copy(src: str, dst: str, **kwargs) -> bool:
    """Copy a file or folder, over an older copy if there is one. Either side may be local or remote.

    A folder copied onto an existing one is merged with it; only with the HDFS command it lands inside, as with
    ``cp -r``. Returns True; a failure raises.
    """
    if any(is_remote(path) and not _by_command(path) for path in (src, dst)):
        _copy_through_fsspec(src, dst)
    elif is_hdfs(src) and is_hdfs(dst):
        _hdfs("-cp", "-f", src, dst)
    elif is_hdfs(src):
        _hdfs("-get", "-f", src, os.path.expanduser(dst))
    elif is_hdfs(dst):
        _hdfs("-put", "-f", os.path.expanduser(src), dst)
    else:
        src, dst = os.path.expanduser(src), os.path.expanduser(dst)
        if os.path.isdir(src):
            shutil.copytree(src, dst, dirs_exist_ok=True)
        else:
            shutil.copy(src, dst)
    return True


def find(pattern: str) -> list[str]:
    """The remote files that fit a glob, sorted, as whole paths."""
    if _by_command(pattern):
        # a pattern that fits nothing is an error of the command, and an empty list here
        listed = _hdfs("-ls", "-C", pattern, check=False)
        return sorted(line for line in listed.stdout.splitlines() if line) if listed.returncode == 0 else []
    store, place = _store(pattern)
    return sorted(store.unstrip_protocol(name) for name in store.glob(place) if store.isfile(name))


def pieces(path: str) -> Iterator[bytes]:
    """Yield the content of a local or remote file, some MiB at a time.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    if _by_command(path):
        command = [str(_program()), "dfs" if _program() == "hdfs" else "fs", "-cat", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            yield from iter(lambda: process.stdout.read(_PIECE), b"")
        if process.returncode:
            raise OSError(f"`{' '.join(command)}` ended with code {process.returncode}")
        return
    if is_remote(path):
        store, place = _store(path)
        opened = store.open(place, "rb")
    else:
        opened = open(os.path.expanduser(path), "rb")
    with opened as file:
        yield from iter(lambda: file.read(_PIECE), b"")


def remove(path: str) -> None:
    """Delete a file or folder; one that is not there is fine."""
    if not is_remote(path):
        path = os.path.expanduser(path)
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.remove(path)
    elif _by_command(path):
        _hdfs("-rm", "-r", "-f", path)
    else:
        store, place = _store(path)
        if store.exists(place):
            store.rm(place, recursive=True)


def stamp(path: str) -> str:
    """A text that changes when a remote file or folder does; empty where the store is not asked (HDFS by command).

    Raises:
        FileNotFoundError: there is no such file.
    """
    if _by_command(path):
        return ""
    store, place = _store(path)
    return json.dumps({_below(place, name): str(store.ukey(name)) for name in _files_of(store, place, path)})


def _copy_through_fsspec(src: str, dst: str) -> None:
    # two stores share no server: through this machine
    if is_remote(src) and is_remote(dst):
        with tempfile.TemporaryDirectory() as folder:
            between = os.path.join(folder, os.path.basename(src.rstrip("/")))
            copy(src, between)
            copy(between, dst)
    elif is_remote(src):
        store, place = _store(src)
        for name in _files_of(store, place, src):
            target = os.path.join(os.path.expanduser(dst), _below(place, name)).rstrip("/")
            # file by file, since ``get`` of a folder differs between stores in whether it makes the top one
            os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
            store.get_file(name, target)
    else:
        store, place = _store(dst)
        src, place = os.path.expanduser(src), place.rstrip("/")
        inside = [os.path.relpath(os.path.join(at, n), src) for at, _, names in os.walk(src) for n in names]
        for name in sorted(inside) if os.path.isdir(src) else [""]:
            target = f"{place}/{name}".rstrip("/")
            store.makedirs(target.rpartition("/")[0], exist_ok=True)
            store.put_file(os.path.join(src, name) if name else src, target)


def _files_of(store: Any, place: str, path: str) -> list[str]:
    """The files a remote path holds: itself, or those below it."""
    if store.isfile(place):
        return [place]
    names = store.find(place)
    if not names:
        raise FileNotFoundError(f"{path!r} does not exist. Correct the path, or the store's credentials.")
    return names


def _below(place: str, name: str) -> str:
    return name[len(place) :].lstrip("/") if name.startswith(place) else os.path.basename(name)


def _store(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import fsspec

    scheme = path.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        raise ImportError(
            f"{path!r} needs {f'the package {package}' if package else 'a package'} for {scheme}://, which is not "
            f"installed ({error}). {f'Run `pip install {package}`' if package else 'Install it'} or use a local path."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path!r}: {scheme}:// is no kind of store that fsspec knows ({error}). Write hdfs://, s3://, gs://, "
            "another one of fsspec's, or a local path."
        ) from error
    except OSError as error:
        if not is_hdfs(path):
            raise
        raise FileNotFoundError(
            f"{path!r} needs the `hdfs` or `hadoop` command and neither is on PATH, nor can libhdfs be loaded "
            f"({error}): install the Hadoop client or use a local path."
        ) from error


def _by_command(path: str) -> bool:
    return is_hdfs(path) and _program() is not None


def _program() -> str | None:
    return next((name for name in ("hdfs", "hadoop") if shutil.which(name)), None)


def _hdfs(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run ``hdfs dfs ...``; exit code 1 of ``-test`` is an answer, anything else that fails is an error."""
    program = _program()
    command = [program, "dfs" if program == "hdfs" else "fs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and (check or done.returncode != 1):
        raise OSError(f"`{' '.join(command)}` ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done


is_non_local = is_remote
list_remote = find


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
        filelock: name of the lock file next to the copy; processes that want the same path wait for one download.
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
    cache_dir = os.path.expanduser(cache_dir) if cache_dir else own_folder(f"{tempfile.gettempdir()}/{_OWN_CACHE}")
    src = src.rstrip("/")
    target = get_local_temp_path(src, cache_dir)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    # all processes of a node start at once and want the same model: one downloads, the others wait
    with _locked(os.path.join(os.path.dirname(target), filelock)):
        kept = Path(f"{target}.stamp")
        known = kept.read_text(encoding="utf-8") if kept.exists() else ""
        try:
            now = stamp(src)
        except (OSError, ImportError) as error:
            if isinstance(error, FileNotFoundError) or not os.path.exists(target):
                raise
            logger.warning("%s cannot be reached (%s): its copy %s is used as it is.", src, error, target)
            now = known
        if os.path.exists(target) and (always_recopy or now != known):
            remove(target)
        if not os.path.exists(target):
            if verbose:
                print(f"Copy from {src} to {target}")
            _write_whole(target, lambda partial: copy(src, partial))
            kept.write_text(now, encoding="utf-8")
    return target


def written_once(target: str, write: Callable[[str], None]) -> str:
    """The path ``target``, which ``write(path)`` fills if it is not there yet; processes that want it wait for one.

    Raises:
        OSError: it cannot be written, the disk is full for example.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with _locked(f"{target}.lock"):
        if not os.path.exists(target):
            _write_whole(target, write)
    return target


def _write_whole(target: str, write: Callable[[str], Any]) -> None:
    """Write under another name first: what was cut off is never taken for the whole."""
    partial = f"{target}.partial"
    remove(partial)
    try:
        write(partial)
    except BaseException:
        remove(partial)
        raise
    os.rename(partial, target)


def write_atomic(
    path: Path, write: Callable[[Path], Any], *, is_private: bool = False, is_durable: bool = False
) -> None:
    """Write a file with ``write(path)`` under another name and rename it: it is there whole or not at all.

    Args:
        is_private: only this user can read it, ``write`` included.
        is_durable: it is on the disk before it has its name; else a crash of the machine could leave it empty.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        if is_private:
            os.close(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
        write(part)
        if is_durable:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def own_folder(path: str) -> str:
    """Make a folder that no other user can write to, in a place that is everyone's, and return it.

    Raises:
        PermissionError: it is there already and belongs to another user, or others may write to it.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat_module.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            errno.EACCES,
            f"{path} belongs to user {found.st_uid}, or others may write to it, and this process is user "
            f"{os.getuid()}: what lies there is not read. Delete it, or let TMPDIR name another place",
        )
    return path


def copy_to_shm(src: str) -> str:
    """A copy of a local file or folder under ``/dev/shm``; the path itself, with a warning, if that cannot hold it.

    The copy is this user's own, and is made again when a file of ``src`` is another than the one that was copied.
    """
    src = os.path.expanduser(src)
    if not os.path.exists(src):
        logger.warning("use_shm=True has no effect for %s: it is not a local path.", src)
        return src
    # links to one model share one copy
    target = get_local_temp_path(os.path.realpath(src), SHM_ROOT)
    kept = Path(f"{target}.source")
    try:
        own_folder(SHM_ROOT)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with _locked(os.path.join(os.path.dirname(target), ".file.lock")):
            there, here = _files(src), _files(target)
            # change time and inode too: rsync and cp -p bring other content with an old modification time
            now = json.dumps({name: [f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino] for name, f in there.items()})
            is_current = kept.exists() and kept.read_text(encoding="utf-8") == now
            is_current = is_current and os.path.exists(target) and here.keys() == there.keys()
            if not is_current or any(here[name].st_size != stat.st_size for name, stat in there.items()):
                remove(target)
                needed = sum(stat.st_size for stat in there.values())
                free = shutil.disk_usage(os.path.dirname(target)).free
                if needed > free:
                    raise OSError(f"it takes {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free")
                _write_whole(target, lambda partial: copy(src, partial))
                kept.write_text(now, encoding="utf-8")  # of before the copy: what changed meanwhile is seen next time
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
        # freed by the system too when its process dies
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _files(path: str) -> dict[str, os.stat_result]:
    """Files below a folder by their relative names, or a file alone; nothing for a path that does not exist."""
    if os.path.isfile(path):
        return {"": os.stat(path)}
    names = (os.path.join(root, name) for root, _, names in os.walk(path) for name in names)
    return {os.path.relpath(name, path): os.stat(name) for name in names}

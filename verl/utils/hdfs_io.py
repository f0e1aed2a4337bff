"""exists, makedirs, copy and find for local paths and remote paths (``hdfs://``, ``s3://``, ``gs://``, ...) alike.

HDFS is reached through the ``hdfs`` (or ``hadoop``) command where there is one; all else through fsspec, which needs
the package of the store: ``s3fs`` for ``s3://``, ``gcsfs`` for ``gs://``.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from typing import Any

HDFS_PREFIX = "hdfs://"
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
        listed = _hdfs("-ls", "-C", pattern, check=False)
        return sorted(line for line in listed.stdout.splitlines() if line) if listed.returncode == 0 else []
    store, place = _store(pattern)
    return sorted(store.unstrip_protocol(name) for name in store.glob(place) if store.isfile(name))


def remove(path: str) -> None:
    """Delete a file or folder; one that is not there is fine."""
    if not is_remote(path):
        path = os.path.expanduser(path)
        shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
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
    if is_remote(src) and is_remote(dst):
        with tempfile.TemporaryDirectory() as folder:
            between = os.path.join(folder, os.path.basename(src.rstrip("/")))
            copy(src, between)
            copy(between, dst)
    elif is_remote(src):
        store, place = _store(src)
        for name in _files_of(store, place, src):
            target = os.path.join(os.path.expanduser(dst), _below(place, name)).rstrip("/")
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

"""exists, makedirs and copy for local paths and ``hdfs://`` paths alike.

HDFS is reached through the ``hdfs`` (or ``hadoop``) command; without that command only local paths work.
"""

import os
import shutil
import subprocess

HDFS_PREFIX = "hdfs://"


def is_hdfs(path: str) -> bool:
    return str(path).startswith(HDFS_PREFIX)


def exists(path: str, **kwargs) -> bool:
    """Whether a file or folder is there."""
    if not is_hdfs(path):
        return os.path.exists(os.path.expanduser(path))
    return _hdfs("-test", "-e", path, check=False).returncode == 0


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs) -> None:
    """Make a folder and its parents. On HDFS an existing folder is always fine and ``mode`` is the cluster's."""
    if is_hdfs(name):
        _hdfs("-mkdir", "-p", name)
    else:
        os.makedirs(os.path.expanduser(name), mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs) -> bool:
    """Copy a file or folder, over an older copy if there is one. Either side may be local or HDFS.

    As with ``cp -r``, a folder copied onto an existing HDFS folder lands inside it; locally the two are merged.
    Returns True; a failure raises.
    """
    if is_hdfs(src) and is_hdfs(dst):
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


def _hdfs(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run ``hdfs dfs ...``; exit code 1 of ``-test`` is an answer, anything else that fails is an error."""
    program = next((p for p in ("hdfs", "hadoop") if shutil.which(p)), None)
    if program is None:
        raise FileNotFoundError(
            f"{arguments[-1]!r} needs the `hdfs` or `hadoop` command and neither is on PATH: install the Hadoop client "
            "or use a local path."
        )
    command = [program, "dfs" if program == "hdfs" else "fs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and (check or done.returncode != 1):
        raise OSError(f"`{' '.join(command)}` ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done

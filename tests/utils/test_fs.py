import multiprocessing
import os
import shutil
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from verl.utils import fs

FAKE_HDFS = """#!{python}
# A file system under $FAKE_HDFS_ROOT that understands the few commands verl uses.
import os, shutil, sys
root = os.environ["FAKE_HDFS_ROOT"]
real = lambda path: os.path.join(root, path[len("hdfs://"):]) if path.startswith("hdfs://") else path
assert sys.argv[1] == "dfs"
with open(os.path.join(root, "log"), "a") as log:
    log.write(sys.argv[2] + "\\n")
command, paths = sys.argv[2], [real(arg) for arg in sys.argv[3:] if not arg.startswith("-")]
if command == "-test":
    sys.exit(0 if os.path.exists(paths[0]) else 1)
if command == "-cat":
    sys.stdout.write(open(paths[0]).read())
elif command == "-mkdir":
    os.makedirs(paths[0], exist_ok=True)
else:
    if not os.path.exists(paths[0]):
        sys.exit("no such file: " + paths[0])
    (shutil.copytree if os.path.isdir(paths[0]) else shutil.copy)(paths[0], paths[1])
"""


@pytest.fixture
def hdfs(tmp_path, monkeypatch):
    """A fake ``hdfs`` command on PATH; yields the folder behind ``hdfs://``."""
    root, program = tmp_path / "hdfs_root", tmp_path / "bin" / "hdfs"
    root.mkdir()
    program.parent.mkdir()
    program.write_text(FAKE_HDFS.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("FAKE_HDFS_ROOT", str(root))
    return root


def test_local_paths_and_hub_ids_are_returned_as_they_are(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert fs.copy_to_local("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert fs.copy_to_local("/a/b") == "/a/b" and fs.copy_to_local("~/a") == "/home/me/a"
    assert fs.is_non_local("hdfs://a/b") and not fs.is_non_local("a/b")


def test_a_remote_file_is_downloaded_once(tmp_path, hdfs):
    (hdfs / "data.txt").write_text("one")
    first = fs.copy_to_local("hdfs://data.txt", cache_dir=str(tmp_path / "cache"))
    assert os.path.basename(first) == "data.txt" and open(first).read() == "one"
    (hdfs / "data.txt").write_text("two")
    assert fs.copy_to_local("hdfs://data.txt", cache_dir=str(tmp_path / "cache")) == first
    assert open(first).read() == "one" and (hdfs / "log").read_text().count("-get") == 1
    fs.copy_to_local("hdfs://data.txt", cache_dir=str(tmp_path / "cache"), always_recopy=True)
    assert open(first).read() == "two"


def test_a_remote_folder_is_downloaded_whole(tmp_path, hdfs):
    (hdfs / "model").mkdir()
    (hdfs / "model" / "config.json").write_text("{}")
    local = fs.copy_to_local("hdfs://model/", cache_dir=str(tmp_path / "cache"))
    assert os.listdir(local) == ["config.json"]


def test_a_download_that_was_cut_off_is_not_taken_for_the_file(tmp_path, hdfs):
    target = fs.get_local_temp_path("hdfs://data.txt", str(tmp_path / "cache"))
    os.makedirs(os.path.dirname(target))
    open(target + ".partial", "w").write("hal")
    (hdfs / "data.txt").write_text("whole")
    assert open(fs.copy_to_local("hdfs://data.txt", cache_dir=str(tmp_path / "cache"))).read() == "whole"


def test_hdfs_and_local_paths_exist_are_made_and_are_copied(tmp_path, hdfs):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.parquet").write_text("x")
    assert not fs.exists("hdfs://a/b")
    fs.makedirs("hdfs://a")
    assert fs.copy(str(tmp_path / "out"), "hdfs://a/b") and fs.exists("hdfs://a/b/train.parquet")
    fs.makedirs(str(tmp_path / "here" / "now"))
    assert fs.copy(str(tmp_path / "out"), str(tmp_path / "here" / "now"))
    assert fs.exists(str(tmp_path / "here" / "now" / "train.parquet"))


def test_a_file_of_a_store_is_read_in_pieces(tmp_path, hdfs, memory):
    (hdfs / "data.txt").write_text("one")
    (tmp_path / "data.txt").write_text("one")
    memory.pipe_file("/data.txt", b"one")
    for path in ("hdfs://data.txt", "memory://data.txt", str(tmp_path / "data.txt")):
        assert b"".join(fs.pieces(path)) == b"one"
    for path in ("hdfs://no.txt", "memory://no.txt", str(tmp_path / "no.txt")):
        with pytest.raises(OSError):
            list(fs.pieces(path))


def test_a_failing_hdfs_command_is_quoted(hdfs):
    with pytest.raises(OSError, match=r"`hdfs dfs -get -f hdfs://nothing /tmp/x` ended with code 1: no such file"):
        fs.copy("hdfs://nothing", "/tmp/x")


def test_without_the_hdfs_command_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="'hdfs://a' needs the `hdfs` or `hadoop` command"):
        fs.exists("hdfs://a")


def test_shared_memory_holds_a_copy_that_follows_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    source = tmp_path / "data.txt"
    source.write_text("one")
    copy = fs.copy_to_local(str(source), use_shm=True)
    assert copy.startswith(str(tmp_path / "shm")) and open(copy).read() == "one"
    assert fs.copy_to_local(str(source), use_shm=True) == copy
    source.write_text("other")
    assert open(fs.copy_to_local(str(source), use_shm=True)).read() == "other"


def test_a_source_of_the_same_size_and_an_older_time_is_copied_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights").write_text("one")
    for replace in (shutil.copy2, os.replace, lambda new, old: os.system(f"cp -p {new} {old}")):
        new = tmp_path / "new"
        new.write_text(str(hash(replace))[:3])
        os.utime(new, (1, 1))
        copy = fs.copy_to_local(str(source), use_shm=True)
        content = new.read_text()
        replace(new, source / "weights")
        assert (source / "weights").stat().st_mtime == 1
        assert (Path(fs.copy_to_local(str(source), use_shm=True)) / "weights").read_text() == content
    before = os.stat(f"{copy}/weights").st_ino
    assert fs.copy_to_local(str(source), use_shm=True) == copy and os.stat(f"{copy}/weights").st_ino == before


def test_a_copy_in_a_place_of_another_user_is_not_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    source = tmp_path / "data.txt"
    source.write_text("one")
    copy = Path(fs.copy_to_local(str(source), use_shm=True))
    copy.write_text("two")  # as another user could leave it, where the folder is theirs
    (tmp_path / "shm").chmod(0o777)
    assert fs.copy_to_local(str(source), use_shm=True) == str(source) and "others may write to it" in caplog.text
    (tmp_path / "shm").chmod(0o700)
    monkeypatch.setattr(fs.os, "getuid", lambda: 12345)
    assert fs.copy_to_local(str(source), use_shm=True) == str(source) and "belongs to user" in caplog.text


def test_shared_memory_that_cannot_be_used_is_reported_and_the_source_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fs, "SHM_ROOT", "/proc/nowhere")
    source = tmp_path / "data.txt"
    source.write_text("one")
    assert fs.copy_to_local(str(source), use_shm=True) == str(source)
    assert "use_shm=True has no effect" in caplog.text


def test_shared_memory_too_small_is_reported_with_the_remedy(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 29))
    source = tmp_path / "model"
    source.mkdir()
    with open(source / "weights", "wb") as file:
        file.truncate(3 << 29)  # a hole, which takes no room
    assert fs.copy_to_local(str(source), use_shm=True) == str(source)
    assert "1.50 GiB, and 0.50 GiB are free" in caplog.text and "docker run --shm-size" in caplog.text
    assert not list((tmp_path / "shm").rglob("model*"))


def test_a_copy_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    source = tmp_path / "model"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_text(name)

    def half(src, dst):
        os.makedirs(dst)
        shutil.copy2(f"{src}/a", dst)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fs, "copy", half)
        fs.copy_to_local(str(source), use_shm=True)
    copy = Path(fs.copy_to_local(str(source), use_shm=True))
    assert sorted(path.name for path in copy.iterdir()) == ["a", "b"]


@pytest.fixture
def memory():
    """A remote store, in memory."""
    store = fsspec.filesystem("memory")
    yield store
    for name in store.ls("/", detail=False):
        store.rm(name, recursive=True)


def test_any_store_of_fsspec_exists_is_copied_and_listed(tmp_path, memory):
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "a.txt").write_text("a")
    (tmp_path / "out" / "b.txt").write_text("b")
    fs.makedirs("memory://top")
    assert fs.copy(str(tmp_path / "out"), "memory://top/out") and fs.exists("memory://top/out/deep/a.txt")
    assert fs.find("memory://top/out/*.txt") == ["memory:///top/out/b.txt"]
    assert fs.copy("memory://top/out", "memory://top/again")
    assert fs.copy("memory://top/again", str(tmp_path / "back"))
    assert (tmp_path / "back" / "deep" / "a.txt").read_text() == "a" and (tmp_path / "back" / "b.txt").exists()
    fs.remove("memory://top/again")
    fs.remove("memory://top/again")
    assert not fs.exists("memory://top/again")


def test_a_copy_follows_its_store_and_serves_while_that_is_away(tmp_path, memory, monkeypatch, caplog):
    memory.pipe_file("/x/data.txt", b"one")
    local = fs.copy_to_local("memory://x/data.txt", cache_dir=str(tmp_path))
    assert Path(local).read_text() == "one"
    memory.pipe_file("/x/data.txt", b"two!")
    assert fs.copy_to_local("memory://x/data.txt", cache_dir=str(tmp_path)) == local
    assert Path(local).read_text() == "two!"

    def away(path):
        raise OSError("no route")

    monkeypatch.setattr(fs, "stamp", away)
    assert fs.copy_to_local("memory://x/data.txt", cache_dir=str(tmp_path)) == local
    assert "cannot be reached (no route)" in caplog.text
    with pytest.raises(OSError, match="no route"):
        fs.copy_to_local("memory://x/other.txt", cache_dir=str(tmp_path))


def test_processes_that_want_one_file_wait_for_one_writer(tmp_path):
    writes, target = tmp_path / "writes", str(tmp_path / "made")

    def write(path):
        with open(writes, "a") as log:
            log.write("w")
        time.sleep(0.1)
        Path(path).write_text("whole")

    def want():
        assert Path(fs.written_once(target, write)).read_text() == "whole"

    run = multiprocessing.get_context("fork").Process
    processes = [run(target=want) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4 and writes.read_text() == "w"


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(path):
        Path(path).write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fs.written_once(str(tmp_path / "made"), fail)
    assert not [path for path in tmp_path.iterdir() if path.name != "made.lock"]

"""Nodes that share a disk, nodes that do not, a save that is cut off anywhere, and a disk that is full."""

import errno
import os
import sys
import threading

import pytest
import torch
from safetensors import SafetensorError

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_model
from verl.checkpoint import checkpoint_manager as staging
from verl.checkpoint import hf_folder
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.checkpoint.rank_files import write_file
from verl.checkpoint.run_state import load_driver_state, save_driver_state
from verl.models.loader import ModelSpec
from verl.trainer.ppo.run_log import dump_samples
from verl.utils.distributed import get_rank
from verl.workers.engine import build_engine

ALL = ["model", "optimizer", "extra", "hf_model"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def _as_node():
    """From here on this rank is the only one of its node."""
    os.environ["RAY_LOCAL_RANK"] = "0"


def _leads(folders):
    _as_node()
    return [staging.leads_its_disk(folders[get_rank()]) for _ in range(2)]


def test_one_rank_leads_each_disk(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    shared, mixed, apart = (
        run_ranks(3, _leads, [tmp_path / name for name in names]) for names in ("aaa", "aba", "abc")
    )
    assert shared == [[True] * 2, [False] * 2, [False] * 2]
    assert mixed == [[True] * 2, [True] * 2, [False] * 2]
    assert apart == [[True] * 2] * 3
    assert not any(file for name in "abc" for file in (tmp_path / name).iterdir())


def _save_and_load(model, folders):
    _as_node()
    path = folders[get_rank()] / "global_step_1" / "actor"
    engine = build_engine("fsdp2", ModelSpec(model))
    manager = CheckpointManager(engine, save_contents=["model", "extra", "hf_model"])
    for _ in range(2):  # the second replaces the first
        manager.save(path)
    there = sorted(file.name for file in path.iterdir())
    manager.load(path, del_after=True)
    return there, path.parent.exists() and list(path.parent.iterdir())


def test_nodes_that_share_a_disk_publish_one_folder(model, tmp_path):
    results = run_ranks(2, _save_and_load, model, [tmp_path, tmp_path])
    files = {f"{part}_world_size_2_rank_{rank}.pt" for part in ("model", "extra_state") for rank in range(2)}
    assert all(
        set(there) == files | {"huggingface", "fsdp_config.json", "manifest.json"} and not left
        for there, left in results
    )


def test_nodes_with_disks_of_their_own_each_keep_their_ranks_files(model, tmp_path):
    results = run_ranks(2, _save_and_load, model, [tmp_path / "a", tmp_path / "b"])
    for rank, (there, left) in enumerate(results):
        files = {f"{part}_world_size_2_rank_{rank}.pt" for part in ("model", "extra_state")}
        assert set(there) - {"huggingface"} == files | {"fsdp_config.json", "manifest.json"} and not left
        assert ("huggingface" in there) == (rank == 0)


def _cut_off_at(event, action, under):
    """Run ``action`` in a fork that dies at its ``event``-th change under the folder; returns whether it was done."""
    pid = os.fork()
    if pid == 0:
        left = [event]

        def count(name, arguments):
            writes = name == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
            if (writes or name in ("os.rename", "os.mkdir", "shutil.rmtree")) and str(arguments[0]).startswith(under):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            action()
        finally:
            os._exit(0)
    return os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 0


def test_a_save_cut_off_at_any_file_leaves_a_whole_checkpoint(model, tmp_path):
    engine = build_engine("local", ModelSpec(model))
    manager, path = CheckpointManager(engine, save_contents=ALL), tmp_path / "global_step_1" / "actor"
    manager.load_contents = ["model"]
    first = next(engine.module.parameters())

    def content():
        manager.load(path)
        return first[0, 0].item()

    for event in range(100):
        with torch.no_grad():
            first.fill_(1.0)
        manager.save(path)
        files = sorted(file.name for file in path.rglob("*"))
        with torch.no_grad():
            first.fill_(2.0)
        done = _cut_off_at(event, lambda: manager.save(path), str(tmp_path))
        found = content()
        assert sorted(file.name for file in path.rglob("*")) == files
        assert found in (1.0, 2.0) and (found == 2.0 or not done)
        if done:
            break
    assert 10 < event < 99


def test_a_full_disk_is_said_with_what_was_needed(tmp_path, monkeypatch):
    (tmp_path / "model.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"model.pt needs 4,000,000 bytes and its disk has [\d,]+ left. Free some") as it:
        write_file({"a": torch.zeros(1000, 1000)}, tmp_path / "model.pt")
    assert it.value.errno == errno.ENOSPC

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hf_folder, "save_file", full)
    with pytest.raises(OSError, match="model-00001.safetensors needs 400 bytes"):
        hf_folder.write_safetensors([("a", torch.zeros(100))], tmp_path)


def test_a_full_disk_is_said_of_the_drivers_files_and_of_samples_too(tmp_path):
    part = f"{os.getpid()}-{threading.get_ident()}.part"
    (tmp_path / f"trainer.json.{part}").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"trainer.json was not written and its disk has [\d,]+ left. Free some, keep fewer"
    ):
        save_driver_state(tmp_path, {"rows": [1]}, {"a": 1})
    (tmp_path / f"3.jsonl.{part}").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"3.jsonl was not written and .*or keep no samples: trainer.rollout_data_dir=null"
    ):
        dump_samples(tmp_path, 3, ["in"], ["out"], [1.0], [None], {})


def test_other_errors_of_writing_are_left_as_they_are(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_file({}, tmp_path)


@pytest.mark.parametrize("name", ["data.pt", "trainer.json"])
def test_a_damaged_file_of_the_driver_names_the_older_step(tmp_path, name):
    for step in (2, 4, 6):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
        save_driver_state(tmp_path / f"global_step_{step}", {"rows": [1]}, {"a": 1})
    newest = tmp_path / "global_step_6"
    (newest / name).write_bytes((newest / name).read_bytes()[:-4])

    class Loader:
        def load_state_dict(self, position):
            pass

    with pytest.raises(ValueError, match=rf"{name} cannot be read.*resume_from_path={tmp_path}/global_step_4 "):
        load_driver_state(newest, Loader())

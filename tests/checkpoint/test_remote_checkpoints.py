import json
from types import SimpleNamespace

import fsspec
import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.checkpoint import run_state
from verl.checkpoint.manifest import TRACKER, DamagedCheckpoint
from verl.checkpoint.run_state import mark_complete, step_folder


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    yield "memory://runs/one"
    for name in memory.ls("/", detail=False):
        memory.rm(name, recursive=True)


def saved(root, step: int, text: str = "weights"):
    """A complete checkpoint on disk."""
    folder = step_folder(root, step)
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    (folder / "actor" / "model.pt").write_text(text)
    (folder / "data.pt").write_text("position")
    mark_complete(folder.parent, step)
    return folder


def trainer(root, store, mode="auto", path=None):
    return SimpleNamespace(resume_mode=mode, resume_from_path=path, default_local_dir=str(root), default_hdfs_dir=store)


def test_a_run_on_an_empty_disk_resumes_from_the_store(tmp_path, store):
    for step in (2, 4):
        run_state.upload(store, saved(tmp_path / "a", step), step)
    folder = run_state.folder_to_resume(trainer(tmp_path / "b", store))
    assert folder == (tmp_path / "b" / "global_step_4").absolute()
    assert (folder / "actor" / "model.pt").read_text() == "weights" and (folder / "data.pt").exists()
    assert run_state.folder_to_resume(trainer(tmp_path / "b", None)) == folder  # and is found there from now on


def test_the_newer_of_disk_and_store_is_taken(tmp_path, store):
    run_state.upload(store, saved(tmp_path / "a", 4), 4)
    saved(tmp_path / "b", 6)
    assert run_state.folder_to_resume(trainer(tmp_path / "b", store)).name == "global_step_6"
    saved(tmp_path / "c", 2)
    assert run_state.folder_to_resume(trainer(tmp_path / "c", store)).name == "global_step_4"


def test_a_new_run_takes_none_and_a_step_of_the_store_may_be_named(tmp_path, store):
    for step in (2, 4):
        run_state.upload(store, saved(tmp_path / "a", step, f"of {step}"), step)
    assert run_state.folder_to_resume(trainer(tmp_path / "b", store, "disable")) is None
    named = run_state.folder_to_resume(trainer(tmp_path / "b", None, "resume_path", f"{store}/global_step_2/"))
    assert (named / "actor" / "model.pt").read_text() == "of 2"


def test_a_step_saved_again_replaces_its_copy_and_dropped_steps_go(tmp_path, store):
    folder = saved(tmp_path / "a", 2, "old")
    (folder / "actor" / "extra.pt").write_text("old")
    run_state.upload(store, folder, 2)
    (folder / "actor" / "extra.pt").unlink()
    run_state.upload(store, saved(tmp_path / "a", 2, "new"), 2)
    memory = fsspec.filesystem("memory")
    assert sorted(memory.find("/runs/one")) == [
        "/runs/one/global_step_2/actor/model.pt",
        "/runs/one/global_step_2/data.pt",
        "/runs/one/latest_checkpointed_iteration.txt",
    ]
    run_state.upload(store, saved(tmp_path / "a", 4), 4)
    run_state.forget(store, 2)
    assert run_state.newest_step(store) == 4 and not memory.exists("/runs/one/global_step_2")


def test_a_copy_that_the_store_altered_is_not_named_and_one_that_arrives_so_not_taken(tmp_path, store, monkeypatch):
    memory = fsspec.filesystem("memory")
    for step in (2, 4):
        run_state.write_step_manifest(saved(tmp_path / "a", step), {})
    run_state.upload(store, tmp_path / "a" / "global_step_2", 2)
    put = type(memory).put_file

    def altered(self, local, remote, **options):
        put(self, local, remote, **options)
        if remote.endswith("model.pt"):
            self.pipe_file(remote, b"weighty")

    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match="global_step_4/actor/model.pt does not hold what"),
    ):
        patch.setattr(type(memory), "put_file", altered)
        run_state.upload(store, tmp_path / "a" / "global_step_4", 4)
    assert run_state.newest_step(store) == 2
    memory.pipe_file("/runs/one/global_step_2/data.pt", b"positioN")
    with pytest.raises(DamagedCheckpoint, match="global_step_2: the copy of data.pt does not hold what was written"):
        run_state.folder_to_resume(trainer(tmp_path / "b", store))
    assert not (tmp_path / "b" / "global_step_2").exists()
    mine = saved(tmp_path / "b", 1)
    assert run_state.folder_to_resume(trainer(tmp_path / "b", store)) == mine


def test_a_tracker_that_names_no_step_is_refused(tmp_path, store):
    fsspec.filesystem("memory").pipe_file("/runs/one/latest_checkpointed_iteration.txt", b"four")
    with pytest.raises(ValueError, match="holds 'four', not a step number .trainer.default_hdfs_dir"):
        run_state.folder_to_resume(trainer(tmp_path, store))


def test_a_local_folder_serves_as_the_second_place(tmp_path):
    second = str(tmp_path / "second")
    for _ in range(2):
        run_state.upload(second, saved(tmp_path / "a", 2), 2)
    assert run_state.folder_to_resume(trainer(tmp_path / "b", second)).name == "global_step_2"


def test_a_run_that_lost_its_disk_goes_on_from_the_store_as_if_never_stopped(tmp_path, monkeypatch):
    task = make_task(tmp_path / "task", rows=2)
    for source, rows in (("a", 7), ("b", 5)):
        prompts = [{"data_source": source, "prompt": f"{source} {i}: say something."} for i in range(rows)]
        lines = [json.dumps(row | {"reward_model": {"style": "rule", "ground_truth": ""}}) for row in prompts]
        (tmp_path / f"{source}.jsonl").write_text("\n".join(lines))
    task["data.train_files"] = str(tmp_path / "*.jsonl")

    def run(name: str, steps: int, **settings) -> dict[int, dict]:
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.log"))
        same = {"data__mixture": "{a: 0.75, b: 0.25}", "trainer__logger": "[file]", "trainer__save_freq": 1}
        same |= {"trainer__total_training_steps": steps, "trainer__default_local_dir": str(tmp_path / name)}
        run_job(overrides(task, **same, **settings))
        return {row["step"]: row["data"] for row in read_metrics(tmp_path / f"{name}.log")}

    store = {"trainer__default_hdfs_dir": f"file://{tmp_path}/store", "trainer__max_actor_ckpt_to_keep": 1}
    whole = run("whole", 5)
    run("first", 3, **store)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["global_step_3", TRACKER]
    resumed = run("second", 5, **store)
    assert sorted(resumed) == [4, 5]
    for step in resumed:
        for key in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "prompt_length/mean"):
            assert resumed[step][key] == whole[step][key], (step, key)

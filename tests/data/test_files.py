"""Every way to name data gives the same rows."""

import csv
import json

import fsspec
import pyarrow as pa
import pytest

from tests.data.files import prompt_row, write, write_numbered
from verl.data import files
from verl.data import readers as arrow_files
from verl.data.files import open_table
from verl.data.rl_dataset import RLHFDataset

ROWS = [prompt_row(f"question {i}, é", i) for i in range(7)]


def write_as(kind: str, folder, rows=ROWS) -> str:
    """The rows in a file of some format."""
    path = folder / f"x.{kind.split()[0]}"
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        write(path, rows)
    elif kind.startswith("arrow"):
        new = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif kind.startswith("json"):
        path.write_text(json.dumps(rows, indent=1) if kind == "json list" else "\n".join(map(json.dumps, rows)))
    else:
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow([*list(rows[0])[:3], "reward_model.style", "reward_model.ground_truth", "extra_info"])
            for row in rows:
                gold = row["reward_model"]
                texts = [row["data_source"], json.dumps(row["prompt"]), row["ability"]]
                out.writerow([*texts, gold["style"], gold["ground_truth"], json.dumps(row["extra_info"])])
    return str(path)


KINDS = ["parquet", "arrow file", "arrow stream", "json list", "json lines", "jsonl", "csv"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_of_any_format_give_the_same_batch(kind, tmp_path, tokenizer):
    path = write_as(kind, tmp_path)
    assert list(open_table(path)) == ROWS
    dataset = RLHFDataset(path, tokenizer, {"max_prompt_length": 64})
    (tmp_path / "other").mkdir()
    parquet = RLHFDataset(write_as("parquet", tmp_path / "other"), tokenizer, {"max_prompt_length": 64})
    for item in range(len(ROWS)):
        one, other = dataset[item], parquet[item]
        assert one.keys() == other.keys() and one["raw_prompt_ids"] == other["raw_prompt_ids"]
        assert one["reward_model"] == other["reward_model"] and one["index"] == other["index"] == item


@pytest.mark.parametrize("kind", ["parquet", "json list", "jsonl", "csv"])
def test_a_large_file_is_mapped_from_a_copy_that_follows_it(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_files, "IN_MEMORY", 100)
    monkeypatch.setattr(files, "IN_MEMORY", 100)
    path, cache = write_as(kind, tmp_path), str(tmp_path / "cache")
    before = pa.total_allocated_bytes()
    table = open_table(path, cache_dir=cache)
    assert list(table) == ROWS and pa.total_allocated_bytes() <= before
    (copy,) = (tmp_path / "cache" / "arrow").glob("*.arrow")
    made = copy.stat().st_mtime_ns
    assert list(open_table(path, cache_dir=cache)) == ROWS and copy.stat().st_mtime_ns == made
    write_as(kind, tmp_path, ROWS[:3])
    assert list(open_table(path, cache_dir=cache)) == ROWS[:3]


def test_lines_left_out_of_a_mapped_copy_are_reported_each_time_and_refused_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "IN_MEMORY", 0)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\nbad\n{"a": 2}\n')
    for _ in range(2):
        table = open_table(str(tmp_path / "x.jsonl"), cache_dir=str(tmp_path / "cache"), bad_rows="skip")
        assert [row.where[-5:] for row in table.skipped] == ["row 1"] and table.where(1)[-5:] == "row 2"
    with pytest.raises(files.DataError, match="line 2"):
        open_table(str(tmp_path / "x.jsonl"), cache_dir=str(tmp_path / "cache"))


def test_a_cell_keeps_its_type_next_to_cells_of_other_types(tmp_path):
    golds = ["5", 5, 5.5, ["5", "five"], {"inputs": ["1"]}, None, True]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"gold": gold}) for gold in golds))
    table = open_table(str(tmp_path / "x.jsonl"))
    assert table.column("gold") == golds and [type(gold) for gold in table.column("gold")] == list(map(type, golds))


def test_globs_lists_and_folders_name_files_in_order(tmp_path):
    for part in (1, 0, 2):
        write_numbered(tmp_path / f"part-{part}.parquet", 2, start=2 * part)
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "_SUCCESS.json").write_text("")
    folder, pattern = str(tmp_path), str(tmp_path / "part-*.parquet")
    for named in (folder, pattern, [pattern], [str(tmp_path / f"part-{part}.parquet") for part in range(3)]):
        assert [row["extra_info"]["index"] for row in open_table(named)] == list(range(6))
    (tmp_path / "[1].parquet").write_bytes((tmp_path / "part-1.parquet").read_bytes())
    assert [row["extra_info"]["index"] for row in open_table(str(tmp_path / "[1].parquet"))] == [2, 3]


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).shuffle(seed=1).save_to_disk(str(tmp_path / "one"), num_shards=2)
    table = open_table(str(tmp_path / "one"))
    assert sorted(row["extra_info"]["index"] for row in table) == list(range(7)) and len(table.names) == 2
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "two"))
    assert list(open_table(str(tmp_path / "two" / "train"))) == ROWS


@pytest.fixture
def memory():
    """A remote store, in memory."""
    store = fsspec.filesystem("memory")
    yield store
    for name in store.ls("/", detail=False):
        store.rm(name, recursive=True)


def test_remote_files_globs_and_folders_are_copied_and_called_by_their_own_names(tmp_path, memory):
    for part in range(2):
        memory.put_file(write_numbered(tmp_path / "a.parquet", 2, start=2 * part), f"/data/part-{part}.parquet")
    for named in (
        "memory://data",
        "memory://data/*.parquet",
        [f"memory://data/part-{part}.parquet" for part in (0, 1)],
    ):
        table = open_table(named, cache_dir=str(tmp_path / "cache"))
        assert [row["extra_info"]["index"] for row in table] == [0, 1, 2, 3]
        assert "part-1.parquet, row 1" in table.where(3) and table.where(3).startswith("memory://")


def test_file_urls_and_shared_memory_are_read(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("verl.utils.fs.SHM_ROOT", str(tmp_path / "shm"))
    path = write_numbered(tmp_path / "a.parquet", 3)
    assert len(open_table(f"file://{path}", cache_dir=str(tmp_path / "cache"))) == 3
    config = {"max_prompt_length": 64, "use_shm": True, "cache_dir": str(tmp_path / "cache")}
    dataset = RLHFDataset(path, tokenizer, config)
    assert dataset.data_files[0].startswith(str(tmp_path / "shm")) and dataset.dataframe.where(1) == f"{path}, row 1"


def test_a_name_is_of_the_hub_only_if_it_can_be_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.hub_parts("openai/gsm8k") == ("openai/gsm8k", None, None)
    assert files.hub_parts("openai/gsm8k:train[:9]") == ("openai/gsm8k", None, "train[:9]")
    assert files.hub_parts("openai/gsm8k:main:test") == ("openai/gsm8k", "main", "test")
    for path in ("./openai/gsm8k", "data/x.parquet", "/openai/gsm8k", "~/data/x", "gsm8k", "a/b/c"):
        assert files.hub_parts(path) is None
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert files.hub_parts("openai/gsm8k") is None


def test_a_data_set_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(name, config, split, cache_dir):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(ROWS).select([2, 1])

    monkeypatch.setattr(datasets, "load_dataset", load)
    table = open_table("some/where:main:test", cache_dir=str(tmp_path))
    assert [row["extra_info"]["index"] for row in table] == [2, 1] and asked == [("some/where", "main", "test")]
    assert table.where(1) == "some/where:main:test, row 1"

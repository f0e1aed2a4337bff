import json

import pyarrow as pa
import pytest

from tests.data.files import prompt_row, write
from verl.data.table import DataError, RowTable, read_table


def two_files(tmp_path) -> RowTable:
    a = write(tmp_path / "a.parquet", [{"x": 0, "y": "p"}, {"x": 1, "y": "q"}])
    b = write(tmp_path / "b.parquet", [{"x": 2, "z": {"k": [1, 2]}}])
    return RowTable.from_files([a, b])


def test_rows_of_several_files_follow_one_another_and_keep_their_own_columns(tmp_path):
    table = two_files(tmp_path)
    assert list(table) == [{"x": 0, "y": "p"}, {"x": 1, "y": "q"}, {"x": 2, "z": {"k": [1, 2]}}]
    assert table.column_names == ["x", "y", "z"]
    assert table.column("y") == ["p", "q", None]


def test_a_selection_keeps_order_and_knows_where_its_rows_came_from(tmp_path):
    chosen = two_files(tmp_path).select([2, 0])
    assert [row["x"] for row in chosen] == [2, 0]
    assert chosen.column("x") == [2, 0]
    assert chosen.where(0).endswith("b.parquet, row 0") and chosen.where(1).endswith("a.parquet, row 0")
    assert [row["x"] for row in chosen.select([1])] == [0]
    assert [row["x"] for row in chosen.filter(lambda row: row["x"] > 0)] == [2]


def test_row_number_beyond_the_end_is_an_index_error(tmp_path):
    table = two_files(tmp_path)
    assert table[-1]["x"] == 2
    with pytest.raises(IndexError, match="row 3 of a table of 3 rows"):
        table[3]


def test_json_lines_and_json_lists_read_like_parquet(tmp_path):
    rows = [prompt_row("a\u2028b"), prompt_row("c", 1)]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    (tmp_path / "list.json").write_text(json.dumps(rows))
    for name in ("lines.jsonl", "list.json"):
        assert list(RowTable.from_files([str(tmp_path / name)])) == rows


def test_a_column_that_only_a_later_json_row_has_is_kept(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": 2, "b": "x"}\n')
    assert read_table(str(tmp_path / "x.jsonl")).to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


def test_unreadable_files_are_named_with_what_they_should_be(tmp_path):
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"x.parquet cannot be read as parquet"):
        read_table(str(tmp_path / "x.parquet"))
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"x.jsonl cannot be read as JSON lines: line 2"):
        read_table(str(tmp_path / "x.jsonl"))


def test_missing_file_is_named_with_the_folder_a_relative_path_starts_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"'no.parquet' \(relative to {tmp_path}\) does not exist"):
        read_table("no.parquet")


def test_missing_column_error_lists_the_columns_and_the_nearest_one():
    table = RowTable([pa.table({"promt": ["x"], "answer": ["y"]})], ["f.parquet"])
    with pytest.raises(DataError, match=r"f.parquet has no column 'prompt'.*promt, answer.*Did you mean 'promt'"):
        table.require("prompt", "data.prompt_key")

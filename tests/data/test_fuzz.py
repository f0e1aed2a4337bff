"""Whatever lies in a data file: the loader raises an error that names it, or every row of it is accounted for."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from verl.data.files import open_table
from verl.data.rl_dataset import DataError, RLHFDataset

RUN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3))
objects = st.dictionaries(st.sampled_from(["prompt", "a", "b", "reward_model"]), values, min_size=1, max_size=4)
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": scalars}))
prompts = st.fixed_dictionaries({"prompt": st.one_of(messages, st.text(max_size=8), values)})


def same(read, written) -> bool:
    """Whether a row came back: what another row has and this one has not may be null."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(same(read.get(name), written.get(name)) for name in read.keys() | written.keys())
    if isinstance(written, list) and isinstance(read, list):
        return len(read) == len(written) and all(map(same, read, written))
    return type(read) is type(written) and read == written


@RUN
@example(rows=[{"b": ""}, {"b": [False, 0]}], cut=1)  # text in one chunk, several types in the next
@given(rows=st.lists(objects, max_size=6), cut=st.integers(1, 4))
def test_json_rows_of_any_types_come_back_as_they_were(tmp_path, monkeypatch, rows, cut):
    monkeypatch.setattr("verl.data.readers._CHUNK", cut)
    for name, written in (("x.jsonl", "\n".join(map(json.dumps, rows))), ("x.json", json.dumps(rows))):
        (tmp_path / name).write_text(written or "\n")
        assert all(map(same, list(open_table(str(tmp_path / name))), rows))
        monkeypatch.setattr("verl.data.files.IN_MEMORY", 0)
        mapped = open_table(str(tmp_path / name), cache_dir=str(tmp_path / "cache"))
        monkeypatch.undo()
        assert len(mapped) == len(rows) and all(map(same, list(mapped), rows))


@RUN
@given(content=st.binary(max_size=200), suffix=st.sampled_from(["parquet", "arrow", "json", "jsonl", "csv"]))
def test_any_bytes_are_read_or_refused_by_name(tmp_path, content, suffix):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    try:
        table = open_table(str(path), bad_rows="skip")
    except DataError as error:
        assert f"x.{suffix}" in str(error)
    else:
        assert len(list(table)) == len(table)


@RUN
@given(cells=st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=3), max_size=5), width=st.integers(1, 3))
def test_every_record_of_a_csv_file_is_a_row_or_named(tmp_path, cells, width):
    out = io.StringIO()
    csv.writer(out).writerows([[f"c{i}" for i in range(width)], *cells])
    (tmp_path / "x.csv").write_text(out.getvalue(), encoding="utf-8", newline="", errors="surrogatepass")
    try:
        table = open_table(str(tmp_path / "x.csv"), bad_rows="skip")
    except DataError as error:
        assert "x.csv" in str(error)
        return
    assert len(table) + len(table.skipped) == len(cells)


@RUN
@given(data=st.data(), where=st.integers(0, 300), byte=st.integers(0, 255))
def test_a_flipped_byte_in_a_parquet_file_loses_no_row_in_silence(tmp_path, data, where, byte):
    pq.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(40)]}), tmp_path / "x.parquet")
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[where % len(content)] = byte
    (tmp_path / "x.parquet").write_bytes(content)
    try:
        table = open_table(str(tmp_path / "x.parquet"))
        assert len(list(table)) == len(table)
    except DataError as error:
        assert "x.parquet" in str(error)


@RUN
@given(rows=st.lists(prompts, min_size=1, max_size=6))
def test_every_row_of_prompts_is_used_or_named(tmp_path, tokenizer, rows):
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    try:
        dataset = RLHFDataset(str(tmp_path / "x.jsonl"), tokenizer, {"max_prompt_length": 999, "bad_rows": "skip"})
    except DataError as error:
        assert "x.jsonl" in str(error)
        return
    assert len(dataset) + len(dataset.skipped_rows) == len(rows)
    assert all(dataset[item]["attention_mask"].sum() > 0 for item in range(len(dataset)))

"""What is wrong with a data file is said with file, row, rule and way out; nothing is lost without a word."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import prompt_row, write
from verl.data.loader import build_dataset
from verl.data.rl_dataset import DataError, RLHFDataset
from verl.utils.tiny_model import make_tokenizer

CONFIG = {"max_prompt_length": 64, "truncation": "error"}
GOOD = json.dumps(prompt_row("fine"))


def text(name: str, content: str | bytes):
    """A file with this content."""

    def make(folder):
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
        return str(folder / name)

    return make


def rows(*bad, **columns):
    """A parquet file of one good row and these."""

    def make(folder):
        good = prompt_row("fine", **{name: None for name in columns})
        return write(folder / "x.parquet", [good, *(prompt_row("", **{"prompt": row, **columns}) for row in bad)])

    return make


def json_rows(*prompts):
    """A file of JSON lines: one good row, and one for each of these prompts."""
    lines = [GOOD, *(json.dumps(prompt_row("", prompt=prompt)) for prompt in prompts)]
    return text("x.jsonl", "\n".join(lines))


def column(name: str, values: list):
    return lambda folder: _table(folder, {name: values})


def _table(folder, columns: dict) -> str:
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return str(folder / "x.parquet")


def cut_parquet(folder):
    path = write(folder / "x.parquet", [prompt_row("fine")] * 50)
    data = open(path, "rb").read()
    open(path, "wb").write(data[: len(data) // 2])
    return path


def scrambled_parquet(folder):
    pq.write_table(
        pa.table({"prompt": ["x" * 9000] * 9}), folder / "x.parquet", compression="none", use_dictionary=False
    )
    data = bytearray((folder / "x.parquet").read_bytes())
    data[4:40] = b"\xff" * 36
    (folder / "x.parquet").write_bytes(bytes(data))
    return str(folder / "x.parquet")


def cut_arrow(folder):
    with pa.OSFile(str(folder / "x.arrow"), "wb") as file:
        table = pa.table({"prompt": ["fine"] * 500})
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    os.truncate(folder / "x.arrow", os.path.getsize(folder / "x.arrow") // 2)
    return str(folder / "x.arrow")


def folder_with(*names: str):
    def make(folder):
        (folder / "data").mkdir()
        for name in names:
            (folder / "data" / name).write_text(GOOD)
        return str(folder / "data")

    return make


def saved_dict(folder):
    (folder / "data").mkdir()
    (folder / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return str(folder / "data")


def saved_without_description(folder):
    (folder / "data").mkdir()
    (folder / "data" / "state.json").write_text('{"no": "files"}')
    return str(folder / "data")


def unreadable(folder):
    path = text("x.jsonl", GOOD)(folder)
    os.chmod(path, 0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    return path


def pipe(folder):
    os.mkfifo(folder / "x.jsonl")
    return str(folder / "x.jsonl")


FILES = {  # what makes the path, and what is said of it
    "a file that is not there": (lambda folder: str(folder / "no.parquet"), "no.parquet' does not exist"),
    "a named pipe": (pipe, "x.jsonl' is not a regular file"),
    "a file of 0 bytes": (text("x.parquet", ""), r"x.parquet is empty \(0 bytes\) where parquet was expected"),
    "an unreadable file": (unreadable, "permission denied. Make it readable"),
    "no extension": (text("prompts", GOOD), "prompts has no known format: its extension is 'none'"),
    "an extension of another kind": (
        text("x.txt", GOOD),
        r"its extension is '.txt'. Rename it to match its content, .parquet",
    ),
    "a compressed file": (text("x.jsonl.gz", b"\x1f\x8b123"), r"by its content it is compressed with gzip"),
    "text named parquet": (text("x.parquet", GOOD), "x.parquet cannot be read as parquet"),
    "parquet named jsonl": (text("x.jsonl", b"PAR1\x00\x00"), "cannot be read as JSON lines: line 1"),
    "a pointer that git left": (text("x.parquet", "version https://git-lfs"), "by its content it is a Git LFS pointer"),
    "parquet cut short": (cut_parquet, "x.parquet cannot be read as parquet"),
    "parquet with broken pages": (scrambled_parquet, "x.parquet cannot be read as parquet"),
    "arrow cut short": (cut_arrow, "x.arrow cannot be read as Arrow"),
    "text named arrow": (text("x.arrow", GOOD), "x.arrow cannot be read as Arrow"),
    "a cut line": (text("x.jsonl", f'{GOOD}\n{{"a": "b\n'), r"2 \(row 1\): not JSON: Invalid control character at c"),
    "a bad line": (text("x.jsonl", f"{GOOD}\n{GOOD}\n{{oops\n"), r"line 3 \(row 2\): not JSON.*data.bad_rows=skip"),
    "a line that is no object": (
        text("x.jsonl", f"{GOOD}\n[1, 2]\n"),
        r"line 2 \(row 1\): list '\[1, 2\]' where an obj",
    ),
    "a line that is not UTF-8": (
        text("x.jsonl", GOOD.encode() + b'\n{"a": "\xff"}'),
        r"line 2 \(row 1\): byte 7 is not",
    ),
    "a line nested too deeply": (text("x.jsonl", "[" + "[" * 200000), "nested too deeply"),
    "JSON that is no list": (
        text("x.json", '{\n "data": []\n}'),
        "neither a JSON list of objects nor one object a line",
    ),
    "a list cut short": (text("x.json", f"[{GOOD},\n{GOOD[:-9]}"), "cannot be read as JSON: line 2"),
    "a list with something behind it": (text("x.json", f"[{GOOD}] end"), "'e' after the end of the list"),
    "a list of texts": (text("x.json", '["a", "b"]'), r"line 1 \(row 0\): str 'a' where an object"),
    "a list that is not UTF-8": (text("x.json", b'[{"a": "\xff"}]'), "not UTF-8"),
    "a table of no rows": (text("x.json", "[]"), "there are no rows"),
    "csv with a cell too many": (
        text("x.csv", "prompt,answer\na,1\nb,2,3\n"),
        r"line 3 \(row 1\): 3 cells where .* 2 col",
    ),
    "csv that is not UTF-8": (
        text("x.csv", b"prompt,answer\na,1\n\xe9,2\n"),
        r"line 3 \(row 1\): column 'prompt' is not",
    ),
    "csv with an open quote": (text("x.csv", 'prompt,answer\n"a,1\nb,2\n'), "line 2: .*double quotes"),
    "csv that names a column twice": (text("x.csv", "prompt,prompt\na,b\n"), "line 1 has the column 'prompt' twice"),
    "csv without a name": (text("x.csv", "prompt,\na,b\n"), "line 1 has a column without a name"),
    "csv without names": (text("x.csv", ",,\na,b,c\n"), "line 1 has no header line"),
    "a glob that nothing fits": (lambda folder: str(folder / "*.parquet"), "no file matches. Correct the pattern"),
    "a folder without data": (folder_with("README.md"), "holds no file ending in .parquet"),
    "a folder of two formats": (folder_with("a.jsonl", "a.csv"), "holds .csv and .jsonl files"),
    "a folder of two splits": (folder_with("train.jsonl", "test.jsonl"), "holds test and train files"),
    "a saved data set of two splits": (saved_dict, "saved DatasetDict with the splits train, test: name the folder"),
    "a saved data set without files": (saved_without_description, "does not describe a saved dataset"),
    "a data set the hub does not give": (
        lambda folder: "some/where:train",
        "cannot be loaded as a dataset of the Hugging Face hub",
    ),
    "a store of an unknown kind": (lambda folder: "nowhere://x/y.parquet", "no kind of store that fsspec knows"),
    "a store without its package": (lambda folder: "gs://bucket/y.parquet", "pip install gcsfs"),
    "a remote file that is not there": (
        lambda folder: "memory://none/y.parquet",
        "'memory://none/y.parquet' does not exist",
    ),
    "no column of prompts": (
        column("question", ["x"]),
        r"no column 'prompt' \(data.prompt_key\); its columns are question",
    ),
    "prompts of numbers": (column("prompt", [1, 2]), "column 'prompt' is of type int64; a prompt is a text or a list"),
    "prompts of NaN": (column("prompt", [float("nan")]), "column 'prompt' is of type double"),
    "prompts of lists of numbers": (column("prompt", [[1], [2]]), "column 'prompt' is of type list"),
    "messages of other fields": (
        column("prompt", [[{"from": "human", "value": "x"}]]),
        "no role and no content; their fie",
    ),
}

ROWS = {
    "a null prompt": (rows(None), "is null"),
    "no messages": (rows([]), "is an empty list"),
    "an empty text": (column("prompt", ["fine", "  \n"]), "is empty"),
    "messages without text": (rows([{"role": "user", "content": " "}]), "is empty: no message has a text"),
    "a null role": (rows([{"role": None, "content": "x"}]), "has no role in message 0"),
    "a null content": (rows([{"role": "user", "content": None}]), "has no content in message 0"),
    "an unknown role": (rows([{"role": "humna", "content": "x"}]), "has the role 'humna' in message 0"),
    "a prompt of another type": (json_rows(5), "is int; a prompt is a text"),
    "a message of another type": (json_rows(["x"]), "has str as message 0 where"),
    "a content of another type": (
        json_rows([{"role": "user", "content": 5}]),
        "has a content of type int in message 0",
    ),
    "half a character": (json_rows([{"role": "user", "content": "\ud800"}]), "is not valid Unicode in message 0"),
    "a NaN prompt": (json_rows(float("nan")), "is NaN"),
    "a NaN answer": (
        rows([{"role": "user", "content": "x"}], reward_model={"style": "rule", "ground_truth": float("nan")}),
        "'reward_model' has the ground_truth NaN",
    ),
    "roles the template refuses": (
        rows([{"role": "assistant", "content": "x"}]),
        "the chat template of .* refuses the messages with the roles assistant: begin with the user",
    ),
}


@pytest.fixture(scope="module")
def strict_tokenizer():
    """Its chat template wants the user to begin."""
    tokenizer = make_tokenizer("byte")
    begin = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    tokenizer.chat_template = begin + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
def test_a_file_that_cannot_be_used_is_named_with_the_reason(case, bad_rows, tmp_path, tokenizer):
    make, said = FILES[case]
    path = make(tmp_path)
    config = {**CONFIG, "bad_rows": bad_rows, "cache_dir": str(tmp_path / "cache")}
    if bad_rows == "skip" and " (row " in said.replace("\\", "") and case not in ("a list of texts",):
        dataset = build_dataset({**config, "prompt_key": "prompt"}, path, tokenizer)
        assert len(dataset.skipped_rows) == 1 and path in dataset.skipped_rows[0].where and len(dataset) > 0
        return
    with pytest.raises((DataError, FileNotFoundError, ImportError, ValueError)) as error:
        build_dataset(config, path, tokenizer)
    message = str(error.value)
    if bad_rows == "refuse":
        error.match(said)
    assert os.path.basename(path) in message and message.rstrip().endswith(".")


@pytest.mark.parametrize("case", ROWS)
def test_a_row_that_cannot_be_used_is_refused_with_its_place_and_the_reason(case, tmp_path, strict_tokenizer):
    make, said = ROWS[case]
    with pytest.raises(DataError, match=rf"1 of 2 rows cannot be used \(.*row 1: .*{said}.*data.bad_rows=skip"):
        build_dataset(CONFIG | {"truncation": "left"}, make(tmp_path), strict_tokenizer)


@pytest.mark.parametrize("case", ROWS)
def test_a_row_that_cannot_be_used_is_left_out_on_request_and_counted(case, tmp_path, strict_tokenizer, caplog):
    make, said = ROWS[case]
    path = make(tmp_path)
    dataset = build_dataset(CONFIG | {"bad_rows": "skip"}, path, strict_tokenizer)
    assert len(dataset) == 1 and "fine" in strict_tokenizer.decode(dataset[0]["raw_prompt_ids"])
    assert [row.where for row in dataset.skipped_rows] == [f"{path}, row 1"]
    assert "1 rows are left out" in caplog.text and path in caplog.text


def test_rows_keep_their_numbers_in_the_file_when_others_are_left_out(tmp_path, tokenizer):
    path = text("x.jsonl", f"{GOOD}\nbad\n{GOOD}\n\n{GOOD}\nbad\n" + json.dumps(prompt_row("", prompt=None)))(tmp_path)
    dataset = RLHFDataset(path, tokenizer, CONFIG | {"bad_rows": "skip"})
    assert [dataset.dataframe.where(item)[-5:] for item in range(3)] == ["row 0", "row 2", "row 3"]
    assert [row.where[-5:] for row in dataset.skipped_rows] == ["row 1", "row 4", "row 5"]
    assert "line 2" in dataset.skipped_rows[0].why and "line 6" in dataset.skipped_rows[1].why


def test_a_file_of_bad_rows_alone_is_refused_even_so(tmp_path, tokenizer):
    with pytest.raises(DataError, match="data.bad_rows=skip leaves none of 1 rows"):
        RLHFDataset(
            write(tmp_path / "x.parquet", [prompt_row("", prompt="")]), tokenizer, CONFIG | {"bad_rows": "skip"}
        )


def test_two_rows_of_one_prompt_id_are_refused(tmp_path, tokenizer):
    path = write(tmp_path / "x.parquet", [prompt_row("a", id="p1"), prompt_row("b", id="p2"), prompt_row("c", id="p1")])
    config = CONFIG | {"prompt_id_key": "id"}
    with pytest.raises(DataError, match=r"row 2: 'id' \(data.prompt_id_key\) is 'p1', as in .*x.parquet, row 0"):
        RLHFDataset(path, tokenizer, config)
    dataset = RLHFDataset(path, tokenizer, config | {"bad_rows": "skip"})
    assert [dataset[i]["prompt_id"] for i in range(2)] == ["p1", "p2"]


def test_a_role_of_the_templates_own_is_known(tmp_path):
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template += "{% if messages[0]['role'] == 'judge' %}!{% endif %}"
    path = write(tmp_path / "x.parquet", [prompt_row("", prompt=[{"role": "judge", "content": "x"}])])
    assert tokenizer.decode(RLHFDataset(path, tokenizer, CONFIG)[0]["raw_prompt_ids"]).endswith("!")

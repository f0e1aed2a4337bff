"""Reading prompts: rows a second of opening, checking and filtering 100k rows, and the memory a million rows take.

``python -m benchmarks.data [--save]``. Each row is a process of its own, so that peaks are its own. ``filter``: from
the path to a data set without the prompts that are too long, every prompt rendered and tokenized, with a tokenizer of a
thousand merges; ``cached`` is the same once more, by another process. ``random`` reads 20,000 rows in random order.
``million`` reads a million rows of parquet: ``anonymous_MB`` is memory that belongs to no file and cannot go to disk,
``resident_MB`` also counts pages of the mapped file. ``whole_MB`` is the peak of a process that makes Python objects of
all rows, which is what is avoided.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import report

ROWS, MANY = 100_000, 1_000_000
FORMATS = ("parquet", "jsonl", "json", "csv", "arrow")
LIMIT = 100


def rows_of(start: int, stop: int) -> list[dict[str, Any]]:
    """Arithmetic word problems, a tenth of them long."""
    rows = []
    for i in range(start, stop):
        story = " ".join(
            f"Box {k} holds {i * k % 997} pens and {(i + k) % 89} pencils." for k in range(2 + 20 * (i % 10 == 0))
        )
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{story} How many are there? Think, then answer after ####."}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(i % 1000)},
                "extra_info": {"index": i, "split": "train"},
            }
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]], times: int = 1) -> None:
    """A file of these rows, so many times over, in the format its name says."""
    if path.suffix in (".parquet", ".arrow"):
        table = pa.Table.from_pylist(rows)
        new = pq.ParquetWriter if path.suffix == ".parquet" else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            for _ in range(times):
                writer.write_table(table)
        return
    lines = [json.dumps(row) for row in rows] * times
    if path.suffix == ".csv":
        cells = ['"' + json.dumps(row["prompt"]).replace('"', '""') + f'",{row["data_source"]}' for row in rows]
        path.write_text("\n".join(["prompt,data_source", *cells]))
    else:
        path.write_text("[" + ",\n".join(lines) + "]" if path.suffix == ".json" else "\n".join(lines))


def make_tokenizer(folder: str) -> None:
    """A byte-level BPE tokenizer trained on such prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from verl.utils.tiny_model import CHAT_TEMPLATE

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=1300, special_tokens=special, show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator((row["prompt"][0]["content"] for row in rows_of(0, 2000)), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)


class Memory:
    """The largest memory of this process while the block runs, MB: anonymous, and resident in all."""

    def __enter__(self) -> Memory:
        self.anonymous = self.resident = 0.0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            self.anonymous = max(self.anonymous, int(lines["RssAnon"].split()[0]) / 1024)
            self.resident = max(self.resident, int(lines["VmRSS"].split()[0]) / 1024)

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._watch.join()


def opened(path: str, cache: str) -> dict[str, float]:
    """Open a file and look at every row's prompt once."""
    from verl.data.files import open_table
    from verl.data.table import ROLES, bad_prompts

    with Memory() as memory, Timer() as timer:
        table = open_table(path, cache_dir=cache)
        assert not bad_prompts(table, "prompt", set(ROLES), "data.prompt_key", False)
    with Timer() as reading:
        order = (i * 7919 % len(table) for i in range(20_000))
        for item in order:
            table[item]
    return {
        "rows": len(table),
        **timer.seconds(),
        "rows_a_cpu_s": len(table) / timer.cpu,
        "random_rows_a_cpu_s": 20_000 / reading.cpu,
        "anonymous_MB": memory.anonymous,
        "resident_MB": memory.resident,
    }


def filtered(path: str, cache: str, tokenizer: str, workers: str) -> dict[str, float]:
    """A data set without the prompts over ``LIMIT`` tokens."""
    from transformers import AutoTokenizer

    from verl.data.rl_dataset import RLHFDataset

    reader = AutoTokenizer.from_pretrained(tokenizer)
    config = {
        "max_prompt_length": LIMIT,
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": int(workers),
        "cache_dir": cache,
    }
    with Timer() as timer:
        dataset = RLHFDataset(path, reader, config)
    return {"rows": ROWS, "left": len(dataset), **timer.seconds(), "rows_a_s": ROWS / timer.wall}


def whole(path: str) -> dict[str, float]:
    """Every row as Python objects at once."""
    with Memory() as memory:
        rows = pq.read_table(path).to_pylist()
    return {"rows": len(rows), "whole_MB": memory.resident}


class Timer:
    """Seconds of a block: of the clock, and of the processors, child processes included."""

    def __enter__(self) -> Timer:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()
        return self

    def __exit__(self, *error: Any) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, _cpu_seconds() - self._cpu

    def seconds(self) -> dict[str, float]:
        return {"wall_s": self.wall, "cpu_s": self.cpu}


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def apart(name: str, *arguments: str) -> dict[str, float]:
    """Return the result of the function of that name, run in a process of its own."""
    code = f"import json, benchmarks.data as d; print(json.dumps(d.{name}(*{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rows, measured = rows_of(0, ROWS), []

    def note(what: str, found: dict[str, float], **about: Any) -> None:
        measured.append({"what": what, "work": f"{found['rows']:,} word problems", **about, **found})
        print(json.dumps(measured[-1]), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_tokenizer(str(folder / "tokenizer"))
        for kind in FORMATS:
            path = folder / f"x.{kind}"
            write(path, rows)
            note(f"open {kind}", apart("opened", str(path), f"{place}/c"), file_MB=_size_MB(path))
        for workers in (1, 2):
            for state in ("cold", "cached"):
                arguments = (str(folder / "x.parquet"), f"{place}/c{workers}", str(folder / "tokenizer"), str(workers))
                note("filter", apart("filtered", *arguments), workers=workers, state=state)
        many = folder / "many.parquet"
        write(many, rows, MANY // ROWS)
        for state in ("cold", "cached"):
            note("million", apart("opened", str(many), f"{place}/c"), state=state, file_MB=_size_MB(many))
        note("million as Python objects", apart("whole", str(many)))
    report("data", measured)


def _size_MB(path: Path) -> float:
    return path.stat().st_size / 2**20


if __name__ == "__main__":
    main()

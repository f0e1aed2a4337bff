"""Markdown tables of single benchmarks, each from the JSON that its script has saved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import measure

Row = dict[str, Any]
WORK = "the work"


def load(name: str) -> dict[str, Any]:
    """Return a saved result; one without rows where nothing has been saved."""
    path = measure.RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"benchmark": name, "rows": []}


def load_rows(name: str) -> list[Row]:
    return load(name)["rows"]


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns of which every cell is empty; empty without rows.

    What all rows have as ``the work`` is said once, below the table.
    """
    lines = [list(row) for row in rows]
    if not lines:
        return ""
    columns = {head: [line[place] for line in lines] for place, head in enumerate(heads)}
    is_common = len(lines) > 1 and len({*columns.get(WORK, [])}) == 1
    work = columns.pop(WORK)[0] if is_common else ""
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    shown = ["| " + " | ".join(line) + " |" for line in (columns, *zip(*columns.values(), strict=True))]
    table = "\n".join([shown[0], "|---" * len(columns) + "|", *shown[1:]])
    return f"{table}\n\nThe work: {work}." if work else table


def digits(value: float) -> str:
    """Three digits or so, and commas."""
    size = abs(value)
    if size < 0.0005:
        return f"{value:.2g}"
    return next(f"{value:,.{places}f}" for limit, places in _PLACES if size < limit)


_PLACES = ((0.1, 4), (1, 3), (10, 2), (100, 1), (float("inf"), 0))


def number(row: Mapping[str, Any], name: str) -> str:
    """Return a row's number, the median of several; empty where the row has none."""
    value = row.get(name)
    value = value["median"] if isinstance(value, dict) else value
    return "" if value is None else digits(value)


def share(row: Mapping[str, Any], name: str) -> str:
    return f"{100 * row[name]:.0f}%" if row.get(name) is not None else ""


def conditions(result: Mapping[str, Any]) -> str:
    """Load, cores and versions of a measurement in a sentence; or that there is none."""
    if not result["rows"]:
        return f"Not measured: `python -m benchmarks.{result['benchmark']} --save`."
    words = f"Load {load_words(result)}"
    words += f" on {result['cores']} cores" if "cores" in result else ""
    used = ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
    return f"{words}; {used}." if used else f"{words}."


def load_words(result: Mapping[str, Any]) -> str:
    """Return the load average of the machine before and after the measurement, or the one that was noted."""
    loads = result["load"] if isinstance(result["load"], list) else [result["load"]]
    return " to ".join(dict.fromkeys(f"{load:.1f}" for load in loads))


def _tables(name: str, *tables: str) -> str:
    """Join those tables that have rows, and the conditions of the measurement."""
    return "\n\n".join([*filter(None, tables), conditions(load(name))])


def methods() -> str:
    """Every estimator and every loss, as ``benchmarks.algorithms --every`` saved them."""
    result = load("algorithms_every")
    heads = ["", WORK, "CPU ms", "copies of its floats", "MB above the start"]
    rows = sorted(result["rows"], key=lambda row: (row["kind"], row["name"]))
    cells = [
        [
            f"{row['kind']} `{row['name']}`",
            row.get("work", ""),
            f"{row['cpu_ms']:.0f}",
            f"{row['ratio_to_copy']:.1f}",
            "" if row["peak_extra_mb"] is None else f"{row['peak_extra_mb']:.0f}",
        ]
        for row in rows
    ]
    return _tables("algorithms_every", grid(heads, cells))


def peers() -> str:
    """The same work here and in other trainers, as ``benchmarks.peers`` saved it."""
    saved = load("peers")
    if not saved["rows"]:
        return conditions(saved)
    versions, known = saved["versions"], {"trl": "TRL", "verl": "verl"}
    sides = [side for side in known if side in versions]
    heads = ["", WORK, "unit", "here", "here, Ray", *(f"{known[side]} {versions[side][side]}" for side in sides)]
    cells = []
    for row in saved["rows"]:
        cost = {side: digits(value) for side, value in row["cost"].items()}
        for side in cost.keys() & {*sides}:
            cost[side] += f" ({row['ratio'][side]:.1f}x)" if side in row["ratio"] else " (unequal work)"
        own = [row["what"], row["work"], row["unit"]]
        cells.append([*own, *(cost.get(side, "") for side in ("here", "here, Ray", *sides))])
    used = ", ".join(f"{name} {versions['here'][name]}" for name in ("torch", "transformers", "python"))
    loads = [load for row in saved["rows"] for load in row["load"]]
    turns = sorted({row["turns"] for row in saved["rows"]})
    cores = f"{saved['cores']} cores with a load of {min(loads):g} to {max(loads):g}"
    words = f"The least of {' or '.join(map(str, turns))} turn{'s' * (turns != [1])} on {cores}; {used}"
    words += f" (verl: transformers {versions['verl']['transformers']})." if "verl" in versions else "."
    unequal = [f"{row['what']}, {side}: {why}" for row in saved["rows"] for side, why in row.get("unequal", {}).items()]
    return "\n\n".join([grid(heads, cells), words, *(f"No ratio: {reason}." for reason in unequal)])


def startup() -> str:
    """CPU seconds of commands from their start to their end, and over those of importing torch."""
    cells = [
        [
            f"`{row['what']}`" if row["what"].startswith(("import", "--")) else row["what"],
            row.get("work", ""),
            digits(row["cpu_s"]["min"]),
            number(row, "cpu_s"),
            *(number(row, name) for name in ("wall_s", "ratio_to_import_torch")),
        ]
        for row in load_rows("startup")
    ]
    heads = ["", WORK, "CPU s, the least", "the median", "s of the clock", "over `import torch`"]
    return _tables("startup", grid(heads, cells))


def scale() -> str:
    """The driver's part of a step by rows, tokens a row, ranks and nodes, and how it grows."""
    rows, powers = [row for row in load_rows("scale") if "driver_cpu_s" in row], load_rows("scale")[-1:]
    heads = [WORK, "CPU s of the driver", "bytes sent a token", "MiB that a step adds", "bytes a token of them"]
    names = ("driver_cpu_s", "sent_bytes_a_token", "step_extra_MiB", "step_extra_bytes_a_token", "peak_rss_GiB")
    cells = [[row.get("work") or _size(row), *(number(row, name) for name in names)] for row in rows]
    growth = [[name, digits(value)] for name, value in (powers[0] if powers else {}).items() if name != "what"]
    tables = (grid([*heads, "GiB of the process"], cells), grid(["by", "exponent of the CPU seconds"], growth))
    return _tables("scale", *tables)


def _size(row: Row) -> str:
    return f"{row['rows']:,} rows of {row['tokens_a_row']:,.0f} tokens, {row['ranks']} ranks"


def rollout() -> str:
    """Engines beside each other: tokens a second, weight syncs over copies, and what seeds add."""
    heads = ["engine", "in", "the work of a sync", "sync over a copy, asleep", "awake"]
    heads += [f"tokens a second, {count} at a time" for count in (1, 16, 64)]
    heads += ["the work of a sequence"]
    rows = load_rows("rollout")
    cells = [
        [
            row["engine"],
            row["dtype"],
            row["work"],
            *(number(row, name) for name in ("sync_over_fresh_copy", "sync_awake_over_copy")),
            *(number(row[f"{count}_sequences"], "tokens_a_second") for count in (1, 16, 64)),
            row["work_of_a_sequence"],
        ]
        for row in rows
        if "sync_over_copy" in row
    ]
    ways = ("unseeded_cpu_ms_a_token", "seeded_cpu_ms_a_token")
    seeds = [
        [row["engine"], row["dtype"], row["work"], *(number(row, name) for name in ways), f"{row['over_unseeded']:.1%}"]
        for row in rows
        if row.get("what") == "seeds"
    ]
    seed_heads = ["engine", "in", WORK, "CPU ms a token without seeds", "with seeds", "more"]
    return _tables("rollout", grid(heads, cells), grid(seed_heads, seeds))


def serving() -> str:
    """Requests one by one over HTTP beside one call of all."""
    heads = ["engine", WORK, "CPU ms a token in one call", "over HTTP", "CPU ms that HTTP adds to a request"]
    heads += ["requests of one token a second in one call", "over HTTP ", "s a step, `mode=sync`", "`mode=async`"]
    cells = [
        [
            row["engine"],
            row["work"],
            *(number(row[way], "cpu_ms") for way in ("call", "served")),
            number(row, "http_cpu_ms_a_request"),
            *(number(row[way], "a_second") for way in ("call_of_one_token", "served_one_token")),
            *(number(row.get(f"step_{mode}", {}), "step_s") for mode in ("sync", "async")),
        ]
        for row in load_rows("serving")
    ]
    return _tables("serving", grid(heads, cells))


def packing() -> str:
    """Speed-ups of packed rows and of shared prompts beside what could be had at most."""
    cells = []
    for row in load_rows("packing"):
        limit = f"{row['size']} rows" if "size" in row else f"at most {row['max_tokens']:,} tokens"
        label = f"packed over padded, micro-batches of {limit}" if row["name"] == "packed" else "shared prompts"
        label += ", small ones as on a CPU" * bool(row.get("kept_small"))
        bound = f"{100 * row['speed_up'] / row['tokens_ratio']:.0f}%"
        shapes = f"{row['prompt']} and {row['response']} tokens, n={row['n']}" if "prompt" in row else ""
        work = row.get("work") or ", ".join(filter(None, [shapes, measure.work_words({"tokens": row["tokens"]})]))
        cells.append([label, work, f"{row['speed_up']:.2f}", f"{row['tokens_ratio']:.2f}", bound])
    return _tables("packing", grid(["", WORK, "speed-up", "at most", "share of that"], cells))


def rewards() -> str:
    """Milliseconds of a reward function by where it runs, of the driver, and the waits of steps."""
    rows = load_rows("rewards")
    by_function: dict[str, Row] = {}
    for row in rows:
        if "ms_a_sample" in row:
            function, place = row["what"].split(", ")
            by_function.setdefault(function, {"work": row.get("work", "")})[place] = row["ms_a_sample"]
    places = ("in the driver", "sandbox of 1", "sandbox of 2")
    calls = [[name, row["work"], *(number(row, place) for place in places)] for name, row in by_function.items()]
    kinds = {"wall_ms": "ms", "driver_cpu_ms": "CPU ms of the driver"}
    others = [
        [row["what"], row.get("work", ""), kind, number(row, name)]
        for row in rows
        for name, kind in kinds.items()
        if name in row
    ]
    steps = [
        [
            row["reward"],
            row["place"],
            row["work"],
            *(number(row, name) for name in ("waited_for_rewards_s", "wall_s")),
            share(row, "hidden_share"),
        ]
        for row in rows
        if "place" in row
    ]
    of_steps = ["reward", "computed", WORK, "s a step waits for it", "s a step", "hidden"]
    tables = (
        grid(["function", WORK, *(f"{place}, ms a sample" for place in places)], calls),
        grid(["", WORK, "unit", "median"], others),
        grid(of_steps, steps),
    )
    return _tables("rewards", *tables)


def data() -> str:
    """Opening, filtering and reading prompts: CPU seconds, rows a second, memory."""
    cells = []
    for row in load_rows("data"):
        workers = f"{row['workers']} worker{'s' * (row['workers'] > 1)}" if "workers" in row else ""
        label = ", ".join(filter(None, [row["what"], workers, row.get("state", "")]))
        work = row.get("work") or measure.work_words({"rows": row["rows"]})
        work += f", {row['file_MB']:.1f} MB" if "file_MB" in row else ""
        speed = digits(row["rows"] / row["cpu_s"]) if "cpu_s" in row else ""
        memory = number(row, "anonymous_MB") or number(row, "whole_MB")
        cells.append([label, work, number(row, "cpu_s"), speed, number(row, "random_rows_a_cpu_s"), memory])
    heads = ["", WORK, "CPU s", "rows a CPU second", "in random order", "MB of memory at the peak"]
    return _tables("data", grid(heads, cells))


def scorers() -> str:
    """Rows a second of scorers by workers, and CPU seconds of validation metrics."""
    by_name: dict[str, Row] = {}
    rows = load_rows("scorers")
    for row in rows:
        if "workers" in row:
            work = row.get("work") or measure.work_words({"rows": row["rows"]})
            by_name.setdefault(row["name"], {"work": work})[str(row["workers"])] = row["rows_per_s"]
    speeds = [[name, row["work"], number(row, "1"), number(row, "2")] for name, row in by_name.items()]
    costs = [
        [row["name"], row.get("work") or f"{row['prompts']:,} prompts x {row['samples']}", number(row, "cpu_s")]
        for row in rows
        if "cpu_s" in row
    ]
    heads = ["scorer", WORK, "1 worker, rows a second", "2 workers"]
    return _tables("scorers", grid(heads, speeds), grid(["", WORK, "CPU s"], costs))


def soak() -> str:
    """Memory of each process of a long run after a fifth of the steps and at its end; those of one name in one row."""
    known: dict[tuple[str, str], list[Row]] = {}
    for row in load_rows("soak"):
        known.setdefault((row["controller"], re.sub(r" \(pid \d+\)$", "", row["process"])), []).append(row)
    cells = []
    for (controller, name), rows in known.items():
        ends = ["; ".join(dict.fromkeys(f"{row['MiB'][place]:.1f}" for row in rows)) for place in (0, 1)]
        growth = f"{max(row['KiB_a_step'] for row in rows):.1f}"
        count = f" ({len(rows)} of them)" if len(rows) > 1 else ""
        cells.append([controller, name + count, rows[0]["work"], *ends, growth])
    heads = ["controller", "process", WORK, "MiB after a fifth", "MiB at the end", "KiB a step, at most"]
    return _tables("soak", grid(heads, cells))


def long_tails() -> str:
    """Ways to generate a batch of log-normal lengths; tokens are relative to the first row."""
    heads = ["", WORK, "bubble", "idle slots", "decode steps a batch", "tokens a decode step", "tokens a second"]
    rows = load_rows("long_tails")
    cells = [
        [
            row["what"],
            row.get("work", ""),
            *(share(row, name) for name in ("bubble_share", "idle_slot_share")),
            f"{row['decode_steps']:.0f}",
            *(f"{row[f'{name}_ratio']:.2f}" for name in ("tokens_a_decode_step", "tokens_a_s")),
            *(share(row, name) if row[name] else "" for name in ("discarded_token_share", "stale_token_share")),
        ]
        for row in rows
    ]
    return _tables("long_tails", grid([*heads, "wasted", "stale"], cells))


def disjoint() -> str:
    """Rollout on devices of its own: tokens a second by schedule, transfers, and what is learned."""
    rows = load_rows("disjoint")
    cells = [
        [
            row["what"].split("a step, ")[-1],
            row.get("work", ""),
            number(row, "tokens_a_second"),
            number(row, "gen"),
            *(share(row, name) for name in ("bubble_share", "trainer_idle_share")),
            number(row, "staleness/mean"),
        ]
        for row in rows
        if "tokens_a_second" in row
    ]
    heads = ["", WORK, "tokens a second", "s a step waits for generation", "engine idle", "trainer idle"]
    heads += ["staleness, mean"]
    transfers = [
        [row["what"], row.get("work", ""), *(number(row, name) for name in ("seconds", "ratio_to_copy"))]
        for row in rows
        if "ratio_to_copy" in row
    ]
    learned = [
        [row["what"], row.get("work", ""), ", ".join(f"{score:.2f}" for score in row["scores"])]
        for row in rows
        if "scores" in row
    ]
    tables = (
        grid(heads, cells),
        grid(["", WORK, "seconds", "over a copy"], transfers),
        grid(["", WORK, "mean reward of the last three steps"], learned),
    )
    return _tables("disjoint", *tables)

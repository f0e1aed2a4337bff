"""``verl trajectories``: lines of all kinds are read, broken ones named, and what a model wrote is only ever text."""

import json
import re
import subprocess
import sys

import pytest

from verl.telemetry.trajectories import Style, find_files, in_full, parse, read, visible
from verl.view.page import of_trajectories as page
from verl.view.trajectory_command import main

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&</pre>"
ESCAPES = "\x1b[2J\x1b]0;title\x07 \u202eback \ud800 \x00"


def dump(step, uid, score, **more):
    return {"input": f"ask {uid}", "output": "an answer", "gts": "g", "score": score, "step": step, "uid": uid, **more}


def episode(step, uid, score, texts=("left", "right"), **more):
    turns = []
    for i, text in enumerate(texts):
        turns.append(
            {
                "role": "assistant",
                "text": text,
                "generated": True,
                "span": [3 * i, 3 * i + 2],
                "reward": i / 2,
                "seconds": 0.5,
            }
        )
        turns.append({"role": "user", "text": f"you see {i}", "generated": False, "span": [3 * i + 2, 3 * i + 3]})
    status = {"status": "completed", "env_tag": "Lake", "seconds": 2.5, "info": {"success": score > 0}}
    return dump(step, uid, score, **(status | more), turns=turns)


TRACE = {
    "step": 1,
    "uid": "u",
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5],
    "score": 0.5,
    "seconds": 1.5,
    "finish_reason": "stop",
}


@pytest.fixture
def folder(tmp_path):
    for step in (1, 10, 9):
        rows = [
            episode(step, "val-0", step / 10),
            episode(step, "val-1", 0.0, status="error"),
            dump(step, "val-2", 0.25),
        ]
        write(tmp_path / f"{step}.jsonl", rows)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(capsys, *words):
    code = main([str(word) for word in words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


# -- lines -------------------------------------------------------------------------------------------------------------
def test_a_dump_of_a_single_turn_is_a_trajectory_of_one_turn():
    t = parse(json.dumps(dump(3, "u", 0.5, finish_reason="stop", response_length=4)), "f", 7)
    assert (t.step, t.index, t.uid, t.reward, t.prompt, t.status, t.num_turns) == (3, 6, "u", 0.5, "ask u", "stop", 1)
    assert (t.turns[0].text, t.turns[0].span, t.metadata["gts"]) == ("an answer", (0, 4), "g")


def test_a_trace_has_text_only_if_the_run_wrote_it():
    t = parse(json.dumps(TRACE), "f", 1)
    assert t.turns[0].text is None and t.turns[0].span == (0, 3) and t.prompt is None
    assert "trace.token2text=true" in in_full(t, Style(False))
    t = parse(json.dumps({**TRACE, "prompt": "p", "response": "r"}), "f", 1)
    assert (t.prompt, t.turns[0].text) == ("p", "r")


def test_a_trace_of_turns_gives_the_mean_log_prob_of_each():
    turns = [
        {"role": "assistant", "generated": True, "span": [0, 2]},
        {"role": "user", "generated": False, "span": [2, 3]},
    ]
    t = parse(json.dumps({**TRACE, "turns": turns, "response_logprobs": [-1.0, -2.0, 0.0]}), "f", 1)
    assert [turn.log_prob for turn in t.turns] == [-1.5, None]
    several = {
        "step": 1,
        "turns": [{**turns[0], "row": 1}],
        "rows": [{"prompt": "p"}, {"response_logprobs": [-3.0, -5.0]}],
    }
    t = parse(json.dumps(several), "f", 1)
    assert t.turns[0].log_prob == -4 and t.prompt == "p"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ("[1]", "list where an object is expected"),
        ("{}", "no key 'step'"),
        ('{"step": 1, "data": {}}', "none of the keys output, response_ids and turns"),
        ('{"step": "1", "output": "x"}', "step is str, not int"),
        ('{"step": 1, "output": 3}', "output is int, not str"),
        ('{"step": 1, "output": "x", "score": "high"}', "score is str, not a number"),
        ('{"step": 1, "turns": 3}', "turns is int, not list"),
        ('{"step": 1, "turns": [{"text": "x"}]}', "turns[0] is no object with a role"),
        ('{"step": 1, "turns": [{"role": "user", "span": [1]}]}', "span=[1] is no pair"),
        ('{"step": 1, "output": "x", "tool_calls": [1]}', "tool_calls has entries that are no objects"),
        ('{"step": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 100_000, ""),
        (b'{"step": 1, "output": "\xff"}', "no UTF-8"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path, line, reason):
    good = json.dumps(dump(1, "u", 1.0)).encode()
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "1.jsonl").write_bytes(good + b"\n\n" + line + b"\n" + good)
    problems = []
    found = list(read(find_files([tmp_path]), problems))
    assert [t.line for t in found] == [1, 4]
    assert len(problems) == 1 and problems[0].startswith(f"{tmp_path}/1.jsonl:3: ") and reason in problems[0]


def test_files_of_a_folder_come_in_the_order_of_steps_and_others_are_left_alone(folder):
    assert [file.name for file in find_files([folder])] == ["1.jsonl", "9.jsonl", "10.jsonl"]
    assert [t.step for t in read(find_files([folder]), [], [9])] == [9, 9, 9]


# -- the command -------------------------------------------------------------------------------------------------------
def test_without_options_it_shows_every_step_and_the_newest_trajectories(folder, capsys):
    code, out, err = run(capsys, folder)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and not err and "\x1b" not in out
    assert lines[0] == [str(folder)] and lines[1][:4] == ["step", "trajectories", "reward", "success"]
    # the failed one counts in no mean
    assert lines[4][:5] == ["10", "3", "0.625", "1.000", "1.5"]
    assert [line[:5] for line in lines[7:10]] == [
        ["10", "0", "val-0", "Lake", "1.000"],
        ["10", "1", "val-1", "Lake", "0.000"],
        ["10", "2", "val-2", "-", "0.250"],
    ]


def test_trajectories_are_chosen_by_what_is_known_of_them(folder, capsys):
    def chosen(*words):
        code, out, _ = run(capsys, folder, "--json", *words)
        assert code == 0
        return [(t["step"], t["index"]) for t in map(json.loads, out.splitlines())]

    assert chosen("--step", "9") == [(9, 0), (9, 1), (9, 2)]
    assert chosen("--step", "last", "--uid", "val-2") == [(10, 2)]
    assert chosen("--step", 1, "--step", 9, "--index", "0") == [(1, 0), (9, 0)]
    assert chosen("--status", "error", "--tag", "Lake", "--step", "1") == [(1, 1)]
    assert chosen("--best", "2") == [(10, 0), (9, 0)]
    assert chosen("--worst", "1", "--status", "completed") == [(1, 0)]
    assert chosen("--sort", "reward", "--step", "1") == [(1, 2), (1, 0), (1, 1)]


def test_one_trajectory_is_shown_with_its_turns_and_rewards(folder, capsys):
    _, out, _ = run(capsys, folder, "--step", "9", "--index", "0")
    places = [
        out.index(text) for text in ("ask val-0", "turn 1", "left", "you see 0", "turn 2", "reward 0.500", "right")
    ]
    assert places == sorted(places)


def test_nothing_found_is_said_and_is_an_error(folder, capsys, tmp_path):
    code, out, err = run(capsys, folder, "--status", "no_such")
    assert code == 1 and "no trajectory is as asked for" in err
    code, out, err = run(capsys, tmp_path / "nowhere")
    assert code == 1 and "nowhere does not exist" in err and "trainer.rollout_data_dir" in err
    (tmp_path / "empty").mkdir()
    assert "has no files <step>.jsonl" in run(capsys, tmp_path / "empty")[2]
    with pytest.raises(SystemExit):
        run(capsys, folder, "--step", "next")
    with pytest.raises(SystemExit):
        run(capsys, folder, "--best", "0")


def test_two_steps_are_compared_prompt_by_prompt(folder, capsys):
    code, out, _ = run(capsys, folder, "--diff", "1", "10", "--best", "1")
    assert code == 0 and re.search(r"val-0 +0\.100 +1\.000", out)
    # the greatest gain in full, before and after
    assert out.index("step 1  #0") < out.index("step 10  #0") and "step 10  #1" not in out
    assert "no trajectories of step 7" in run(capsys, folder, "--diff", "7", "10")[2]


def test_training_prompts_are_compared_by_their_text(tmp_path, capsys):
    for step in (1, 2):
        write(tmp_path / f"{step}.jsonl", [{**dump(step, f"step{step}-0", step), "input": "the same"}])
    assert re.search(r"1\.000 +2\.000", run(capsys, tmp_path, "--diff", 1, 2)[1])
    write(tmp_path / "3.jsonl", [dump(3, "other", 0.0)])
    assert "share no prompt" in run(capsys, tmp_path, "--diff", 1, 3)[2]


def test_broken_lines_are_said_and_do_not_end_it(folder, capsys):
    with open(folder / "10.jsonl", "a", encoding="utf-8") as file:
        file.write("half a li")
    code, out, err = run(capsys, folder)
    assert code == 0 and f"skipped {folder}/10.jsonl:4: no JSON" in err


# -- what a model wrote ------------------------------------------------------------------------------------------------
def test_the_terminal_gets_no_control_characters(tmp_path, capsys):
    rows = [
        episode(1, f"u{ESCAPES}", 1.0, texts=(ESCAPES,), env_tag=ESCAPES, error=ESCAPES, tool_calls=[{"name": ESCAPES}])
    ]
    write(tmp_path / "1.jsonl", rows)
    for words in ([], ["--index", "0"], ["--diff", 1, 1]):
        _, out, err = run(capsys, tmp_path, *words)
        assert "\\x1b[2J" in out and not set("\x1b\x07\u202e\ud800\x00") & {*out, *err}
    assert visible("a\tb\nc é 漢") == "a\tb\nc é 漢"


def shown_in(path):
    """The data of a page: what its script shows, as text."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["samples"][0]


def test_the_page_has_what_a_model_wrote_as_data_and_loads_nothing(tmp_path, capsys):
    text = EVIL + ESCAPES
    row = episode(1, text, 1.0, texts=(text,), status=text, env_tag=text, tool_calls=[{"name": text}], input=text)
    row["turns"][0] |= {"role": text, "state": {text: text}}
    row["turns"][1] |= {"text": text}
    write(tmp_path / "1.jsonl", [row])
    code, out, _ = run(capsys, tmp_path, "--html")
    written = (tmp_path / "trajectories.html").read_text(encoding="utf-8")
    assert code == 0 and "trajectories.html: 1 trajectories" in out
    assert "<img" not in written and written.count("<script") == 2 and "url(" not in written and written.isascii()
    assert not re.search(r"\s(src|href|onerror|onload|onclick)=(?!\"data:,)", written.partition("<script")[0])
    assert not set("\x1b\x07\x00") & set(written)
    [whole] = shown_in(tmp_path / "trajectories.html")["whole"]
    assert whole["prompt"] == text and [turn["text"] for turn in whole["turns"]] == [text, text]  # all can be read


def test_no_script_but_the_pages_own_may_run(folder):
    from base64 import b64encode
    from hashlib import sha256

    text = page(list(read(find_files([folder]), [])), "title")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert re.search(rf"default-src 'none'; [^\"]*script-src 'sha256-{re.escape(digest)}'\"", text)


def test_the_page_tells_generated_tokens_from_those_that_were_read(folder, capsys):
    code, out, _ = run(capsys, folder, "--step", "9", "--html", folder / "my.html")
    whole = shown_in(folder / "my.html")["whole"]
    assert code == 0 and len(whole) == 3
    assert [(turn["text"], turn["generated"]) for turn in whole[0]["turns"]][:2] == [
        ("left", True),
        ("you see 0", False),
    ]


def test_a_folder_behind_html_is_a_folder(folder, capsys, monkeypatch):
    assert run(capsys, folder / "1.jsonl", "--html", folder / "9.jsonl")[0] == 0
    assert len(shown_in(folder / "trajectories.html")["whole"]) == 6


# -- cost --------------------------------------------------------------------------------------------------------------
def test_it_imports_nothing_heavy(folder):
    program = (
        f"import sys; from verl.cli import main; main(['trajectories', {str(folder)!r}, '--html']);"
        "print(sorted({'torch', 'numpy', 'hydra', 'omegaconf', 'ray', 'transformers', 'rich'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert shown.stdout.splitlines()[-1] == "[]", shown.stderr


def test_colours_are_for_terminals_only():
    t = parse(json.dumps(episode(1, "u", 1.0)), "f", 1)
    assert "\x1b[32m   left\x1b[0m" in in_full(t, Style(True)) and "\x1b" not in in_full(t, Style(False))

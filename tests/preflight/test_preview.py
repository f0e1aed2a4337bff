"""What the check says of data: every promise on a small file made for it."""

import json
import subprocess
import sys

import pytest

from tests.preflight.files import row, sums, write
from tests.support.images import SHOWN, image_dataset, image_row, make_tiny_vl_model, picture, video_row
from verl.config.ppo import PPOConfig
from verl.data.rl_dataset import RLHFDataset
from verl.preflight.checks import examine_data
from verl.preflight.command import read_options
from verl.preflight.data import Limits, preview
from verl.utils.tiny_model import make_tokenizer
from verl.utils.tokenizer import hf_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def look(model, files, *words, **limits):
    config, given = read_options([f"model={model}", *words], [files] if isinstance(files, str) else files)
    report = examine_data(config, frozenset(given), Limits(**limits))
    report.data.findings = [*report.findings, *report.notes]
    return report.data


def texts(found, level):
    return [finding.text for finding in found.findings if finding.level == level]


def test_good_data_has_no_findings_and_its_prompts_are_shown(model, tmp_path):
    found = look(model, write(tmp_path, sums(20)))
    assert found.findings == [] and not found.has_errors and found.num_rows == 20
    tokenizer = hf_tokenizer(model)
    for number, prompt in enumerate(found.prompts):
        chat = [{"role": "user", "content": f"What is {number} + {number}?"}]
        assert prompt.text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert prompt.where.endswith(f"train.parquet, row {number}")
    [scores] = found.scores
    assert (scores.form, set(scores.known_good), set(scores.known_bad), set(scores.other)) == (
        "#### answer",
        {1.0},
        {0.0},
        {0.0},
    )
    assert found.columns | {"images": "none"} == {
        **dict.fromkeys(("prompt", "data_source", "reward_model", "ability", "extra_info"), "all"),
        **dict.fromkeys(("images", "videos", "agent_name"), "none"),
    }


def test_lengths_are_those_of_the_dataset(model, tmp_path):
    rows = [row("x" * n) for n in (5, 40, 200, 7, 90)]
    path = write(tmp_path, rows)
    found = look(model, path, "data.max_prompt_length=100", "data.truncation=left")
    dataset = RLHFDataset(path, hf_tokenizer(model), {"max_prompt_length": 300})
    lengths = [len(dataset[i]["raw_prompt_ids"]) for i in range(5)]
    assert (found.lengths.shortest, found.lengths.longest) == (min(lengths), max(lengths))
    assert found.lengths.median == sorted(lengths)[2] and found.lengths.mean == sum(lengths) / 5
    assert found.lengths.overlong == sum(length > 100 for length in lengths)
    assert sum(count for *_, count in found.lengths.histogram) == 5
    for start, end, count in found.lengths.histogram:
        assert count == sum(start <= length < end for length in lengths)


def test_too_long_prompts_are_all_found_though_few_are_counted(model, tmp_path):
    rows = sums(300)
    for i in (17, 170, 299):
        rows[i] = row("y" * 90)
    path = write(tmp_path, rows)
    found = look(model, path, "data.max_prompt_length=100", tokens=10)
    assert found.lengths.counted == 10 and found.lengths.overlong == 3 and found.lengths.is_overlong_exact
    [error] = texts(found, "error")
    assert (
        "3 of 300 prompts exceed data.max_prompt_length=100 (the longest: 109)" in error and "truncation=error" in error
    )
    found = look(model, path, "data.max_prompt_length=100", tokens=2)
    assert found.lengths.overlong == 2 and not found.lengths.is_overlong_exact
    for option, word in (
        ("data.truncation=left", "will be truncated"),
        ("data.filter_overlong_prompts=true", "left out"),
    ):
        found = look(model, path, "data.max_prompt_length=100", option)
        assert not found.has_errors and word in texts(found, "warning")[0]


BAD = {
    "prompt is empty": ({"prompt": []}, "'prompt' (data.prompt_key) is an empty list"),
    "prompt is null": ({"prompt": None}, "'prompt' (data.prompt_key) is null"),
    "no role": ({"prompt": [{"role": None, "content": "x"}]}, "'prompt' (data.prompt_key) has no role in message 0"),
    "no content": (
        {"prompt": [{"role": "user", "content": None}]},
        "'prompt' (data.prompt_key) has no content in message 0",
    ),
    "no truth": ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model has no ground_truth"),
    "no source": ({"data_source": ""}, "'data_source' is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_cannot_be_used_is_named_with_its_file(model, tmp_path, case):
    columns, why = BAD[case]
    path = write(tmp_path, [*sums(3), row(**columns), *sums(2)], "odd.parquet")
    found = look(model, [write(tmp_path, sums(4)), path])
    assert found.rows.num_bad == 1 and (found.rows.bad[0].file, found.rows.bad[0].row) == (path, 3)
    assert found.rows.bad[0].why.startswith(why) and found.lengths.counted == 9
    assert any(f"1 of 10 rows cannot be used: {path}, row 3: {why}" in text for text in texts(found, "error"))


def test_a_row_for_a_reward_model_needs_no_ground_truth(model, tmp_path):
    scored = {"reward_model": {"style": "model", "ground_truth": None}}
    assert look(model, write(tmp_path, [row(**scored), *sums(3)])).rows.num_bad == 0


def test_what_is_doubtful_is_looked_for_in_the_first_rows_of_each_file(model, tmp_path):
    lines = tmp_path / "more.jsonl"
    lines.write_text("\n".join(json.dumps(one) for one in sums(9)))
    found = look(model, [write(tmp_path, [*sums(20), *sums(3), row(prompt=[])]), str(lines)], rows=4)
    assert [file.rows for file in found.rows.files] == [24, 9] and found.lengths.counted == 32
    assert "4 prompts of the first 4 of each file are repeated" in texts(found, "note")[0]
    assert [bad.row for bad in found.rows.bad] == [23]  # every row is looked at for whether it can be used


def test_a_folder_without_a_tokenizer_is_an_error_and_prompts_are_counted_in_bytes(tmp_path):
    found = look(tmp_path, write(tmp_path, sums(3)))
    assert found.lengths.unit == "bytes" and "holds no tokenizer" in texts(found, "error")[0]
    assert "counted in bytes" in texts(found, "note")[0]


def test_managers_with_ways_of_their_own_are_not_tried(model, tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    found = look(model, write(tmp_path, sums(3)), f"reward_model.reward_manager={tmp_path}/mine.py:Mine")
    assert "user-defined manager" in texts(found, "note")[0] and not found.scores


def test_each_data_source_goes_to_its_function(model, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(ground_truth, **sample):\n    return 0.5\n")
    path = write(tmp_path, [*sums(2), *sums(2, "mine/a")])
    found = look(model, path, f"+reward_model.by_source={{'mine/*': '{tmp_path}/reward.py'}}")
    assert [set(trial.known_good) for trial in found.scores] == [{1.0}, {0.5}]


def test_a_prompt_that_the_template_refuses_is_a_bad_row(model, tmp_path):
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    two = row(prompt=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    found = look(model, write(tmp_path, [*sums(4), two]), f"actor_rollout_ref.model.custom_chat_template={template!r}")
    assert [bad.row for bad in found.rows.bad] == [4] and "one turn only" in found.rows.bad[0].why


def test_files_that_cannot_be_read_do_not_hide_the_others(model, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "caf\u00e9"}'.encode("latin-1"))
    names = ["broken.parquet", "latin.jsonl", "none.parquet"]
    good = write(tmp_path, sums(3))
    found = look(model, [*(str(tmp_path / name) for name in names), good, write(tmp_path, sums(0), "empty.parquet")])
    errors = texts(found, "error")
    assert all(any(name in text for text in errors) for name in names)
    assert any("empty.parquet holds no rows" in text for text in errors) and found.num_rows == 4 and found.scores


def test_columns_that_are_missing_are_said_with_what_there_is(model, tmp_path):
    rows = [{"question": "What?", "answer": "8"}]
    found = look(model, write(tmp_path, rows))
    assert any(
        "data.prompt_key=prompt is not a column of" in t and "has question, answer" in t for t in texts(found, "error")
    )
    found = look(model, write(tmp_path, rows), "data.prompt_key=question")
    assert found.prompts[0].tokens == found.lengths.longest
    for text in ("data.reward_fn_key=data_source is not a column", "has no column 'reward_model'"):
        assert any(text in error for error in texts(found, "error"))
    both = [write(tmp_path, rows, "other.parquet"), write(tmp_path, sums(2))]
    assert look(model, both).columns["prompt"] == "some"


def test_prompts_that_come_up_twice_are_counted_over_all_files(model, tmp_path):
    train, test = write(tmp_path, sums(6)), write(tmp_path, sums(2), "test.parquet")
    found = look(model, [train, test])
    assert found.rows.num_duplicates == 2 and found.rows.first_duplicate == (f"{test}, row 0", f"{train}, row 0")
    assert "2 prompts are repeated" in texts(found, "note")[0] and not found.has_errors


def test_prompts_that_went_through_a_template_are_noticed(model, tmp_path):
    found = look(model, write(tmp_path, [row("<|im_start|>user\nWhat?<|im_end|>"), *sums(3)]))
    assert "1 prompts contain '<|im_start|>'" in texts(found, "warning")[0]


def test_images_are_opened_and_counted_against_their_placeholders(model, tmp_path):
    good, two = image_row("<image>What?", [picture()]), image_row("<image> and <image>", [picture()])
    broken = image_row("<image>", [picture()]) | {"images": [{"bytes": b"no image", "path": None}]}
    found = look(model, write(tmp_path, [good, two, good, broken]))
    assert [(bad.row, bad.why[:40]) for bad in found.rows.bad] == [
        (1, "the prompt has 2 <image> placeholders and"),
        (3, "image 0: an image cannot be read: cannot"),
    ] or [bad.row for bad in found.rows.bad] == [1, 3]
    assert "placeholders" in found.rows.bad[0].why and "cannot be read" in found.rows.bad[1].why
    assert found.rows.num_duplicates == 1


def test_tokens_of_images_and_videos_are_counted_as_the_dataset_counts_them(tmp_path):
    seeing = make_tiny_vl_model(tmp_path / "model")
    path = write(tmp_path, [video_row(*shown) for shown in SHOWN])
    dataset = image_dataset(seeing, path, max_prompt_length=96)
    lengths = [int(dataset[i]["attention_mask"].sum()) for i in range(len(SHOWN))]
    found = look(seeing, path, f"data.max_prompt_length={max(lengths) - 1}")
    assert (found.lengths.shortest, found.lengths.longest) == (min(lengths), max(lengths))
    assert found.lengths.overlong == lengths.count(max(lengths))
    assert found.prompts[0].tokens == lengths[0] and "<|video_pad|>" in found.prompts[0].text


def test_a_first_prompt_that_the_template_refuses_does_not_hide_the_others(model, tmp_path):
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    two = row(prompt=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    given = f"actor_rollout_ref.model.custom_chat_template={template!r}"
    found = look(model, write(tmp_path, [two, *sums(3)]), given)
    assert [bad.row for bad in found.rows.bad] == [0] and found.lengths.counted == 3 and len(found.prompts) == 2
    found = look(model, write(tmp_path, [two]), given)
    assert found.lengths is None and "1 of 1 rows cannot be used" in texts(found, "error")[0]


def test_lines_that_are_no_record_are_bad_rows_with_their_number(model, tmp_path):
    lines = [*map(json.dumps, sums(3))]
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], "{broken", *lines[1:]]))
    found = look(model, str(tmp_path / "*.jsonl"))
    assert [(bad.row, bad.file[-7:]) for bad in found.rows.bad] == [(1, "a.jsonl")] and found.num_rows == 4
    assert "1 of 4 rows cannot be used" in texts(found, "error")[0]
    assert found.prompts[1].where.endswith("row 2")


def test_messages_may_be_json_in_their_column(model, tmp_path):
    rows = [{**row(), "talk": json.dumps(row("Hi?")["prompt"])}, {**row(), "talk": "{no"}]
    found = look(model, write(tmp_path, rows), "data.messages_key=talk")
    assert "user\nHi?" in found.prompts[0].text and [bad.row for bad in found.rows.bad] == [1]


def test_json_lines_and_sources_are_scored_apart(model, tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, [*sums(3), *sums(5, "digit_add")])))
    found = look(model, str(path))
    assert [(s.data_source, s.rows, s.form) for s in found.scores] == [
        ("openai/gsm8k", 3, "#### answer"),
        ("digit_add", 5, "answer"),
    ]


def test_without_a_tokenizer_lengths_are_in_bytes(tmp_path):
    found = preview(read_options([f"model={tmp_path}/none"], [write(tmp_path, sums(3))])[0])
    assert found.lengths.unit == "bytes" and found.prompts[0].text == "user: What is 0 + 0?" and not found.has_errors


def test_a_configuration_names_its_own_files(model, tmp_path):
    train, val = write(tmp_path, sums(4)), write(tmp_path, sums(2), "val.parquet")
    config, _ = read_options([f"model={model}", f"data.train_files=[{train}]", f"data.val_files={val}"])
    assert isinstance(config, PPOConfig)
    assert [file.path for file in preview(config).rows.files] == [train, val]


def test_a_file_named_twice_is_counted_once(model, tmp_path):
    path = write(tmp_path, sums(4))
    found = look(model, [path, path, f"{tmp_path}/*.parquet"])
    assert found.num_rows == 4 and found.rows.num_duplicates == 0 and found.rows.sources.total() == 4


@pytest.mark.parametrize("module", ["verl.preflight.data", "verl.preflight.checks", "verl.config.model_info"])
def test_a_module_may_be_the_first_to_be_imported(module):
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_heavy_is_loaded_for_text(model, tmp_path):
    path = write(tmp_path, sums(3))
    code = (
        f"import sys; from verl.preflight.command import check; check([{path!r}, 'model={model}', '--json']);"
        "print([m for m in ('torch', 'hydra', 'datasets') if m in sys.modules], file=sys.stderr)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1] == "[]"


def test_rows_of_rolls_shape_are_looked_at_as_a_run_reads_them(model, tmp_path):
    rows = [
        {"id": str(i), "messages": json.dumps([{"role": "user", "content": f"{i}?"}]), "ground_truth": "4", "tag": tag}
        for i, tag in enumerate(["aime", "aime", "KodCode"])
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    words = ["data.messages_key=messages", "data.reward_fn_key=tag", "data.domains={math_rule: [aime]}",
             "reward_model.by_source={math_rule/*: 'builtin:math'}"]  # fmt: skip
    found = look(model, str(path), *words)
    assert texts(found, "error") == [] and found.num_rows == 2
    [scores] = found.scores
    assert scores.data_source == "math_rule/aime" and set(scores.known_good) == {1.0} and set(scores.known_bad) == {0.0}

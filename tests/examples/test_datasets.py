"""Each script of a known data set, on a few rows in the layout of its source: the columns, and answers that score."""

import json
import random
import re
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.examples.test_data_preprocess import FOLDER, load, rows
from tests.support.images import picture, png
from verl.data.rl_dataset import RLHFDataset
from verl.preflight.command import read_options
from verl.preflight.data import preview
from verl.utils.tiny_model import make_tokenizer
from verl.utils.tiny_vl_model import make_tiny_vl_model
from verl.utils.tokenizer import hf_processor, hf_tokenizer

GSM8K = [{"question": f"What is {n} + 1000?", "answer": f"{n} + 1000 = <<{n}+1000>>\n#### 1,00{n}"} for n in range(3)]
MATH = [{"problem": "What is $1/2$?", "solution": "So $\\boxed{\\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"}]
MATH_500 = [{"problem": "Half?", "solution": "x", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 2}]
HELLASWAG = [
    {
        "activity_label": "Cooking",
        "ctx_a": "A man peels an onion. [header] He",
        "ctx_b": "he",
        "endings": ["flies.", "cuts [substeps] it.", "sings.", "sleeps."],
        "label": "1",
    }
]
HH = [{"prompt": "Human: Hi.\n\nAssistant:", "response": " Hello.", "chosen": " Hello.", "rejected": " Go."}]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"Task {n}. Answer: $Answer"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{n}"},
    }
    for n in (0, 1, 0)
]
AIME = [{"id": 60, "problem": "How many?", "solution": "s", "answer": "025", "url": "u", "year": "2024"}]
SEARCH = [{"id": "train_0", "question": "who wrote it", "golden_answers": ["A", "B"], "data_source": "nq"}]
COUNTDOWN = [{"target": 46, "nums": [5, 4, 47]} for _ in range(4)]
ENTRY = [{"question": "1 + 2 = ?", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}]
MBPP = [
    {
        "task_id": 11,
        "prompt": "Write f.",
        "code": "def f(): return 1",
        "test_imports": ["import math"],
        "test_list": ["assert f() == 1"],
    }
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def f():\n    """One."""\n',
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "f",
    }
]
IFEVAL = [
    {
        "key": 1000,
        "prompt": "Write without commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"relation": None, "num_words": None}, {"relation": "at least", "num_words": 300}],
    }
]
KK = [{"quiz": "Who?", "solution_text_format": "(1) A is a knight\n(2) B is a knave", "statements": "(('lying', 1),)"}]

BOX, TAGS = "\\boxed{}", "<answer> </answer>"
CASES = {  # script, options -> split of the source, rows of it, data_source, ability, ground truth, said in the prompt
    "gsm8k": ("train test", GSM8K, "openai/gsm8k", "math", "1000", '"####"'),
    "gsm8k_multiturn_w_tool": ("train test", GSM8K, "openai/gsm8k", "math", "1000", "`calc_gsm8k_reward`"),
    "gsm8k_multiturn_w_interaction": ("train test", GSM8K, "openai/gsm8k", "math", "1000", "`####`"),
    "math_dataset": ("train test", MATH, "DigitalLearningGmbH/MATH-lighteval", "math", "\\frac{1}{2}", BOX),
    "math_dataset --only_500": ("test", MATH_500, "HuggingFaceH4/MATH-500", "math", "\\frac{1}{2}", BOX),
    "hellaswag": ("train validation", HELLASWAG, "Rowan/hellaswag", "nlp", "B", "B. cuts it."),
    "full_hh_rlhf": ("train test", HH, "Dahoas/full-hh-rlhf", "alignment", " Hello.", "Human: Hi."),
    "dapo17k": ("train", DAPO, "math_dapo", "math", "0", "Answer: $Answer"),
    "aime": ("train", AIME, "aime2024", "math", "25", "Answer: $Answer"),
    "preprocess_search_r1_dataset": (
        "train test",
        SEARCH,
        "searchR1_nq",
        "fact-reasoning",
        {"target": ["A", "B"]},
        "wrote it?",
    ),
    "countdown": ("train", COUNTDOWN, "countdown", "math", {"target": 46, "numbers": [5, 4, 47]}, TAGS),
    "reasoning_gym_tasks": ("train test", ENTRY, "reasoning_gym/chain_sum", "reasoning", "3", TAGS),
    "mbpp": ("train validation test", MBPP, "google/mbpp", "code", None, "assert f() == 1"),
    "humaneval": ("test", HUMANEVAL, "openai/human-eval", "code", None, "```python\ndef f()"),
    "ifeval": ("train", IFEVAL, "google/IFEval", "instruction_following", None, "Write without commas."),
    "kk": ("train/3ppl test/3ppl", KK, "kk_logic", "logic", None, "Who?"),
}


def write_source(folder, names, examples):
    for name in names.split():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(map(json.dumps, examples)))


def run(case, tmp_path, monkeypatch, *options):
    name, *given = case.split()
    write_source(tmp_path / "source", *CASES[case][:2])
    out = tmp_path / "out"
    script = load(name, monkeypatch)
    script.main(["--local_dataset_path", str(tmp_path / "source"), "--local_save_dir", str(out), *given, *options])
    return {path.stem: rows(path) for path in sorted(out.rglob("*.parquet"))}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_source_get_the_standard_form(case, tmp_path, monkeypatch):
    _, examples, source, ability, truth, said = CASES[case]
    splits = run(case, tmp_path, monkeypatch)
    assert splits.keys() <= {"train", "test", "validation"} and splits
    for split, found in splits.items():
        for index, row in enumerate(found):
            assert row["data_source"] == source and row["ability"] == ability
            assert row["extra_info"]["split"] == split and row["extra_info"]["index"] == index
            assert row["reward_model"]["style"] == ("model" if case == "full_hh_rlhf" else "rule")
            assert all(message.keys() == {"role", "content"} for message in row["prompt"])
            assert row["prompt"][-1]["role"] == "user"
        first = found[0]
        assert any(said in message["content"] for message in first["prompt"])
        assert truth is None or first["reward_model"]["ground_truth"] == truth


@pytest.mark.parametrize("case", CASES)
def test_rows_load_and_render(case, tmp_path, monkeypatch):
    run(case, tmp_path, monkeypatch)
    make_tokenizer("byte").save_pretrained(tmp_path / "tokenizer")
    files = [str(path) for path in (tmp_path / "out").rglob("*.parquet")]
    words = [f"model={tmp_path}/tokenizer", "data.max_prompt_length=4096"]
    found = preview(read_options(words, files)[0])
    assert not found.rows.num_bad and found.prompts and not found.lengths.overlong
    expected = "no built-in scorer|the package reasoning-gym"
    assert all(re.search(expected, f.text) for f in found.findings if f.level == "error"), found.findings
    for scores in found.scores:  # of those whose scorer is built in
        is_text = case != "countdown"  # whose gold is a number to reach, not an answer
        assert scores.has_no_scorer or not is_text or not scores.known_good or min(scores.known_good) >= 0.9
    assert len(
        RLHFDataset(files, hf_tokenizer(str(tmp_path / "tokenizer")), {"max_prompt_length": 4096})[0]["input_ids"]
    )


def test_code_and_rules_are_json_that_scorers_read(tmp_path, monkeypatch):
    truths = {}
    for case in ("mbpp", "humaneval", "ifeval"):
        [row] = run(case, tmp_path / case, monkeypatch)["test"]
        truths[case] = json.loads(row["reward_model"]["ground_truth"])
        info = row["extra_info"]
        assert case == "ifeval" or info.get("reference", info.get("canonical_solution"))
    assert truths["mbpp"] == {"test_imports": ["import math"], "test_list": ["assert f() == 1"]}
    assert truths["humaneval"]["entry_point"] == "f" and "def check" in truths["humaneval"]["test"]
    assert truths["ifeval"] == {
        "instruction_id_list": IFEVAL[0]["instruction_id_list"],
        "kwargs": [{}, {"relation": "at least", "num_words": 300}],
    }


def test_tools_and_interactions_get_what_they_are_made_with(tmp_path, monkeypatch):
    row = run("gsm8k_multiturn_w_tool", tmp_path / "a", monkeypatch, "--agent_name", "tool_agent")["train"][0]
    info = row["extra_info"]
    assert row["agent_name"] == "tool_agent" and info["need_tools_kwargs"] is True
    assert info["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1000"}}}
    row = run("gsm8k_multiturn_w_interaction", tmp_path / "b", monkeypatch)["train"][0]
    kwargs = row["extra_info"]["interaction_kwargs"]
    assert kwargs == {"name": "gsm8k", "query": row["prompt"][-1]["content"], "ground_truth": "1000"}
    row = run("preprocess_search_r1_dataset", tmp_path / "c", monkeypatch)["train"][0]
    create = row["extra_info"]["tools_kwargs"]["search"]["create_kwargs"]
    assert create == {"ground_truth": {"target": ["A", "B"]}, "question": "who wrote it?", "data_source": "searchR1_nq"}
    for case, option in (("dapo17k", "--with_tool"), ("aime", "--with_tool")):
        info = next(iter(run(case, tmp_path / case, monkeypatch, option).values()))[0]["extra_info"]
        assert info["tools_kwargs"]["code_interpreter"]["create_kwargs"]["ground_truth"] in ("0", "25")


def test_dapo_keeps_each_problem_once(tmp_path, monkeypatch):
    found = run("dapo17k", tmp_path, monkeypatch)["train"]
    assert [row["reward_model"]["ground_truth"] for row in found] == ["0", "1"] and found[0]["extra_info"][
        "id"
    ] == "id-0"


def test_aime_can_be_written_many_times(tmp_path, monkeypatch):
    assert len(run("aime", tmp_path, monkeypatch, "--times", "3")["test"]) == 3


@pytest.mark.parametrize("kind", ["rl", "sft", "rm"])
def test_dialogues_have_the_columns_of_their_use(kind, tmp_path, monkeypatch):
    found = run("full_hh_rlhf", tmp_path, monkeypatch, "--split", kind)["train"][0]
    columns = {"sft": {"prompt", "response"}, "rm": {"prompt", "chosen", "rejected"}}
    assert (tmp_path / "out" / kind / "test.parquet").is_file()
    assert found.keys() == columns.get(kind, {"data_source", "prompt", "ability", "reward_model", "extra_info"})


def test_preferences_have_conversations_and_margins_and_equal_ones_are_left_out(tmp_path, monkeypatch):
    def talk(text):
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]

    pair = {"prompt": "q", "chosen": talk("a"), "rejected": talk("b"), "score_chosen": 8.5, "score_rejected": 6}
    write_source(tmp_path / "source", "train_prefs test_prefs", [pair, {**pair, "rejected": talk("a")}])
    options = ["--local_dataset_path", str(tmp_path / "source"), "--local_save_dir", str(tmp_path / "out")]
    load("ultrafeedback", monkeypatch).main(options)
    (found,) = rows(tmp_path / "out" / "train.parquet")
    assert found == {"prompt": "q", "chosen": talk("a"), "rejected": talk("b"), "margin": 2.5}


def test_generated_pairs_have_a_right_and_a_wrong_answer(tmp_path, monkeypatch):
    load("arithmetic", monkeypatch).main(["--pairs", "--train_size", "20", "--local_save_dir", str(tmp_path)])
    for row in rows(tmp_path / "train.parquet"):
        a, b = int(row["prompt"].split()[2]), int(row["prompt"].split()[4].rstrip("?"))
        assert int(row["chosen"]) == a + b != int(row["rejected"])


@pytest.mark.parametrize("tool", [False, True])
def test_geometry_has_its_figures(tool, tmp_path, monkeypatch):
    example = {"images": [png(picture())], "problem": "<image>Find x.", "answer": "3"}
    for split in ("train", "test"):  # a snapshot of the hub keeps its pieces in data/
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([example] * 2), tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    options = ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")]
    load("geo3k", monkeypatch).main(options + ["--with_tool"] * tool)
    row = rows(tmp_path / "out" / "train.parquet")[0]
    assert row["data_source"] == "hiyouga/geometry3k" and row["reward_model"]["ground_truth"] == "3"
    assert ("tools_kwargs" in row["extra_info"]) is tool and len(row["prompt"]) == 1 + tool
    model = make_tiny_vl_model(tmp_path / "model")
    path = str(tmp_path / "out" / "train.parquet")
    dataset = RLHFDataset(path, hf_tokenizer(model), {"max_prompt_length": 512}, hf_processor(model))
    assert dataset[1]["multi_modal_data"]["image"][0].size == (56, 56)


def test_generated_countdown_tasks_are_solved_by_their_solutions(tmp_path, monkeypatch):
    options = ["--generate", "--train_size", "50", "--test_size", "5", "--local_save_dir", str(tmp_path)]
    script = load("countdown", monkeypatch)
    script.main(options)
    found = rows(tmp_path / "train.parquet")
    assert len(found) == 50 and len(rows(tmp_path / "test.parquet")) == 5
    for row in found:
        truth, text = row["reward_model"]["ground_truth"], row["extra_info"]["one_solution"]
        used = [int(word) for word in text.replace("(", " ").replace(")", " ").split() if word.isdigit()]
        assert sorted(used) == sorted(truth["numbers"])
        assert eval(text, {"__builtins__": {}}) == pytest.approx(truth["target"])  # made two lines above, of ours
    assert list(script.generate(3, random.Random(1))) == list(script.generate(3, random.Random(1)))


def test_generated_conversations_have_turns_and_tools(tmp_path, monkeypatch):
    load("multiturn", monkeypatch).main(["--train_size", "4", "--test_size", "2", "--local_save_dir", str(tmp_path)])
    talk, tool = rows(tmp_path / "train.parquet")[:2]
    assert [m["role"] for m in talk["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    [call] = json.loads(tool["messages"][1]["tool_calls"])
    total = sum(call["function"]["arguments"].values())
    assert tool["messages"][2]["content"] == str(total) and json.loads(tool["tools"])[0]["function"]["name"] == "add"


def test_a_saved_data_set_is_read_too(tmp_path, monkeypatch):
    from datasets import Dataset, DatasetDict

    saved = DatasetDict({split: Dataset.from_list(GSM8K) for split in ("train", "test")})
    saved.save_to_disk(str(tmp_path / "saved"))
    options = ["--local_dataset_path", str(tmp_path / "saved"), "--local_save_dir", str(tmp_path / "out")]
    load("gsm8k", monkeypatch).main(options)
    assert len(rows(tmp_path / "out" / "train.parquet")) == 3


def test_without_network_the_way_out_is_said(tmp_path, monkeypatch):
    script = load("math_dataset", monkeypatch)
    import datasets

    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(SystemExit) as end:
        script.main(["--local_save_dir", str(tmp_path)])
    message = str(end.value)
    assert "DigitalLearningGmbH/MATH-lighteval cannot be loaded" in message and "no route to host" in message
    assert "--local_dataset_path: train.jsonl, test.jsonl or .parquet, with the columns problem, solution" in message


def test_what_the_hub_gives_is_what_a_folder_gives(tmp_path, monkeypatch):
    """A data set as ``load_dataset`` returns it, with images that it would decode."""
    import datasets

    images = {"images": [[png(picture())]] * 2, "problem": ["<image>x?"] * 2, "answer": ["3", "4"]}
    features = datasets.Features(
        {"images": [datasets.Image()], "problem": datasets.Value("string"), "answer": datasets.Value("string")}
    )
    held = datasets.Dataset.from_dict(images, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: datasets.DatasetDict(train=held, test=held))
    load("geo3k", monkeypatch).main(["--local_save_dir", str(tmp_path)])
    found = rows(tmp_path / "train.parquet")
    assert [row["images"] for row in found] == [[png(picture())]] * 2


def test_a_source_with_other_columns_is_refused_with_what_it_should_have(tmp_path, monkeypatch):
    write_source(tmp_path, "train test", [{"task": "x", "solution": "\\boxed{1}"}])
    message = r"train.jsonl, row 0: no column 'problem'; there are task, solution; a row is \{problem, solution"
    with pytest.raises(ValueError, match=message):
        load("math_dataset", monkeypatch).main(
            ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)]
        )


BOXES = {
    "so $\\boxed{\\frac{1}{2}}$.": "\\frac{1}{2}",
    "\\boxed{1} and then \\boxed{{2}}": "{2}",
    "\\fbox{x}": "x",
    "we get $\\boxed 7$": "7",
}


def test_the_last_box_is_the_answer(monkeypatch):
    load("arithmetic", monkeypatch)
    boxed_answer = sys.modules["saving"].boxed_answer
    assert {text: boxed_answer(text) for text in BOXES} == BOXES
    for text, message in (("no box", "has no"), ("\\boxed{1", "not closed")):
        with pytest.raises(ValueError, match=message):
            boxed_answer(text)


def test_every_script_says_how_to_be_called(monkeypatch, capsys):
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("saving", "loading"))
    assert {case.split()[0] for case in CASES} | {
        "geo3k",
        "multiturn",
        "arithmetic",
        "brightness",
        "ultrafeedback",
    } == set(names)
    for name in names:
        script = load(name, monkeypatch)
        with pytest.raises(SystemExit):
            script.main(["--help"])
        assert "--local_save_dir" in capsys.readouterr().out and f"examples/data_preprocess/{name}.py" in script.__doc__

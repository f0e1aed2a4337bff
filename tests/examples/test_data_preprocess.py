import importlib.util
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl.data.rl_dataset import RLHFDataset
from verl.rewards.scorers import default_compute_score
from verl.utils.tiny_model import make_tokenizer
from verl.utils.tiny_vl_model import make_tiny_vl_model
from verl.utils.tokenizer import hf_processor, hf_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "data_preprocess"


@pytest.fixture(params=["arithmetic", "gsm8k"])
def any_script(request, monkeypatch):
    return load(request.param, monkeypatch)


def load(name, monkeypatch):
    """The script as a module, with its own folder first on the path as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"data_preprocess_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(path) -> list[dict]:
    return pq.read_table(path).to_pylist()


ORACLE = {
    "add1": ("What is 3 + 5? Answer with only the number.", "8", 100),
    "mul1": ("What is 3 * 5? Answer with only the number.", "15", 64),
    "even": ("Is 12 an even number? Answer yes or no.", "yes", 90),
    "digits": ("Say something about a cat.", "5", 16),
}


@pytest.mark.parametrize("task", ["add1", "mul1", "max3", "even", "digits"])
def test_a_generated_task_is_in_the_standard_format_and_its_answers_score(tmp_path, monkeypatch, task):
    load("arithmetic", monkeypatch).main(["--task", task, "--local_dir", str(tmp_path), "--train_size", "200"])
    train, test = rows(tmp_path / "train.parquet"), rows(tmp_path / "test.parquet")
    assert len(train) == 200
    for split, part in (("train", train), ("test", test)):
        for i, row in enumerate(part):
            assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
            assert row["reward_model"]["style"] == "rule" and row["extra_info"] == {"split": split, "index": i}
    for row in train[:20]:
        truth = row["reward_model"]["ground_truth"]
        gold = "12345" if task == "digits" else truth
        assert default_compute_score(row["data_source"], gold, truth) == 1.0
        assert default_compute_score(row["data_source"], "cannot say", truth) == 0.0
    prompts = [row["prompt"][0]["content"] for row in test]
    assert len(set(prompts)) == len(prompts) == min(100, ORACLE.get(task, (0, 0, 100))[2])
    if task in ORACLE:
        prompt, answer, _ = ORACLE[task]
        everything = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in train + test}
        assert everything[prompt] == answer


def test_largest_of_three_is_the_largest(tmp_path, monkeypatch):
    load("arithmetic", monkeypatch).main(["--task", "max3", "--local_save_dir", str(tmp_path), "--train_size", "50"])
    for row in rows(tmp_path / "train.parquet"):
        numbers = [int(word.strip(",?")) for word in row["prompt"][0]["content"].split() if word[0].isdigit()]
        assert len(numbers) == 3 and row["reward_model"]["ground_truth"] == str(max(numbers))


def test_the_seed_decides_the_generated_rows(tmp_path, monkeypatch):
    main = load("arithmetic", monkeypatch).main
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        main(["--local_save_dir", str(tmp_path / name), "--seed", seed])
    a, b, c = (rows(tmp_path / name / "train.parquet") for name in "abc")
    assert a == b != c


def test_generated_rows_load_as_a_dataset(tmp_path, monkeypatch):
    load("arithmetic", monkeypatch).main(["--local_save_dir", str(tmp_path), "--train_size", "8"])
    dataset = RLHFDataset(str(tmp_path / "train.parquet"), make_tokenizer(), {"max_prompt_length": 96})
    assert len(dataset) == 8 and dataset[3]["index"] == 3 and dataset[0]["attention_mask"].sum() > 40


def test_generated_images_load_as_a_dataset_and_reward_who_sees(tmp_path, monkeypatch):
    load("brightness", monkeypatch).main(["--local_save_dir", str(tmp_path), "--train_size", "6", "--test_size", "2"])
    model = make_tiny_vl_model(tmp_path / "model")
    config = {"max_prompt_length": 96}
    dataset = RLHFDataset(str(tmp_path / "train.parquet"), hf_tokenizer(model), config, hf_processor(model))
    for number in range(6):
        row = dataset[number]
        [image] = row["multi_modal_data"]["image"]
        kind = "bright" if sum(image.convert("L").tobytes()) / 56**2 > 128 else "dark"
        assert row["reward_model"]["ground_truth"] == kind == ("bright", "dark")[number % 2]
        score = {text: default_compute_score(row["data_source"], text, kind) for text in ("1234", "abcd", "12ab", "")}
        assert score["12ab"] == 0.5 and score[""] == 0.0 and sorted([score["1234"], score["abcd"]]) == [0.0, 1.0]


def write_gsm8k(folder, answer="2 * 5 = <<2*5=10>>10\n#### 1,010"):
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(
            json.dumps({"question": f"How many in {split}?", "answer": answer}) + "\n"
        )


def test_gsm8k_from_a_folder_of_json_lines_scores_its_own_answers(tmp_path, monkeypatch):
    write_gsm8k(tmp_path)
    out = tmp_path / "out"
    load("gsm8k", monkeypatch).main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(out)])
    for split in ("train", "test"):
        [row] = rows(out / f"{split}.parquet")
        assert row["data_source"] == "openai/gsm8k" and row["reward_model"] == {"style": "rule", "ground_truth": "1010"}
        question = f"How many in {split}?"
        instruction = 'Let\'s think step by step and output the final answer after "####".'
        assert row["prompt"] == [{"role": "user", "content": f"{question} {instruction}"}]
        assert row["extra_info"]["question"] == question and row["extra_info"]["split"] == split
        assert default_compute_score("openai/gsm8k", row["extra_info"]["answer"], "1010") == 1.0


def test_gsm8k_names_the_row_without_an_answer(tmp_path, monkeypatch):
    write_gsm8k(tmp_path, answer="ten")
    with pytest.raises(ValueError, match="train.jsonl, row 0: the answer has no '#### <number>'"):
        load("gsm8k", monkeypatch).main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)])


def test_gsm8k_names_the_file_it_misses(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="holds no train.jsonl"):
        load("gsm8k", monkeypatch).main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)])


def test_results_are_copied_to_hdfs(tmp_path, monkeypatch):
    load("arithmetic", monkeypatch)
    copies = []
    monkeypatch.setattr(sys.modules["saving"], "makedirs", lambda path: copies.append(("makedirs", path)))
    monkeypatch.setattr(sys.modules["saving"], "copy", lambda src, dst: copies.append((src, dst)))
    sys.modules["saving"].save_splits({}, str(tmp_path), "hdfs://x/y")
    assert copies == [("makedirs", "hdfs://x/y"), (str(tmp_path), "hdfs://x/y")]


def test_help_names_the_output_options(any_script, capsys):
    with pytest.raises(SystemExit) as end:
        any_script.main(["--help"])
    assert end.value.code == 0
    assert all(name in capsys.readouterr().out for name in ("--local_save_dir",)) and any_script.__doc__

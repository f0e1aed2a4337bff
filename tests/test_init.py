"""``verl init``: what it writes is accepted, runs, and is never written over what is there."""

import json
from pathlib import Path

import pytest

import verl
from tests.support.commands import calls_of
from verl.cli import main
from verl.config.load import load_ppo_config
from verl.init import ALGORITHMS, TASKS
from verl.utils.import_utils import load_extern_type


def test_the_first_command_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my run", "--gpus", "0", "--yes"]) == 0
    assert "bash 'my run'/run.sh " in capsys.readouterr().out
    [call] = calls_of(tmp_path / "my run" / "run.sh", tmp_path, "trainer.seed=2", environment={"PYTHON": "python3"})
    assert call == [
        "-m",
        "verl",
        "ppo",
        "--config-path",
        str(tmp_path / "my run"),
        "--config-name",
        "config",
        "trainer.seed=2",
    ]
    monkeypatch.chdir(tmp_path / "my run")
    trainer = verl.Trainer("config.yaml", trainer={"total_training_steps": 1, "val_before_train": False}).fit()
    assert len(trainer.samples) == 64 and (Path("run") / "global_step_1").is_dir()


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"grpo"}))
def test_every_algorithm_is_accepted_with_rows_of_a_users_file(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sums.csv").write_text("id,question,solution\n" + "".join(f"{i},{i} + 1?,#### {i + 1}\n" for i in range(40)))
    gpus = "8" if algorithm == "gae" else "0"
    words = ["--data", "sums.csv", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--gpus", gpus, "--algorithm", algorithm]
    assert main(["init", "mine", "-y", *words]) == 0
    config = load_ppo_config([], str(tmp_path / "mine"), "config")
    assert config.algorithm.adv_estimator == algorithm and config.trainer.world_size == max(1, int(gpus))
    packed = config.actor_rollout_ref.actor.use_remove_padding, config.critic.model.use_remove_padding
    assert packed == ((True, True) if gpus == "8" else (False, False)), "a CPU decides by itself"
    rows = [json.loads(line) for line in Path("mine/data/train.jsonl").read_text().splitlines()]
    assert len(rows) == 38 and len(Path("mine/data/test.jsonl").read_text().splitlines()) == 2
    assert rows[3]["prompt"][0]["content"] == "3 + 1?" and rows[3]["reward_model"]["ground_truth"] == "#### 4"


ANSWERS = {  # task -> ground truth, then responses and what they earn
    "math": ("#### 1,018", {"It is 1018.0": 1.0, "It is 17": 0.1, "I do not know": 0.0, "": 0.0}),
    "text": ("New York", {"In new-york, of course.": 1.0, "New Yorker": 0.0, "": 0.0}),
    "tags": ("7", {"<answer>5</answer> no, <answer> 7 </answer>": 1.0, "<answer>70</answer>": 0.1, "7": 0.0}),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_reward_of_a_task_earns_what_it_says(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--task", task, "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--gpus", "0", "-y"]) == 0
    score = load_extern_type("mine/reward.py", "compute_score")
    truth, responses = ANSWERS[task]
    assert {text: score("x", text, truth, None) for text in responses} == responses


def test_nothing_is_overwritten_and_unusable_data_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/reward.py").write_text("# mine\n")
    assert main(["init", "mine", "-y"]) == 2 and "mine/reward.py is there already" in capsys.readouterr().err
    assert Path("mine/reward.py").read_text() == "# mine\n" and len(list(Path("mine").iterdir())) == 1
    Path("rows.jsonl").write_text('{"a": 1, "b": 2}\n')
    assert main(["init", "new", "--data", "rows.jsonl", "-y"]) == 2
    assert "no column for prompts was found: there are a, b. Name one by --prompt-column" in capsys.readouterr().err
    assert main(["init", "new", "--data", "none.jsonl", "-y"]) == 2 and not Path("new").exists()


def test_on_a_terminal_what_no_flag_says_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked, answers = (
        [],
        {"folder": "x", "task": "text", "GPUs": "0", "algorithm": "rloo", "model": "Qwen/Q"},
    )

    def answer(question):
        asked.append(question)
        wanted = next((text for name, text in answers.items() if question.startswith(name)), "")
        return "nonsense" if question.startswith("algorithm") and asked.count(question) == 1 else wanted

    monkeypatch.setattr("builtins.input", answer)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert main(["init"]) == 0 and len(asked) == 7, "a wrong answer is asked for again"
    config = load_ppo_config([], str(tmp_path / "x"), "config")
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.model.path) == ("rloo", "Qwen/Q")

"""Evaluation: a run's own figures for its responses, closed forms, and what is refused."""

import json
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.runs import make_task, overrides, run_job
from verl.trainer.generation.evaluation import interval, pass_at_k
from verl.trainer.main_eval import main
from verl.trainer.main_generation import main as generate

GREEDY = ["trainer.device=cpu", "trainer.controller=local", "trainer.n_gpus_per_node=1", "rollout.name=hf",
          "rollout.dtype=float32", "trainer.seed=3", "trainer.progress_bar=false"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step with its checkpoint, validated before it with four samples a prompt."""
    folder = tmp_path_factory.mktemp("evaluation")
    task = make_task(folder)
    settings = {
        "trainer.total_training_steps": 1, "trainer.val_before_train": True, "trainer.save_freq": 1,
        "trainer.validation_data_dir": folder / "validation", "trainer.seed": 3,
        "actor_rollout_ref.rollout.val_kwargs.n": 4, "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    }  # fmt: skip
    trainer = run_job(overrides(task, **settings))
    return folder, task, dict(trainer.validations)[0]


def evaluate(*words, capsys=None):
    main([str(word) for word in words])
    path = next(word.partition("=")[2] for word in map(str, words) if word.startswith("data.results_path="))
    return json.loads(open(path).read())


def test_the_samples_of_a_validation_give_the_figures_of_the_run(run, tmp_path, capsys):
    folder, task, figures = run
    report = evaluate(
        folder / "validation" / "0.jsonl", f"custom_reward_function.path={task['custom_reward_function.path']}",
        f"data.results_path={tmp_path / 'f.json'}",
    )  # fmt: skip
    assert report["metrics"] == figures and "val-core/digits/reward/mean@4" in figures
    found = report["sources"]["digits"]
    assert (found["prompts"], found["responses"]) == (8, 32)
    best = found["figures"]["reward best@4"]
    assert best["low"] < best["value"] == figures["val-core/digits/reward/best@4/mean"] < best["high"]
    assert "reward mean@4" in capsys.readouterr().out


def test_a_model_on_a_data_set_gets_the_figures_of_the_validation_before_the_first_step(run, tmp_path):
    _, task, figures = run
    report = evaluate(
        task["actor_rollout_ref.model.path"], task["data.val_files"], *GREEDY, "data.n_samples=4", "data.batch_size=3",
        "rollout.temperature=1.0", "rollout.response_length=12", "rollout.prompt_length=64",
        f"custom_reward_function.path={task['custom_reward_function.path']}", f"data.output_path={tmp_path}/r.parquet",
        f"data.results_path={tmp_path / 'f.json'}",
    )  # fmt: skip
    assert report["metrics"] == figures and report["model"] == task["actor_rollout_ref.model.path"]


def test_the_folder_of_a_run_stands_for_its_newest_checkpoint(run, tmp_path):
    folder, task, _ = run
    common = [*GREEDY, "rollout.response_length=4", "data.n_samples=1", "rollout.do_sample=false"]
    for model, path in ((folder / "run", "run"), (folder / "run" / "merged_step_1", "merged")):
        generate([str(model), task["data.val_files"], *common, f"data.output_path={tmp_path}/{path}.parquet"])
    run, merged = (pq.read_table(tmp_path / f"{path}.parquet")["responses"] for path in ("run", "merged"))
    assert run == merged and (folder / "run" / "merged_step_1" / "config.json").exists()


def test_sources_majorities_and_a_column_of_plain_answers(tmp_path, capsys):
    rows = [
        {"data_source": source, "responses": [f"#### {answer}" for answer in answers], "reward_model": "7"}
        for source, answers in [("openai/gsm8k", "7712"), ("openai/gsm8k", "1234"), ("math", "7777")]
    ]
    rows[2]["responses"] = [r"\boxed{7}", "7", r"\boxed{8}", r"\boxed{7}"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    report = evaluate(tmp_path / "r.parquet", f"data.results_path={tmp_path / 'f.json'}")
    figures = {source: found["figures"] for source, found in report["sources"].items()}
    assert figures["openai/gsm8k"]["reward mean@4"]["value"] == 0.25  # (2 of 4 and none of 4)
    assert figures["openai/gsm8k"]["correct pass@2"]["value"] == pytest.approx((1 - 1 / 6) / 2)
    assert figures["math"]["correct pass@4"]["value"] == 1.0
    assert figures["all"]["correct pass@1"]["value"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    evaluate(tmp_path / "r.parquet", f"data.results_path={tmp_path / 'f.json'}")
    assert "(replaced)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"data_source": "openai/gsm8k", "reward_model": "7"}, "has no column 'responses'"),
        ({"data_source": "openai/gsm8k", "responses": ["x"]}, "'reward_model'"),
        ({"data_source": "openai/gsm8k", "responses": [], "reward_model": "7"}, "row 0: 'responses'"),
        ({"data_source": "openai/gsm8k", "responses": ["x"], "reward_model": {"style": "rule"}}, "no ground_truth"),
        ({"data_source": "nobody/knows", "responses": ["x"], "reward_model": "7"}, "nobody/knows"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused_by_name(tmp_path, capsys, row, said):
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "r.jsonl")])
    assert said in capsys.readouterr().err and not list(tmp_path.glob("*.eval.json"))


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response():
    samples = {"a": [1, 0, 0, 1, 0], "b": [0, 0, 0, 0, 0], "c": [1, 1, 1, 1, 0]}
    uids = [uid for uid, values in samples.items() for _ in values]
    found = pass_at_k(uids, [float(value) for values in samples.values() for value in values])
    assert list(found) == ["pass@1", "pass@2", "pass@4", "pass@5"]
    for k in (1, 2, 4, 5):
        expected = [np.mean([max(subset) for subset in combinations(values, k)]) for values in samples.values()]
        assert found[f"pass@{k}"] == pytest.approx(expected)


def test_intervals_are_wilsons_for_shares_and_cover_a_mean_as_often_as_they_say():
    assert interval(np.array([1.0] * 8 + [0.0] * 2)) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert interval(np.zeros(10)) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    random = np.random.RandomState(0)
    ends = np.array([interval(random.beta(2, 3, 60)) for _ in range(200)])
    assert 0.9 < np.mean((ends[:, 0] < 0.4) & (0.4 < ends[:, 1])) < 0.99

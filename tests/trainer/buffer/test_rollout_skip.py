"""A batch that was sampled once is taken from disk when the same is asked for, and only then."""

import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("skip"))


@pytest.fixture
def run(task, tmp_path, capsys):
    """Two steps that keep their batches; returns the trainer, its numbers and what was printed."""

    def start(name, **settings):
        folder = tmp_path / name
        keys = {"skip_rollout": True, "skip_dump_dir": tmp_path / "kept", "calculate_log_probs": True}
        keys = {f"actor_rollout_ref__rollout__{key}": value for key, value in keys.items()}
        trainer = run_job(
            overrides(
                task,
                **{
                    "trainer__total_training_steps": 2,
                    "trainer__logger": "[console,file]",
                    "trainer__default_local_dir": folder,
                    **keys,
                    **settings,
                },
            )
        )
        return trainer, [row["data"] for row in read_metrics(folder / "metrics.jsonl")], capsys.readouterr().out

    return start


def learned(rows):
    return [{name: row[name] for name in row if name.startswith(("actor/", "critic/", "response"))} for row in rows]


def kept(tmp_path):
    return sorted((tmp_path / "kept" / "verl_examples" / "gsm8k").glob("*.safetensors"))


def test_the_next_run_learns_the_same_without_the_engine(run, tmp_path):
    _, first, out = run("first")
    assert "batches are read" not in out and len(kept(tmp_path)) == 2
    times = [path.stat().st_mtime_ns for path in kept(tmp_path)]
    _, second, out = run("second")
    assert learned(second) == learned(first)
    assert not [name for name in second[0] if name.startswith("rollout/engine/")]  # it was not asked
    assert out.count("batches are read from") == 1
    assert times == [path.stat().st_mtime_ns for path in kept(tmp_path)]


def test_batches_made_with_other_settings_are_refused_by_name_and_saved_too(run, tmp_path):
    run("first")
    _, rows, out = run("second", actor_rollout_ref__rollout__temperature=0.5)
    assert out.count("is not used, its key differs: sampling.temperature was 1.0, is 0.5") == 1
    assert len(kept(tmp_path)) == 4 and rows[0]["rollout/engine/requests"] == 16
    run("third", data__train_batch_size=8, actor_rollout_ref__actor__ppo_mini_batch_size=8)
    assert len(kept(tmp_path)) == 6


def test_validation_is_always_sampled(run):
    run("first", trainer__test_freq=1)
    trainer, rows, _ = run("second", trainer__test_freq=1)
    assert [step for step, _ in trainer.validations] == [1, 2]
    assert all(rows[i]["val-core/digits/reward/mean@1"] is not None for i in range(2))


def test_the_greedy_responses_of_remax_are_kept_apart(run, tmp_path):
    settings = {"algorithm__adv_estimator": "remax"}
    _, first, out = run("first", **settings)
    assert len(kept(tmp_path)) == 4 and "its key differs" not in out
    _, second, _ = run("second", **settings)
    assert learned(second) == learned(first)

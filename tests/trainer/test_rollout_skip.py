"""A batch that was sampled once is taken from disk when the same is asked for, and only then."""

import numpy as np
import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_skip import load_batch, read_facts, save_batch
from verl.utils.ragged import Layout, Ragged


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
    assert "batches are taken" not in out and len(kept(tmp_path)) == 2
    times = [path.stat().st_mtime_ns for path in kept(tmp_path)]
    _, second, out = run("second")
    assert learned(second) == learned(first)
    assert not [name for name in second[0] if name.startswith("rollout/engine/")]  # it was not asked
    assert out.count("batches are taken from") == 1
    assert times == [path.stat().st_mtime_ns for path in kept(tmp_path)]


def test_batches_made_with_other_settings_are_refused_by_name_and_kept_beside(run, tmp_path):
    run("first")
    _, rows, out = run("second", actor_rollout_ref__rollout__temperature=0.5)
    assert out.count("is not used, it was made otherwise: sampling.temperature was 1.0, is 0.5") == 1
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
    assert len(kept(tmp_path)) == 4 and "made otherwise" not in out
    _, second, _ = run("second", **settings)
    assert learned(second) == learned(first)


def batch():
    layout = Layout(torch.tensor([0, 0]), torch.tensor([3, 0]), 4)
    columns = {"responses": Ragged(torch.tensor([5, 6, 7]), layout, 9)}
    columns["rollout_log_probs"] = columns["responses"].like(torch.tensor([-1.0, -2.5, -0.125]))
    dense = {"turns": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), "half": torch.ones(2, dtype=torch.bfloat16)}
    arrays = {"finish_reason": np.array(["stop", "abort"], dtype=object)}
    return DataProto.from_ragged(columns, dense, arrays, {"pad_token_id": 9, "timing": {"gen": 1.0}})


def test_a_batch_comes_back_as_it_was(tmp_path):
    save_batch(batch(), tmp_path / "b.safetensors", {"step": 3})
    again = load_batch(tmp_path / "b.safetensors")
    for name in batch().keys():
        assert (
            torch.equal(again.column(name), batch().column(name))
            and again.column(name).dtype == batch().column(name).dtype
        )
    assert again.ragged("responses").layout is again.ragged("rollout_log_probs").layout
    assert again.non_tensor_batch["finish_reason"].tolist() == ["stop", "abort"]
    assert again.meta_info == {"pad_token_id": 9, "timing": {}} and read_facts(tmp_path / "b.safetensors") == {
        "step": 3
    }
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"]


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    path = tmp_path / "b.safetensors"
    save_batch(batch(), path, {})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="b.safetensors cannot be read.*Delete it"):
        load_batch(path)
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="is no batch kept by rollout.skip_rollout"):
        load_batch(path)


def test_what_json_cannot_hold_is_refused(tmp_path):
    odd = batch()
    odd.non_tensor_batch["tool"] = np.array([object(), object()], dtype=object)
    with pytest.raises(ValueError, match="skip_rollout=true: the batch cannot be kept.*tool"):
        save_batch(odd, tmp_path / "b.safetensors", {})

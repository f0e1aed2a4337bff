"""Training on examples with Ray: its processes start before the driver loads, and the run takes them."""

import json

import pytest

from tests.support.runs import train_sft
from verl.single_controller.ray.pools import RayResourcePool
from verl.utils.tiny_model import make_tiny_model


@pytest.mark.ray
def test_the_ranks_of_sft_on_ray_are_those_that_started_ahead(tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=1)
    rows = [{"question": f"{i}?", "answer": "ab" * (i % 5 + 1)} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        *("trainer.device=cpu", "trainer.logger=[file]", "trainer.progress_bar=false", "data.train_batch_size=5"),
        *(f"model.path={tmp_path / 'model'}", f"data.train_files={tmp_path / 'rows.jsonl'}"),
        *("trainer.total_training_steps=1", "trainer.n_gpus_per_node=1", "trainer.save_freq=-1"),
        "trainer.export_model=false",
    ]
    taken = []
    take = RayResourcePool.take_actors
    monkeypatch.setattr(
        RayResourcePool, "take_actors", lambda pool, options: taken.append(take(pool, options)) or taken[-1]
    )

    def run(controller):
        folder = tmp_path / controller
        return train_sft([*words, f"trainer.controller={controller}", f"trainer.default_local_dir={folder}"])[1]

    on_ray, local = run("ray"), run("local")
    assert [len(actors) for actors in taken] == [1]
    for name in ("train/loss", "train/grad_norm"):
        assert on_ray[1][name] == pytest.approx(local[1][name], rel=1e-5)

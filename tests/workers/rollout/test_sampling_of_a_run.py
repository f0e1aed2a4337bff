"""A whole run samples as its configuration says: training by its own keys, validation by its own."""

import json

from tests.support.runs import make_task, overrides, run_job


def test_a_run_stops_penalises_and_bans_as_configured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {
        "data__max_response_length": 40,
        "actor_rollout_ref__rollout__stop": "['e','stop']",
        "actor_rollout_ref__rollout__use_fire_sampling": True,
        "actor_rollout_ref__rollout__min_p": 0.001,
        "actor_rollout_ref__rollout__logit_bias": "{5:-100}",  # a space, after four special tokens and a newline
        "actor_rollout_ref__rollout__val_kwargs__n": 3,
        "actor_rollout_ref__rollout__val_kwargs__do_sample": True,
        "actor_rollout_ref__rollout__val_kwargs__temperature": 1.0,
        "actor_rollout_ref__rollout__val_kwargs__stop": "[]",
        "trainer__rollout_data_dir": str(tmp_path / "train"),
        "trainer__validation_data_dir": str(tmp_path / "val"),
        "trainer__val_before_train": True,
        "trainer__total_training_steps": 1,
    }
    run_job(overrides(make_task(tmp_path), **settings))
    train, val = (
        [json.loads(line) for line in (tmp_path / place).read_text().splitlines()]
        for place in ("train/1.jsonl", "val/0.jsonl")
    )
    assert len(train) == 16 and len(val) == 24 and len({row["output"] for row in val}) > 8
    ended = [row["output"] for row in train if "e" in row["output"]]
    assert ended and all(text.index("e") == len(text) - 1 for text in ended)
    assert any("e" in row["output"][:-1] for row in val)
    assert not any(" " in row["output"] for row in train + val)

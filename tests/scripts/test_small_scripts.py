"""Scripts of a screen: random models, the viewer of samples, the whole configuration as a file."""

import json
import runpy
import subprocess
import sys

import pytest
import yaml

from tests.support.commands import ROOT
from verl.config.load import load_ppo_config


def run(monkeypatch, name, *words):
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")


def test_a_random_model_of_a_size_and_one_like_it(tmp_path, monkeypatch, capsys):
    run(
        monkeypatch, "init_random_model.py", "--output_path", tmp_path / "a", "--new_config", '{"num_hidden_layers": 3}'
    )
    (tmp_path / "changes.json").write_text('{"num_hidden_layers": 1, "intermediate_size": 32}')
    like = ["--hf_model_path", tmp_path / "a", "--new_config_path", tmp_path / "changes.json"]
    run(monkeypatch, "init_random_model.py", *like, "--output_path", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"], config["hidden_size"]) == (1, 32, 64)
    assert "parameters, random" in capsys.readouterr().out and (tmp_path / "b" / "tokenizer.json").exists()
    for words, text in ((["--new_config", '{"num_layer": 1}'], "num_layer is not in"), ([], "holds a model already")):
        folder = tmp_path / ("c" if words else "b")
        with pytest.raises(SystemExit):
            run(monkeypatch, "init_random_model.py", *like[:2], *words, "--output_path", folder)
        assert text in capsys.readouterr().err


def test_the_whole_configuration_is_a_configuration(tmp_path):
    words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=hf"]
    words += ["actor_rollout_ref.actor.use_dynamic_bsz=true", "trainer.seed=5"]
    command = ["bash", str(ROOT / "scripts" / "generate_trainer_config.sh"), *words]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(text)["trainer"]["seed"] == 5 and "${" not in text
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{text}")
    assert load_ppo_config([], str(tmp_path), "mine").to_dict() == load_ppo_config(words).to_dict()


def test_the_viewer_shows_the_samples_of_a_run(tmp_path, monkeypatch, capsys):
    row = {"input": "2 + 2?", "output": "four", "gts": "4", "score": 0.5, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, "rollout_viewer.py", tmp_path, "--best", "1")
    assert "four" in capsys.readouterr().out

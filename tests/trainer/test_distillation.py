"""On-policy distillation as a user runs it: one and several teachers, every kind of loss, and a resumed run."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.runs import make_task, overrides, read_metrics, run_job
from tests.support.tiny_models import make_tiny_model
from tests.workers.rollout.conftest import rollout_config
from verl.config.base import ConfigError
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.server.server import RolloutServer

LOSS = "distillation__distillation_loss"
MODELS = "distillation__teacher_models"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    task = make_task(folder, rows=16)
    for number, name in enumerate(("one", "two")):
        make_tiny_model(folder / name, family="qwen2", seed=70 + number)
    return task | {"folder": str(folder)}


@pytest.fixture(scope="module")
def served(task):
    """URL of a server that runs the teacher ``one``."""
    folder = Path(task["folder"]) / "one"
    engine = HFRollout(str(folder), rollout_config(load_format="auto"))
    server = RolloutServer(engine, engine.version, tokenizer=hf_tokenizer(str(folder)))
    yield server.start()
    server.stop()


def run(task, folder, monkeypatch, steps=1, models=None, **settings):
    """The metrics of each step."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    places = Path(task["folder"])
    models = models or {"one": None}
    for name, key in models.items():
        settings.setdefault(f"{MODELS}__{name}__model_path", places / name)
        settings |= {f"{MODELS}__{name}__key": key} if key else {}
    settings = {
        "trainer__logger": "[file]",
        "trainer__total_training_steps": steps,
        "trainer__default_local_dir": folder / "run",
        "distillation__enabled": True,
        "distillation__teacher__fsdp_config__mixed_precision__param_dtype": "fp32",
        **settings,
    }
    run_job(overrides({key: value for key, value in task.items() if key != "folder"}, **settings))
    return [row["data"] for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    "settings",
    [
        {f"{LOSS}__loss_mode": "jsd_topk", f"{LOSS}__topk": 8},
        {f"{LOSS}__loss_mode": "reverse_kl_full", f"{LOSS}__use_task_rewards": False},
        {f"{LOSS}__loss_mode": "k1", f"{LOSS}__use_policy_gradient": True, f"{LOSS}__policy_loss_mode": "cispo"},
    ],
    ids=lambda settings: settings[f"{LOSS}__loss_mode"],
)
def test_a_step_trains_with_each_kind_of_loss_and_is_the_same_with_a_teacher_elsewhere(
    task, tmp_path, monkeypatch, settings, served
):
    [step] = run(task, tmp_path, monkeypatch, **settings)
    assert step["actor/grad_norm"] > 0 and step["actor/nonfinite_steps"] == 0 and step["distill/loss"] != 0
    is_full = settings[f"{LOSS}__loss_mode"].endswith("full")
    assert ("timing_s/teacher" in step) == ("distill/kl" in step) == (not is_full)
    assert ("distill/topk_mass" in step) == (f"{LOSS}__topk" in settings)
    apart = {"distillation__nnodes": 1}
    elsewhere = {
        "jsd_topk": [
            {f"{MODELS}__one__server_urls": served, f"{MODELS}__one__model_path": "null"},
            {**apart, "distillation__n_gpus_per_node": 1, f"{MODELS}__one__inference__dtype": "float32"},
        ],
        "k1": [{**apart, "distillation__n_gpus_per_node": 2, "distillation__teacher__strategy": "fsdp2"}],
    }.get(settings[f"{LOSS}__loss_mode"], [])
    for number, place in enumerate(elsewhere):
        [other] = run(task, tmp_path / str(number), monkeypatch, **settings, **place)
        same = [name for name in step if name.startswith(("actor/", "distill/", "critic/score"))]
        assert {name: other[name] for name in same} == pytest.approx({n: step[n] for n in same}, rel=1e-4, abs=1e-5)


def test_a_server_that_is_not_there_stops_a_run_before_a_model_is_loaded(task, tmp_path, monkeypatch):
    nobody = {f"{MODELS}__one__server_urls": "http://127.0.0.1:9", f"{MODELS}__one__model_path": "null"}
    with pytest.raises(ConfigError, match="one.server_urls=http://127.0.0.1:9 cannot be reached"):
        run(task, tmp_path, monkeypatch, **nobody)


def test_a_resumed_run_goes_on_bit_for_bit_and_teachers_share_out_the_rows(task, tmp_path, monkeypatch):
    data = tmp_path / "train.parquet"
    table = pq.read_table(task["data.train_files"])
    sources = ["digits" if row % 2 else "letters" for row in range(len(table))]
    pq.write_table(table.set_column(table.schema.get_field_index("data_source"), "data_source", [sources]), data)
    options = {
        **{"models": {"one": "digits", "two": "letters"}, "data__train_files": data, "trainer__save_freq": 1},
        **{f"{LOSS}__loss_mode": "forward_kl_topk", f"{LOSS}__topk": 8, f"{LOSS}__use_task_rewards": False},
    }
    whole = run(task, tmp_path / "whole", monkeypatch, steps=2, **options)
    run(task, tmp_path / "parts", monkeypatch, steps=1, **options)
    parts = run(task, tmp_path / "parts", monkeypatch, steps=2, **options)
    for one, other in zip(whole, parts, strict=True):
        same = {name for name in one if name.startswith(("actor/", "distill/"))}
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    assert {"distill/kl/one", "distill/kl/two"} <= whole[0].keys()


def make_writer_of_digits(folder):
    """A model of random weights and another family, whose last layer has a bias towards digits."""
    make_tiny_model(folder, "phi")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    digits = [token for text, token in tokenizer.get_vocab().items() if text.isdigit()]
    with torch.no_grad():
        model.lm_head.bias[digits] += 7.0
    model.save_pretrained(folder)


@pytest.mark.learning
def test_a_student_of_random_weights_writes_as_its_teacher_does_without_rewards(task, tmp_path, monkeypatch):
    make_writer_of_digits(Path(task["folder"]) / "writer")
    options = {f"{LOSS}__loss_mode": "forward_kl_topk", f"{LOSS}__topk": 16, f"{LOSS}__use_task_rewards": False}
    options |= {"actor_rollout_ref__actor__optim__lr": "1e-2", "actor_rollout_ref__actor__skip_old_log_probs": True}
    steps = run(task, tmp_path, monkeypatch, steps=20, models={"writer": None}, **options)
    rewards = [step["critic/score/mean"] for step in steps]
    assert max(rewards[:2]) < 0.3 and min(rewards[-3:]) > 0.8
    assert steps[-1]["distill/loss"] < 0.05 * steps[0]["distill/loss"]
    assert steps[-1]["distill/student_topk_mass"] > 0.9 > steps[0]["distill/student_topk_mass"]


def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(task, tmp_path, monkeypatch):
    places = Path(task["folder"])
    other = make_tiny_model(tmp_path / "other", family="qwen2", tokenizer="byte")
    (places / "other").symlink_to(other)
    with pytest.raises(ConfigError, match="another vocabulary than the policy.*verl sft"):
        run(task, tmp_path / "a", monkeypatch, models={"other": None})
    with pytest.raises(ValueError, match="data_source='digits' is the key of no teacher.*'letters', 'maths'"):
        run(task, tmp_path / "b", monkeypatch, models={"one": "letters", "two": "maths"})
    assert json.loads((places / "one" / "config.json").read_text())["vocab_size"]

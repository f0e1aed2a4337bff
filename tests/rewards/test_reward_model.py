"""A run whose rewards come from a model: who scores what, what is refused before it starts, and that it learns."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.learning import check_learned
from tests.support.runs import make_task, overrides, read_metrics, run_job, write_prompts
from tests.trainer.test_learning import LEARNING, TINY
from verl.config.load import load_ppo_config
from verl.protocol import DataProto
from verl.rewards.managers.rule import RewardError
from verl.rewards.reward_model import by_style, check_reward_model, check_texts, is_judged
from verl.utils.tiny_model import make_digit_judge, make_tiny_model, make_tokenizer

RM = {
    "reward_model__enable": True,
    "reward_model__strategy": "local",
    "reward_model__micro_batch_size_per_gpu": 32,
    "data__return_raw_chat": True,
    "custom_reward_function__path": None,
}
FEW = {
    "trainer__total_training_steps": 2,
    "trainer__logger": "[file]",
    "data__train_batch_size": 2,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run with a judge of digits; returns the trainer and the metrics of each step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.chdir(tmp_path)

    def call(size="tiny", **settings):
        task = make_task(tmp_path, size=size)
        task["reward_model.model.path"] = make_digit_judge(tmp_path / "judge")
        trainer = run_job(overrides(task, **{**RM, **settings}))
        return trainer, [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]

    return call


@pytest.mark.learning
def test_a_policy_learns_what_the_reward_model_likes(run):
    _, steps = run(**LEARNING | TINY)
    scores = [step["reward_model/score/mean"] for step in steps]
    check_learned("reward model", scores)
    assert scores == pytest.approx([step["critic/score/mean"] for step in steps])


def test_ppo_takes_a_reward_model_also_for_the_start_of_its_critic(run, tmp_path):
    critic = {
        "algorithm__adv_estimator": "gae",
        "critic__model__path": str(tmp_path / "judge"),
        "critic__strategy": "local",
        "critic__ppo_micro_batch_size_per_gpu": 8,
        "trainer__critic_warmup": 1,
    }
    _, steps = run(**FEW, **critic)
    first = steps[0]
    assert abs(first["critic/values/mean"] - first["reward_model/score/mean"]) < 0.1
    assert first["critic/grad_norm"] > 0 and "actor/grad_norm" not in first


def test_two_ranks_score_what_one_does(run):
    two = {
        "trainer__n_gpus_per_node": 2,
        "reward_model__strategy": "fsdp2",
        "reward_model__micro_batch_size_per_gpu": None,
        "reward_model__use_dynamic_bsz": True,
        "reward_model__forward_max_token_len_per_gpu": 200,
        "actor_rollout_ref__actor__strategy": "fsdp2",
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4,
    }
    _, [one, *_] = run(**FEW, reward_model__model__input_tokenizer=None)
    _, [other, *_] = run(**FEW, **two, reward_model__model__input_tokenizer=None)
    for name in ("score/mean", "score/max", "tokens/mean"):
        assert one[f"reward_model/{name}"] == pytest.approx(other[f"reward_model/{name}"], rel=1e-2)


MIX = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 5.0
"""
MANAGER = '''
from verl.rewards.managers import register
from verl.rewards.managers.built_in import NaiveRewardManager


@register("sum_of_both")
class SumOfBoth(NaiveRewardManager):
    """The reward model's score and the function's."""

    def __call__(self, data, return_dict=False):
        judged = data.pop(batch_keys=["rm_scores"]).column("rm_scores") if "rm_scores" in data.keys() else 0
        result = super().__call__(data, return_dict=True)
        result["reward_tensor"] = result["reward_tensor"] + judged
        return result if return_dict else result["reward_tensor"]
'''


@pytest.mark.parametrize("background", [False, True])
def test_a_manager_may_add_a_rule_to_the_model_also_during_the_log_probs(background, run, tmp_path, monkeypatch):
    (tmp_path / "mix.py").write_text(MIX)
    (tmp_path / f"managers_{background}.py").write_text(MANAGER.replace("sum_of_both", f"sum_of_both_{background}"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "custom_reward_function__path": str(tmp_path / "mix.py"),
        "actor_rollout_ref__model__external_lib": f"managers_{background}",
        "reward_model__reward_manager": f"sum_of_both_{background}",
        "reward_model__launch_reward_fn_async": background,
    }
    _, steps = run(**FEW, **settings)
    for step in steps:
        assert step["critic/score/mean"] == pytest.approx(5 + step["reward_model/score/mean"], rel=1e-4)


def test_an_error_of_a_function_in_the_background_stops_the_run(run, tmp_path):
    (tmp_path / "bad.py").write_text(MIX.replace("return 5.0", "raise OSError('the judge is away')"))
    settings = {"custom_reward_function__path": str(tmp_path / "bad.py"), "reward_model__launch_reward_fn_async": True}
    settings["reward_model__self_test"] = "off"  # or it would be refused before the run
    with pytest.raises(RewardError, match="the judge is away"):
        run(**FEW, **{**settings, "reward_model__enable": False})


def test_validation_rows_say_who_scores_them(run, tmp_path):
    rows = pq.read_table(write_prompts(tmp_path / "mixed.parquet", 8)).to_pylist()
    for row in rows[::2]:
        row["reward_model"]["style"] = "model"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    settings = {
        "data__val_files": str(tmp_path / "mixed.parquet"),
        "trainer__total_training_steps": 1,
        "trainer__test_freq": 1,
        "custom_reward_function__path": str(tmp_path / "mix.py"),
    }
    (tmp_path / "mix.py").write_text(MIX)
    _, [step] = run(**{**FEW, **settings})
    # half of the rows are scored 5 by the function; a random model writes a digit now and then
    assert 2.5 < step["val-core/digits/reward/mean@1"] < 2.65


def rows_of_style(*styles):
    rows = np.array([{"style": style, "ground_truth": ""} for style in styles], dtype=object)
    return DataProto.from_dict({"x": torch.arange(len(styles))}, {"reward_model": rows})


def test_rows_of_each_style_are_scored_apart():
    parts = by_style(rows_of_style("rule", "model", "model", "rule"))
    assert [part.column("x").tolist() for part in parts] == [[0, 3], [1, 2]]
    assert [is_judged(part) for part in parts] == [False, True]
    assert len(by_style(rows_of_style("model"))) == 1


def test_rows_with_images_are_refused():
    data = rows_of_style("model", "model")
    check_texts(data)
    data.non_tensor_batch["multi_modal_data"] = np.array([{}, {"image": [1]}], dtype=object)
    with pytest.raises(ValueError, match="row 1 of the batch has images.*reward function"):
        check_texts(data)


# -- before a run ------------------------------------------------------------------------------------------------------


def config_for(folder, **settings):
    task = {"actor_rollout_ref.model.path": "policy", "reward_model.model.path": str(folder)}
    return load_ppo_config(overrides(task, **{**RM, **settings}))


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def with_two_labels(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "bad", "1": "good"}
    config["label2id"] = {"bad": 0, "good": 1}
    (folder / "config.json").write_text(json.dumps(config))


IDS = {"reward_model__model__input_tokenizer": None}
UNFIT = {
    "a language model": ({"head": "lm"}, None, {}, "holds Qwen2ForCausalLM, not a reward model.*num_labels=1"),
    "no head": ({}, without_head, {}, "holds no weights of a head"),
    "two labels": ({}, with_two_labels, {}, "has 2 labels.*trained with one label"),
    "no template": ({}, without_template, {}, "has no chat template.*input_tokenizer=null"),
    "fewer tokens": ({"vocab_size": 90}, None, IDS, "knows 90 tokens and the policy 100.*Set input_tokenizer"),
    "few positions": ({"max_position_embeddings": 70}, None, IDS, "positions for 70 tokens.*up to 76"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_cannot_judge_is_refused_before_a_run(case, tmp_path):
    made, spoil, settings, message = UNFIT[case]
    make_tiny_model(tmp_path, **{"head": "sequence", **made})
    if spoil is not None:
        spoil(tmp_path)
    with pytest.raises(ValueError, match=f"^reward_model.model.path=.*{message}"):
        check_reward_model(config_for(tmp_path, **settings), make_tokenizer())


@pytest.mark.parametrize("settings", [{}, IDS])
def test_a_reward_model_is_accepted(settings, tmp_path):
    make_tiny_model(tmp_path, head="sequence")
    check_reward_model(config_for(tmp_path, **settings), make_tokenizer())

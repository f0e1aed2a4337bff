"""The whole loop with images: a tiny model with random weights learns to tell bright ones from dark ones."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.examples.test_data_preprocess import load
from tests.support.images import image_row, make_tiny_vl_model, picture
from tests.support.learning import SEED, check_learned
from tests.support.runs import overrides, read_metrics, run_job

ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"
SETTINGS = {
    "data__train_batch_size": 8,
    "data__max_prompt_length": 80,
    "data__max_response_length": 4,
    f"{ROLLOUT}__n": 8,
    f"{ROLLOUT}__ignore_eos": True,
    f"{ROLLOUT}__calculate_log_probs": True,
    f"{ROLLOUT}__log_prob_micro_batch_size_per_gpu": 32,
    f"{ACTOR}__ppo_mini_batch_size": 8,
    f"{ACTOR}__ppo_micro_batch_size_per_gpu": 32,
    f"{ACTOR}__optim__lr": "2e-3",
    f"{ACTOR}__optim__weight_decay": 0.0,
    f"{ACTOR}__optim__betas": "[0.9,0.99]",
    "actor_rollout_ref__model__enable_gradient_checkpointing": False,
    "trainer__logger": "[file]",
}


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.chdir(tmp_path)
    sizes = ["--train_size", "64", "--test_size", "8"]
    load("brightness", monkeypatch).main(["--local_save_dir", str(tmp_path), *sizes])
    return {
        "data.train_files": str(tmp_path / "train.parquet"),
        "data.val_files": str(tmp_path / "test.parquet"),
        "actor_rollout_ref.model.path": make_tiny_vl_model(tmp_path / "model", seed=SEED, initializer_range=0.1),
    }


def run(task, tmp_path, metric="critic/score/mean", **settings):
    """A metric of the steps, the reward; at every step rollout and trainer must agree on the images."""
    run_job(overrides(task, **{**SETTINGS, **settings}))
    rows = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4
    return [row[metric] for row in rows]


@pytest.mark.learning
@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_grpo_learns_what_only_who_sees_can_know(name, task, tmp_path):
    """A response that is the same for all images scores one half at most."""
    rewards = run(task, tmp_path, **{f"{ROLLOUT}__name": name, "trainer__total_training_steps": 18})
    check_learned(f"images, {name}", rewards)


OTHER_WAYS = {
    "two_ranks": {f"{ACTOR}__strategy": "fsdp2", "trainer__n_gpus_per_node": 2},
    "tokens": {f"{ACTOR}__use_dynamic_bsz": True, f"{ACTOR}__ppo_max_token_len_per_gpu": 400},
    "asynchronous": {f"{ROLLOUT}__mode": "async"},
    "apart": {"actor_rollout_ref__hybrid_engine": False, f"{ROLLOUT}__n_gpus_per_node": 1},
    "made_by_workers": {
        "data__return_multi_modal_inputs": False,
        f"{ACTOR}__strategy": "fsdp2",
        "trainer__n_gpus_per_node": 2,
    },
    "sglang": {f"{ROLLOUT}__name": "sglang", f"{ROLLOUT}__mode": "async"},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.sglang) if way == "sglang" else way for way in OTHER_WAYS]
)
def test_two_steps_go_the_same_way_however_the_rows_are_dealt(way, task, tmp_path):
    """Prompts with and without images, dealt to ranks, by tokens, one by one, or with tensors made where needed."""
    rows = pq.read_table(task["data.train_files"]).to_pylist()[:16]
    for row in rows[::4]:
        row["prompt"], row["images"] = [{"role": "user", "content": "No image."}], []
    pq.write_table(pa.Table.from_pylist(rows), task["data.train_files"])
    settings = {"trainer__total_training_steps": 2}
    plain = run(task, tmp_path, **settings)
    (tmp_path / "metrics.jsonl").unlink()
    assert run(task, tmp_path, **settings, **OTHER_WAYS[way]) == pytest.approx(plain)


def test_a_batch_generated_ahead_saw_the_images(task, tmp_path):
    """The first batch, which nothing precedes: its log-probs are those of the trainer."""
    settings = {"actor_rollout_ref__hybrid_engine": False, f"{ROLLOUT}__n_gpus_per_node": 1}
    run(task, tmp_path, **settings, **{f"{ROLLOUT}__max_staleness": 1, "trainer__total_training_steps": 1})


def test_a_reference_sees_the_images_too(task, tmp_path):
    settings = {"algorithm__use_kl_in_reward": True, "trainer__total_training_steps": 1}
    settings["actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu"] = 16
    settings["actor_rollout_ref__ref__fsdp_config__mixed_precision__param_dtype"] = "fp32"
    assert run(task, tmp_path, "actor/reward_kl_penalty", **settings) == pytest.approx([0], abs=1e-6)


def test_a_checkpoint_opens_with_its_processor(task, tmp_path):
    contents = "[model,optimizer,extra,hf_model]"
    settings = {"trainer__save_freq": 1, f"{ACTOR}__checkpoint__save_contents": contents}
    run(task, tmp_path, **settings, trainer__total_training_steps=1, trainer__default_local_dir=str(tmp_path / "run"))
    folder = tmp_path / "run" / "global_step_1" / "actor" / "huggingface"
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    inputs = AutoProcessor.from_pretrained(folder)(
        text=["<|vision_start|><|image_pad|><|vision_end|>"], images=[picture()], return_tensors="pt"
    )
    assert model(**inputs).logits.shape[:2] == (1, 6)


def test_a_row_with_an_image_too_few_stops_the_job_at_the_start(task, tmp_path):
    rows = [image_row("<image>", [picture()]), image_row("<image> and <image>", [picture()])]
    pq.write_table(pa.Table.from_pylist(rows * 4), tmp_path / "uneven.parquet")
    task["data.train_files"] = str(tmp_path / "uneven.parquet")
    with pytest.raises(ValueError, match="uneven.parquet, row 1: .* 2 <image> placeholders and the row 1 images"):
        run_job(overrides(task, **SETTINGS))

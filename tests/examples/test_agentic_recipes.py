"""Verl's multi-turn command lines start: one step each, with a tiny model on the CPU."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.commands import ROOT, calls_of, main_ppo_overrides
from tests.support.runs import read_metrics
from verl.utils.tiny_model import make_tiny_model

CONFIG = ROOT / "examples" / "sglang_multiturn" / "config"
ROLLOUT = "actor_rollout_ref.rollout"
SMALL = [
    "trainer.device=cpu", "trainer.controller=local", "trainer.n_gpus_per_node=1", "trainer.logger=[file]",
    "trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
    "trainer.progress_bar=false", "data.train_batch_size=2", "data.max_prompt_length=1600",
    "data.max_response_length=96", "data.dataloader_num_workers=0", f"{ROLLOUT}.name=hf", f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.dtype=float32", "actor_rollout_ref.actor.strategy=local", "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", f"{ROLLOUT}.multi_turn.max_tokens_per_turn=12",
    "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.model.use_remove_padding=false", "trainer.unread_keys=off",
]  # fmt: skip
"""What makes a run of any recipe one of seconds."""


def row(index: int, source: str = "openai/gsm8k", truth="4", **extra) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "split": "train", "question": "2 + 2?", "answer": "4", **extra},
    }


def tool(name: str, **create) -> dict:
    return {"need_tools_kwargs": True, "tools_kwargs": {name: {"create_kwargs": create}}}


SEARCH = {"target": ["four"]}
ROWS = {
    "run_gsm8k_multiturn_tool.sh": lambda i: row(i, **tool("calc_gsm8k_reward", ground_truth="4")),
    "run_gsm8k_multiturn_interaction.sh": lambda i: row(
        i, interaction_kwargs={"name": "gsm8k", "query": "2 + 2?", "ground_truth": "4"}
    ),
    "run_search_r1.sh": lambda i: row(i, "searchR1_nq", SEARCH, **tool("search", ground_truth=SEARCH)),
    "run_retool.sh": lambda i: row(i, "math_dapo"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def run(folder: Path, model: str, recipe: str, words: list[str], config_name: str = "ppo_trainer") -> dict[str, float]:
    """Run one step; returns its metrics."""
    from verl.config.base import ConfigError
    from verl.config.load import load
    from verl.trainer.ppo.job import PPOJob

    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([ROWS[recipe](i) for i in range(4)]), folder / f"{name}.parquet")
    places = [f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet"]
    places += [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}/run"]
    loaded = load([*words, *SMALL, *places], str(CONFIG) if config_name != "ppo_trainer" else None, config_name)
    if loaded.problems:
        raise ConfigError([problem.text for problem in loaded.problems])
    PPOJob(loaded.config).run()
    return read_metrics(folder / "run" / "metrics.jsonl")[-1]["data"]


@pytest.mark.parametrize("recipe", list(ROWS))
def test_a_recipe_starts_with_a_tiny_model(recipe, model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (words,) = main_ppo_overrides(calls_of(ROOT / "examples" / "agentic" / recipe, tmp_path))
    metrics = run(tmp_path, model, recipe, words)
    assert metrics["training/global_step"] == 1
    assert metrics["num_turns/mean"] > 1


VERLS_OWN = [
    # what verl's scripts of v0.5 say besides sizes, models and devices
    ("run_gsm8k_multiturn_tool.sh", "gsm8k_multiturn_grpo", [
        f"{ROLLOUT}.multi_turn.tool_config_path=examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml",
        f"{ROLLOUT}.multi_turn.max_user_turns=1", "data.return_raw_chat=True", f"{ROLLOUT}.mode=sync"]),
    ("run_gsm8k_multiturn_interaction.sh", "gsm8k_multiturn_grpo_w_interaction", [
        f"{ROLLOUT}.multi_turn.interaction_config_path="
        "examples/sglang_multiturn/config/interaction_config/gsm8k_interaction_config.yaml",
        "custom_reward_function.path=null"]),
    ("run_search_r1.sh", "search_multiturn_grpo", [
        f"{ROLLOUT}.multi_turn.tool_config_path=examples/sglang_multiturn/config/tool_config/search_tool_config.yaml"]),
    ("run_retool.sh", "retool_multiturn_grpo", [
        "data.custom_cls.path=recipe/retool/retool.py", "data.custom_cls.name=CustomRLHFDataset",
        "custom_reward_function.path=recipe/retool/retool.py", "custom_reward_function.name=compute_score",
        f"{ROLLOUT}.multi_turn.tool_config_path=recipe/retool/sandbox_fusion_tool_config.yaml",
        f"{ROLLOUT}.multi_turn.format=hermes", f"{ROLLOUT}.agent.num_workers=8"]),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "config", "words"), VERLS_OWN, ids=[case[1] for case in VERLS_OWN])
def test_verls_own_command_line_starts(recipe, config, words, model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    metrics = run(tmp_path, model, recipe, words, config)
    assert metrics["training/global_step"] == 1

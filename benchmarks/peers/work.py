"""The work that every side is given: a model that all can open, prompts, a reward, and how much of each a step has."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits among the first eight characters."""
    return min(1.0, sum(c.isdigit() for c in solution_str) / 8)
'''

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
}
"""The shape of SmolLM2-135M; its weights are random, which costs the same where lengths are fixed."""


@dataclass(frozen=True)
class Step:
    """A GRPO step; the length of every response is fixed, so that all sides sample and train the same number."""

    name: str
    model: str
    prompts: int
    n: int
    new_tokens: int
    steps: int
    lr: float = 1e-5
    weight_decay: float = 0.01

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    def words(self) -> str:
        return f"{self.model}, {self.prompts} prompts x {self.n} responses x {self.new_tokens} new tokens"


STEPS = {
    "tiny": Step("tiny", "random Qwen2, 2.6M", 16, 4, 64, 6),
    "smollm2": Step("smollm2", "random Llama, SmolLM2-135M's shape", 4, 4, 64, 3),
}


def make(step: Step, folder: Path, model: str | None) -> dict[str, Any]:
    """Write model, prompts and reward of a step below ``folder``; return what its runners read.

    Args:
        model: folder of a Hugging Face model to take instead of a random one.
    """
    from tests.support.runs import write_prompts

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model"
    if model:
        _copy_model(Path(model), target)
    else:
        _random_model(step.name, target)
    _open_to_all(target)
    (folder / "reward.py").write_text(REWARD)
    train = write_prompts(folder / "train.parquet", step.prompts * step.steps)
    length = longest_prompt(target, train)
    return {
        **asdict(step),
        "model": str(target),
        "train": str(train),
        "reward": str(folder / "reward.py"),
        "longest_prompt": length,
        "micro_batch": step.rows,
    }


def _random_model(name: str, target: Path) -> None:
    from verl.utils.tiny_model import make_tiny_model

    if name == "tiny":
        make_tiny_model(target, family="qwen2", size="2.5M")
        return
    make_tiny_model(target, family="llama", **SMOLLM2)
    _fill_vocabulary(target / "tokenizer.json", SMOLLM2["vocab_size"])


def _fill_vocabulary(path: Path, size: int) -> None:
    """Give every id of the model a token, as a real tokenizer does: what is decoded is scored."""
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    for number in range(len(vocab), size):
        vocab[f"t{number}"] = number
    path.write_text(json.dumps(tokenizer))


def _copy_model(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source, dtype="float32").save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def _open_to_all(folder: Path) -> None:
    """Let transformers 4 read what transformers 5 wrote: the tokenizer's class, and where the RoPE base stands."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=1))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    config.setdefault("torch_dtype", config.get("dtype", "float32"))
    path.write_text(json.dumps(config, indent=1))


def longest_prompt(model: Path, train: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = pq.read_table(train, columns=["prompt"]).to_pylist()
    return max(
        len(
            tokenizer(tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True))[
                "input_ids"
            ]
        )
        for row in prompts
    )


def verl_keys(work: dict[str, Any], output: Path) -> dict[str, Any]:
    """Return the command line of the work for verl, here and of the index alike."""
    actor = "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": work["train"],
        "data.val_files": work["train"],
        "data.train_batch_size": work["prompts"],
        "data.max_prompt_length": work["longest_prompt"],
        "data.max_response_length": work["new_tokens"],
        "data.shuffle": "false",
        "actor_rollout_ref.model.path": work["model"],
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        f"{actor}.strategy": "fsdp",
        f"{actor}.optim.lr": work["lr"],
        f"{actor}.optim.weight_decay": work["weight_decay"],
        f"{actor}.ppo_mini_batch_size": work["prompts"],
        f"{actor}.ppo_micro_batch_size_per_gpu": work["micro_batch"],
        f"{actor}.use_kl_loss": "false",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": work["n"],
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": work["micro_batch"],
        "custom_reward_function.path": work["reward"],
        "data.dataloader_num_workers": 0,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": "[console]",
        "trainer.val_before_train": "false",
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": work["steps"],
        "trainer.default_local_dir": output,
    }

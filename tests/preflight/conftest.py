"""A folder with all a run needs, made without torch; tests run in it."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.composing import load_over
from verl.config.base import ConfigError
from verl.config.command_line import check_overrides
from verl.config.load import LoadedConfig
from verl.config.ppo import PPOConfig
from verl.preflight.checks import examine_loaded
from verl.preflight.machine import Machine
from verl.preflight.report import Finding, Report

BASE = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=data/train.parquet",
    "data.val_files=data/test.parquet",
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=3e-4",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
    "trainer.logger=file",
    "trainer.total_training_steps=20",
    "trainer.test_freq=10",
    "trainer.save_freq=10",
    "trainer.default_local_dir=run",
)
"""GRPO on two CPU workers, about which there is nothing to say; later words win over these."""

ELSEWHERE = Machine(is_this=False)
"""A machine with every device and package."""

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def examined(*words: str) -> Report:
    """The report about ``BASE`` and ``words``; ``test_the_shared_base_is_no_shortcut`` holds it against ``examine``."""
    try:
        return examine_loaded(loaded_with(*words), ELSEWHERE)
    except ConfigError as error:
        return Report([Finding("error", text) for text in error.problems])


def loaded_with(*words: str) -> LoadedConfig:
    """What ``BASE`` and ``words`` come to."""
    checked = check_overrides(words, PPOConfig, lambda name: False)
    if checked.problems:
        raise ConfigError([problem.text for problem in checked.problems])
    return load_over(BASE, words)


def make_model(folder: Path, vocab: int = 260, architecture: str = "Qwen2ForCausalLM", tokens: int = 0, **config):
    """A folder as a model's, with weights of which only the header is there."""
    folder.mkdir()
    shape = {**_SHAPE, "vocab_size": vocab, "num_key_value_heads": 2, "max_position_embeddings": 2048, **config}
    content = {"model_type": "qwen2", "architectures": [architecture], "tie_word_embeddings": True, **shape}
    (folder / "config.json").write_text(json.dumps(content))
    h, inner, narrow = shape["hidden_size"], shape["intermediate_size"], 32
    sizes = {"q_proj": (h, h), "k_proj": (narrow, h), "v_proj": (narrow, h), "o_proj": (h, h)}
    shapes = {"model.embed_tokens.weight": (vocab, h), "model.norm.weight": (h,)}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"{at}.self_attn.{name}.bias": size[:1] for name, size in sizes.items() if name != "o_proj"}
        shapes |= {f"{at}.mlp.{name}.weight": (inner, h) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{at}.mlp.down_proj.weight": (h, inner)}
        shapes |= {f"{at}.{name}.weight": (h,) for name in ("input_layernorm", "post_attention_layernorm")}
    header = {name: {"dtype": "F32", "shape": list(size), "data_offsets": [0, 0]} for name, size in shapes.items()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    if tokens:
        make_tokenizer(folder, tokens)


def make_tokenizer(folder: Path, tokens: int):
    """One token a byte, and specials up to ``tokens`` in all."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(special + letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    more = [f"<|{number}|>" for number in range(tokens - 260)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special + more])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def make_rows(number: int, source: str = "digits", start: int = 0) -> list[dict]:
    """Prompts of 27 to 29 tokens."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Say {'something'[: 3 + i % 3]}."}],
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(start, start + number)
    ]


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """Model, data and reward function of ``BASE``, and faulty ones next to them."""
    folder = tmp_path_factory.mktemp("doctor")
    make_model(folder / "model", tokens=260)
    make_model(folder / "judge", architecture="Qwen2ForSequenceClassification", tokens=260)
    make_model(folder / "small_vocabulary", vocab=100)
    (folder / "large_tokenizer").mkdir()
    make_tokenizer(folder / "large_tokenizer", 300)
    data = folder / "data"
    data.mkdir()
    pq.write_table(pa.Table.from_pylist(make_rows(64)), data / "train.parquet")
    pq.write_table(pa.Table.from_pylist(make_rows(8, start=64)), data / "test.parquet")
    pq.write_table(pa.Table.from_pylist(make_rows(64, "nobody/knows")), data / "other_source.parquet")
    without = [{name: row[name] for name in ("data_source", "prompt")} for row in make_rows(64)]
    pq.write_table(pa.Table.from_pylist(without), data / "without_truth.parquet")
    (data / "more_rows.jsonl").write_text("\n".join(map(json.dumps, make_rows(64, start=100))) + "\n")
    (folder / "broken.parquet").write_text("no parquet")
    (folder / "broken.py").write_text("def compute_score(:\n")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.strip() == ground_truth)\n\n\n"
        "def other_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    is_right = f'<answer>{ground_truth}</answer>' in solution_str\n"
        "    return {'score': float(is_right), 'length': len(solution_str)}\n\n\n"
        "async def slow_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.strip() == ground_truth)\n\n\n"
        "def scores_of(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(a == b) for a, b in zip(solution_strs, ground_truths)]\n\n\n"
        "def of_constant(**sample):\n    return 1.0\n\n\n"
        "def fails_on_nothing(solution_str, **sample):\n    return float(solution_str.split()[-1] == '1')\n\n\n"
        "def returns_nothing(**sample):\n    pass\n\n\n"
        "def hangs(**sample):\n    while True:\n        pass\n\n\n"
        "def leaves(**sample):\n    import os\n\n    os._exit(3)\n"
    )
    return folder


@pytest.fixture
def there(workplace, monkeypatch):
    """The test runs in the workplace, without a GPU."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("verl.rewards.functions.trial.FIRST_S", 1.0)
    assert os.path.exists("model/config.json")
    return workplace

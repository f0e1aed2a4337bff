"""Preference training end to end: the loss of a plain loop, resume, exports, and main_ppo behind both."""

import json
import math
import shutil
from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.support.runs import make_task, overrides, run_job, train_sft
from verl.config.base import ConfigError
from verl.models.loader import ModelSpec, load_model
from verl.trainer.preference.job import DPOJob, RewardJob

DEFAULTS = (
    *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[file]", "trainer.progress_bar=false"),
    *("engine.strategy=local", "engine.mixed_precision.param_dtype=fp32", "data.train_batch_size=4"),
    *("data.max_length=128", "optim.lr=1e-2", "optim.warmup_style=constant", "optim.lr_warmup_steps_ratio=0"),
    *("trainer.total_epochs=9", "data.num_workers=1", "trainer.val_before_train=false", "trainer.export_model=false"),
)
WHOLE = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2", "trainer.export_model=true")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A tiny model, and pairs of unequal length in which digits are right."""
    folder = tmp_path_factory.mktemp("pairs")
    keys = make_task(folder / "rl")
    rows = [
        {"prompt": f"{i}?", "chosen": "12" * (i % 5 + 1), "rejected": "ab" * (i % 3 + 1), "margin": i % 2 / 2}
        for i in range(12)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"data.{name}_files={folder / 'rows.jsonl'}" for name in ("train", "val")]
    return folder, [*DEFAULTS, f"model.path={keys['actor_rollout_ref.model.path']}", *files], keys


def train(task, job, name, *words):
    return train_sft([*task[1], f"trainer.default_local_dir={task[0] / name}", *words], job)


@pytest.fixture(scope="module")
def dpo(task):
    """Four steps without a stop, saved after the second."""
    return train(task, DPOJob, "dpo", *WHOLE, "algorithm.rpo_alpha=0.2")


@pytest.fixture(scope="module")
def reward(task):
    return train(task, RewardJob, "rm", *WHOLE, "algorithm.center_rewards_coefficient=0.05")


def plain_loop(trainer, model, pair_loss, steps):
    """Losses of the same pairs by transformers and torch alone, and the weights after them."""
    options = trainer.config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), options.lr, betas=tuple(options.betas), weight_decay=options.weight_decay
    )
    order, losses = trainer.loader.sampler.order, []
    trainer.loader.sampler.epoch = 0
    rows = order(len(trainer.train_dataset))
    trainer.loader.sampler.epoch = 1
    rows += order(len(trainer.train_dataset))
    for first in range(0, 4 * steps, 4):
        loss = sum(pair_loss(model, trainer.train_dataset[row]) for row in rows[first : first + 4]) / 4
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def log_prob(model, item):
    """Sum of log-probabilities of the response, and their mean."""
    logits = model(item["input_ids"][None]).logits[0, :-1]
    every = logits.log_softmax(-1).gather(1, item["input_ids"][1:, None])[:, 0] * item["loss_mask"][1:]
    return every.sum(), every.sum() / item["loss_mask"].sum()


def test_dpo_is_a_plain_loop_of_transformers(task, dpo):
    from transformers import AutoModelForCausalLM

    trainer, metrics = dpo
    load = partial(AutoModelForCausalLM.from_pretrained, trainer.config.model.path, dtype=torch.float32)
    model, reference = load(), load()

    def pair_loss(model, pair):
        (chosen, mean), (rejected, _) = (log_prob(model, pair[side]) for side in ("chosen", "rejected"))
        with torch.no_grad():
            was = [log_prob(reference, pair[side])[0] for side in ("chosen", "rejected")]
        return -logsigmoid(0.1 * (chosen - was[0] - rejected + was[1])) - 0.2 * mean

    losses, last = plain_loop(trainer, model, pair_loss, 4)
    assert metrics[1]["train/loss"] == pytest.approx(losses[0], rel=1e-6)
    assert [metrics[step]["train/loss"] for step in range(1, 5)] == pytest.approx(losses, rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(trainer.export_folder, dtype=torch.float32).state_dict()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, last[name], rtol=1e-3, atol=1e-4)
    assert metrics[4]["val/preference_accuracy"] == 1 and metrics[4]["val/preference_margin"] > 0


def reward_pair_loss(model, pair):
    chosen, rejected = (model(pair[side]["input_ids"][None]).logits[0, 0] for side in ("chosen", "rejected"))
    return -logsigmoid(chosen - rejected - pair["margin"]) + 0.05 * (chosen + rejected) ** 2


def test_a_reward_model_is_a_plain_loop_of_transformers_and_loads_there(task, reward):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    trainer, metrics = reward
    # the same new head: its weights come from the run's seed
    start = load_model(ModelSpec(trainer.config.model.path, "reward", new_head=True), trainer.config.trainer.seed)
    losses, last = plain_loop(trainer, start.train(), reward_pair_loss, 4)
    assert metrics[1]["train/loss"] == pytest.approx(losses[0], rel=1e-6)
    assert [metrics[step]["train/loss"] for step in range(1, 5)] == pytest.approx(losses, rel=1e-5)

    model = AutoModelForSequenceClassification.from_pretrained(trainer.export_folder, dtype=torch.float32)
    assert model.config.num_labels == 1
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, last[name], rtol=1e-3, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(trainer.export_folder)
    chats = [[{"role": "user", "content": "0?"}, {"role": "assistant", "content": text}] for text in ("12", "ababab")]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    one = trainer.val_dataset[0]["chosen"]["input_ids"][None]
    with torch.no_grad():
        scores, alone = model(**batch).logits[:, 0], model(one).logits[0, 0]
    # a padded batch is scored where training scored
    assert scores[0] == pytest.approx(float(alone), rel=1e-4) and scores[0] > scores[1]


@pytest.mark.parametrize(
    "words",
    [
        ["data.micro_batch_size_per_gpu=1"],
        ["data.max_token_len_per_gpu=256", "model.use_prefix_sharing=true"],
        ["model.use_remove_padding=false", "data.micro_batch_size_per_gpu=3"],
        ["algorithm.precompute_ref=true", "trainer.balance_batch=false"],
    ],
    ids=["one", "tokens", "padded", "precomputed"],
)
def test_loss_and_gradient_do_not_depend_on_packing_division_and_when_the_reference_is_read(task, dpo, words):
    options = ["trainer.total_training_steps=2", "trainer.test_freq=2", "algorithm.rpo_alpha=0.2"]
    _, metrics = train(task, DPOJob, "cut", *options, *words)
    for step in (1, 2):
        for name in ("train/loss", "train/grad_norm", "train/preference_margin", "train/chosen_log_prob"):
            assert metrics[step][name] == pytest.approx(dpo[1][step][name], rel=2e-5, abs=1e-6)
    assert metrics[2]["val/loss"] == pytest.approx(dpo[1][2]["val/loss"], rel=1e-5)


def test_a_resumed_run_is_the_run_that_was_not_stopped_to_the_bit(task, dpo):
    folder, trainer = task[0] / "resumed", dpo[0]
    shutil.copytree(trainer.export_folder.parent / "global_step_2", folder / "global_step_2")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    resumed, again = train(task, DPOJob, "resumed", *WHOLE, "algorithm.rpo_alpha=0.2")
    assert set(again) == {3, 4}
    for step in again:
        for name in ("train/loss", "train/grad_norm", "train/preference_margin"):
            assert again[step][name] == dpo[1][step][name]
    files = [one.export_folder / "model.safetensors" for one in (resumed, trainer)]
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ConfigError, match="algorithm.beta"):
        train(task, DPOJob, "resumed", *WHOLE, "algorithm.rpo_alpha=0.2", "algorithm.beta=0.3")


def test_with_an_adapter_the_base_model_is_the_reference(task):
    words = ["model.lora_rank=4", "trainer.total_training_steps=3"]
    trainer, metrics = train(task, DPOJob, "lora", *words)
    assert metrics[1]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)  # nothing has moved
    assert metrics[3]["train/preference_margin"] > 0 and metrics[3]["train/loss"] < metrics[1]["train/loss"]


@pytest.mark.parametrize("loss", ["robust", "hinge", "ipo", "sppo", "simpo", "orpo"])
def test_each_loss_raises_the_chosen_above_the_rejected(task, loss):
    words = [f"algorithm.loss_type={loss}", "trainer.total_training_steps=3", "data.val_files=null", "optim.lr=1e-3"]
    _, metrics = train(task, DPOJob, loss, *words)
    gap = [metrics[step]["train/chosen_log_prob"] - metrics[step]["train/rejected_log_prob"] for step in (1, 3)]
    assert metrics[3]["train/loss"] < metrics[1]["train/loss"] or gap[1] > gap[0]


def test_reinforcement_learning_goes_on_from_the_policy_and_scores_with_the_reward_model(task, dpo, reward):
    keys = {**task[2], "trainer.default_local_dir": str(task[0] / "ppo")}
    keys["actor_rollout_ref.model.path"] = str(dpo[0].export_folder)
    keys["reward_model.model.path"] = str(reward[0].export_folder)
    del keys["custom_reward_function.path"]
    words = dict(trainer__total_training_steps=1, data__val_files=None, reward_model__enable=True)
    words |= dict(reward_model__micro_batch_size_per_gpu=8, reward_model__strategy="local", data__return_raw_chat=True)
    trainer = run_job(overrides(keys, **words))
    assert trainer.global_steps == 1 and trainer.metrics["critic/score/max"] > trainer.metrics["critic/score/min"]

"""Supervised fine-tuning end to end: the loss of a plain loop, resume, export, and a start of main_ppo from it."""

import json
import shutil

import pytest
import torch

from tests.support.runs import make_task, overrides, run_job, train_sft
from verl.config.base import ConfigError

DEFAULTS = (
    *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[file]", "trainer.progress_bar=false"),
    *("engine.strategy=local", "engine.mixed_precision.param_dtype=fp32", "data.train_batch_size=4"),
    *("data.max_length=128", "optim.lr=1e-2", "optim.warmup_style=constant", "optim.lr_warmup_steps_ratio=0"),
    *("trainer.total_epochs=1", "data.num_workers=1", "trainer.val_before_train=false"),
)
TURNS = 3


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A tiny model, and conversations of unequal length."""
    folder = tmp_path_factory.mktemp("sft")
    keys = make_task(folder / "rl")
    rows = [
        {"messages": [turn for k in range(i % TURNS + 1) for turn in (
            {"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "ab" * (i % 5 + k + 1)})]}
        for i in range(12)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"data.{name}_files={folder / 'rows.jsonl'}" for name in ("train", "val")]
    return folder, [*DEFAULTS, f"model.path={keys['actor_rollout_ref.model.path']}", *files], keys


def train(task, name, *words):
    return train_sft([*task[1], f"trainer.default_local_dir={task[0] / name}", *words])


@pytest.fixture(scope="module")
def straight(task):
    """Six steps without a stop, saved after the third."""
    return train(task, "straight", "trainer.total_training_steps=6", "trainer.save_freq=3", "trainer.test_freq=3")


def weights(trainer):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(trainer.export_folder, dtype=torch.float32).state_dict()


def plain_loop(task, trainer, steps):
    """Losses of the same batches by transformers and torch alone, padded rows, one at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trainer.config.model.path, dtype=torch.float32)
    options = trainer.config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), options.lr, betas=tuple(options.betas), weight_decay=options.weight_decay
    )
    order, losses = trainer.loader.sampler.order, []
    trainer.loader.sampler.epoch = 0
    rows = [row for _ in range(steps) for row in order(len(trainer.train_dataset))]
    for first in range(0, 4 * steps, 4):
        items = [trainer.train_dataset[row] for row in rows[first : first + 4]]
        tokens = sum(int(item["loss_mask"].sum()) for item in items)
        loss = 0.0
        for item in items:
            labels = torch.where(item["loss_mask"].bool(), item["input_ids"], -100)
            logits = model(item["input_ids"][None]).logits[0, :-1]
            one = torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / tokens
            one.backward()
            loss += float(one)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, model.state_dict()


def test_the_loss_is_that_of_a_plain_loop(task, straight):
    trainer, metrics = straight
    losses, last = plain_loop(task, trainer, 6)
    # the loop is as exact as fp32: after the first step weights differ in their last bits
    assert metrics[1]["train/loss"] == pytest.approx(losses[0], rel=1e-6)
    assert [metrics[step]["train/loss"] for step in range(1, 7)] == pytest.approx(losses, rel=1e-5)
    for name, weight in weights(trainer).items():
        torch.testing.assert_close(weight, last[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["data.micro_batch_size_per_gpu=1"],
        ["data.max_token_len_per_gpu=130"],
        ["model.use_remove_padding=false", "data.micro_batch_size_per_gpu=3"],
    ],
)
def test_loss_and_gradient_do_not_depend_on_packing_and_division(task, straight, words):
    _, expected = straight
    _, metrics = train(task, "cut", "trainer.total_training_steps=2", "trainer.export_model=false", *words)
    for name in ("train/loss", "train/grad_norm"):
        assert [metrics[s][name] for s in (1, 2)] == pytest.approx([expected[s][name] for s in (1, 2)], rel=1e-5)


def test_a_resumed_run_is_the_run_that_was_not_stopped_to_the_bit(task, straight):
    trainer, metrics = straight
    folder = task[0] / "resumed"
    shutil.copytree(trainer.export_folder.parent / "global_step_3", folder / "global_step_3")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    words = ["trainer.total_training_steps=6", "trainer.save_freq=3", "trainer.test_freq=3"]
    resumed, again = train(task, "resumed", *words)
    assert set(again) == {4, 5, 6}
    for step in again:
        for name in ("train/loss", "train/grad_norm", "train/lr"):
            assert again[step][name] == metrics[step][name]
    assert again[6]["val/loss"] == metrics[6]["val/loss"] and metrics[6]["val/loss"] < metrics[1]["train/loss"]
    mine, theirs = weights(resumed), weights(trainer)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(ConfigError, match="optim.lr"):
        train(task, "resumed", *words, "optim.lr=1e-3")


def test_validation_loss_is_the_mean_over_all_learned_tokens(task, straight):
    trainer, _ = straight
    options = [f"model.path={trainer.export_folder}", "trainer.val_only=true", "data.val_batch_size=5"]
    again, _ = train(task, "val", *options)
    # its weights are in bf16 precision only if the model's were: this one's are fp32
    assert again.validations[0][1]["val/loss"] == pytest.approx(trainer.validations[-1][1]["val/loss"], rel=1e-6)
    assert not (task[0] / "val" / "huggingface").exists()


def test_reinforcement_learning_starts_from_the_exported_model(task, straight):
    keys = {**task[2], "trainer.default_local_dir": str(task[0] / "ppo")}
    keys["actor_rollout_ref.model.path"] = str(straight[0].export_folder)
    trainer = run_job(overrides(keys, trainer__total_training_steps=1, data__val_files=None))
    assert trainer.global_steps == 1


def test_an_adapter_is_trained_alone_and_exported_merged(task):
    words = ["model.lora_rank=4", "trainer.total_training_steps=2", "trainer.save_freq=2"]
    trainer, metrics = train(task, "lora", *words)
    assert metrics[2]["train/loss"] < metrics[1]["train/loss"]
    assert (trainer.last_checkpoint / "actor" / "lora_adapter" / "adapter_config.json").exists()
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(trainer.config.model.path, dtype=torch.float32).state_dict()
    moved = {name for name, weight in weights(trainer).items() if not torch.equal(weight, base[name])}
    assert moved and all(name.endswith("proj.weight") for name in moved)


# -- health ------------------------------------------------------------------------------------------------------------

USUAL = {"train/loss": 1.0, "train/grad_norm": 1.0}


def broken(steps, **limits):
    """The rules that the last of these steps broke, and what was said of all."""
    from types import SimpleNamespace

    from verl.config.supervised import ExamplesHealthConfig
    from verl.trainer.sft.health import ExamplesHealth

    watch = ExamplesHealth(SimpleNamespace(halt_on=[], health=ExamplesHealthConfig(**limits)))
    said = [sentence for step in steps for sentence in watch.note(step)]
    return watch.metrics["health/broken_rules"], said


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([USUAL | {"train/grad_norm": 0.0, "train/loss": 1 + k / 9} for k in range(5)], "train/grad_norm was 0"),
        ([USUAL] * 6, "was that of the step before"),
        ([USUAL | {"train/loss": 1 + k / 9} for k in range(10)] + [{"train/loss": 9.0}], "train/loss jumped to 9"),
        ([USUAL | {"val/loss": 1.0}, {"val/loss": 1.05}, {"val/loss": 1.2}], "learned by heart"),
        ([{"val/loss": float("nan")}], "val/loss was nan"),
    ],
)
def test_what_goes_wrong_is_said_once_with_what_to_change(steps, words):
    rules, said = broken(steps)
    assert rules == 1 and len(said) == 1 and words in said[0]
    assert broken(steps[:1] * 2 + steps[-1:], constant_loss=None, val_loss=None)[1] == []


def test_a_rule_of_halt_on_ends_the_run_and_the_loggers_hear_of_it(task):
    from verl.telemetry.tracking import Tracking
    from verl.trainer.health import UnhealthyRun

    with pytest.raises(ConfigError, match="val_loss=null switches that rule off"):
        train(task, "halted", "trainer.halt_on=[val_loss]", "trainer.health.val_loss=null")
    ends, own = [], Tracking.finish
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UnhealthyRun, match="halt_on=.constant_loss. ends"):
        patch.setattr(Tracking, "finish", lambda self, failed=False: (ends.append(failed), own(self, failed)))
        words = ["trainer.total_training_steps=9", "trainer.memory_ledger=true", "data.val_files=null"]
        train(task, "halted", *words, "trainer.halt_on=[constant_loss]", "trainer.health.constant_loss=100")
    assert ends == [True]
    rows = [json.loads(line)["data"] for line in (task[0] / "halted" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and rows[-1]["health/broken_rules"] == 1  # held in 5 of 6 steps
    assert {"memory/update_actor_gb", "perf/memory_processes_gb"} <= rows[0].keys()
    assert len((task[0] / "halted" / "memory.jsonl").read_text().splitlines()) == 6


def test_the_folder_of_the_run_is_a_model_to_generate_and_chat_with(task, straight):
    from verl.config.generation import GenerationConfig
    from verl.trainer.main_generation import model_and_data, read_command

    run = task[0] / "straight"
    command = read_command([str(run), "rows.jsonl"], GenerationConfig.short_names, model_and_data)
    assert command.checkpoint is None and any(str(run / "huggingface") in word for word in command.arguments)
    of_step = read_command([str(run / "global_step_3")], GenerationConfig.short_names, model_and_data)
    assert of_step.checkpoint == str(run / "global_step_3")

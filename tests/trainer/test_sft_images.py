"""Supervised fine-tuning of a vision-language model: the tokens are its processor's, the loss that of a plain loop."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.images import MIXED, asked, make_tiny_vl_model, picture, png
from tests.support.runs import train_sft
from verl.data.sft_dataset import SFTDataset
from verl.data.table import DataError
from verl.models.multimodal import modality_tokens
from verl.utils.tokenizer import hf_processor, hf_tokenizer

ANSWERS = ["bright", "none", "a b", "dark!", "no", "x"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A tiny model, and rows with none, one and two images as prompts with responses and as conversations."""
    folder = tmp_path_factory.mktemp("images")
    make_tiny_vl_model(folder / "model", seed=3)
    rows = [
        {"question": text, "answer": answer, "images": [png(image) for image in images]}
        for (text, images), answer in zip(MIXED, ANSWERS, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    for row in rows:
        turns = (("user", row.pop("question")), ("assistant", row.pop("answer")))
        row["messages"] = [{"role": role, "content": text} for role, text in turns]
    pq.write_table(pa.Table.from_pylist(rows), folder / "messages.parquet")
    return folder


def dataset(task, name, **config):
    folder = str(task / "model")
    options = {"num_workers": 1, **config}
    return SFTDataset(str(task / name), hf_tokenizer(folder), options, processor=hf_processor(folder))


@pytest.mark.parametrize("name", ["pairs.parquet", "messages.parquet"])
def test_tokens_and_images_are_those_of_the_processor_and_only_the_answer_is_learned(task, name):
    processor, examples = hf_processor(str(task / "model")), dataset(task, name)
    for example, (text, images), answer in zip(examples, MIXED, ANSWERS, strict=True):
        _, expected = asked(processor, text, images)
        prompt = expected["input_ids"][0].tolist()
        ids, mask = example["input_ids"].tolist(), example["loss_mask"].tolist()
        assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])
        learned = [token for token, is_learned in zip(ids, mask, strict=True) if is_learned]
        assert processor.tokenizer.decode(learned).startswith(answer) and len(learned) == sum(mask[len(prompt) :])
        shown = example["multi_modal_inputs"]
        assert bool(shown) == bool(images)
        for key in shown:
            torch.testing.assert_close(torch.as_tensor(shown[key]), torch.as_tensor(expected[key]))


def test_a_part_of_a_message_may_hold_its_image(task, tmp_path):
    path = tmp_path / "one.png"
    picture(seed=1).save(path)
    content = [{"type": "image", "image": str(path)}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "bright"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": json.dumps(turns)}))
    [inline] = dataset(task, tmp_path / "rows.jsonl")
    [column, *_] = dataset(task, "messages.parquet")
    assert torch.equal(inline["input_ids"], column["input_ids"])
    pixels = (torch.as_tensor(one["multi_modal_inputs"]["pixel_values"]) for one in (inline, column))
    torch.testing.assert_close(*pixels)


def test_the_doctor_looks_at_images_too(task, capsys):
    from verl.preflight.command import doctor

    words = [f"model.path={task / 'model'}", f"data.train_files={task / 'messages.parquet'}", "trainer.device=cpu"]
    assert doctor(["sft", *words, "trainer.n_gpus_per_node=1", "data.train_batch_size=6"]) == 0
    assert "  learned 'bright<|im_end|>'" in capsys.readouterr().out


def test_what_cannot_be_learned_is_refused_by_name(task, tmp_path):
    folder = str(task / "model")
    with pytest.raises(DataError, match="data.image_key.*the model has no image processor"):
        SFTDataset(str(task / "pairs.parquet"), hf_tokenizer(folder), {"num_workers": 1})
    with pytest.raises(DataError, match="would cut off holds an image"):
        dataset(task, "messages.parquet", max_length=30, truncation="left")
    rows = [{"question": "<image><image>?", "answer": "x", "images": [png(picture())]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="the text has 2 <image> placeholders and the row 1 images"):
        dataset(task, tmp_path / "rows.parquet")


def test_loss_and_gradient_are_those_of_a_plain_loop_and_the_model_is_exported_whole(task, tmp_path):
    from transformers import AutoModelForImageTextToText

    words = [
        *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[file]", "trainer.progress_bar=false"),
        *("engine.strategy=local", "engine.mixed_precision.param_dtype=fp32", "data.train_batch_size=6"),
        *("trainer.total_training_steps=2", "optim.lr=1e-2", "optim.warmup_style=constant", "data.num_workers=1"),
        *("optim.lr_warmup_steps_ratio=0", "data.max_length=200", f"model.path={task / 'model'}"),
        *(f"data.{name}_files={task / 'messages.parquet'}" for name in ("train", "val")),
    ]
    trainer, metrics = train_sft([*words, f"trainer.default_local_dir={tmp_path / 'run'}"])
    model = AutoModelForImageTextToText.from_pretrained(task / "model", dtype=torch.float32)
    tokens, loss = sum(int(item["loss_mask"].sum()) for item in trainer.train_dataset), 0.0
    processor = hf_processor(str(task / "model"))
    for item, (_, images) in zip(trainer.train_dataset, MIXED, strict=True):
        kinds = {"mm_token_type_ids": (item["input_ids"] == processor.image_token_id).long()[None]} if images else {}
        labels = torch.where(item["loss_mask"].bool(), item["input_ids"], -100)
        shown = {key: torch.as_tensor(value) for key, value in item["multi_modal_inputs"].items()}
        logits = model(item["input_ids"][None], **shown, **kinds).logits[0, :-1]
        # the policy never writes tokens of media: they have no probability, as in reinforcement learning
        logits[:, modality_tokens(model.config)] = -torch.inf
        one = torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / tokens
        one.backward()
        loss += one.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    assert metrics[1]["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics[0]["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics[1]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics[2]["train/loss"] < loss and hf_processor(str(trainer.export_folder)) is not None
    packed, again = train_sft(
        [*words, f"trainer.default_local_dir={tmp_path / 'cut'}", "data.max_token_len_per_gpu=200"]
    )
    assert again[1]["train/grad_norm"] == pytest.approx(metrics[1]["train/grad_norm"], rel=1e-5)

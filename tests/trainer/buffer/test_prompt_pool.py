"""Every prompt is handed out until it is trained on: none is lost, none comes twice in an epoch."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from verl.data.loader import build_train_loader
from verl.trainer.buffer.prompt_pool import PromptPool


class Rows(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"input_ids": torch.tensor([i, i]), "index": i}


def loader(rows, batch):
    return build_train_loader({"train_batch_size": batch, "dataloader_num_workers": 0, "shuffle": True}, Rows(rows))


def numbers(prompts):
    return [int(i) for i in prompts.non_tensor_batch["index"]]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_no_prompt_is_lost_or_doubled_whatever_is_deferred(data):
    batch = data.draw(st.integers(1, 4))
    extra = data.draw(st.integers(0, 4))
    rows = batch * data.draw(st.integers(1, 4))
    pool, trained, uids = PromptPool(loader(rows, batch)), [], []
    for step in range(1, 3 * rows // batch + 1):
        prompts = pool.take(batch + extra, step)
        taken = sorted(data.draw(st.permutations(range(len(prompts))))[:batch])
        rest = [i for i in range(len(prompts)) if i not in taken]
        trained += numbers(prompts[taken])
        uids += list(prompts.non_tensor_batch["uid"][taken])
        pool.finish(prompts.non_tensor_batch["uid"][taken])
        pool.defer(prompts[rest])
        if data.draw(st.booleans()):  # a restart
            state = pickle.loads(pickle.dumps((pool.state(), pool.loader.state_dict())))
            pool = PromptPool(loader(rows, batch))
            pool.load_state(*state[0])
            pool.loader.load_state_dict(state[1])
    left = numbers(pool.take(pool.num_deferred, 99)) if pool.num_deferred else []
    assert len(uids) == len(set(uids)) and len(trained) == 3 * rows and len(left) == extra
    times = np.bincount(trained + left, minlength=rows)
    assert times.max() - times.min() <= 1  # whole epochs, and a part of one


def test_deferred_prompts_come_first_and_keep_their_name():
    pool = PromptPool(loader(8, 2))
    first = pool.take(4, 1)
    pool.defer(first[[3, 1]])
    pool.finish(first.non_tensor_batch["uid"][[0, 2]])
    second = pool.take(4, 2)
    assert list(second.non_tensor_batch["uid"]) == ["step1-3", "step1-1", "step2-0", "step2-1"]
    assert numbers(second)[:2] == [numbers(first)[3], numbers(first)[1]]
    assert torch.equal(second.column("input_ids")[:, 0], torch.tensor(numbers(second)))
    assert [pool.entries[uid].deferrals for uid in second.non_tensor_batch["uid"]] == [1, 1, 0, 0]


def test_a_loader_without_batches_is_an_error():
    with pytest.raises(ValueError, match="no batch of prompts"):
        PromptPool([]).take(1, 1)

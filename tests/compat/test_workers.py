"""Worker classes of a user's, called through groups; on Ray in ``test_scripts.py``."""

import numpy as np
import pytest
import torch

from tests.compat.support import FILES
from verl import DataProto
from verl.single_controller.base import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup


@pytest.fixture(params=[1, 2])
def group(request, monkeypatch):
    monkeypatch.syspath_prepend(str(FILES))
    from my_worker import Scorer

    cls = ClassWithInitArgs(Scorer, config={"bias": 0.5}, role="scorer")
    group = LocalWorkerGroup(resource_pool=ResourcePool([request.param]), ray_cls_with_init=cls)
    group.init_model()
    yield group
    group.stop()


def test_a_batch_is_cut_over_ranks_and_joined(group):
    data = DataProto.from_dict(
        tensors={"values": torch.arange(5.0)}, non_tensors={"name": np.array(list("abcde"), dtype=object)}
    )
    scored = group.score(data)  # five rows on two ranks: padded and cut back
    assert scored.batch["scores"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert scored.non_tensor_batch["name"].tolist() == list("abcde")
    assert set(scored.batch["rank"].tolist()) == set(range(group.world_size))
    assert data.batch["values"].tolist() == [0, 1, 2, 3, 4]
    assert group.score_later(data).get().batch["scores"].equal(scored.batch["scores"])


def test_lists_and_single_ranks(group):
    n = group.world_size
    assert group.rank_of(list(range(n))) == [(rank, (rank,)) for rank in range(n)]
    assert group.only_first() == 0
    assert [rank for rank, _ in group.execute_all_sync("rank_of")] == list(range(n))
    assert group.execute_rank_zero_sync("rank_of")[0] == 0

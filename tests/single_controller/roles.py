"""Roles for the tests of the controllers, importable by name in any process."""

import os
import time

import numpy as np
import torch

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register


class Counter(Worker):
    """Keeps a number, so that tests see which process they talk to."""

    def __init__(self, begin=0):
        super().__init__()
        self.count = begin

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, number):
        self.count += number
        return self.count

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self, number=0):
        self.count = number

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        return {"pid": os.getpid(), "rank": self.rank, **{name: os.environ[name] for name in names}}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, *args, **kwargs):
        return args, kwargs

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self, text):
        return f"{text} from {self.rank}"

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def zero(self, text):
        return f"{text} to {self.rank}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own(self, number):
        return number * 10 + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self, seconds):
        import asyncio

        await asyncio.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def slow_rank(self, seconds):
        time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def siblings(self):
        return sorted(self.fused_worker_dict), [worker.count for worker in self.fused_worker_dict.values()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unsendable(self):
        return (number for number in range(3))


class Splitter(Worker):
    """Looks at its part of a batch."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tag(self, data):
        rank = torch.full((len(data),), self.rank)
        return DataProto.from_dict({"x": data.column("x") * 2, "rank": rank}, {"name": data.non_tensor_batch["name"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x", "name", "absent"))
    def seen(self, data):
        names = [sorted(data.keys()) + sorted(data.non_tensor_batch) + sorted(data.meta_info)] * len(data)
        return DataProto.from_dict(non_tensors={"seen": names})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, reads=("response_mask", "loss_mask"))
    def masks(self, data):
        return {name: data.column(name).sum(-1).tolist() for name in data.keys()}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def metrics_only(self, data):
        return DataProto(meta_info={"metrics": {"rows": [len(data)]}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def spoil(self, data):
        data.column("x").add_(100)
        data.non_tensor_batch["name"][:] = "spoilt"
        data.meta_info["spoilt"] = True
        return DataProto.from_dict({"x": data.column("x")})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def promised(self, data):
        return DataProto.from_dict({"x": data.column("x") + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def both(self, left, scale, right=None):
        return DataProto.from_dict({"x": left.column("x") * scale + right.column("x")})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def keep(self, data):
        self.kept = data
        return DataProto.from_dict({"x": data.column("x")})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x", "response_mask"), balanced=True)
    def shared(self, data):
        self.share = flat = data.column("x").flatten().tolist()
        self.steps = [[flat[row] for row in rows] for rows in data.step_rows or ()]
        self.masked = data.column("response_mask").sum(-1).tolist()
        return DataProto.from_dict({"x": data.column("x") * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_share(self):
        return self.share, self.steps, self.masked

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept_sum(self):
        return float(self.kept.column("x").double().sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def big(self, data):
        return DataProto.from_dict(
            {"y": data.column("x").repeat(1, 3)}, {"o": np.array(["é"] * len(data), dtype=object)}
        )


class MeshWorker(Worker):
    """Four ranks, two by two: dp rank = rank // 2, the odd rank of each pair answers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self._register_dispatch_collect_info("actor", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor")
    def tag(self, data):
        self.rows = len(data)
        return DataProto.from_dict({"x": data.column("x"), "rank": torch.full((len(data),), self.rank)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def tag_as_megatron(self, data):
        return self.tag(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, mesh="actor")
    def own(self, number):
        return self.rank, number

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rows_seen(self):
        return self.rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def register_again(self):
        self._register_dispatch_collect_info("critic", dp_rank=0, is_collect=True)


class Reader(Worker):
    """Shows every row of the packed columns that it got, and returns one more."""

    def __init__(self, pairs=False):
        super().__init__()
        if pairs:
            self._register_dispatch_collect_info("pairs", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    def _shown(self, data):
        columns = {name: [row.tolist() for row in data.ragged(name).rows()] for name in sorted(data._ragged)}
        shown = [{name: rows[i] for name, rows in columns.items()} for i in range(len(data))]
        for row, images in zip(shown, data.non_tensor_batch.get("images", ()), strict=False):
            row["images"] = {name: tensor.tolist() for name, tensor in images.items()}
        for images in data.non_tensor_batch.get("images", ()):
            images.clear()  # a dict is the method's own, its tensors are not
        return DataProto.from_dict(non_tensors={"shown": shown})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="pairs", balanced=True)
    def show(self, data):
        return self._shown(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="pairs", balanced=True)
    def show_in_steps(self, data):
        return self._shown(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="pairs", balanced=True, stays=("values",))
    def score(self, data):
        return DataProto.from_ragged({"values": data.ragged("advantages").like(data.ragged("responses").values * 0.5)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, balanced=True)
    def write_in_place(self, data):
        if "images" in data.non_tensor_batch:
            data.non_tensor_batch["images"][0]["pixels"].add_(1)
        else:
            data.ragged("advantages").values.add_(1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, balanced=True, stays=("values",))
    def score_later(self, data):
        return self.score(data)

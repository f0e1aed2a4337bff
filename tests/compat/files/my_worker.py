"""Workers of a project."""

import torch

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.workers.fsdp_workers import ActorRolloutRefWorker


class Scorer(Worker):
    """A role of the project's own."""

    def __init__(self, config, role="scorer"):
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.bias = self.config["bias"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        data = data.to("cpu")
        scores = data.batch["values"] + self.bias
        data.batch["values"].add_(100)  # its own copy
        names = data.non_tensor_batch["name"]
        return DataProto.from_dict(
            tensors={"scores": scores, "rank": torch.full((len(data),), self.rank)}, non_tensors={"name": names}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score_later(self, data: DataProto) -> DataProto:
        return self.score(data)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def rank_of(self, *args):
        return self.rank, args

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_first(self):
        return self.rank


class MyActor(ActorRolloutRefWorker):
    """Adds a verb, and has a constructor of its own."""

    def __init__(self, config, role):
        super().__init__(config, role)
        self.updates = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        self.updates += 1
        output = super().update_actor(data)
        output.meta_info["metrics"]["actor/my_updates"] = [float(self.updates)]
        return output

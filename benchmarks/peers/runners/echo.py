"""A worker that reads what a log-prob call reads and returns a column as wide as the responses."""

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register


class EchoWorker(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        if hasattr(data, "ragged"):  # as workers of this project read it; those of verl 0.5 read padded columns
            responses = data.ragged("responses")
            return DataProto.from_ragged({"old_log_probs": responses.like(responses.values.float())})
        return DataProto.from_dict({"old_log_probs": data.batch["responses"].float()})

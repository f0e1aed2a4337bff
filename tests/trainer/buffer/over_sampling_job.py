"""The main job with rollout.mode=async whose requests enter the engine between two steps, in the driver's process.

Which group is complete first is then the same in every run, so that whole runs can be compared bit for bit.

    python -m tests.trainer.buffer.over_sampling_job KEY=VALUE ...
"""

import sys

from tests.support.engine_client import EngineClient
from verl.config.load import load_ppo_config
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class InProcessTrainer(RayPPOTrainer):
    def use_worker_groups(self, groups):
        super().use_worker_groups(groups)
        [worker] = self.actor_wg._hosts._host._workers.values()
        limit = self.config.actor_rollout_ref.rollout.max_running_requests
        self.buffer.engine.client = EngineClient(worker.rollout, limit)


class InProcessJob(PPOJob):
    trainer_cls = InProcessTrainer


def run(arguments):
    return InProcessJob(load_ppo_config(arguments)).run()


if __name__ == "__main__":
    run(sys.argv[1:])

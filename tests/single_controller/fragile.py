"""A role that fails, importable by name in any process, and without torch: its groups start fast."""

import os
import sys
import time

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.telemetry.flight_recorder import flight_recorder


class Fragile(Worker):
    """Fails in all the ways a worker can."""

    def __init__(self, fail_at_start=False):
        super().__init__()
        if fail_at_start and self.rank == 1:
            raise KeyError("no weights")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on(self, rank, hang=True):
        if self.rank == rank:
            raise ValueError(f"rank {rank} found no rows\nsecond line")
        if hang:
            time.sleep(1000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def raise_later(self):
        raise ValueError("found no rows")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def raise_later_on_rows(self, data):
        raise ValueError("found no rows")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def exit(self):
        if self.rank == 1:
            sys.exit("had enough")
        time.sleep(1000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank, signal):
        if self.rank == rank:
            os.kill(os.getpid(), signal)
        time.sleep(1000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_with_grandchild(self):
        if self.rank == 1:
            if os.fork() == 0:
                print("grandchild", os.getpid(), flush=True)
                time.sleep(1000)
            time.sleep(0.2)
            os._exit(7)
        time.sleep(1000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_in_collective(self, rank):
        """A rank is killed while the others wait for it in an all-reduce: they see a broken connection."""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if self.rank == rank:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_on(self, rank, seconds):
        time.sleep(seconds if self.rank == rank else 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def report_progress(self, seconds):
        for _ in range(int(seconds / 0.05)):
            flight_recorder().tick()
            time.sleep(0.05)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self, anything):
        return self.rank

"""Two roles fused into one worker class, with methods that use both."""

from verl.single_controller.base import ClassWithInitArgs, Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker_group import create_colocated_worker_raw_cls


class Actor(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.rank


class Critic(Worker):
    def __init__(self, val):
        super().__init__()
        self.val = val

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def subtract(self, x):
        return x - self.val


class_dict = {"actor": ClassWithInitArgs(cls=Actor), "critic": ClassWithInitArgs(cls=Critic, val=10)}
FusedBase = create_colocated_worker_raw_cls(class_dict)


class Hybrid(FusedBase):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def both(self, x):
        assert self.critic.fused_worker_dict["actor"] is self.actor
        return self.critic.subtract(self.actor.add(x))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spell(self, x):
        return self._fuw_execute("actor_fwmn_add", x)

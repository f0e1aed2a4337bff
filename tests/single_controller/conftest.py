"""Both controllers, one Ray for the whole session."""

import pytest

from verl.single_controller import get_controller


@pytest.fixture(scope="session")
def ray_controller():
    controller = get_controller("ray")
    controller.start({"num_cpus": 32, "object_store_memory_mb": 100}, {"OMP_NUM_THREADS": "1"})
    yield controller
    controller.stop()


@pytest.fixture(scope="session")
def local_controller():
    controller = get_controller("local")
    controller.start(None, {})
    yield controller
    controller.stop()


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def controller(request):
    return request.getfixturevalue(f"{request.param}_controller")


def starter(controller):
    """A function that starts a group of a role; the same class and arguments give the same group again."""
    groups = {}

    def start(cls, world_size=2, *args, fresh=False, timeout=None, **kwargs):
        key = object() if fresh else (cls, world_size, args, tuple(kwargs.items()))
        if key not in groups:
            classes = controller.ClassWithInitArgs(cls, *args, **kwargs)
            groups[key] = controller.WorkerGroup(controller.ResourcePool([world_size]), classes, timeout=timeout)
        return groups[key]

    yield start
    for group in groups.values():
        group.stop()


@pytest.fixture(scope="module")
def start(controller):
    """Start groups on the controller of the test; they end with the module."""
    yield from starter(controller)


@pytest.fixture(scope="module")
def start_local(local_controller):
    """Start groups without Ray, for promises that do not depend on the controller."""
    yield from starter(local_controller)

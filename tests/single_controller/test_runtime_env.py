"""``ray_init.runtime_env`` reaches Ray: whole on a cluster, without variables that workers inherit on this machine."""

import pytest

from verl.config.trainer import RayInitConfig

ray = pytest.importorskip("ray")


@pytest.fixture
def asked(monkeypatch):
    """What ``ray.init`` was asked for."""
    found = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: found.update(options))
    monkeypatch.setenv("VERL_TEST_NAME", "")
    return found


def start(env):
    from verl.config.base import FreeDict
    from verl.single_controller.ray.base import RayController

    runtime_env = FreeDict({"working_dir": ".", "pip": ["a"], "env_vars": FreeDict(env)})
    RayController().start(RayInitConfig(runtime_env=runtime_env), env)


def test_a_cluster_gets_all_of_it(asked, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    start({"VERL_TEST_NAME": 1})
    assert asked["runtime_env"] == {"working_dir": ".", "pip": ["a"], "env_vars": {"VERL_TEST_NAME": "1"}}


def test_this_machine_gets_the_rest(asked, monkeypatch):
    import os

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    start({"VERL_TEST_NAME": 2})
    assert asked["runtime_env"] == {"working_dir": ".", "pip": ["a"]} and os.environ["VERL_TEST_NAME"] == "2"
    assert type(asked["runtime_env"]) is dict, "Ray fills it in"

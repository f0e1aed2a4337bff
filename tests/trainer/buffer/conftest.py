"""Real engines for tests of partial rollouts."""

from tests.workers.rollout.conftest import model_folder, reference

__all__ = ["model_folder", "reference"]

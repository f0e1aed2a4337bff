"""Where hydra looks for plugins: lets any application with an ``@hydra.main`` of its own build on ``ppo_trainer``.

A namespace package, as hydra wants it: there is no ``__init__.py`` here.
"""

from verl.config.hydra_plugin import VerlSearchPath

__all__ = ["VerlSearchPath"]

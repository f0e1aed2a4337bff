"""What verl tells hydra: its YAML folder, and the dataclass defaults as ``schema/*`` nodes.

``load.py`` calls ``register`` when it composes. An application with its own ``@hydra.main`` that builds on
``ppo_trainer`` calls it once, before the decorated function runs.
"""

from functools import lru_cache

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl.config.base import Config
from verl.config.ppo import PPOConfig


class VerlSearchPath(SearchPathPlugin):
    """Puts verl's YAML folder behind the application's own, so that ``defaults: [ppo_trainer, _self_]`` is found."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from verl.config.compose import CONFIG_DIR

        search_path.append("verl", f"file://{CONFIG_DIR}")


@lru_cache(maxsize=1)  # the same root again costs nothing, another root replaces it
def register(root: type[Config] = PPOConfig) -> None:
    """Make ``schema/*`` and verl's YAML folder known to hydra in this process; ``root`` gives the defaults."""
    from verl.config.compose import schemas

    store = ConfigStore.instance()
    for name, node in schemas(root).items():
        store.store(group="schema", name=name, node=node, provider="verl")
    Plugins.instance().register(VerlSearchPath)

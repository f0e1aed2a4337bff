"""Settings of verl that hydra is given: its YAML folder, and the dataclass defaults as ``schema/*`` nodes.

Hydra finds this through ``hydra_plugins/`` in every application, also in those with an ``@hydra.main`` of their own.
Nothing of verl is imported until such an application composes.
"""

from functools import lru_cache

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlSearchPath(SearchPathPlugin):
    """Puts verl's YAML folder behind the application's own, so that ``defaults: [ppo_trainer, _self_]`` is found."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from verl.config.compose import CONFIG_DIR

        if "schema" not in ConfigStore.instance().repo:
            store_schemas()
        search_path.append("verl", f"file://{CONFIG_DIR}")


@lru_cache(maxsize=1)  # the same root again costs nothing, another root replaces it
def store_schemas(root: type | None = None) -> None:
    """Make ``schema/*`` known to hydra in this process; ``root`` (None: ``PPOConfig``) gives the defaults."""
    from verl.config.compose import schemas
    from verl.config.ppo import PPOConfig

    store = ConfigStore.instance()
    for name, node in schemas(root or PPOConfig).items():
        store.store(group="schema", name=name, node=node, provider="verl")


def register(root: type | None = None) -> None:
    """Make ``schema/*`` and verl's YAML folder known to hydra, where ``hydra_plugins/`` is not on the path either."""
    store_schemas(root)
    Plugins.instance().register(VerlSearchPath)

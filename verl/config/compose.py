"""Hydra's part: from YAML files and overrides to one tree. Keys are known to exist before this is called.

The only module, with ``hydra_plugin.py``, that knows hydra; it imports it when it composes.
"""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config.base import Config, ConfigError, schema_tree
from verl.config.features import feature_of_config, not_built

CONFIG_DIR = Path(__file__).parents[1] / "trainer" / "config"
"""Folder of verl's own YAML; always the last place searched."""

SCHEMAS = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "critic": "critic",
    "reward_model": "reward_model",
    "data": "data",
    "distillation": "distillation",
    "npu_profile": "trainer.npu_profile",
}
"""Group of YAML files -> the section it fills. ``schema/ppo`` holds everything else."""


def compose(
    overrides: Sequence[str], folders: Sequence[Path], config_name: str, root: type[Config]
) -> tuple[Any, dict]:
    """The tree hydra makes of YAML and overrides: as a DictConfig, and as plain dicts with unresolved interpolations.

    Args:
        overrides: as ``check_overrides`` returns them.
        folders: searched in this order for YAML and groups.
        config_name: YAML file to start from.
        root: class whose defaults the ``schema/*`` nodes hold.

    Raises:
        ConfigError: with hydra's explanation.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from verl.config.hydra_plugin import register

    # again for each composition: another root may have been registered since
    register(root)
    outer = GlobalHydra.instance().hydra  # of an application with its own @hydra.main, which must not notice
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings(), hydra.initialize_config_dir(str(folders[0]), version_base=None):
            warnings.simplefilter("ignore", UserWarning)  # a search path that is not there matters only if missed
            extra = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders[1:-1])}]"]
            composed = hydra.compose(config_name, [*overrides, *(extra if len(folders) > 2 else [])])
        return composed, OmegaConf.to_container(composed, resolve=False)
    except OverrideParseException as error:
        word, reason = error.override.removeprefix("++"), _explain(error).partition(" See http")[0]
        raise ConfigError([f"{word} does not follow hydra's grammar ({reason}): put the value in quotes."]) from error
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([_missing(error, folders) or _explain(error)]) from error
    finally:
        GlobalHydra.instance().hydra = outer


def _missing(error: BaseException, folders: Sequence[Path]) -> str | None:
    """The sentence about a YAML file that is in none of ``folders``; None if that is not what went wrong."""
    name = getattr(error, "missing_cfg_file", None)
    if not isinstance(name, str):
        return None
    feature = feature_of_config(name)
    if feature:
        return not_built(f"the configuration {name}", feature)
    if "/" in name:
        return None  # hydra lists the choices of a group
    own = ", ".join(sorted({path.stem for folder in folders for path in folder.glob("*.yaml")}))
    looked = ", ".join(map(str, folders))
    return f"the configuration {name} is not in {looked}, where there are {own}. Give its folder with --config-path."


def _explain(error: BaseException) -> str:
    """Hydra's message in one paragraph, with the reason it hides behind."""
    text = re.sub(r"\s*\n\s*", " ", str(error)).strip()
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text += f" ({' '.join(str(cause).split())})"
    if "sweep" in text.lower():
        text += " One command runs one configuration: quote a value that holds a comma, or write lists as [a,b]."
    return text


def schemas(root: type[Config]) -> dict[str, dict]:
    """Name of a ``schema/*`` node -> its content: the defaults of the dataclasses."""
    whole = schema_tree(root())
    if root._schema is not None:  # a program of its own, without groups
        return {root._schema: whole}
    nodes = {}
    for name, key in SCHEMAS.items():
        *path, last = key.split(".")
        # cut out of the whole, so that no default is stored twice and a group's YAML is the only one to fill it
        parent = whole
        for part in path:
            parent = parent[part]
        nodes[name] = parent.pop(last)
    return {"ppo": whole, **nodes}


def search_folders(config_path: str | None, config_dir: str | None) -> list[Path]:
    """The user's folders, then verl's own. A relative path is looked for here, then next to main_ppo.py as in hydra."""
    found = []
    for given in (config_path, config_dir):
        if given is None:
            continue
        text = given.removeprefix("file://")
        choices = [Path(text).expanduser().absolute(), (CONFIG_DIR.parent / text).absolute()]
        folder = next((choice for choice in choices if choice.is_dir()), None)
        if folder is None:
            raise ConfigError(
                [
                    f"--config-path={given} is no folder (looked at {choices[0]} and {choices[1]}). "
                    f"Give the folder that holds your YAML file."
                ]
            )
        if folder not in found and folder != CONFIG_DIR:
            found.append(folder)
    return [*found, CONFIG_DIR]

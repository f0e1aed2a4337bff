"""Public names for turning YAML trees into typed options and for checking them; the work is done in ``verl.config``."""

import importlib
import warnings
from typing import Any, cast

from verl.config.base import Config, ConfigError, ConfigWarning, Problem, leaves, plain
from verl.config.command_line import locate
from verl.config.load import LoadedConfig, check, interpret
from verl.config.ppo import PPOConfig
from verl.config.tree import build

__all__ = [
    "adopt_config",
    "omega_conf_to_dataclass",
    "to_ppo_config",
    "typed_config",
    "typed_section",
    "validate_config",
]


def omega_conf_to_dataclass(config: Any, dataclass_type: type[Config] | None = None) -> Any:
    """A section as its dataclass.

    Args:
        config: a DictConfig or mapping; None or a dataclass comes back as it is.
        dataclass_type: the class. None: the one ``config["_target_"]`` names.

    Raises:
        ConfigError: unknown keys or values of the wrong type, all at once.
        ValueError: neither ``dataclass_type`` nor ``_target_`` is given.
    """
    if config is None or hasattr(config, "__dataclass_fields__"):
        return config
    values = _plain(config)
    if dataclass_type is None:
        target = values.get("_target_")
        if not target:
            raise ValueError(
                f"cannot tell the class of a section with the keys {sorted(values)}: give dataclass_type, or "
                f"_target_ in the section."
            )
        module, _, name = target.rpartition(".")
        dataclass_type = getattr(importlib.import_module(module), name)
    if not issubclass(dataclass_type, Config):
        return dataclass_type(**{name: value for name, value in values.items() if name != "_target_"})
    problems: list[Problem] = []
    typed = build(dataclass_type(), values, "", problems)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return typed


def to_ppo_config(config: Any) -> PPOConfig:
    """A whole tree, as an application with its own ``@hydra.main`` composed it, typed and checked.

    Raises:
        ConfigError: with every problem found.
    """
    if isinstance(config, PPOConfig):
        return config
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else dict(config)
    loaded = interpret(tree, set())
    if loaded.problems:
        raise ConfigError([problem.text for problem in loaded.problems])
    return loaded.config


_ADOPTED = "adopted_by_verl"  # flag of a tree whose warnings were given


def adopt_config(config: Any) -> Any:
    """A tree handed in by a script of the user's: checked, its old names translated, and still a DictConfig.

    Keys verl does not know stay in it for the script's own code, and are named in a warning. A PPOConfig comes back
    as it is.

    Raises:
        ConfigError: with every problem found.
    """
    if isinstance(config, PPOConfig):
        return config
    from omegaconf import OmegaConf, open_dict

    tree = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else dict(config)
    has_warned = OmegaConf.is_config(config) and config._get_flag(_ADOPTED)
    adopted = OmegaConf.create(tree)
    loaded, unknown = _interpret(tree)
    messages = list(loaded.warnings)
    if unknown:
        messages.append(f"left to the script that set them: {' '.join(problem.text for problem in unknown)}")
    for message in () if has_warned else messages:
        warnings.warn(message, ConfigWarning, stacklevel=3)
    with open_dict(adopted):
        for key, value in leaves(loaded.config):
            OmegaConf.update(adopted, key, plain(value), merge=False, force_add=True)
    OmegaConf.set_struct(adopted, True)
    adopted._set_flag(_ADOPTED, True)
    return adopted


def typed_config(config: Any) -> PPOConfig:
    """The typed sections of a tree as hydra or ``adopt_config`` gives it; keys of a script's own are left out.

    Raises:
        ConfigError: with every problem found.
    """
    if isinstance(config, Config):  # of another program too, whose tree is its own
        return cast(PPOConfig, config)
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else dict(config)
    return _interpret(tree)[0].config


def typed_section(config: Any, cls: type[Config]) -> Any:
    """A section as its class ``cls``: one that a script took out of hydra's tree, keys of its own left out.

    Anything but a mapping of OmegaConf's or Python's comes back as it is.

    Raises:
        ConfigError: with every value that cannot be used.
    """
    if isinstance(config, Config) or not (isinstance(config, dict) or hasattr(config, "_metadata")):
        return config
    problems: list[Problem] = []
    typed = build(cls(), _plain(config), "", problems)
    if wrong := [problem.text for problem in problems if locate(cls, problem.key).kind != "unknown"]:
        raise ConfigError(wrong)
    return typed


def _interpret(tree: dict) -> tuple[LoadedConfig, list[Problem]]:
    """The typed tree, and the problems that are only unknown keys. Raises ConfigError for all others."""
    loaded = interpret(tree, set())
    unknown = [problem for problem in loaded.problems if locate(PPOConfig, problem.key).kind == "unknown"]
    if wrong := [problem.text for problem in loaded.problems if problem not in unknown]:
        raise ConfigError(wrong)
    return loaded, unknown


def validate_config(config: Any, use_reference_policy: bool | None = None, use_critic: bool | None = None) -> None:
    """Raise ``ConfigError`` (a ValueError) naming everything that is wrong with ``config``.

    Keys of a script's own are no fault of its tree: ``RayPPOTrainer`` names them in a warning.

    Whether there is a reference policy and a critic follows from the configuration; the two flags are accepted for
    callers written for verl and not needed.
    """
    if isinstance(config, PPOConfig):
        check(config)
    else:
        typed_config(config)


def _plain(config: Any) -> dict[str, Any]:
    if not hasattr(config, "_metadata"):
        return dict(config)
    from omegaconf import OmegaConf  # whose DictConfig is a Mapping, and holds lists that are none

    return OmegaConf.to_container(config, resolve=True)

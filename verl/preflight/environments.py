"""Environments that a configuration names: that there are such, and that they take what they are given."""

from collections.abc import Iterator

from verl.config.base import Problem
from verl.config.ppo import PPOConfig
from verl.utils.import_utils import split_file_name


def missing_environments(config: PPOConfig) -> Iterator[Problem]:
    """Find tags whose environment is unknown, or does not take its arguments.

    Only environments of the package are made: the files of a user are read by ``names_in_files``, and a package's
    environment may take its time.
    """
    from verl.envs.base import built_in_names, environment_class, make

    env, problems = config.env, list[Problem]()
    tags = [*(env.train.tags or ()), *env.val_tags] if env.makes_rows else []
    for tag in dict.fromkeys([*tags, *env.registry]):
        entry = env.read_tag(tag, problems)  # what is wrong with the entry itself is an error of the validators
        key = f"env.registry.{tag}.type"
        if split_file_name(entry.type):
            continue
        where = f"{key}={entry.type}" if tag in env.registry else f"env.train.tags={tag}"
        try:
            if entry.type in built_in_names():
                make(entry.type, **entry.kwargs)
            else:
                environment_class(entry.type)
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            yield Problem(key, f"{where}: {error}".rstrip(".") + ".", ("env.train.tags",))


def environment_files(config: PPOConfig) -> Iterator[tuple[str, str, str]]:
    """Return (key, file, class) of each environment that is in a file of the user's."""
    for tag in config.env.registry:
        kind = config.env.read_tag(tag, []).type
        if in_file := split_file_name(kind):
            yield f"env.registry.{tag}.type", *in_file

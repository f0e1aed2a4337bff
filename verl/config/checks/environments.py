"""Environment groups: whether the ``env`` section fits together, and what contradicts it elsewhere."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import IsGiven, contradictions, problem, unused, validator
from verl.config.env import EnvSplitConfig
from verl.config.ppo import ROLLOUT, SHAPING, PPOConfig
from verl.config.tree import show

contradictions(
    __name__,
    {
        f"{ROLLOUT}.skip_rollout with env.train.tags": "batches are kept by their prompts, and the prompts of "
        "environments are known when they run. Set skip_rollout=false.",
        "env.reward=environment|function|sum with reward_model.enable": "the model's score is the reward of a "
        "trajectory. Set env.reward=auto, or reward_model.enable=false.",
    },
)


@validator("error")
def registry_entries(config: PPOConfig) -> Iterator[Problem]:
    problems: list[Problem] = []
    for name in config.env.registry:
        config.env.read_tag(name, problems)
    yield from problems


@validator("error")
def environments_named(config: PPOConfig) -> Iterator[Problem]:
    if config.env.train.tags is None:
        text = "env.train.tags must be given: the environments to train in, as in env.train.tags=[FrozenLake]. Or run "
        yield Problem("env.train.tags", f"{text}verl.trainer.main_ppo, to train on data files.")


@validator("error")
def groups_of_tags(config: PPOConfig) -> Iterator[Problem]:
    """Groups of each tag, and numbers of groups and of episodes, that do not come to what the split says."""
    env = config.env
    if not env.makes_rows:
        return
    splits: tuple[tuple[str, EnvSplitConfig, list[str]], ...] = (
        ("env.train", env.train, list(env.train.tags or ())),
        ("env.val", env.val, env.val_tags),
    )
    for key, split, tags in splits:
        if twice := [tag for tag in tags if tags.count(tag) > 1]:
            yield problem(config, f"{key}.tags", f"names {twice[0]} twice. Name it once, and set {key}.groups_per_tag.")
        counts = split.groups_per_tag
        if counts is None:
            if len(tags) > split.n_groups:
                text = f"is less than the {len(tags)} tags of {key}.tags: some would have no group. Raise it."
                yield problem(config, f"{key}.n_groups", text, f"{key}.tags")
        elif len(counts) != len(tags) or sum(counts) != split.n_groups or min(counts, default=0) < 0:
            yield problem(
                config,
                f"{key}.groups_per_tag",
                f"must have one number for each of the {len(tags)} tags in {key}.tags={show(tags)}, which add up to "
                f"{key}.n_groups={split.n_groups}. Correct them, or leave it null to divide the groups equally.",
                f"{key}.tags",
                f"{key}.n_groups",
            )


@validator("error")
def environments_decide(config: PPOConfig) -> Iterator[Problem]:
    """Options elsewhere that say something else than the environment groups."""
    env, rollout, data = config.env, config.actor_rollout_ref.rollout, config.data
    if not env.makes_rows:
        return
    for key, size in ((f"{ROLLOUT}.n", "env.train.group_size"), (f"{ROLLOUT}.val_kwargs.n", "env.val.group_size")):
        value = rollout.n if key.endswith("rollout.n") else rollout.val_kwargs.n
        group = env.train.group_size if size.startswith("env.train") else env.val.group_size
        if value != group:
            text = f"must be {size}={group}, the environments of a group. Leave it out."
            yield problem(config, key, text, size)
    if rollout.mode != "async":
        text = "runs no agent loops, and env.train.tags asks for episodes. Leave it out, or set async."
        yield problem(config, f"{ROLLOUT}.mode", text, "env.train.tags")
    for key, files in data.files.items():
        if files:
            text = f"with env.train.tags={show(env.train.tags)}: rows are environment groups. Leave one of them out."
            yield problem(config, key, text, "env.train.tags")
    groups, most = env.train.n_groups, env.train.max_traj_per_env
    if data.train_batch_size % groups:
        text = (
            f"must be a multiple of env.train.n_groups={groups}: all environments run as many episodes. Leave it out."
        )
        yield problem(config, "data.train_batch_size", text, "env.train.n_groups")
    elif 0 < most < data.train_batch_size // groups:
        episodes = data.train_batch_size // groups
        text = f"asks for {episodes} episodes of each environment, and env.train.max_traj_per_env={most} allows fewer. "
        text += "Leave one of them out."
        yield problem(config, "data.train_batch_size", text, "env.train.max_traj_per_env")
    if most == 0 or env.val.max_traj_per_env == 0:
        key = "env.train.max_traj_per_env" if most == 0 else "env.val.max_traj_per_env"
        yield problem(config, key, "must be at least 1, or -1.")
    if env.train.redundancy and round(rollout.over_sample_rate * groups, 3) != env.train.redundancy:
        text = f"must be env.train.redundancy={env.train.redundancy} over env.train.n_groups={groups}. Leave it out."
        yield problem(config, f"{ROLLOUT}.over_sample_rate", text, "env.train.redundancy")
    if config.trainer.total_training_steps is None and not config.trainer.val_only:
        text = "must be given: environments have no end, and so no epochs. Set the number of steps."
        yield problem(config, "trainer.total_training_steps", text, "env.train.tags")


@validator("error")
def normalized_once(config: PPOConfig) -> Iterator[Problem]:
    """``env.reward_normalization`` and the options that do the same, where they differ."""
    normalization, shaping = config.env.reward_normalization, config.algorithm.reward_shaping
    for name, value in normalization.shaping.items():
        if (found := get_path(shaping, name)) != value:
            key = f"{SHAPING}.{name}"
            text = (
                f"must be {show(value)} with env.reward_normalization.method={normalization.method}, "
                f"grouping={normalization.grouping}, which does the same. Leave one of them out."
            )
            yield Problem(key, f"{key}={show(found)} {text}", ("env.reward_normalization.method",))


@validator("error")
def environment_reward(config: PPOConfig) -> Iterator[Problem]:
    """A source of rewards that is not there."""
    if config.env.makes_rows and config.env.reward in ("function", "sum") and not _has_function(config):
        text = (
            "asks for a reward function, and there is none. Name its file with custom_reward_function.path, or set "
            "environment."
        )
        yield problem(config, "env.reward", text, "custom_reward_function.path")


@validator("warning")
def memory_of_threads(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.env.num_workers == 0:
        why = "environments run in threads of the driver (env.num_workers=0), which cannot be limited one by one"
        yield from unused(config, ["env.memory_mb"], is_given, why)


@validator("warning")
def groups_unused_without_tags(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.env.makes_rows:
        keys = [f"env.{split}.{name}" for split in ("train", "val") for name in config.env.train]
        keys.remove("env.train.format_penalty")  # of rows of data that name an environment
        yield from unused(config, keys, is_given, "env.train.tags is empty, so rows are those of data files")
        return
    why = "rows are environment groups, in the order of their numbers"
    names = ("shuffle", "sampler.class_path", "mixture", "train_max_samples", "val_max_samples", "validation_shuffle")
    keys = [f"data.{name}" for name in (*names, "datagen.path", "custom_cls.path", "filter_overlong_prompts")]
    yield from unused(config, keys, is_given, why)


@validator("warning")
def custom_function_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.env.makes_rows and config.env.reward in ("auto", "environment") and _has_function(config):
        why = f"env.reward={config.env.reward} takes the environment's reward; set env.reward=sum or function"
        yield from unused(config, ["custom_reward_function.path"], is_given, why)


def _has_function(config: PPOConfig) -> bool:
    return config.custom_reward_function.path is not None

"""Options of environments and of the episodes that agent loops run in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from verl.config.base import Config, ConfigError, Problem, ReadIf, option, plain, read_if, section
from verl.config.tree import build

_AGENTS = read_if("actor_rollout_ref.rollout.mode", "async", remark="runs no agent loops")


@dataclass
class EnvSplitConfig(Config):
    """Environment groups of training. With ``tags`` they are what a run trains on, and no data files are read."""

    n_groups: int = option(8, above=0)
    """Environment groups of a step: of each group all environments begin in the same state."""

    group_size: int = option(8, above=0)
    """Environments of a group, which is the group of GRPO: becomes ``rollout.n`` (of validation ``val_kwargs.n``)."""

    redundancy: int = option(0, at_least=0)
    """Further groups that a step starts; it trains on those complete first. Becomes ``rollout.over_sample_rate``."""

    tags: list[str] | None = option([])
    """Names of ``env.registry``, or of built-in environments, that take part. Empty: the run reads data files. Null,
    as ``main_agentic`` has it: they must be given."""

    groups_per_tag: list[int] | None = None
    """Groups of each tag, ``n_groups`` in all. Null: as equal as can be."""

    max_traj_per_env: int = option(-1, at_least=-1)
    """Episodes of each environment in a step at most, one after the other from other seeds. ``data.train_batch_size``
    becomes ``n_groups`` times as many. -1: as many as ``data.train_batch_size`` asks for; without one, 1."""

    format_penalty: float = 0.0
    """Added to the reward of each turn without a valid action (``info["valid_action"]``). Mostly negative."""

    def tag_of_group(self, tags: Sequence[str]) -> list[str]:
        """Return the tag of each group: ``n_groups`` names."""
        counts = self.groups_per_tag or [len(range(place, self.n_groups, len(tags))) for place in range(len(tags))]
        return [tag for tag, count in zip(tags, counts, strict=True) for _ in range(count)]


@dataclass
class EnvValidationConfig(EnvSplitConfig):
    """Environment groups of validation."""

    n_groups: int = option(32, above=0)
    """Environment groups of a validation: of each group all environments begin in the same state."""

    group_size: int = option(1, above=0)
    """Environments of a group; becomes ``val_kwargs.n``. More than one is of use with ``val_kwargs.do_sample``."""

    redundancy: int = option(0, never_read="validation waits for every episode")
    """Not for validation."""

    tags: list[str] | None = None
    """As ``env.train.tags``. Null: those; ``[]``: nothing is validated."""

    max_traj_per_env: int = option(-1, at_least=-1)
    """Episodes of each environment in a validation. -1: 1."""

    format_penalty: float = option(0.0, never_read="the penalty is that of env.train, or of the tag")
    """Not for validation."""


@dataclass
class RewardNormalizationConfig(Config):
    """Normalization of episode scores before the estimator, as RAGEN means it."""

    grouping: Literal["state", "inductive", "batch"] = "state"
    """Episodes that are compared: of the same group (``state``), of the same tag (``inductive``: the same value of
    ``data.reward_fn_key``), or all of the step (``batch``)."""

    method: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """``identity``: none. ``mean``: minus the mean. ``mean_std``: over the standard deviation too. ``asym_clip``: that,
    clipped to [-1, 3]. Source: RAGEN, Wang et al. 2025 (arXiv:2504.20073). Becomes ``algorithm.reward_shaping.norm``
    and ``clip_range``: the rewards of all turns are divided, and the mean is taken from the last turn."""

    @property
    def shaping(self) -> dict[str, Any]:
        """Options of ``algorithm.reward_shaping`` that do this; empty: none."""
        group = {"state": "group", "inductive": "source", "batch": "batch"}[self.grouping]
        if self.method == "identity":
            return {}
        options: dict[str, Any] = {"norm.mean": group}
        if self.method != "mean":
            options["norm.std"] = group
        if self.method == "asym_clip":
            options["clip_range"] = [-1.0, 3.0]
        return options


@dataclass
class EnvTagConfig(Config):
    """An environment by the name of its tag."""

    type: str = "FrozenLake"
    """Built-in or registered name, ``path/file.py:Class``, ``package.module.Class`` or ``gymnasium:ID``."""

    kwargs: dict[str, Any] = option({})
    """Free-form: arguments of its class."""

    max_steps: int | None = option(None, above=0)
    """Turns of an episode at most. Null: ``multi_turn.max_assistant_turns``."""

    max_tokens_per_step: int | None = option(None, above=0)
    """Tokens of a turn at most. Null: what is left of the response window."""

    system_prompt: str | None = None
    """First message of the conversation, of role system."""

    turn_template: str = "{observation}"
    """Text of the user's message of each turn. Reads ``{observation}``, ``{turn}``, ``{turns_left}`` and
    ``{max_steps}``."""

    format_penalty: float | None = None
    """Null: ``env.train.format_penalty``."""


@dataclass
class EnvConfig(Config):
    """Environments, and the episodes that agent loops run in them and with tools."""

    _read_if: ClassVar[ReadIf] = _AGENTS

    num_workers: int = option(0, at_least=0)
    """Processes that run environments, many in each; they can be killed. 0: they run in threads of the driver, where
    a hung one is abandoned and cannot be killed."""

    max_concurrent_steps: int | None = option(None, above=0)
    """Steps of environments that run at a time. Null: no bound."""

    reset_timeout: float = option(60.0, above=0)
    """Seconds in which an environment must begin an episode."""

    step_timeout: float = option(60.0, above=0)
    """Seconds in which an environment must answer an action."""

    episode_timeout: float | None = option(None, above=0)
    """Seconds of an episode at most, generation included; of every agent loop. Null: no limit."""

    idle_timeout: float | None = option(1800.0, above=0)
    """Seconds in which an agent loop must ask for tokens again, or end; one that waits longer fails, and the place in
    its code is named. One that blocks the event loop of all loops for so long ends the run. Null: no limit."""

    memory_mb: int | None = option(None, above=0)
    """MiB that one environment process may use. Null: no limit. Read with ``num_workers``."""

    on_error: Literal["retry", "drop", "stop"] = "retry"
    """When an agent loop, an environment or a tool's set-up fails: run the episode again and then drop it; drop it; or
    stop the run. A dropped episode leaves its group, and is never a reward of 0."""

    max_retries: int = option(1, at_least=0)
    """Times that ``on_error=retry`` runs an episode again."""

    max_error_share: float = option(0.25, at_least=0, at_most=1)
    """Share of a step's episodes that may fail; with more the run ends with the causes."""

    reward: Literal["auto", "environment", "function", "sum"] = "auto"
    """Reward of a trajectory: that of the environment (agent loop); that of the reward function, which finds the
    environment's in ``extra_info["rollout_reward_scores"]``; or their sum. ``auto``: the environment's where the agent
    loop gives a ``reward_score``, else the function's."""

    render_save_dir: str | None = None
    """Folder for the frames of validation episodes. Null: none are kept."""

    reward_normalization: RewardNormalizationConfig = section(RewardNormalizationConfig)
    """Normalization of episode scores."""

    train: EnvSplitConfig = section(EnvSplitConfig)
    """Environment groups of training."""

    val: EnvValidationConfig = section(EnvValidationConfig)
    """Environment groups of validation; their seeds never meet those of training."""

    registry: dict[str, Any] = option({})
    """Environments by tag: ``env.registry.<tag>.{type,kwargs,max_steps,max_tokens_per_step,system_prompt,turn_template,
    format_penalty}``, the fields of ``verl.config.env.EnvTagConfig``."""

    @property
    def makes_rows(self) -> bool:
        """Whether the rows of the run are environment groups, and not those of data files."""
        return bool(self.train.tags)

    @property
    def val_tags(self) -> list[str]:
        """Tags of validation; none: nothing is validated."""
        return list((self.train.tags if self.val.tags is None else self.val.tags) or ())

    def tag(self, name: str) -> EnvTagConfig:
        """Return the entry of ``env.registry`` for a tag; one without an entry is an environment of that type.

        Raises:
            ConfigError: the entry has an unknown key, or a value that does not fit.
        """
        problems: list[Problem] = []
        found = self.read_tag(name, problems)
        if problems:
            raise ConfigError([problem.text for problem in problems])
        return found

    def read_tag(self, name: str, problems: list[Problem]) -> EnvTagConfig:
        """As `tag`; what is wrong with the entry goes to ``problems``."""
        entry = self.registry.get(name) or {}
        key = f"env.registry.{name}"
        if not isinstance(entry, dict):
            problems.append(Problem(key, f"{key}={entry!r} is no section. Give {key}.type=NAME and what it takes."))
            entry = {}
        return build(EnvTagConfig(type=name), plain(entry), key, problems)

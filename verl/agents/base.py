"""Base class of agent loops, and their registry. Knows no server and no batch."""

import asyncio
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from verl.utils.import_utils import load_class_from_fqn, load_extern_type, load_module_from_file
from verl.utils.py_functional import nearest_name


@dataclass
class AgentLoopMetrics:
    """Seconds of one row: an agent loop may also give a dict of them."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class EpisodeStatus(str, Enum):
    """How an episode ended."""

    __str__ = str.__str__

    COMPLETED = "completed"
    """The environment, the simulated user or the policy ended it."""
    TRUNCATED = "truncated"
    """The environment ended it at a limit of its own."""
    ASSISTANT_TURNS = "max_assistant_turns"
    USER_TURNS = "max_user_turns"
    TOOL_CALLS = "max_tool_calls"
    TURN_TOKENS = "max_tokens_per_turn"
    """A turn of the policy was cut at its limit of tokens."""
    TOKENS = "max_tokens"
    """The response window is full."""
    TIMEOUT = "episode_timeout"
    ERROR = "error"
    """It failed: the row has no token in the loss, and counts in no group."""


@dataclass
class AgentLoopOutput:
    """One row's conversation as tokens: the prompt, and all that followed it."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Tokens of the policy and of whatever answered it, in order."""
    response_mask: list[int]
    """1 on tokens that the policy sampled and that are trained on, 0 on those of tools or users."""
    response_logprobs: list[float] | None = None
    """Log-probability of each response token under the distribution it was sampled from; any value where masked."""
    reward_score: float | None = None
    """The row's reward, if the loop knows it; then no reward function is called. It belongs to the last token that the
    policy sampled, though tool output may follow."""
    turn_rewards: Sequence[float] | None = None
    """Rewards of the policy's turns, one for each of ``turn_spans``. Each belongs to the last token of its turn, next
    to ``reward_score``, which is the episode's."""
    turn_spans: Sequence[tuple[int, int]] | None = None
    """First and last + 1 of the response tokens of each turn of the policy. None: the runs of ones in
    ``response_mask``."""
    turn_state_ids: Sequence[Any] | None = None
    """State in which each turn began, for ``algorithm.adv_estimator=gigpo``: text, numbers or arrays."""
    status: EpisodeStatus | str | None = None
    """How the episode ended."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation as chat messages, for dumps and traces."""
    num_turns: int = 2
    """Messages of all sides, the prompt counting as one."""
    metrics: Mapping[str, float] | AgentLoopMetrics = field(default_factory=dict)
    """Seconds by name: ``generate_sequences``, ``tool_calls`` or any other, logged as their spread over the rows."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, one value each."""
    multi_modal_data: Mapping[str, Any] | None = None
    """Images in the prompt: the row's own. Images that are added while a loop runs are not supported."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """``metrics`` as a mapping."""
        return vars(self.metrics) if isinstance(self.metrics, AgentLoopMetrics) else self.metrics

    def __post_init__(self):
        # one form from here on: whoever reads them merges mappings
        self.metrics = self.seconds
        for name in ("response_mask", "response_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(
                    f"AgentLoopOutput: {name} has {len(values)} entries, response_ids {len(self.response_ids)}. "
                    "There must be one for each response token."
                )


STATUS_COLUMN = "episode_status"
"""Column with the `EpisodeStatus` of each row; "error" marks a row that counts nowhere."""

TRAJECTORY_COLUMN = "trajectory_id"
"""Column where trajectories have several rows, one a turn: rows of one trajectory have the same value."""


class TrainerConfig:
    """The whole configuration for agent loops: by its sections, and as ``config``, which verl's loops read."""

    def __init__(self, config: Any):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        # not self.config: where it is missing that would come here again, without end
        return getattr(vars(self)["config"], name)


class AgentLoopBase(ABC):
    """Conversation of one row. A new object is made for every row, in the event loop of its process.

    Args:
        trainer_config: the whole configuration.
        server_manager: `AsyncLLMServerManager`, whose `generate` generates tokens.
        tokenizer, processor: the policy's.
        kwargs: what the loop's entry in ``rollout.agent.agent_loop_config_path`` has besides name and class.
    """

    _class_initialized = False

    ends_in_time = False
    """Whether it ends by itself at ``env.episode_timeout``, with the turns that are complete by then."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any = None, **kwargs: Any):
        self.config = trainer_config.config if isinstance(trainer_config, TrainerConfig) else trainer_config
        self.init_class(self.config, tokenizer, processor, **kwargs)
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.options = kwargs
        # raises outside of a running loop: agent loops are made by the task that runs them
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Prepare what all rows share. Called for every row: check ``_class_initialized`` to act once."""
        # on the class of this loop: those derived from it inherit the mark
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Turn a row into a conversation; several outputs are the turns of one trajectory, in order.

        Blocking work belongs into ``self.loop.run_in_executor``: all rows share this event loop.

        Args:
            sampling_params: fields of `verl.workers.rollout.base.SamplingParams`, a dict of the row's own.
            row: the row's columns, with ``raw_prompt_ids`` (the prompt's tokens) always among them.
        """


_LOOPS: dict[str, Callable[..., AgentLoopBase]] = {}

# built in: imported when they are asked for
_BUILT_IN = {
    "env_agent": "verl.agents.env_agent",
    "interaction_agent": "verl.agents.interaction_agent",
    "openai_agent": "verl.agents.outside_agent",
    "tool_agent": "verl.agents.tool_agent",
}


def register(name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Class decorator: rows whose ``agent_name`` is ``name`` are generated by this loop."""

    def decorate(cls: type[AgentLoopBase]) -> type[AgentLoopBase]:
        _LOOPS[name] = cls
        return cls

    return decorate


def agent_loop(name: str) -> Callable[..., AgentLoopBase]:
    """Return the constructor of the loop of this name.

    Raises:
        ValueError: no loop has this name; lists those that exist.
    """
    if name not in _LOOPS and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _LOOPS:
        known = sorted({*_LOOPS, *_BUILT_IN})
        raise ValueError(
            f"agent_name={name!r} is not a known agent loop; known are {', '.join(known)}."
            f"{nearest_name(name, known)} Register yours in the file of "
            "actor_rollout_ref.rollout.agent.agent_loop_config_path."
        )
    return _LOOPS[name]


_CLOSERS: list[Callable[[], Any]] = []


def at_close(function: Callable[[], Any]) -> Callable[[], Any]:
    """Function decorator: called at the end of a run, to give back what the loops of all rows share.

    In the event loop of the agent loops; the function may be ``async``.
    """
    _CLOSERS.append(function)
    return function


async def close_shared() -> None:
    """Call what `at_close` was given."""
    for function in _CLOSERS:
        result = function()
        if inspect.isawaitable(result):
            await result


def load_agent_loops(path: str) -> None:
    """Register the user's loops: a Python file registers them itself, a YAML file lists them.

    Raises:
        ValueError: an entry of the YAML lacks its name or class.
        TypeError: an entry's class is no AgentLoopBase.
    """
    if path.endswith(".py"):
        # its `register` decorators run as it is imported
        load_module_from_file(path)
        return
    from omegaconf import OmegaConf

    entries = OmegaConf.to_container(OmegaConf.load(path))
    for entry in entries if isinstance(entries, Sequence) else [entries]:
        if not isinstance(entry, Mapping) or not entry.get("name") or not entry.get("_target_"):
            raise ValueError(
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}: the entry {entry!r} must have a name "
                "and a _target_, the dotted class of the loop."
            )
        options = dict(entry)
        name, target, file = options.pop("name"), options.pop("_target_"), options.pop("path", None)
        cls = load_extern_type(file, target) if file else load_class_from_fqn(target, "_target_")
        if not (isinstance(cls, type) and issubclass(cls, AgentLoopBase)):
            raise TypeError(f"{path}: {target} of agent loop {name!r} is no subclass of verl.agents.AgentLoopBase.")
        # over one of the same name: a user may replace a built-in loop
        _LOOPS[name] = partial(cls, **options)


# -- One prompt, one response ----------------------------------------------------------------------------------------


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """One prompt, one response: the tokens of ``mode=sync``, from the same seeds."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt_ids = list(row["raw_prompt_ids"])
        images = (row.get("multi_modal_data") or {}).get("image")
        completion = await self.server_manager.generate(
            prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=images
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            response_logprobs=completion.log_probs,
        )

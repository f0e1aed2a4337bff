"""Profiling of steps: what is recorded, of which ranks, in which form. The traces are telemetry's (`profiler.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from verl.config.base import Config, ReadIf, option, read_if, section

Content = Literal["cpu", "cuda", "memory", "shapes", "stack", "module"]
Tool = Literal["torch", "torch_memory", "nsys", "npu"]
_STEPS = read_if("trainer.profile_steps", remark="profiles no step")


@dataclass
class ProfilerConfig(Config):
    """Ranks that are profiled, in the steps ``trainer.profile_steps``."""

    _target_: ClassVar[str] = "verl.utils.profiler.ProfilerConfig"
    _read_if: ClassVar[ReadIf | None] = _STEPS

    discrete: bool = False
    """One trace for each call of a worker (``update_actor``, ...) instead of one of the whole step."""

    all_ranks: bool = False
    """Profile every rank."""

    ranks: list[int] | None = option([])
    """Ranks to profile. Null or empty: rank 0."""

    enable: bool | None = None
    """Profile this role. Null: yes, unless another role says true."""


@dataclass
class FollowingProfilerConfig(Config):
    """As ``actor_rollout_ref.profiler``, whose values stand where these are null. In processes that play several roles
    one trace holds them all, and is made if one of them is profiled."""

    _read_if: ClassVar[ReadIf | None] = _STEPS

    discrete: bool | None = None
    """One trace for each call of a worker."""

    all_ranks: bool | None = None
    """Profile every rank."""

    ranks: list[int] | None = None
    """Ranks to profile."""

    enable: bool | None = None
    """Profile this role."""


@dataclass
class TorchMemoryConfig(Config):
    """CUDA's history of allocations, for ``tool=torch_memory``."""

    trace_alloc_max_entries: int = option(100_000, above=0)
    """Allocations that are kept, the newest."""

    stack_depth: int = option(32, never_read="torch keeps whole stacks", above=0)
    """Has no effect: torch keeps whole stacks."""

    context: Literal["state", "alloc", "all"] | None = "all"
    """Stacks to keep: of living memory, of allocations too, of these and of what was freed. Null: none."""

    stacks: Literal["python", "all"] = "all"
    """Stacks of Python alone, or of C++ as well."""

    kw_args: dict[str, Any] = option({})
    """Free-form: more arguments of ``torch.cuda.memory._record_memory_history``."""


@dataclass
class ToolConfig(Config):
    """Options of single tools."""

    torch_memory: TorchMemoryConfig = section(TorchMemoryConfig)
    """History of allocations."""


@dataclass
class GlobalProfilerConfig(Config):
    """Form of the traces of the steps that ``trainer.profile_steps`` names."""

    _read_if: ClassVar[ReadIf | None] = _STEPS

    tool: Tool | None = None
    """``torch``: torch.profiler, a trace of operators and phases. ``torch_memory``: a snapshot of allocations on CUDA;
    elsewhere a trace with each allocation. ``nsys``: Nsight Systems around Ray workers. Null: ``torch``."""

    save_path: str | None = None
    """Folder of the traces. Null: ``profile`` in the run's folder, where ``verl view`` finds them."""

    contents: list[Content] = option([])
    """Parts of torch's traces: operators of the cpu, kernels of cuda, each allocation (memory), shapes of inputs, stack
    (lines of Python), module. Empty: cpu, and cuda where a process uses it."""

    max_module_calls: int | None = option(10_000, above=0)
    """Bound of torch's traces: calls of model layers that each call of a worker records. Of the rest of a call only its
    span is left. Null: all, which of a long generation are gigabytes."""

    global_tool_config: ToolConfig = section(ToolConfig)
    """Options of single tools."""


@dataclass
class SFTProfilerConfig(Config):
    """Traces of the steps that ``trainer.profile_interval`` names."""

    enable: bool | None = None
    """False: none are made."""

    tool: Tool = "torch"
    """As ``global_profiler.tool`` of main_ppo: ``torch`` or ``torch_memory``."""

    discrete: bool = False
    """One trace for each call of a worker instead of one of all steps."""

    all_ranks: bool = False
    """Profile every rank."""

    ranks: list[int] | None = option([], read_if("all_ranks", "false"))
    """Ranks to profile. Null or empty: rank 0."""

    save_path: str | None = None
    """Folder of the traces. Null: ``profile`` in the run's folder, where ``verl view`` finds them."""

    contents: list[Content] = option([])
    """Parts of torch's traces: cpu, cuda, memory, shapes, stack, module. Empty: cpu, and cuda where it is used."""

    max_module_calls: int | None = option(10_000, above=0)
    """Bound of torch's traces: calls of model layers that each call of a worker records. Null: all."""

    tool_config: ToolConfig = section(ToolConfig)
    """Options of single tools."""


class RoleProfile(NamedTuple):
    """Which ranks of a role are recorded."""

    enabled: bool
    discrete: bool
    ranks: tuple[int, ...] | None
    """None: all."""

    def has(self, rank: int) -> bool:
        return self.enabled and (self.ranks is None or rank in self.ranks)


class ProfilePlan(NamedTuple):
    """The traces that a run makes."""

    steps: frozenset[int]
    continuous: bool
    """One trace of adjacent steps."""
    tool: str
    save_path: str | None
    settings: dict[str, Any]
    """Of the tool, as plain values."""
    roles: dict[str, RoleProfile]
    """Role -> its ranks; roles as the sections are called: actor, rollout, ref, critic, reward_model."""

    @property
    def is_on(self) -> bool:
        return bool(self.steps) and any(role.enabled for role in self.roles.values())


def profile_plan(
    steps: list[int] | None,
    continuous: bool,
    tools: GlobalProfilerConfig | SFTProfilerConfig,
    sections: Mapping[str, Any],
    follows: Mapping[str, str] | None = None,
) -> ProfilePlan:
    """Return the plan of a run.

    Args:
        sections: role -> its profiler section.
        follows: role -> the one whose values stand where its own are null.
    """
    asked = any(one.enable for one in sections.values())
    roles = {}
    for name, own in sections.items():
        base = sections[(follows or {}).get(name, name)]
        value = {key: getattr(base if getattr(own, key) is None else own, key) for key in ProfilerConfig()}
        enabled = not asked if value["enable"] is None else value["enable"]
        ranks = None if value["all_ranks"] else tuple(value["ranks"] or [0])
        roles[name] = RoleProfile(enabled, bool(value["discrete"]), ranks)
    memory = tools.global_tool_config if isinstance(tools, GlobalProfilerConfig) else tools.tool_config
    settings = {
        "contents": list(tools.contents),
        "max_module_calls": tools.max_module_calls,
        "torch_memory": memory.torch_memory.to_dict(),
    }
    return ProfilePlan(frozenset(steps or ()), continuous, tools.tool or "torch", tools.save_path, settings, roles)

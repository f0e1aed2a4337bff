"""Dispatch modes of worker methods: the arguments of each rank, and the value returned to the caller.

`register` marks a method with a dispatch mode: a pair of functions, one that spreads the arguments over the ranks and
one that collects the outputs. Modes that split a batch split it over a *mesh*: the data-parallel position of each rank,
which the worker registers under a name (`Worker._register_dispatch_collect_info`). Tensor, pipeline and sequence
parallel ranks of one position get the same rows.

Knows no process and no transport; of a group it uses ``world_size`` and ``mesh(name)`` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from verl.batch.partition import Partition, row_lengths
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.batch_cache import BatchPart, SplitCall, map_arguments, without_training

Args = tuple[tuple, dict]
"""Positional and named arguments of a call."""

# -- Rows of a call's batches: columns selected, padded or split over ranks, and brought back in order ----------------


class Padding(NamedTuple):
    """Rows of a batch before and after padding."""

    real: int
    padded: int


def map_batches(fn: Callable[[DataProto], Any], args: tuple, kwargs: dict) -> Args:
    """Apply ``fn`` to the arguments that are DataProtos."""
    return map_arguments(DataProto, fn, args, kwargs)


def keep_columns(data: DataProto, reads: tuple[str, ...] | None) -> DataProto:
    """The columns named in ``reads`` that are there (None: all), as a new DataProto; ``meta_info`` stays whole."""
    if reads is None:
        return data.select()
    return data.select(
        [name for name in reads if name in data], [name for name in reads if name in data.non_tensor_batch]
    )


def _common_length(batches: Sequence[DataProto]) -> int:
    """Rows of the batches of a call; 0 if there are none."""
    # a batch of columns without rows goes with any other: it is neither padded nor split
    lengths = {len(data) for data in batches} - {0}
    if len(lengths) > 1:
        raise ValueError(f"the batches of one call have {sorted(lengths)} rows: give all the same number of rows.")
    return max(lengths, default=0)


def pad_rows(args: tuple, kwargs: dict, parts: int) -> tuple[tuple, dict, Padding | None]:
    """Make every DataProto of a call divisible by ``parts``, with copies of its first rows that do not train.

    Returns the arguments and the row counts, None if nothing was added.

    Raises:
        ValueError: the batches of one call differ in length.
    """
    rows = _common_length([value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)])
    if rows % parts == 0:
        return args, kwargs, None

    def padded(data: DataProto) -> DataProto:
        longer, added = pad_dataproto_to_divisor(data, parts)
        # padding comes last, so that `drop_padding` takes it off a result by its length
        return without_training(longer, len(data)) if added else data

    args, kwargs = map_batches(padded, args, kwargs)
    return args, kwargs, Padding(rows, rows + -rows % parts)


def drop_padding(result: Any, padding: Padding | None) -> Any:
    """Take the padding rows off a result that has them; anything else is returned as it is."""
    if padding is None or not isinstance(result, DataProto) or len(result) != padding.padded:
        return result
    return unpad_dataproto(result, padding.padded - padding.real)


class SplitBatch(list):
    """A batch already split: a `BatchPart`, or a DataProto, for each data-parallel rank."""


def plan_partition(args: tuple, kwargs: dict, method: str, parts: int) -> Partition | None:
    """Return the partition of a call's batches if one carries a `PartitionPlan` that names the method; else None.

    All batches are divided by the lengths (and, to keep groups together, ``uid``) of the one that carries the plan.
    """
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    for data in batches:
        if (plan := data.partition_plan) is not None:
            if method in plan.calls and _common_length(batches):
                return plan.partition(method, row_lengths(data, plan.groups_together), parts)
            break
    return None


def split_rows(data: DataProto, partition: Partition, call: SplitCall) -> DataProto | SplitBatch:
    """Return the rows of each data-parallel rank; a batch without rows as it is."""
    if not len(data):
        return data
    return SplitBatch(
        # the filler is the last of a rank's rows, see `Partition.has_filler`
        BatchPart(data, np.asarray(rows, dtype=np.int64), len(rows) - has_filler, steps, call)
        for rows, has_filler, steps in zip(
            partition.rows,
            partition.has_filler,
            [None] * len(partition.rows) if partition.steps is None else partition.steps,
            strict=True,
        )
    )


def restore_rows(result: Any, partition: Partition | None) -> Any:
    """Bring the rows of a joined result into the order of the batch; anything else is returned as it is."""
    # a result of another length has no row for each row of the batch, and no order to restore
    if partition is None or not isinstance(result, DataProto) or len(result) != sum(map(len, partition.rows)):
        return result
    positions = partition.output_positions()
    return result if positions is None or len(partition.rows) == 1 else result.select_idxs(positions)


# -- Dispatch modes ---------------------------------------------------------------------------------------------------

Member = TypeVar("Member", bound="DynamicEnum")

MAGIC_ATTR = "attrs_3141562937"
"""Attribute of a registered method that holds its `Registration`."""


ONLY_MESH = "*"
"""Mesh name that stands for the one mesh a worker registered (the MEGATRON names, which predate mesh names)."""


class _DynamicEnumMeta(type):
    _members: dict[str, Any]

    def __iter__(cls):
        return iter(cls._members.values())

    def __len__(cls) -> int:
        return len(cls._members)

    def __contains__(cls, item) -> bool:
        return item in cls._members.values() or item in cls._members

    def __getitem__(cls, name: str) -> Any:
        if name not in cls._members:
            raise KeyError(f"{cls.__name__} has no member {name!r}; it has {', '.join(cls._members)}")
        return cls._members[name]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_") or name not in cls._members:
            raise AttributeError(f"{cls.__name__} has no member {name!r}; it has {', '.join(cls._members)}")
        return cls._members[name]


class DynamicEnum(metaclass=_DynamicEnumMeta):
    """An enumeration that can be extended: ``Dispatch.register("MINE")`` makes ``Dispatch.MINE``."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._members = {}

    def __init__(self, name: str, value: int):
        self.name, self.value = name, value

    @classmethod
    def register(cls: type[Member], name: str) -> Member:
        """Add a member. Registering a name twice is a ValueError."""
        key = name.upper()
        if key in cls._members:
            raise ValueError(f"{cls.__name__}.{key} is already registered: choose another name.")
        cls._members[key] = cls(key, 1 + max((member.value for member in cls._members.values()), default=-1))
        return cls._members[key]

    @classmethod
    def from_name(cls: type[Member], name: str) -> Member | None:
        """The member of this name in any case; None if there is none."""
        return cls._members.get(name.upper())

    @classmethod
    def remove(cls: type[Member], name: str) -> Member:
        """Take a member out; KeyError if there is none."""
        member = cls[name.upper()]
        del cls._members[member.name]
        return member

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self):
        # by name: a mode registered at run time may have another number in the process that reads it
        return type(self)._from_wire, (self.name,)

    @classmethod
    def _from_wire(cls: type[Member], name: str) -> Member:
        """The member of this name, made if the process that unpickles it has not registered it."""
        return cls._members.get(name) or cls.register(name)


class Dispatch(DynamicEnum):
    """Names of the dispatch modes; see the table in the folder's README."""


class Execute(DynamicEnum):
    """Ranks that run the method."""


for _name in ("ALL", "RANK_ZERO"):
    Execute.register(_name)


@dataclass(frozen=True)
class Mode:
    """Functions of a dispatch mode, for a call on a group of n ranks.

    ``mode["dispatch_fn"]`` works too, for code that expects the dict of older releases.
    """

    dispatch_fn: Callable[..., tuple[tuple, dict]]
    """(group, *args, **kwargs) -> args, kwargs in which every value is a list with one element per rank."""
    collect_fn: Callable[[Any, list], Any]
    """(group, outputs by rank) -> what the caller gets."""
    parts: Callable[[Any], int] | None = None
    """group -> number of parts that a batch is split into, None if it is not. Uneven ones are padded to a multiple,
    unless the batch carries a partition plan."""
    sources: Callable[[Any], Sequence[int]] | None = None
    """group -> ranks whose outputs are collected; the others send nothing back (their output is None). None = all."""

    def __getitem__(self, name: str):
        return getattr(self, name)


@dataclass(frozen=True)
class Mesh:
    """Data-parallel positions of the ranks of a group."""

    dp_ranks: tuple[int, ...]
    """For each rank the part of the batch it works on."""
    sources: tuple[int, ...]
    """For each part the rank that answers for it."""

    @staticmethod
    def over_world(world_size: int) -> Mesh:
        return Mesh(tuple(range(world_size)), tuple(range(world_size)))

    @staticmethod
    def from_positions(name: str, positions: Sequence[tuple[int, bool] | None]) -> Mesh:
        """Build from what each rank registered: (dp_rank, is_collect), None where it registered nothing.

        Raises:
            ValueError: a rank registered nothing, or a dp rank is missing or has not exactly one collecting rank.
        """
        silent = [rank for rank, place in enumerate(positions) if place is None]
        if silent:
            raise ValueError(
                f"mesh {name!r}: ranks {silent} registered no position in it. Every rank must call "
                f"_register_dispatch_collect_info({name!r}, dp_rank=, is_collect=)."
            )
        dp_ranks = tuple(dp_rank for dp_rank, _ in positions)
        answers = {
            dp_rank: [r for r, p in enumerate(positions) if p == (dp_rank, True)] for dp_rank in sorted(set(dp_ranks))
        }
        if list(answers) != list(range(len(answers))) or any(len(ranks) != 1 for ranks in answers.values()):
            raise ValueError(
                f"mesh {name!r}: dp ranks must be 0, 1, ... with exactly one collecting rank each; the "
                f"registered (dp_rank, is_collect) by rank are {list(positions)}."
            )
        return Mesh(dp_ranks, tuple(ranks[0] for ranks in answers.values()))


# -- Functions of the modes: arguments are spread to a list with one element per rank, outputs collected ---------------


def _spread(args: tuple, kwargs: dict, each: Callable[[Any], list]) -> Args:
    return tuple(each(arg) for arg in args), {name: each(value) for name, value in kwargs.items()}


def dispatch_one_to_all(group, *args, **kwargs) -> Args:
    """The same arguments for every rank."""
    return _spread(args, kwargs, lambda value: [value] * group.world_size)


def dispatch_all_to_all(group, *args, **kwargs) -> Args:
    """The arguments as they are; if every one is a list of world_size elements, each rank gets its own."""
    return args, kwargs


def collect_all_to_all(group, outputs):
    """The outputs as they are."""
    return outputs


def dispatch_rows(group, *args, mesh_name: str | None = None, **kwargs) -> Args:
    """Split every DataProto along its rows, part i for dp rank i; anything else goes to every rank."""
    mesh = group.mesh(mesh_name)

    def each(value):
        if isinstance(value, DataProto) and len(value):
            # equal parts: `invoke` has padded the rows to a multiple, or split them by a plan
            value = SplitBatch(value.chunk(len(mesh.sources)))
        return [value[dp_rank] if isinstance(value, SplitBatch) else value for dp_rank in mesh.dp_ranks]

    return _spread(args, kwargs, each)


def dispatch_lists(group, *args, mesh_name: str | None = None, **kwargs) -> Args:
    """Give each rank its dp rank's element of every argument, a list of one element per dp rank.

    Raises:
        ValueError: an argument is no list of that length.
    """
    mesh = group.mesh(mesh_name)

    def each(value):
        if not isinstance(value, list | tuple) or len(value) != len(mesh.sources):
            what = f"a list of {len(value)}" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise ValueError(
                f"an argument is {what}: this method takes lists of {len(mesh.sources)} elements, one per "
                "data parallel rank. Use Dispatch.DP_COMPUTE_PROTO to have a DataProto split."
            )
        return [value[dp_rank] for dp_rank in mesh.dp_ranks]

    return _spread(args, kwargs, each)


def dispatch_same_on_mesh(group, *args, mesh_name: str | None = None, **kwargs) -> Args:
    """The same arguments for every rank; outputs are those of the mesh."""
    return dispatch_one_to_all(group, *args, **kwargs)


def collect_sources(group, outputs, mesh_name: str | None = None) -> list:
    """The outputs of the ranks that answer for their part, in the order of the parts."""
    return [outputs[rank] for rank in group.mesh(mesh_name).sources]


def collect_rows(group, outputs, mesh_name: str | None = None):
    """Join the DataProtos of the answering ranks; outputs of another kind come as a list."""
    outputs = [outputs[rank] for rank in group.mesh(mesh_name).sources]
    if not all(isinstance(output, DataProto) for output in outputs):
        return outputs
    # they are of no one else: what the driver does not read is never copied
    is_here = not any(outputs[0].is_remote(name) for name in outputs[0].keys())
    return outputs[0] if len(outputs) == 1 and is_here else DataProto._concat(outputs, later=True)


def _refuse_direct_call(group, *args, **kwargs):
    raise NotImplementedError("a DIRECT_ROLLOUT_METHOD is called on the worker itself, never through its group.")


ModeFactory = Callable[[str | None], Mode]
"""Mesh name -> mode."""


def _mesh_mode(dispatch_fn: Callable, collect_fn: Callable, splits: bool = False) -> ModeFactory:
    def make(mesh_name: str | None) -> Mode:
        return Mode(
            functools.partial(dispatch_fn, mesh_name=mesh_name),
            functools.partial(collect_fn, mesh_name=mesh_name),
            # asked of the group at each call: a role registers its meshes after its class was decorated
            parts=(lambda group: len(group.mesh(mesh_name).sources)) if splits else None,
            sources=lambda group: group.mesh(mesh_name).sources,
        )

    return make


def _plain_mode(dispatch_fn: Callable, collect_fn: Callable) -> ModeFactory:
    return lambda mesh_name: Mode(dispatch_fn, collect_fn)


_LISTS = _mesh_mode(dispatch_lists, collect_sources)
_ROWS = _mesh_mode(dispatch_rows, collect_rows, splits=True)
_MODES: dict[Dispatch, ModeFactory] = {
    Dispatch.register(name): make
    for name, make in {
        "RANK_ZERO": _plain_mode(dispatch_all_to_all, collect_all_to_all),
        "ONE_TO_ALL": _plain_mode(dispatch_one_to_all, collect_all_to_all),
        "ALL_TO_ALL": _plain_mode(dispatch_all_to_all, collect_all_to_all),
        "MEGATRON_COMPUTE": _LISTS,
        "MEGATRON_PP_AS_DP": _LISTS,
        "MEGATRON_PP_ONLY": _mesh_mode(dispatch_same_on_mesh, collect_sources),
        "MEGATRON_COMPUTE_PROTO": _ROWS,
        "MEGATRON_PP_AS_DP_PROTO": _ROWS,
        "DP_COMPUTE": _LISTS,
        "DP_COMPUTE_PROTO": _ROWS,
        "DP_COMPUTE_PROTO_WITH_FUNC": _ROWS,
        "DP_COMPUTE_METRIC": _mesh_mode(dispatch_rows, collect_sources, splits=True),
        "DIRECT_ROLLOUT_METHOD": _plain_mode(_refuse_direct_call, _refuse_direct_call),
    }.items()
}


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Add ``Dispatch.<NAME>``: its functions as described in `Mode`."""
    _MODES[Dispatch.register(dispatch_mode_name)] = _plain_mode(dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Replace the functions of a known mode, for methods registered from now on.

    Raises:
        ValueError: the mode is not known.
    """
    if dispatch_mode not in _MODES:
        raise ValueError(f"dispatch mode {dispatch_mode!r} is not known; known are {list(_MODES)}.")
    _MODES[dispatch_mode] = _plain_mode(dispatch_fn, collect_fn)


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> Mode:
    """The functions of a mode, over the whole world: ``["dispatch_fn"]`` and ``["collect_fn"]``."""
    return resolve_mode(dispatch_mode, None)


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """Name of the group method that runs a call of this mode, under ``execute_fn_name``."""
    return {"execute_fn_name": f"execute_{execute_mode.name.lower()}"}


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Mode:
    """``register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))`` is DP_COMPUTE_PROTO with that mesh."""
    return resolve_mode(Dispatch.DP_COMPUTE_PROTO, mesh_name)


def resolve_mode(dispatch_mode: Dispatch | Mode | dict, mesh_name: str | None) -> Mode:
    """Return the functions of a dispatch mode as `register` takes it.

    Raises:
        ValueError: it is not a mode, or a dict without both functions.
    """
    if isinstance(dispatch_mode, Mode):
        return dispatch_mode
    if isinstance(dispatch_mode, dict):
        if not {"dispatch_fn", "collect_fn"} <= dispatch_mode.keys():
            raise ValueError(
                f"a dispatch mode as a dict needs dispatch_fn and collect_fn, it has {sorted(dispatch_mode)}."
            )
        return Mode(dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"])
    if dispatch_mode not in _MODES:
        raise ValueError(
            f"dispatch_mode={dispatch_mode!r} is neither a Dispatch member ({', '.join(Dispatch._members)}) "
            "nor a dict of dispatch_fn and collect_fn."
        )
    # their callers name no mesh, and mean the one that the worker has
    if mesh_name is None and dispatch_mode.name.startswith("MEGATRON"):
        mesh_name = ONLY_MESH
    return _MODES[dispatch_mode](mesh_name)


# The decorator --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Registration:
    """Arguments of `register` for one method; a group reads them to bind the method."""

    mode: Mode
    dispatch_mode: Any
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    mesh: str | None
    reads: tuple[str, ...] | None
    balanced: bool
    stays: tuple[str, ...]

    def __getitem__(self, name: str):
        return getattr(self, name)


def register(
    dispatch_mode: Dispatch | Mode | dict = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    mesh: str | None = None,
    reads: Sequence[str] | None = None,
    balanced: bool = False,
    stays: Sequence[str] = (),
) -> Callable[[Callable], Callable]:
    """Make a worker method callable on the worker group. Works on plain and on async methods.

    Args:
        dispatch_mode: how arguments are spread and outputs collected; a dict {dispatch_fn, collect_fn} is a mode, too.
        execute_mode: which ranks run it.
        blocking: with False the call returns at once: a DataProtoFuture for modes that join rows, else futures by rank.
        materialize_futures: wait for arguments that are DataProtoFutures before the call is sent.
        mesh: name of the mesh a batch is split over; None is the whole world, one part per rank.
        reads: tensor and object columns the method looks at; only these, where present, are sent. None sends all.
            ``meta_info`` always travels.
        balanced: split a batch by the ``PartitionPlan`` that it carries, if that names this method: into parts of
            unequal length, each with its ``step_rows`` in an update. Joined rows come back in the
            order of the batch.
        stays: columns of the output that stay with the ranks, of a ``balanced`` call whose ranks all answer. The driver
            fetches one when it first reads its values; later calls on the same rows read it where it is.
    """
    if isinstance(reads, str):
        raise ValueError(f"register(reads={reads!r}): a string is not a list of column names. Write ({reads!r},).")
    if execute_mode not in Execute:
        raise ValueError(f"register(execute_mode={execute_mode!r}): use one of {list(Execute)}.")
    registration = Registration(
        mode=resolve_mode(dispatch_mode, mesh),
        dispatch_mode=dispatch_mode,
        execute_mode=execute_mode,
        blocking=blocking,
        materialize_futures=materialize_futures,
        mesh=mesh,
        reads=None if reads is None else tuple(reads),
        balanced=balanced,
        stays=tuple(stays),
    )

    def decorate(method: Callable) -> Callable:
        # the method stays as it is: called in its own worker it dispatches nothing
        setattr(method, MAGIC_ATTR, registration)
        return method

    return decorate

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
from typing import TYPE_CHECKING, Any, NamedTuple

# -- Select columns, pad and split the rows of a call's batches over ranks, and restore the order of the outputs -----


if TYPE_CHECKING:
    from verl.batch.partition import Partition
    from verl.protocol import DataProto


_MASKS = ("response_mask", "loss_mask")
"""Columns that mark the tokens of the loss; zero on padding rows, so that these do not train."""


class Padding(NamedTuple):
    """Rows of a batch before and after padding."""

    real: int
    padded: int


def map_batches(fn: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Apply ``fn`` to the arguments that are DataProtos."""
    from verl.protocol import DataProto

    def each(value):
        return fn(value) if isinstance(value, DataProto) else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


def _batches(args: tuple, kwargs: dict) -> list[DataProto]:
    from verl.protocol import DataProto

    return [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]


def keep_columns(data, reads: tuple[str, ...] | None):
    """The columns named in ``reads`` that are there (None: all), as a new DataProto; ``meta_info`` stays whole."""
    if reads is None:
        return data.select()
    return data.select(
        [name for name in reads if name in data], [name for name in reads if name in data.non_tensor_batch]
    )


def pad_rows(args: tuple, kwargs: dict, parts: int) -> tuple[tuple, dict, Padding | None]:
    """Make every DataProto of a call divisible by ``parts``, with copies of its first rows that do not train.

    Returns the arguments and the row counts, None if nothing was added.

    Raises:
        ValueError: the batches of one call differ in length.
    """
    rows = _common_length(args, kwargs)
    if rows % parts == 0:
        return args, kwargs, None
    args, kwargs = map_batches(lambda data: _pad(data, parts) if len(data) else data, args, kwargs)
    return args, kwargs, Padding(rows, rows + -rows % parts)


def drop_padding(result: Any, padding: Padding | None) -> Any:
    """Take the padding rows off a result that has them; anything else is returned as it is."""
    from verl.protocol import DataProto, unpad_dataproto

    if padding is None or not isinstance(result, DataProto) or len(result) != padding.padded:
        return result
    return unpad_dataproto(result, padding.padded - padding.real)


def _common_length(args: tuple, kwargs: dict) -> int:
    """Rows of the batches of a call; 0 if there are none."""
    lengths = {len(data) for data in _batches(args, kwargs)} - {0}
    if len(lengths) > 1:
        raise ValueError(f"the batches of one call have {sorted(lengths)} rows: give all the same number of rows.")
    return lengths.pop() if lengths else 0


class SplitBatch(list):
    """A batch already split: one DataProto for each data-parallel rank."""


def plan_partition(args: tuple, kwargs: dict, method: str, parts: int) -> Partition | None:
    """Return the partition of a call's batches if one carries a `PartitionPlan` that names the method; else None.

    All batches are divided by the lengths (and, to keep groups together, ``uid``) of the one that carries the plan.
    """
    carriers = [data for data in _batches(args, kwargs) if data.partition_plan is not None]
    if not carriers or method not in carriers[0].partition_plan.calls or not _common_length(args, kwargs):
        return None
    from verl.batch.partition import row_lengths

    plan = carriers[0].partition_plan
    return plan.partition(method, row_lengths(carriers[0], plan.groups_together), parts)


def split_rows(args: tuple, kwargs: dict, partition: Partition) -> tuple[tuple, dict]:
    """Replace every DataProto that has rows by a `SplitBatch`."""
    return map_batches(lambda data: _split(data, partition) if len(data) else data, args, kwargs)


def _split(data, partition: Partition) -> SplitBatch:
    parts = SplitBatch()
    for rank, (rows, has_filler) in enumerate(zip(partition.rows, partition.has_filler, strict=True)):
        is_whole = len(partition.rows) == 1 and not has_filler
        part = data.select() if is_whole else data.select_idxs(rows)
        for name in _MASKS if has_filler else ():
            if name in part:
                part.put(name, _zeroed_from(part, name, len(part) - 1))
        part.partition_plan = None
        part.step_rows = None if partition.steps is None else partition.steps[rank]
        parts.append(part)
    return parts


def restore_rows(result: Any, partition: Partition | None) -> Any:
    """Bring the rows of a joined result into the order of the batch; anything else is returned as it is."""
    from verl.protocol import DataProto

    if partition is None or not isinstance(result, DataProto) or len(result) != sum(map(len, partition.rows)):
        return result
    positions = partition.output_positions()
    return result if positions is None or len(partition.rows) == 1 else result.select_idxs(positions)


def _pad(data, parts: int):
    from verl.protocol import pad_dataproto_to_divisor

    padded, _ = pad_dataproto_to_divisor(data, parts)
    for name in _MASKS:
        if name in padded:
            padded.put(name, _zeroed_from(padded, name, len(data)))
    return padded


def _zeroed_from(data, name: str, first: int):
    """Column ``name`` with zeros from row ``first`` on, packed if it can be."""
    from verl.protocol import DataProtoError

    try:
        column = data.ragged(name)
    except DataProtoError:  # the columns sent along do not tell its valid tokens
        column = data.column(name).clone()
        column[first:] = 0
        return column
    values = column.values.clone()
    values[column.layout.offsets[first] :] = 0
    return column.like(values)


MAGIC_ATTR = "attrs_3141562937"
"""Attribute of a registered method that holds its `Registration`."""


ONLY_MESH = "*"
"""Mesh name that stands for the one mesh a worker registered (the MEGATRON names, which predate mesh names)."""


class _DynamicEnumMeta(type):
    def __iter__(cls):
        return iter(cls._members.values())

    def __len__(cls) -> int:
        return len(cls._members)

    def __contains__(cls, item) -> bool:
        return item in cls._members.values() or item in cls._members

    def __getitem__(cls, name: str):
        if name not in cls._members:
            raise KeyError(f"{cls.__name__} has no member {name!r}; it has {', '.join(cls._members)}")
        return cls._members[name]

    def __getattr__(cls, name: str):
        if name.startswith("_") or name not in cls._members:
            raise AttributeError(f"{cls.__name__} has no member {name!r}; it has {', '.join(cls._members)}")
        return cls._members[name]


class DynamicEnum(metaclass=_DynamicEnumMeta):
    """An enumeration that can be extended: ``Dispatch.register("MINE")`` makes ``Dispatch.MINE``."""

    _members: dict[str, DynamicEnum] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._members = {}

    def __init__(self, name: str, value: int):
        self.name, self.value = name, value

    @classmethod
    def register(cls, name: str) -> DynamicEnum:
        """Add a member. Registering a name twice is a ValueError."""
        key = name.upper()
        if key in cls._members:
            raise ValueError(f"{cls.__name__}.{key} is already registered: choose another name.")
        cls._members[key] = cls(key, 1 + max((member.value for member in cls._members.values()), default=-1))
        return cls._members[key]

    @classmethod
    def from_name(cls, name: str) -> DynamicEnum | None:
        """The member of this name in any case; None if there is none."""
        return cls._members.get(name.upper())

    @classmethod
    def remove(cls, name: str) -> DynamicEnum:
        """Take a member out; KeyError if there is none."""
        member = cls[name.upper()]
        del cls._members[name.upper()]
        return member

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self):
        return _member, (type(self), self.name)


def _member(cls: type[DynamicEnum], name: str) -> DynamicEnum:
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
        """Build from what each rank registered: (dp_rank, is_collect), None where it registered nothing."""
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


# Spreading and collecting ---------------------------------------------------------------------------------------------
def _spread(args: tuple, kwargs: dict, each: Callable[[Any], list]) -> tuple[tuple, dict]:
    return tuple(each(arg) for arg in args), {name: each(value) for name, value in kwargs.items()}


def dispatch_one_to_all(group, *args, **kwargs):
    """The same arguments for every rank."""
    return _spread(args, kwargs, lambda value: [value] * group.world_size)


def dispatch_all_to_all(group, *args, **kwargs):
    """The arguments as they are; if every one is a list of world_size elements, each rank gets its own."""
    return args, kwargs


def collect_all_to_all(group, outputs):
    """The outputs as they are."""
    return outputs


def dispatch_rows(group, *args, mesh_name: str | None = None, **kwargs):
    """Split every DataProto along its rows, part i for dp rank i; anything else goes to every rank."""
    from verl.protocol import DataProto

    mesh = group.mesh(mesh_name)

    def each(value):
        if isinstance(value, SplitBatch):
            return [value[dp_rank] for dp_rank in mesh.dp_ranks]
        if not isinstance(value, DataProto) or not len(value):
            return [value] * group.world_size
        parts = value.chunk(len(mesh.sources))
        return [parts[dp_rank] for dp_rank in mesh.dp_ranks]

    return _spread(args, kwargs, each)


def dispatch_lists(group, *args, mesh_name: str | None = None, **kwargs):
    """Arguments are lists of one element per dp rank."""
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


def collect_sources(group, outputs, mesh_name: str | None = None) -> list:
    """The outputs of the ranks that answer for their part, in the order of the parts."""
    return [outputs[rank] for rank in group.mesh(mesh_name).sources]


def collect_rows(group, outputs, mesh_name: str | None = None):
    """Join the DataProtos of the answering ranks; outputs of another kind come as a list."""
    from verl.protocol import DataProto

    outputs = collect_sources(group, outputs, mesh_name)
    if not all(isinstance(output, DataProto) for output in outputs):
        return outputs
    return outputs[0] if len(outputs) == 1 else DataProto.concat(outputs)


def _refuse_direct_call(group, *args, **kwargs):
    raise NotImplementedError("a DIRECT_ROLLOUT_METHOD is called on the worker itself, never through its group.")


# The modes ------------------------------------------------------------------------------------------------------------
def _mesh_mode(dispatch_fn, collect_fn, splits: bool) -> Callable[[str | None], Mode]:
    """Mode factory: mesh name -> mode."""

    def make(mesh_name: str | None) -> Mode:
        def on_mesh(fn):
            return fn if fn is collect_all_to_all else functools.partial(fn, mesh_name=mesh_name)

        return Mode(
            on_mesh(dispatch_fn),
            on_mesh(collect_fn),
            parts=(lambda group: len(group.mesh(mesh_name).sources)) if splits else None,
            sources=lambda group: group.mesh(mesh_name).sources,
        )

    return make


def _plain_mode(dispatch_fn, collect_fn) -> Callable[[str | None], Mode]:
    mode = Mode(dispatch_fn, collect_fn)
    return lambda mesh_name: mode


_MODES: dict[Dispatch, Callable[[str | None], Mode]] = {}


def _define_modes() -> None:
    lists = _mesh_mode(dispatch_lists, collect_sources, splits=False)
    rows = _mesh_mode(dispatch_rows, collect_rows, splits=True)
    for name, make in {
        "RANK_ZERO": _plain_mode(dispatch_all_to_all, collect_all_to_all),
        "ONE_TO_ALL": _plain_mode(dispatch_one_to_all, collect_all_to_all),
        "ALL_TO_ALL": _plain_mode(dispatch_all_to_all, collect_all_to_all),
        "MEGATRON_COMPUTE": lists,
        "MEGATRON_PP_AS_DP": lists,
        "MEGATRON_PP_ONLY": _mesh_mode(
            lambda group, *args, mesh_name, **kwargs: dispatch_one_to_all(group, *args, **kwargs),
            collect_sources,
            splits=False,
        ),
        "MEGATRON_COMPUTE_PROTO": rows,
        "MEGATRON_PP_AS_DP_PROTO": rows,
        "DP_COMPUTE": lists,
        "DP_COMPUTE_PROTO": rows,
        "DP_COMPUTE_PROTO_WITH_FUNC": rows,
        "DP_COMPUTE_METRIC": _mesh_mode(dispatch_rows, collect_sources, splits=True),
        "DIRECT_ROLLOUT_METHOD": _plain_mode(_refuse_direct_call, _refuse_direct_call),
    }.items():
        _MODES[Dispatch.register(name)] = make


_define_modes()


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Add ``Dispatch.<NAME>``: its functions as described in `Mode`."""
    _MODES[Dispatch.register(dispatch_mode_name)] = _plain_mode(dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Replace the functions of a known mode, for methods registered from now on."""
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
    """Return the functions of a dispatch mode as `register` takes it."""
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
    )

    def decorate(method: Callable) -> Callable:
        setattr(method, MAGIC_ATTR, registration)
        return method

    return decorate

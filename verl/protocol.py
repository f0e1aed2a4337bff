"""DataProto, the batch that flows between driver and workers, and the operations on its rows and columns.

Tensor columns are held padded or packed (``Ragged``). The trainer and the workers stay on the packed side: cost follows
the valid tokens, not the window, and tensordict is never imported. ``data.batch`` is the padded side, a real TensorDict
that may be changed in place; touching it pads every packed column in, once.

Which columns are ragged is known to ``verl.batch.windows``. Knows no model and no process.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures as concurrent_futures
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from verl.batch.equality import first_difference
from verl.batch.layout import tensor_from_numpy, tensor_to_numpy
from verl.batch.ragged import JoinedTokens, Ragged, cat_columns, move_columns, select_columns, slice_columns
from verl.batch.windows import WINDOWS, pack_column, register_ragged_column, window_layouts

if TYPE_CHECKING:
    from tensordict import TensorDict

    from verl.batch.partition import PartitionPlan

__all__ = [
    *("DataProto", "DataProtoItem", "DataProtoFuture", "DataProtoConfig", "DataProtoError", "MissingColumn"),
    *("pad_dataproto_to_divisor", "unpad_dataproto", "collate_fn", "fold_batch_dim", "unfold_batch_dim"),
    *("union_tensor_dict", "union_numpy_dict", "list_of_dict_to_dict_of_list", "all_gather_data_proto"),
    "register_ragged_column",
]


class DataProtoError(ValueError, AssertionError):
    """Rows or columns that do not fit. Also an AssertionError, which is what users of verl catch."""


class MissingColumn(KeyError, DataProtoError):
    """A requested column that the batch does not have."""

    __str__ = Exception.__str__  # KeyError would show the repr of the sentence


class _AutoPadding(type):
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        """True if any batch may be padded to fit a split; set here or by env VERL_AUTO_PADDING=1."""
        return cls._enabled or os.getenv("VERL_AUTO_PADDING", "").lower() in ("1", "true")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = bool(enabled)


class DataProtoConfig(metaclass=_AutoPadding):
    """Switches that hold for every batch of this process."""

    auto_padding_key = "_verl_auto_padding"
    """Name in ``meta_info`` that allows padding for one batch."""


@dataclass
class DataProtoItem:
    """One row of a DataProto: its tensors (a TensorDict without batch dim), its objects, the metadata of its batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """B rows of tensor columns and object columns, and metadata of the whole batch.

    Attributes:
        batch: TensorDict of the padded tensor columns, batch size (B,), or None. Made when touched; may be changed.
        non_tensor_batch: name -> numpy array, dim 0 = B.
        meta_info: metadata of the batch (temperature, global_steps, metrics), never instructions to workers.
        partition_plan: the driver's plan by which calls on this batch divide its rows among ranks; None: equal parts.
        step_rows: of a rank's part, the row numbers in it of each optimizer step; None: the worker splits its rows.

    Rows taken by slice are views, by index copies. Received columns may lie in shared memory: what ``column`` and
    ``ragged`` return is read-only by rule; ``batch`` gives tensors that are yours.
    """

    def __init__(
        self,
        batch: TensorDict | Mapping[str, Tensor | Ragged] | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ):
        self.non_tensor_batch: dict[str, np.ndarray] = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info: dict[str, Any] = {} if meta_info is None else meta_info
        self.partition_plan: PartitionPlan | None = None
        self.step_rows: Sequence[np.ndarray] | None = None
        self._rows: int | None = None  # None: no tensor part at all
        # a TensorDict once it was given or touched
        self._dense: Any = {}
        self._ragged: dict[str, Ragged] = {}
        self.batch = batch
        self.check_consistency()

    # Making one -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls, tensors=None, non_tensors=None, meta_info=None, num_batch_dims: int = 1, auto_padding: bool = False
    ) -> DataProto:
        """Build from padded tensors and arrays of equal dim 0; lists become arrays of objects.

        As numpy has it, lists of equally long lists have as many dims: ``[[1, 2], [3, 4]]`` is (2, 2), and
        ``[[1], [2, 3]]`` are two lists. Anything but lists and tuples is one object, whatever it could be read as.

        The first ``num_batch_dims`` dims of all tensors must agree; the first of them is the batch dim.
        """
        shapes = {name: tuple(tensor.shape[:num_batch_dims]) for name, tensor in (tensors or {}).items()}
        if len(set(shapes.values())) > 1:
            raise DataProtoError(f"DataProto.from_dict: batch dims differ: {shapes}. Drop or repeat rows to one size.")
        arrays = {name: _nested_array(value) for name, value in (non_tensors or {}).items()}
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[DataProtoConfig.auto_padding_key] = True
        return cls(dict(tensors) if tensors else None, arrays, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info=None, auto_padding: bool = False) -> DataProto:
        """Build from one dict: torch tensors become tensor columns, numpy arrays object columns."""
        for name, value in data.items():
            if not isinstance(value, Tensor | np.ndarray):
                kind = type(value).__name__
                raise ValueError(f"DataProto.from_single_dict: {name!r} is a {kind}, not a tensor or numpy array.")
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        arrays = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None = None, meta_info=None, num_batch_dims: int = 1
    ) -> DataProto:
        """Build from a TensorDict; what in it is no tensor (``NonTensorStack``) becomes object columns."""
        columns = {} if tensor_dict is None else {name: tensor_dict[name] for name in tensor_dict.keys()}
        tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
        arrays = {
            name: _as_array(value.tolist() if hasattr(value, "tolist") else value)
            for name, value in columns.items()
            if name not in tensors
        }
        return cls.from_dict(tensors, arrays, meta_info, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """All columns as one TensorDict, objects among them as ``NonTensorStack``; ``meta_info`` stays behind."""
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        objects = {
            name: NonTensorStack(*map(NonTensorData, array.tolist())) for name, array in self.non_tensor_batch.items()
        }
        return TensorDict({**{name: self.column(name) for name in self.keys()}, **objects}, batch_size=[len(self)])

    @classmethod
    def from_ragged(cls, columns: Mapping[str, Ragged], tensors=None, non_tensors=None, meta_info=None) -> DataProto:
        """Build from packed columns, with padded tensors and arrays as in ``from_dict``."""
        return cls.from_dict({**columns, **(tensors or {})}, non_tensors, meta_info)

    # The padded side ------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> TensorDict | None:
        if self._rows is None:
            return None
        if isinstance(self._dense, dict):
            from tensordict import TensorDict  # seconds to import: only users of the padded side pay

            self._dense = TensorDict(self._dense, batch_size=[self._rows])
        for name, column in self._ragged.items():
            self._dense[name] = column.padded()
        self._ragged = {}
        return self._dense

    @batch.setter
    def batch(self, batch: TensorDict | Mapping[str, Tensor | Ragged] | None) -> None:
        size = getattr(batch, "batch_size", None)
        if size is not None and len(size) != 1:
            raise DataProtoError(f"DataProto: a batch of size {tuple(size)} has not exactly one batch dim. Flatten it.")
        self._rows, self._dense, self._ragged = None, {}, {}
        if size is not None:
            self._rows, self._dense = size[0], batch
        elif batch is not None:
            for name, column in batch.items():
                self.put(name, column)  # type: ignore[arg-type]  # TensorDict is a MutableMapping in its stubs

    def column(self, name: str) -> Tensor:
        """One tensor column in padded form; the others stay as they are. Read-only by rule."""
        column = self._column(name)
        return column.padded() if isinstance(column, Ragged) else column

    # The packed side ------------------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Names of the tensor columns."""
        return [*self._dense.keys(), *self._ragged]

    def __contains__(self, name: str) -> bool:
        return name in self._ragged or name in self._dense.keys()

    def put(self, name: str, column: Tensor | Ragged) -> DataProto:
        """Set one tensor column, padded or packed; returns self."""
        rows = column.shape[0]
        if len(self) != rows and self._has_columns():
            raise DataProtoError(f"put: column {name!r} has {rows} rows, the batch {len(self)}. Drop or pad its rows.")
        self._rows = rows
        self._drop(name)
        if isinstance(column, Ragged):
            equal = (other.layout for other in self._ragged.values() if other.layout == column.layout)
            self._ragged[name] = column.with_layout(next(equal, column.layout))  # one Layout object for all
        else:
            self._dense[name] = column
        return self

    def ragged(self, name: str) -> Ragged:
        """One tensor column in packed form. A padded known column is packed by the attention mask at each call."""
        column = self._column(name)
        if isinstance(column, Ragged):
            return column
        layouts = window_layouts(self._columns())
        if (packed := pack_column(name, column, layouts, self.meta_info.get("pad_token_id"))) is None:
            known = {window: (len(layout), layout.width) for window, layout in layouts.items()}
            raise DataProtoError(
                f"ragged: cannot tell the valid tokens of column {name!r}, shape {tuple(column.shape)}: its window is "
                f"{WINDOWS.get(name)!r}, the windows known here are {known}. Keep attention_mask with prompts and "
                f"responses in the batch, register_ragged_column({name!r}, window), or use column({name!r})."
            )
        return packed

    def row_sums(self, name: str) -> Tensor:
        """(B,) float64: the sum of each row of one tensor column."""
        column = self._column(name)
        return column.row_sums() if isinstance(column, Ragged) else column.double().sum(-1)

    def packed(self) -> DataProto:
        """The same rows with every known column packed; columns of unknown or unfitting shape stay padded."""
        data = self.select()
        layouts = window_layouts(self._columns()) if len(self._dense.keys()) else {}
        for name, column in self._dense.items():
            packed = pack_column(name, column, layouts, self.meta_info.get("pad_token_id"))
            if packed is not None:
                data.put(name, packed)
        return data

    # Rows -----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self._rows is not None:
            return self._rows
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: slice | list | np.ndarray | Tensor) -> DataProto: ...

    def __getitem__(self, item) -> DataProtoItem | DataProto:
        """A row number gives a DataProtoItem; a slice (view), list, array or tensor (copy) a DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | Tensor):
            return self.select_idxs(item)
        if not isinstance(item, int | np.integer):
            raise TypeError(f"DataProto[{item!r}]: a {type(item).__name__} is no row number, slice, list or array.")
        row = int(self._row_numbers([item])[0])
        objects = {name: array[row] for name, array in self.non_tensor_batch.items()}
        return DataProtoItem(None if self._rows is None else self.batch[row], objects, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows [start, end) as views; with a step other than 1, copies."""
        if step not in (None, 1):
            return self.select_idxs(np.arange(len(self))[start:end:step])
        first, last, _ = slice(start, end).indices(len(self))
        last = max(first, last)
        return self._take(slice(first, last), slice_columns(self._ragged, first, last), last - first)

    def select_idxs(self, idxs: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """The rows of these numbers (repeats allowed, negatives from the end) or of this boolean mask (B,), copied."""
        rows = self._row_numbers(idxs)
        return self._take(rows, select_columns(self._ragged, torch.from_numpy(rows)), len(rows))

    def reorder(self, indices: Sequence[int] | np.ndarray | Tensor) -> None:
        """Put row ``indices[i]`` at place i, in place."""
        self._become(self.select_idxs(indices))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times``, copies side by side (0 0 1 1) or, not interleaved, block by block (0 1 0 1)."""
        rows = np.arange(len(self))
        return self.select_idxs(rows.repeat(repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Row i ``repeat_times[i]`` times, copies side by side."""
        counts = np.asarray(repeat_times, dtype=np.int64)
        if len(counts) != len(self):
            raise DataProtoError(f"sample_level_repeat: {len(counts)} counts for {len(self)} rows. Give one per row.")
        return self.select_idxs(np.arange(len(self)).repeat(counts))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of the last row, or of the "first", in place."""
        row = 0 if padding_candidate == "first" else len(self) - 1
        self._become(self.select_idxs([*range(len(self)), *[row] * padding_size]))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into ``chunks`` equal parts, as views; with padding enabled the first ones may have one row more."""
        rows = len(self)
        if rows % chunks and not self.is_padding_enabled():
            raise DataProtoError(
                f"chunk: {rows} rows do not make {chunks} equal chunks, {rows % chunks} would be left over. Change the "
                f"batch size, pad with pad_dataproto_to_divisor(data, {chunks}), or set DataProtoConfig.auto_padding."
            )
        bounds = [i * (rows // chunks) + min(i, rows % chunks) for i in range(chunks + 1)]
        return [self.slice(bounds[i], bounds[i + 1]) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Split into parts of ``split_size`` rows, as views; the last may be short."""
        return [self.slice(first, first + split_size) for first in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all parts, one after the other; all hold the same columns. ``meta_info`` is that of the first."""
        return DataProto._concat(data)

    @staticmethod
    def _concat(data: Sequence[DataProto], later: bool = False) -> DataProto:
        """As `concat`; ``later``: packed columns are copied when first read, if nothing else holds the parts."""
        if not data:
            raise DataProtoError("concat: an empty list has no columns to join. Give at least one DataProto.")
        first = data[0]
        names, array_names = first.keys(), list(first.non_tensor_batch)
        for i, part in enumerate(data):
            if odd := {*names, *array_names} ^ {*part.keys(), *part.non_tensor_batch}:
                raise MissingColumn(
                    f"concat: columns {sorted(odd)} are not in both part 0 and part {i}. Drop or add them."
                )
        alike = [{name: column.shape[1:] for name, column in part._ragged.items()} for part in data]
        packed = [name for name, shape in alike[0].items() if all(shapes.get(name) == shape for shapes in alike)]
        ragged = cat_columns([{name: part._ragged[name] for name in packed} for part in data], later)
        dense = {}
        for name in (name for name in names if name not in ragged):
            pieces = [part.column(name) for part in data]
            if len({piece.shape[1:] for piece in pieces}) > 1:
                shapes = [tuple(piece.shape) for piece in pieces]
                raise DataProtoError(f"concat: column {name!r} has shapes {shapes}. Pad the parts to one width.")
            dense[name] = torch.cat(pieces)
        arrays = {name: np.concatenate([part.non_tensor_batch[name] for part in data]) for name in array_names}
        return first._new(dense, ragged, arrays, sum(map(len, data)))

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: dict | None = None
    ) -> Iterator[DataProto]:
        """Mini-batches of ``mini_batch_size`` rows, ``epochs`` times over; each carries ``meta_info``.

        With ``dataloader_kwargs={"shuffle": True}`` every epoch has an order of its own, decided by ``seed``.
        """
        rows = len(self)
        if rows % mini_batch_size:
            raise DataProtoError(
                f"make_iterator: {rows} rows are no multiple of mini_batch_size={mini_batch_size}. "
                f"Change one of them, or pad with pad_dataproto_to_divisor(data, {mini_batch_size})."
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: Iterable[DataProto] = torch.utils.data.DataLoader(
            range(rows),  # type: ignore[arg-type]  # any sequence is a data set
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    # Columns --------------------------------------------------------------------------------------------------------

    def select(
        self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy: bool = False
    ) -> DataProto:
        """The columns and metadata of these names, None = all. Tensors are shared unless ``deepcopy``."""
        names = self.keys() if batch_keys is None else list(batch_keys)
        columns = {name: self._column(name) for name in names}
        ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
        dense = {name: column for name, column in columns.items() if not isinstance(column, Ragged)}
        arrays, meta = _pick(self.non_tensor_batch, non_tensor_batch_keys), _pick(self.meta_info, meta_info_keys)
        if deepcopy:
            dense = {name: column.clone() for name, column in dense.items()}
            ragged = {name: column.copied() for name, column in ragged.items()}
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return self._new(dense, ragged, arrays, self._rows, meta)

    def pop(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None) -> DataProto:
        """Take these columns and metadata out, into a new DataProto; None = nothing of that kind."""
        requested = [list(keys or ()) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        present = (self.keys(), self.non_tensor_batch, self.meta_info)
        for where, names, known in zip(("batch", "non_tensor_batch", "meta_info"), requested, present, strict=True):
            if absent := [name for name in names if name not in known]:
                raise MissingColumn(f"pop: {absent} not in {where}, which holds {sorted(known)}. Pop only those.")
        taken = self.select(batch_keys=requested[0], non_tensor_batch_keys=requested[1], meta_info_keys=requested[2])
        if not requested[0]:
            taken._rows = None
        for name in requested[0]:
            self._drop(name)
        for names, entries in zip(requested[1:], (self.non_tensor_batch, self.meta_info), strict=True):
            for name in names:
                del entries[name]
        return taken

    def rename(self, old_keys=None, new_keys=None) -> DataProto:
        """Rename tensor columns in place: two names, two lists of names, or one dict old -> new. Returns self."""
        if not isinstance(old_keys, Mapping):
            old, new = ([keys] if isinstance(keys, str) else list(keys or ()) for keys in (old_keys, new_keys))
            if len(old) != len(new):
                raise ValueError(
                    f"rename: {len(old)} old names {old}, {len(new)} new names {new}. Give one new per old."
                )
            old_keys = dict(zip(old, new, strict=True))
        columns = {new: self._column(old) for old, new in old_keys.items()}
        for old in old_keys:
            self._drop(old)
        for new, column in columns.items():
            self.put(new, column)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and metadata of ``other`` in place; what both have must be equal in value. Returns self.

        A packed column is compared on its valid tokens.
        """
        if len(self) != len(other) and self._has_columns() and other._has_columns():
            raise DataProtoError(f"union: {len(self)} and {len(other)} rows. Both must hold the same rows, in order.")
        columns = _unite(self._columns(), other._columns(), "column")
        arrays = _unite(dict(self.non_tensor_batch), other.non_tensor_batch, "column")
        meta_info = _unite(dict(self.meta_info), other.meta_info, "meta_info")
        for name, column in columns.items():
            if name not in self:
                self.put(name, column)
        self.non_tensor_batch, self.meta_info = arrays, meta_info
        self._rows = other._rows if self._rows is None else self._rows
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> DataProto:
        """Make ``n_split`` rows of each: ``split_keys`` are split, (B, n * k) -> (B * n, k); the others repeat.

        A column of lists is split list by list. Names of ``split_keys`` that the batch does not have are ignored.
        """
        data = self.repeat(n_split)
        for name in split_keys or ():
            if name not in self and name not in self.non_tensor_batch:
                continue
            column = self.column(name) if name in self else self.non_tensor_batch[name]
            if column.ndim == 1:
                parts: list[Any] = []
                for row in column:
                    if not hasattr(row, "__len__") or len(row) % n_split:
                        raise DataProtoError(
                            f"unfold_column_chunks: {row!r} of column {name!r} does not make {n_split} equal chunks. "
                            "Leave the column out of split_keys, or give every row a list that divides."
                        )
                    size = len(row) // n_split
                    parts += [row[i * size : (i + 1) * size] for i in range(n_split)]
                data.non_tensor_batch[name] = _as_array(parts)
                continue
            if column.shape[1] % n_split:
                raise DataProtoError(
                    f"unfold_column_chunks: column {name!r}, shape {tuple(column.shape)}, does not make {n_split} "
                    "equal chunks a row. Give a divisor of its second dim."
                )
            pieces = column.reshape(len(data), column.shape[1] // n_split, *column.shape[2:])
            if isinstance(pieces, Tensor):
                data.put(name, pieces)
            else:
                data.non_tensor_batch[name] = pieces
        return data

    def fetched(self) -> DataProto:
        """This batch, whose columns are all in this process: those that stayed with workers are fetched."""
        for name in self._ragged:
            if self.is_remote(name):
                _ = self._ragged[name].values
        return self

    def is_packed(self, name: str) -> bool:
        """Whether a tensor column is kept without padding."""
        return name in self._ragged

    def is_remote(self, name: str) -> bool:
        """Whether a tensor column has stayed with the workers that made it; to read it is to fetch it."""
        return name in self._ragged and self._ragged[name].is_remote

    def unshared(self) -> DataProto:
        """The same rows and columns, whose ``batch`` may be changed without this one noticing."""
        for column in self._ragged.values():
            if isinstance(column, JoinedTokens):
                _ = column.values  # made here once, and not in every call
        data = self.select()
        # of packed columns padded() makes new tensors
        data._dense = {name: column.clone() for name, column in data._dense.items()}
        return data

    # The whole ------------------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> DataProto:
        """Move all tensors, in place; returns self."""
        dense = self._dense
        self._dense = {k: v.to(device) for k, v in dense.items()} if isinstance(dense, dict) else dense.to(device)
        self._ragged = move_columns(self._ragged, device)
        return self

    def save_to_disk(self, filepath: str | os.PathLike) -> None:
        with open(filepath, "wb") as file:
            pickle.dump(self, file, protocol=5)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike) -> DataProto:
        """Read what ``save_to_disk`` wrote. It is a pickle: read only files you trust."""
        with open(filepath, "rb") as file:
            return pickle.load(file)

    def print_size(self, prefix: str = "") -> None:
        """Print what the columns take in memory, in GB."""
        here = [column for name, column in self._columns().items() if not self.is_remote(name)]
        tensors = [column.values if isinstance(column, Ragged) else column for column in here]
        tensor_GB = sum(tensor.nbytes for tensor in tensors) / 1024**3
        array_GB = sum(array.nbytes for array in self.non_tensor_batch.values()) / 1024**3
        print(f"{prefix}{', ' if prefix else ''}tensors: {tensor_GB:.6f} GB, other columns: {array_GB:.6f} GB")

    def check_consistency(self) -> None:
        """Raise unless every column has B rows."""
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise DataProtoError(f"non_tensor_batch[{name!r}] is a {type(array).__name__}, not a numpy array.")
        rows = {name: column.shape[0] for name, column in self._columns().items()}
        rows |= {name: array.shape[0] if array.ndim else 0 for name, array in self.non_tensor_batch.items()}
        if odd := {name: count for name, count in rows.items() if count != len(self)}:
            raise DataProtoError(f"DataProto: {len(self)} rows, but columns {odd}. Drop or repeat their rows.")

    def is_padding_enabled(self) -> bool:
        """True if an uneven split may pad this batch."""
        return DataProtoConfig.auto_padding or bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def __repr__(self) -> str:
        def described(name, column):
            kind = f"ragged, {column.layout.total} tokens" if isinstance(column, Ragged) else "padded"
            kind += ", with the workers" if self.is_remote(name) else ""
            return f"  {name}: {tuple(column.shape)} {kind}"

        lines = [described(name, column) for name, column in self._columns().items()]
        lines += [f"  {name}: {array.shape} {array.dtype}" for name, array in self.non_tensor_batch.items()]
        return "\n".join([f"DataProto of {len(self)} rows", *lines, f"  meta_info: {list(self.meta_info)}"])

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo) -> DataProto:
        return self.select(deepcopy=True)

    def __reduce__(self):
        """Known columns leave packed, every tensor as one buffer of its own bytes."""
        data = self.packed()
        dense = dict(data._dense.items())
        for name, column in dense.items():
            if type(column) is Tensor and column.layout == torch.strided and not column.is_nested:
                dense[name] = tensor_to_numpy(column)
        columns = dense, data._ragged, self.non_tensor_batch
        return _from_wire, (type(self), *columns, self._rows, self.meta_info, self.partition_plan, self.step_rows)

    # Inside ---------------------------------------------------------------------------------------------------------

    def _take(self, item: Any, ragged: dict[str, Ragged], rows: int) -> DataProto:
        """Index every padded column and array by ``item``, a slice or row numbers; the packed columns are given."""
        dense = {name: column[item] for name, column in self._dense.items()}
        return self._new(dense, ragged, {name: array[item] for name, array in self.non_tensor_batch.items()}, rows)

    def _new(self, dense, ragged, arrays, rows: int | None, meta_info: dict | None = None) -> DataProto:
        """A DataProto like this one over other columns."""
        meta_info = dict(self.meta_info) if meta_info is None else meta_info
        data = type(self)(non_tensor_batch=arrays, meta_info=meta_info)
        data._dense, data._ragged, data._rows = dense, ragged, None if self._rows is None else rows
        data.partition_plan, data.step_rows = self.partition_plan, self.step_rows
        return data

    def _become(self, other: DataProto) -> None:
        self._dense, self._ragged, self._rows = other._dense, other._ragged, other._rows
        self.non_tensor_batch = other.non_tensor_batch

    def _has_columns(self) -> bool:
        return self._rows is not None or bool(self.non_tensor_batch)

    def _columns(self) -> dict[str, Tensor | Ragged]:
        return {**dict(self._dense.items()), **self._ragged}

    def _column(self, name: str) -> Tensor | Ragged:
        if name in self._ragged:
            return self._ragged[name]
        if name not in self._dense.keys():
            raise MissingColumn(f"no column {name!r} among the tensor columns {sorted(self.keys())}. Produce it first.")
        return self._dense[name]

    def _drop(self, name: str) -> None:
        for columns in (self._dense, self._ragged):
            if name in columns.keys():
                del columns[name]

    def _row_numbers(self, idxs) -> np.ndarray:
        """(N,) int64 in [0, B) of row numbers or a boolean mask."""
        index, rows = np.array(idxs.cpu().numpy() if isinstance(idxs, Tensor) else idxs), len(self)
        if index.dtype == bool and index.shape == (rows,):
            return np.flatnonzero(index)
        if index.size and index.dtype.kind not in "iu":
            raise TypeError(
                f"rows of a DataProto: {index.dtype} {index.shape} is neither row numbers nor a mask ({rows},)."
            )
        index = index.astype(np.int64).reshape(-1)
        if len(outside := index[(index < -rows) | (index >= rows)]):
            raise IndexError(f"row {outside[0]} of a DataProto of {rows} rows: numbers go from {-rows} to {rows - 1}.")
        return index % max(1, rows)


def _from_wire(cls, dense, ragged, arrays, rows, meta_info, partition_plan=None, step_rows=None) -> DataProto:
    def received(column):
        if not isinstance(column, tuple):
            return column
        array, dtype = column
        # Packed columns are copied when `.batch` pads them; these `.batch` hands out as they are, to be changed.
        return tensor_from_numpy(array if array.flags.writeable else array.copy(), dtype)

    data = cls(non_tensor_batch=arrays, meta_info=meta_info)
    data._dense, data._ragged, data._rows = {k: received(v) for k, v in dense.items()}, ragged, rows
    data.partition_plan, data.step_rows = partition_plan, step_rows
    return data


def _pick(mapping: Mapping, keys: Iterable | None) -> dict:
    names = mapping.keys() if keys is None else set(keys)
    return {name: value for name, value in mapping.items() if name in names}


def _as_array(value) -> np.ndarray:
    """Arrays as they are; of anything else, element i becomes object i, also where all are lists of one length."""
    if isinstance(value, np.ndarray):
        return value
    array = np.empty(len(value), dtype=object)
    for i, element in enumerate(value):
        array[i] = element
    return array


def _nested_array(value) -> np.ndarray:
    """Nested lists as an array with a dim for each level on which all are equally long; arrays as they are."""
    if isinstance(value, np.ndarray):
        return value
    shape: list[int] = []
    level = list(value)
    while True:
        shape.append(len(level) // int(np.prod(shape)))
        sizes = {len(item) if isinstance(item, list | tuple) else None for item in level}
        if len(sizes) != 1 or None in sizes:
            break
        level = [inner for item in level for inner in item]
    return _as_array(level).reshape(shape)


# Union ----------------------------------------------------------------------------------------------------------------


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the columns of the second to the first, in place; equal names must hold equal tensors."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise DataProtoError(f"union: batch sizes {sizes} differ. Both must hold the same rows, in order.")
    return _unite(tensor_dict1, tensor_dict2, "column")


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place; equal names must hold equal arrays (NaN equals NaN)."""
    return _unite(tensor_dict1, tensor_dict2, "column")


def _unite(mine, theirs, kind: str):
    """Add ``theirs`` to ``mine``, in place, or change nothing and name the first conflict."""
    for name, value in theirs.items():
        if name in mine.keys() and (difference := first_difference(mine[name], value)):
            raise DataProtoError(
                f"union: {kind} {name!r} is in both and differs: {difference}. "
                f"Equal names must hold equal values: pop() or rename() it on one side."
            )
    for name, value in theirs.items():
        if name not in mine.keys():
            mine[name] = value
    return mine


# Batches as arguments -------------------------------------------------------------------------------------------------


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows from the start, over again if need be, until the size is a multiple; returns (padded, rows added)."""
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % max(1, len(data))), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Take the rows off again that ``pad_dataproto_to_divisor`` added."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Turn rows into columns; all rows have the keys of the first."""
    columns: dict[str, list] = {name: [] for name in (list_of_dict[0] if list_of_dict else ())}
    for i, row in enumerate(list_of_dict):
        if row.keys() != columns.keys():
            raise MissingColumn(
                f"row {i} has keys {sorted(row)}, row 0 {sorted(columns)}. Give all rows the same keys."
            )
        for name, value in row.items():
            columns[name].append(value)
    return columns


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows into a batch; ``meta_info`` stays behind."""
    tensors = [item.batch for item in items if item.batch is not None]
    arrays = {}
    for name, values in list_of_dict_to_dict_of_list([item.non_tensor_batch for item in items]).items():
        # rows of an array of several dims make such an array again
        is_stack = all(isinstance(value, np.ndarray) and value.dtype == object for value in values)
        is_stack = is_stack and len({value.shape for value in values}) == 1
        arrays[name] = np.stack(values) if is_stack else _as_array(values)
    stacked: Any = torch.stack(tensors).contiguous() if tensors else None  # type: ignore[arg-type]  # TensorDicts
    return DataProto(stacked, arrays)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, ...) -> (new_batch_size, B / new_batch_size, ...) for every column."""
    if len(data) % new_batch_size:
        raise DataProtoError(f"fold_batch_dim: {len(data)} rows do not fold into {new_batch_size} equal groups.")
    return _reshaped(data, new_batch_size, lambda shape: (new_batch_size, shape[0] // new_batch_size, *shape[1:]))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first ``batch_dims`` dims of every column into one: undoes ``fold_batch_dim``."""
    columns = [*data._columns().values(), *data.non_tensor_batch.values()]
    rows = int(np.prod(columns[0].shape[:batch_dims])) if columns else 0
    return _reshaped(data, rows, lambda shape: (rows, *shape[batch_dims:]))


def _reshaped(data: DataProto, rows: int, shape: Callable[[tuple], tuple]) -> DataProto:
    columns = {name: data.column(name) for name in data.keys()}
    dense = {name: column.reshape(shape(column.shape)) for name, column in columns.items()}
    arrays = {name: array.reshape(shape(array.shape)) for name, array in data.non_tensor_batch.items()}
    return data._new(dense, {}, arrays, rows)


def all_gather_data_proto(data: DataProto, process_group) -> None:
    """Give every rank of the group the rows of all ranks, in rank order, in place and on the device they were on."""
    parts: list[DataProto | None] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(parts, data, group=process_group)
    device = next((c.values.device if isinstance(c, Ragged) else c.device for c in data._columns().values()), "cpu")
    data._become(DataProto.concat(parts).to(device))


@dataclass
class DataProtoFuture:
    """Future output of a call that does not block. Hand it to the next call, or ``get`` it.

    ``futures``, one per worker: concurrent.futures.Future, Ray ObjectRefs, or objects with ``get()``. ``collect_fn``
    joins their results, ``dispatch_fn`` then takes a part of the whole.
    """

    collect_fn: Callable[[list], DataProto]
    futures: list
    dispatch_fn: Callable[[DataProto], DataProto] | None = None

    @staticmethod
    def concat(data: list) -> DataProtoFuture:
        """The rows of all futures, one after the other."""
        return DataProtoFuture(DataProto.concat, data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Chunk i of what will come, for each i; nothing is waited for."""

        def taken(data: DataProto, i: int) -> DataProto:
            return (data if self.dispatch_fn is None else self.dispatch_fn(data)).chunk(chunks)[i]

        return [replace(self, dispatch_fn=partial(taken, i=i)) for i in range(chunks)]

    def get(self) -> DataProto:
        """Wait for the results and join them. A worker that fails raises here, even if others never finish."""
        data = self.collect_fn(self._outputs())
        return data if self.dispatch_fn is None else self.dispatch_fn(data)

    def _outputs(self) -> list:
        if all(hasattr(future, "get") for future in self.futures):
            return [future.get() for future in self.futures]
        pending = [future.future() if hasattr(future, "future") else future for future in self.futures]
        # the first failure is raised even if another future never finishes
        for finished in concurrent_futures.wait(pending, return_when=concurrent_futures.FIRST_EXCEPTION).done:
            finished.result()
        return [future.result() for future in pending]

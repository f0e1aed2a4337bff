"""A dataset that grows during training: after each batch a user-defined generator may add prompts.

``data.datagen.{path,name}`` name the generator. Rows it adds are used from the next epoch on, and are part of a
checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from verl.data.readers import table_in_memory
from verl.data.rl_dataset import RLHFDataset
from verl.data.table import RowTable, leave_out
from verl.utils.import_utils import load_extern_type


class AbstractDataGenerator(ABC):
    """Base of generators named by ``data.datagen.{path,name}``.

    Args:
        config: the ``data.datagen`` section.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    @abstractmethod
    def generate(self, dataset: DynamicGenDataset) -> Any:
        """Return new rows: a list of dicts, a ``pyarrow.Table`` or a ``datasets.Dataset``; an empty list adds none.

        ``dataset.last_batch`` is the batch that was just trained on (a DataProto with rewards), ``dataset.dataframe``
        holds all rows so far.
        """


class DynamicGenDataset(RLHFDataset):
    """:class:`RLHFDataset` with the rows its generator adds after each batch. Arguments as there."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        section = self.config["datagen"]
        generator_cls = load_extern_type(section["path"], section["name"])
        if not (isinstance(generator_cls, type) and issubclass(generator_cls, AbstractDataGenerator)):
            raise TypeError(
                f"data.datagen.name={section['name']!r} of {section['path']} is not a subclass of "
                "verl.data.dynamicgen_dataset.AbstractDataGenerator; let it inherit from it."
            )
        self.generator = generator_cls(section)
        self.last_batch: Any = None
        self._added: list[pa.Table] = []

    def on_batch_end(self, batch: Any) -> None:
        """Call the generator with a finished batch and add the rows it returns."""
        self.last_batch = batch
        self.append_dataframe(self.generator.generate(self))

    def append_dataframe(self, rows: Any) -> None:
        """Add rows; they are checked and filtered like those of the files."""
        table = _as_table(rows)
        if table.num_rows:
            self._add(table)

    def _add(self, table: pa.Table) -> None:
        new, old = RowTable([table], [f"rows generated after {len(self._added)} others"]), self.dataframe
        if self._reads_prompt_column():
            new.require(self.prompt_key, self._prompt_option())
        new = leave_out(new, self._unusable_rows(new), self.bad_rows)
        if self.filter_overlong_prompts:
            new = new.select(np.flatnonzero(self.lengths_of(new) <= self.max_prompt_length))
        # ids of the files' prompts do not cover the new rows
        self.dataframe, self._token_ids = RowTable.joined([old, new]), None
        # before filtering: a checkpoint holds what the generator returned
        self._added.append(table)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows added so far, and the state of the generator if it has any."""
        added = [_to_bytes(table) for table in self._added]
        own = self.generator.state_dict() if hasattr(self.generator, "state_dict") else None
        return {"added": added, "generator": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the rows of ``state`` to those of the files."""
        # resuming twice adds nothing twice
        for table_bytes in state["added"][len(self._added) :]:
            with pa.ipc.open_stream(pa.py_buffer(table_bytes.numpy().tobytes())) as reader:
                self._add(reader.read_all())
        if state["generator"] is not None and hasattr(self.generator, "load_state_dict"):
            self.generator.load_state_dict(state["generator"])


def _to_bytes(table: pa.Table) -> torch.Tensor:
    """Serialize a table to a byte tensor, which a checkpoint restores without pickle."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)


def _as_table(rows: Any) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        return table_in_memory(dict(row) for row in rows)
    if hasattr(rows, "to_list"):
        return table_in_memory(rows.to_list())
    raise TypeError(
        f"data.datagen: generate() returned {type(rows).__name__}; return a list of dicts, a pyarrow.Table or a "
        "datasets.Dataset."
    )

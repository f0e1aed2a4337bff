"""What rows show a model beside text: images and videos, read, counted against the prompt, and given to the processor.

Knows the columns of a data set and the model's processor; how one image or video is read is ``vision_utils``' and
``video_utils``' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.data.table import DataError, RowTable
from verl.data.vision import (
    EncodedPrompt,
    ImagePrompts,
    count_image_parts,
    open_image,
    placeholder_mismatch,
    process_image,
    process_video,
    uneven_image_rows,
)

Where = Callable[[], str]
"""Names the row, for a message."""


@dataclass(frozen=True)
class Shown:
    """The images and videos of one data set."""

    prompts: ImagePrompts | None
    """Prompts under the model's processor; None for a model of text."""
    columns: Mapping[str, str]
    """``image``, ``video`` -> the column that holds them."""

    @property
    def takes_videos(self) -> bool:
        """Whether the model's processor takes videos."""
        return self.prompts is not None and self.prompts.takes_videos

    def kinds(self, columns: Collection[str]) -> list[tuple[str, str]]:
        """(kind, column) of what rows with these columns may show the model."""
        takes = {"image": self.prompts is not None, "video": self.takes_videos}
        return [(kind, key) for kind, key in self.columns.items() if takes[kind] and key in columns]

    def read(self, row: Mapping[str, Any], where: Where, pixels: bool = True) -> dict[str, list[Any]]:
        """The images and videos of a row, of those kinds whose column its file has.

        Args:
            pixels: False opens images without reading their pixels.

        Raises:
            DataError: one cannot be read.
        """
        readers = {"image": process_image if pixels else open_image, "video": process_video}
        return {kind: _read(row[key], readers[kind], kind, key, where) for kind, key in self.kinds(row)}

    def check(self, prompt: Any, held: Mapping[str, Sequence[Any]], where: Where) -> None:
        """See that the prompt of a row has one placeholder for each image and video.

        Raises:
            DataError: it has more, or fewer.
        """
        for kind, things in held.items():
            places = 0 if isinstance(prompt, str) else count_image_parts(prompt, kind)
            if places != len(things):
                raise DataError(placeholder_mismatch(where(), places, len(things), self.columns[kind], kind))

    def encode(self, text: str, held: Mapping[str, list[Any]], where: Where) -> EncodedPrompt:
        """Token ids and tensors of a rendered prompt with what it shows."""
        try:
            return self.prompts.encode(text, held.get("image", []), held.get("video", []))
        except ValueError as error:
            raise DataError(f"{where()}: {error}.") from error

    def num_tokens(self, text: str, held: Mapping[str, list[Any]]) -> int:
        """Tokens of a rendered prompt with what it shows."""
        return self.prompts.num_tokens(text, held.get("image", []), held.get("video", []))

    def refuse_unseen(self, table: RowTable) -> None:
        """See that the model takes what the rows show.

        Raises:
            DataError: there are images, and it takes none.
            NotImplementedError: there are videos, and it takes none.
        """
        image_key, video_key = self.columns["image"], self.columns["video"]
        for file, path in zip(table.tables, table.names, strict=True):
            if not self.takes_videos and len(rows := _rows_with_items(file, video_key)):
                raise NotImplementedError(
                    f"{path}, row {rows[0]} has {video_key!r} (data.video_key), and the model's processor takes "
                    f"no videos. Use a model of the Qwen2-VL or Qwen2.5-VL families, leave out the {len(rows)} rows "
                    "that have them, or name another column with data.video_key."
                )
            if self.prompts is None and len(rows := _rows_with_items(file, image_key)):
                raise DataError(
                    f"{path}, row {rows[0]} has {image_key!r} (data.image_key), and the model has no image "
                    f"processor. Use a vision-language model, leave out the {len(rows)} rows that have images, or name "
                    "another column with data.image_key."
                )

    def uneven_rows(self, table: RowTable, prompt_key: str) -> Iterator[tuple[int, str]]:
        """(position, what is wrong) of rows with more or fewer placeholders than images or videos."""
        start = 0
        for file in table.tables:
            for kind, key in self.kinds(file.column_names):
                for row, shown, held in uneven_image_rows(file[prompt_key], file[key], kind):
                    yield start + row, placeholder_mismatch("", shown, held, key, kind).removeprefix(": ")
            start += file.num_rows


def _read(held: Any, read: Callable[[Any], Any], kind: str, key: str, where: Where) -> list[Any]:
    held = [] if held is None else list(held) if isinstance(held, (list, tuple, np.ndarray)) else [held]
    try:
        return [read(one) for one in held]
    except ValueError as error:
        raise DataError(f"{where()}: {error} ({key!r}, data.{kind}_key).") from error


def _rows_with_items(table: pa.Table, name: str) -> np.ndarray:
    """Rows of a list column that hold at least one item; of any other column: that are not null."""
    if name not in table.column_names:
        return np.zeros(0, np.int64)
    column = table[name]
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    filled = pc.is_valid(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        filled = pc.fill_null(pc.greater(pc.list_value_length(column), 0), False)
    return np.flatnonzero(filled.to_numpy(zero_copy_only=False))

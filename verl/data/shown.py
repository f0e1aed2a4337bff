"""Image and video columns of a dataset: read, checked against the placeholders of prompts, encoded."""

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
    mismatched_image_rows,
    open_image,
    placeholder_mismatch,
    process_image,
    process_video,
)

Where = Callable[[], str]
"""Returns the location of the row, for a message."""


@dataclass(frozen=True)
class MediaColumns:
    """The columns of images and videos of one dataset."""

    prompts: ImagePrompts | None
    """Encoder with the model's processor; None for a text model."""
    columns: Mapping[str, str]
    """``image``, ``video`` -> column."""

    @property
    def takes_videos(self) -> bool:
        """Whether the model's processor takes videos."""
        return self.prompts is not None and self.prompts.takes_videos

    def kinds(self, columns: Collection[str]) -> list[tuple[str, str]]:
        """Return (kind, column) of the images and videos that rows with these columns may have."""
        takes = {"image": self.prompts is not None, "video": self.takes_videos}
        return [(kind, key) for kind, key in self.columns.items() if takes[kind] and key in columns]

    def read(self, row: Mapping[str, Any], where: Where, pixels: bool = True) -> dict[str, list[Any]]:
        """Read the images and videos of a row.

        Args:
            pixels: False opens images without reading their pixels.

        Raises:
            DataError: one cannot be read.
        """
        readers = {"image": process_image if pixels else open_image, "video": process_video}
        return {kind: _read(row[key], readers[kind], kind, key, where) for kind, key in self.kinds(row)}

    def check(self, prompt: Any, media: Mapping[str, Sequence[Any]], where: Where) -> None:
        """Check that the prompt of a row has one placeholder for each image and video.

        Raises:
            DataError: it has more, or fewer.
        """
        for kind, items in media.items():
            placeholders = 0 if isinstance(prompt, str) else count_image_parts(prompt, kind)
            if placeholders != len(items):
                raise DataError(placeholder_mismatch(where(), placeholders, len(items), self.columns[kind], kind))

    def encode(self, text: str, media: Mapping[str, list[Any]], where: Where) -> EncodedPrompt:
        """Return token ids and processor tensors of a rendered prompt with its images and videos."""
        try:
            return self.prompts.encode(text, media.get("image", []), media.get("video", []))
        except ValueError as error:
            raise DataError(f"{where()}: {error}.") from error

    def num_tokens(self, text: str, media: Mapping[str, list[Any]]) -> int:
        """Return the number of tokens of a rendered prompt with its images and videos."""
        return self.prompts.num_tokens(text, media.get("image", []), media.get("video", []))

    def check_supported(self, table: RowTable) -> None:
        """Check that the model supports the images and videos of the rows.

        Raises:
            DataError: there are images, which it does not support.
            NotImplementedError: there are videos, which it does not support.
        """
        image_key, video_key = self.columns["image"], self.columns["video"]
        for file, path in zip(table.tables, table.names, strict=True):
            if not self.takes_videos and len(rows := _rows_with_items(file, video_key)):
                raise NotImplementedError(
                    f"{path}, row {rows[0]} has {video_key!r} (data.video_key), and the model's processor does not "
                    f"support videos. Use a model of the Qwen2-VL or Qwen2.5-VL families, leave out the {len(rows)} "
                    "rows that have them, or name another column with data.video_key."
                )
            if self.prompts is None and len(rows := _rows_with_items(file, image_key)):
                raise DataError(
                    f"{path}, row {rows[0]} has {image_key!r} (data.image_key), and the model has no image "
                    f"processor. Use a vision-language model, leave out the {len(rows)} rows that have images, or name "
                    "another column with data.image_key."
                )

    def placeholder_mismatches(self, table: RowTable, prompt_key: str) -> Iterator[tuple[int, str]]:
        """Yield (position, reason) of rows whose placeholders differ in number from their images or videos."""
        yield from mismatched_rows(table, prompt_key, self.kinds)


def mismatched_rows(
    table: RowTable, prompt_key: str, kinds: Callable[[Collection[str]], Collection[tuple[str, str]]]
) -> Iterator[tuple[int, str]]:
    """Yield (position, reason) of rows whose placeholders differ in number from their images or videos.

    Args:
        kinds: columns of a file -> (kind, column) to check.
    """
    start = 0
    for file in table.tables:
        for kind, key in kinds(file.column_names):
            for row, placeholders, items in mismatched_image_rows(file[prompt_key], file[key], kind):
                yield start + row, placeholder_mismatch("", placeholders, items, key, kind).removeprefix(": ")
        start += file.num_rows


def _read(cell: Any, read: Callable[[Any], Any], kind: str, key: str, where: Where) -> list[Any]:
    items = [] if cell is None else list(cell) if isinstance(cell, (list, tuple, np.ndarray)) else [cell]
    try:
        return [read(item) for item in items]
    except ValueError as error:
        raise DataError(f"{where()}: {error} ({key!r}, data.{kind}_key).") from error


def _rows_with_items(table: pa.Table, name: str) -> np.ndarray:
    """Return the rows of a list column with at least one item, or of another column that are not null."""
    if name not in table.column_names:
        return np.zeros(0, np.int64)
    column = table[name]
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    filled = pc.is_valid(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        filled = pc.fill_null(pc.greater(pc.list_value_length(column), 0), False)
    return np.flatnonzero(filled.to_numpy(zero_copy_only=False))

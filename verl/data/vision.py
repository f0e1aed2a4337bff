"""Images and videos of prompts: read, matched with placeholders, counted in tokens, encoded by the processor."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.data.table import DataError, RowTable, is_list, is_text

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import ProcessorMixin


PLACEHOLDERS = {"image": "<image>", "video": "<video>"}
"""Kind of media -> its placeholder in a text."""

_TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "video_metadata")


def open_image(image: Any) -> Image:
    """Open an image of a data file without reading its pixels.

    Args:
        image: ``{"bytes": ...}`` or ``{"path": ...}`` as ``datasets`` writes them, a path, the bytes of an image file,
            or a PIL image.

    Raises:
        ValueError: it is none of these, or not a readable image.
    """
    from PIL import Image, UnidentifiedImageError

    # datasets gives both fields and leaves one null
    if isinstance(image, Mapping):
        found = [image[name] for name in ("bytes", "path", "image") if image.get(name) is not None]
        if not found:
            raise ValueError(f"an image with the fields {', '.join(image)} has neither bytes nor a path")
        image = found[0]
    if isinstance(image, Image.Image):
        return image
    try:
        if isinstance(image, (bytes, bytearray, memoryview)):
            return Image.open(BytesIO(image))
        if isinstance(image, (str, os.PathLike)):
            return Image.open(os.path.expanduser(str(image).removeprefix("file://")))
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error
    raise ValueError(f"an image is a {type(image).__name__}, neither bytes, nor a path, nor a PIL image")


def process_image(image: Any) -> Image:
    """Read an image (:func:`open_image`) with its pixels, as RGB."""
    try:
        return open_image(image).convert("RGB")
    except OSError as error:  # a truncated file
        raise ValueError(f"an image cannot be read: {error}") from error


def with_image_parts(messages: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ("image",)) -> list[dict[str, Any]]:
    """Split the contents of messages into parts: each ``<image>`` becomes an image part, the text between them text.

    Args:
        kinds: ``image``, ``video``: the kinds whose placeholders are split off.
    """
    return [{**message, "content": _parts(message.get("content"), kinds)} for message in messages]


def _parts(content: Any, kinds: Sequence[str]) -> Any:
    if isinstance(content, str):
        kind_of = {PLACEHOLDERS[kind]: kind for kind in kinds}
        if not any(placeholder in content for placeholder in kind_of):
            return content
        pieces = re.split(f"({'|'.join(map(re.escape, kind_of))})", content)
        return [
            {"type": kind_of[piece]} if piece in kind_of else {"type": "text", "text": piece}
            for piece in pieces
            if piece
        ]
    if content is None:
        return None
    # Parquet gives every part of a column the same fields; unused ones are null.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def count_image_parts(messages: Sequence[Mapping[str, Any]], kind: str = "image") -> int:
    """Count the images (or videos) in messages made by :func:`with_image_parts`."""
    contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
    return sum(part.get("type") == kind for content in contents for part in content)


def placeholder_mismatch(placeholders: int, items: int, key: str, kind: str = "image") -> str:
    """Return the error text for a row whose placeholders and images differ in number."""
    return (
        f"the prompt has {placeholders} {PLACEHOLDERS[kind]} placeholders and the row {items} {kind}s in "
        f"{key!r} (data.{kind}_key). Each placeholder stands for one {kind}, in order: correct or remove the row."
    )


class EncodedPrompt(NamedTuple):
    """A prompt with images or videos, as token ids."""

    engine_ids: list[int]
    """One placeholder token per image, as rollout engines expect together with the images."""
    ids: list[int]
    """One placeholder token per image feature, as the model reads them."""
    inputs: dict[str, Any]
    """The processor's tensors of the images and videos: ``pixel_values``, ``image_grid_thw``."""


class ImagePrompts:
    """Encoder of prompts with images and videos, with a model's processor."""

    def __init__(self, processor: ProcessorMixin):
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.token = getattr(processor, "image_token", None)
        self.token_id = getattr(processor, "image_token_id", None)
        if self.token_id is None and self.token is not None:
            self.token_id = self.tokenizer.convert_tokens_to_ids(self.token)
        self.video_token = getattr(processor, "video_token", None)
        self.video_token_id = getattr(processor, "video_token_id", None)
        self.tokens = {token for token in (self.token_id, self.video_token_id) if token is not None}

    @property
    def takes_videos(self) -> bool:
        """Whether the model supports videos."""
        return getattr(self.processor, "video_processor", None) is not None and self.video_token_id is not None

    def encode(self, text: str, images: Sequence[Image], videos: Sequence[Video] = ()) -> EncodedPrompt:
        """Return token ids and image tensors of a prompt to which the chat template was applied.

        Raises:
            ValueError: the template or the processor did not write one placeholder per image or video.
        """
        media = {"images": list(images)} if images else {}
        media |= video_arguments(videos) if videos else {}
        outputs = dict(self.processor(text=[text], return_tensors="pt", **media))
        ids = outputs["input_ids"][0].tolist()
        # the processor repeats each placeholder once for each feature; the engine's are not repeated
        engine_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._check_placeholders(engine_ids, "image", self.token, self.token_id, len(images))
        self._check_placeholders(engine_ids, "video", self.video_token, self.video_token_id, len(videos))
        inputs = {k: v for k, v in outputs.items() if k not in _TEXT_INPUTS}
        if videos:
            self._check_videos(engine_ids, ids, inputs["video_grid_thw"])
        return EncodedPrompt(engine_ids, ids, inputs)

    def _check_placeholders(self, ids: Sequence[int], kind: str, token: Any, token_id: Any, items: int) -> None:
        if token_id is not None and (placeholders := ids.count(token_id)) != items:
            raise ValueError(
                f"the chat template wrote {placeholders} {token} for {items} {kind}s. Use the template of the model, "
                "and do not write this token into prompts"
            )

    def _check_videos(self, engine_ids: Sequence[int], ids: Sequence[int], grid: Any) -> None:
        """Check that only placeholders were expanded: rollout engines expand them too, and write nothing else."""
        # merge_size² patches become one token
        lengths = iter((grid.prod(-1) // self.processor.video_processor.merge_size**2).tolist())
        token = self.video_token_id
        expanded = [i for given in engine_ids for i in ([given] * next(lengths) if given == token else [given])]
        if [i for i in expanded if i != self.token_id] != [i for i in ids if i != self.token_id]:
            raise ValueError(
                f"{type(self.processor).__name__} writes more than {self.video_token} for a video (timestamps of "
                "its frames, for example), which is not supported. For videos use a Qwen2-VL or Qwen2.5-VL model"
            )

    def num_tokens(self, text: str, images: Sequence[Image], videos: Sequence[Video] = ()) -> int:
        """Return the length of ``encode(text, images, videos).ids``, from image sizes alone if the processor can."""
        # transformers' own counter, which vLLM uses as well
        measure = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if measure is None or videos:
            return len(self.encode(text, [image.convert("RGB") for image in images], videos).ids)
        counts = measure(image_sizes=[(image.height, image.width) for image in images])
        text_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(text_ids) - len(images) + sum(counts.num_image_tokens)

    def truncate(self, prompt: EncodedPrompt, keep: Sequence[int]) -> EncodedPrompt:
        """Keep the tokens at the positions ``keep`` of ``prompt.ids``, with all images.

        Raises:
            ValueError: a token of an image would be removed.
        """
        kept, ids = set(keep), prompt.ids
        is_media = [token in self.tokens for token in ids]
        # a run of equal image tokens stands for one placeholder of the engine's ids
        first = [i for i in range(len(ids)) if not is_media[i] or i == 0 or ids[i - 1] != ids[i]]
        loses_part = any(is_media[i] and i not in kept for i in range(len(ids)))
        if loses_part or [ids[i] for i in first] != prompt.engine_ids:
            raise ValueError("part of an image would be cut off")
        return EncodedPrompt([ids[i] for i in first if i in kept], [ids[i] for i in keep], prompt.inputs)


# -- Videos: image frames, an array, or a video file, read as RGB frames -----------------------------------------------

FPS = 2.0
"""Default frames per second, of given frames and of frames sampled from a video file."""


MAX_FRAMES = 768
"""Most frames sampled from a video file; longer ones get a lower rate."""


class Video(NamedTuple):
    """A video as the model reads it: all frames are used."""

    frames: tuple[Image, ...]
    """RGB, all of one size."""
    fps: float = FPS
    """Frames per second."""


def process_video(video: Any) -> Video:
    """Read a video of a data file with its pixels.

    Args:
        video: a list of images, each as :func:`verl.data.vision.open_image` takes it; an array
            (frames, height, width, 3) of bytes; the path of a video file or its bytes; or a mapping with one of these
            under ``frames``, ``video``, ``path`` or ``bytes``. A mapping may have ``fps``, the rate of the frames
            or of sampling from a file, and for a file ``max_frames``.

    Raises:
        ValueError: it is none of these, cannot be read, or has no frames.
    """
    fps, max_frames = None, None
    if isinstance(video, Video):
        return video
    if isinstance(video, Mapping):
        fps, max_frames = video.get("fps"), video.get("max_frames")
        found = [video[name] for name in ("frames", "video", "bytes", "path") if video.get(name) is not None]
        if not found:
            raise ValueError(f"a video with the fields {', '.join(video)} has no frames, bytes, path or video")
        video = found[0]
    if isinstance(video, (str, os.PathLike, bytes, bytearray, memoryview)):
        return _from_file(video, float(fps or FPS), int(max_frames or MAX_FRAMES))
    if isinstance(video, np.ndarray) and video.ndim == 4:
        from PIL import Image

        video = [Image.fromarray(np.ascontiguousarray(frame).astype("uint8")) for frame in video]
    if not isinstance(video, (list, tuple, np.ndarray)):
        raise ValueError(f"a video is a {type(video).__name__}, neither frames, nor an array, nor a file")
    if not len(video):
        raise ValueError("a video has no frames")
    try:
        frames = tuple(process_image(frame) for frame in video)
    except ValueError as error:
        raise ValueError(f"a frame of a video: {error}") from error
    if len(sizes := {frame.size for frame in frames}) > 1:
        raise ValueError(f"the frames of a video have {len(sizes)} sizes, including {min(sizes)} and {max(sizes)}")
    return Video(frames, float(fps or FPS))


def _from_file(source: Any, fps: float, max_frames: int) -> Video:
    """Sample evenly spaced frames of a video file: ``fps`` per second, at most ``max_frames``."""
    try:
        import av
    except ImportError as error:
        raise ValueError(
            "a video file cannot be read without PyAV: pip install av, or write its frames into the data as images"
        ) from error
    if isinstance(source, (str, os.PathLike)):
        opened: Any = os.path.expanduser(str(source).removeprefix("file://"))
    else:
        opened = io.BytesIO(bytes(source))
    try:
        with av.open(opened) as container:
            stream = container.streams.video[0]
            frames = [frame.to_image() for frame in container.decode(stream)]
            rate = float(stream.average_rate or FPS)
    except (av.error.FFmpegError, OSError, IndexError) as error:
        raise ValueError(f"a video file cannot be read: {error}") from error
    if not frames:
        raise ValueError("a video file holds no frames")
    # at least one frame, and never one twice
    count = max(1, min(len(frames), max_frames, round(len(frames) / rate * fps)))
    sampled = np.linspace(0, len(frames) - 1, count).round().astype(int)
    return Video(tuple(frames[number].convert("RGB") for number in sampled), count / (len(frames) / rate))


def video_arguments(videos: Sequence[Video]) -> dict[str, Any]:
    """Return the arguments of a processor for videos: all frames, with their rate."""
    metadata = [
        {"fps": video.fps, "total_num_frames": len(video.frames), "frames_indices": list(range(len(video.frames)))}
        for video in videos
    ]
    frames = [list(video.frames) for video in videos]
    # the frames were sampled already: by default a processor would sample again
    return {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}


def media_inputs(processor: ProcessorMixin, media: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the processor's tensors of the images and videos of one prompt.

    Of videos these are ``pixel_values_videos``, ``video_grid_thw``, and ``second_per_grid_ts`` (seconds per temporal
    patch) if the model uses it.

    Args:
        media: ``{"image": [PIL images], "video": [Video]}``, either of which may be missing.
    """
    tensors: dict[str, Any] = {}
    if media.get("image"):
        tensors |= dict(processor.image_processor(images=list(media["image"]), return_tensors="pt"))
    if videos := [Video(*video) for video in media.get("video") or ()]:
        import torch

        tensors |= dict(processor.video_processor(return_tensors="pt", **video_arguments(videos)))
        tensors.pop("video_metadata", None)
        if "second_per_grid_ts" in processor.model_input_names:
            step = processor.video_processor.temporal_patch_size
            tensors["second_per_grid_ts"] = torch.tensor([step / video.fps for video in videos])
    return tensors


def pixels_of(media: Mapping[str, Sequence[Any]]) -> dict[str, Tensor] | None:
    """The RGB images and videos of one prompt as tensors of bytes by name (``image/0``), which `media_of` reads.

    None where one is no RGB image.
    """
    import torch

    def tensor(array: Any, dtype: Any = None) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=dtype))

    images, videos = list(media.get("image") or ()), [Video(*video) for video in media.get("video") or ()]
    every = [*images, *(frame for video in videos for frame in video.frames)]
    if any(getattr(image, "mode", None) != "RGB" for image in every):
        return None
    found = {f"image/{i}": tensor(image) for i, image in enumerate(images)}
    for i, video in enumerate(videos):
        found |= {f"video/{i}": tensor([np.asarray(frame) for frame in video.frames])}
        found |= {f"video/{i}/fps": tensor([video.fps], np.float64)}
    return found


def media_of(pixels: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Undo `pixels_of`."""
    from PIL import Image

    media: dict[str, list[Any]] = {}
    for name, value in pixels.items():
        kind = name.split("/")[0]
        if name.endswith("/fps"):
            continue
        if kind == "image":
            media.setdefault(kind, []).append(Image.fromarray(value.numpy()))
        else:
            frames = tuple(map(Image.fromarray, value.numpy()))
            media.setdefault(kind, []).append(Video(frames, pixels[f"{name}/fps"].item()))
    return media


# -- Image and video columns of a dataset: read, checked against the placeholders of prompts, encoded ----------------


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
        # a text prompt has no parts
        for kind, items in media.items():
            placeholders = 0 if isinstance(prompt, str) else count_image_parts(prompt, kind)
            if placeholders != len(items):
                why = placeholder_mismatch(placeholders, len(items), self.columns[kind], kind)
                raise DataError(f"{where()}: {why}")

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


def mismatched_rows(table: RowTable, prompt_key: str, columns: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield (position, reason) of rows whose placeholders differ in number from their images or videos.

    Contents that are not text are skipped.

    Args:
        columns: ``image``, ``video`` -> column; files without it are skipped.
    """
    start = 0
    for file in table.tables:
        for kind, key in columns.items():
            if key not in file.column_names:
                continue
            prompts, items = (file[name].combine_chunks() for name in (prompt_key, key))
            contents, parents = prompts, np.arange(len(prompts))
            if is_list(prompts.type):
                contents = pc.struct_field(pc.list_flatten(prompts), "content")
                parents = pc.list_parent_indices(prompts).to_numpy()
            if not is_list(items.type) or not is_text(contents.type):
                continue
            counts = pc.fill_null(pc.count_substring(contents, PLACEHOLDERS[kind]), 0).to_numpy(zero_copy_only=False)
            placeholders = np.bincount(parents, counts, len(prompts)).astype(np.int64)
            there = pc.fill_null(pc.list_value_length(items), 0).to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(placeholders != there).tolist():
                yield start + row, placeholder_mismatch(int(placeholders[row]), int(there[row]), key, kind)
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
    if is_list(column.type):
        filled = pc.fill_null(pc.greater(pc.list_value_length(column), 0), False)
    return np.flatnonzero(filled.to_numpy(zero_copy_only=False))

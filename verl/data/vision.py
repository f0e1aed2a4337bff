"""Images of a row: opened, put where the prompt says ``<image>``, and counted in tokens; videos with them.

Knows one row and the model's processor; no files of rows, no batches. Nothing of it is needed for text.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "EncodedPrompt",
    "ImagePrompts",
    "Video",
    "media_inputs",
    "open_image",
    "process_image",
    "process_video",
    "video_arguments",
    "with_image_parts",
]

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin


PLACEHOLDER = "<image>"
PLACEHOLDERS = {"image": PLACEHOLDER, "video": "<video>"}
"""Kind of what is shown -> where a text shows it."""

_TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "video_metadata")


def open_image(image: Any) -> Image:
    """An image of a data file, its pixels not read yet.

    Args:
        image: ``{"bytes": ...}`` or ``{"path": ...}`` as ``datasets`` writes them, a path, the bytes of an image file,
            or a PIL image.

    Raises:
        ValueError: it is none of these, or no image can be read there.
    """
    from PIL import Image, UnidentifiedImageError

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
    """:func:`open_image` with its pixels read, as RGB."""
    try:
        return open_image(image).convert("RGB")
    except OSError as error:  # a file cut short
        raise ValueError(f"an image cannot be read: {error}") from error


def with_image_parts(messages: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ("image",)) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts: each ``<image>`` an image part, what stands between them text.

    Args:
        kinds: ``image``, ``video``: of what the placeholders count.
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
    # Parquet gives every part of a column the same fields: those a part does not use are null.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def count_image_parts(messages: Sequence[Mapping[str, Any]], kind: str = "image") -> int:
    """Images (or videos) that messages made by :func:`with_image_parts` show."""
    contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
    return sum(part.get("type") == kind for content in contents for part in content)


def uneven_image_rows(
    prompts: pa.ChunkedArray, images: pa.ChunkedArray, kind: str = "image"
) -> Iterator[tuple[int, int, int]]:
    """(row, ``<image>`` placeholders, images) of rows where the two differ; contents that are no texts are left out."""
    prompts, images = (column.combine_chunks() for column in (prompts, images))
    if not pa.types.is_list(images.type) and not pa.types.is_large_list(images.type):
        return
    if pa.types.is_list(prompts.type) or pa.types.is_large_list(prompts.type):
        contents = pc.struct_field(pc.list_flatten(prompts), "content")
        parents = pc.list_parent_indices(prompts).to_numpy()
    else:
        contents, parents = prompts, np.arange(len(prompts))
    if not pa.types.is_string(contents.type) and not pa.types.is_large_string(contents.type):
        return
    counts = pc.fill_null(pc.count_substring(contents, PLACEHOLDERS[kind]), 0).to_numpy(zero_copy_only=False)
    shown = np.bincount(parents, counts, len(prompts)).astype(np.int64)
    held = pc.fill_null(pc.list_value_length(images), 0).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(shown != held):
        yield int(row), int(shown[row]), int(held[row])


def placeholder_mismatch(where: str, shown: int, held: int, key: str, kind: str = "image") -> str:
    """What to say of a row whose placeholders and images differ in number."""
    return (
        f"{where}: the prompt has {shown} {PLACEHOLDERS[kind]} placeholders and the row {held} {kind}s in {key!r} "
        f"(data.{kind}_key). Each placeholder stands for one {kind}, in order: correct or remove the row."
    )


class EncodedPrompt(NamedTuple):
    """A prompt with images or videos, as token ids."""

    engine_ids: list[int]
    """One placeholder token an image: what a rollout engine is given, beside the images."""
    ids: list[int]
    """As many placeholder tokens an image as it has features: what the model reads."""
    inputs: dict[str, Any]
    """The processor's tensors of what is shown: ``pixel_values``, ``image_grid_thw``."""


class ImagePrompts:
    """Prompts with images and videos under one model's processor."""

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
        """Whether the model is one that is shown videos."""
        return getattr(self.processor, "video_processor", None) is not None and self.video_token_id is not None

    def encode(self, text: str, images: Sequence[Image], videos: Sequence[Video] = ()) -> EncodedPrompt:
        """Token ids and image tensors of a prompt that went through the chat template.

        Raises:
            ValueError: the template or the processor did not make one placeholder an image or video.
        """

        shown = {"images": list(images)} if images else {}
        shown |= video_arguments(videos) if videos else {}
        outputs = dict(self.processor(text=[text], return_tensors="pt", **shown))
        ids = outputs["input_ids"][0].tolist()
        engine_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._check_placeholders(engine_ids, "image", self.token, self.token_id, len(images))
        self._check_placeholders(engine_ids, "video", self.video_token, self.video_token_id, len(videos))
        inputs = {k: v for k, v in outputs.items() if k not in _TEXT_INPUTS}
        if videos:
            self._check_videos(engine_ids, ids, inputs["video_grid_thw"])
        return EncodedPrompt(engine_ids, ids, inputs)

    def _check_placeholders(self, ids: Sequence[int], kind: str, token: Any, token_id: Any, held: int) -> None:
        if token_id is not None and (shown := ids.count(token_id)) != held:
            raise ValueError(
                f"the chat template made {shown} {token} of {held} {kind}s. Use the template of the model, and write "
                "no such token into a prompt"
            )

    def _check_videos(self, engine_ids: Sequence[int], ids: Sequence[int], grid: Any) -> None:
        """A rollout engine makes each placeholder as long as its video: nothing else may have been written."""
        lengths = iter((grid.prod(-1) // self.processor.video_processor.merge_size**2).tolist())
        token = self.video_token_id
        made = [i for given in engine_ids for i in ([given] * next(lengths) if given == token else [given])]
        if [i for i in made if i != self.token_id] != [i for i in ids if i != self.token_id]:
            raise ValueError(
                f"{type(self.processor).__name__} writes more than {self.video_token} where a video is shown (times of "
                "its frames, say), which is not supported. For videos use a Qwen2-VL or Qwen2.5-VL model"
            )

    def num_tokens(self, text: str, images: Sequence[Image], videos: Sequence[Video] = ()) -> int:
        """Length of ``encode(text, images, videos).ids``; from the images' sizes alone where the processor can."""
        measure = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if measure is None or videos:
            return len(self.encode(text, [image.convert("RGB") for image in images], videos).ids)
        found = measure(image_sizes=[(image.height, image.width) for image in images])
        text_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(text_ids) - len(images) + sum(found.num_image_tokens)

    def truncate(self, prompt: EncodedPrompt, keep: Sequence[int]) -> EncodedPrompt:
        """The tokens at the positions ``keep`` of ``prompt.ids``, with all of its images.

        Raises:
            ValueError: a token of an image is not among them.
        """
        kept = set(keep)
        first = [i for i, token in enumerate(prompt.ids) if token not in self.tokens or self._starts(prompt.ids, i)]
        cut = any(token in self.tokens and i not in kept for i, token in enumerate(prompt.ids))
        if cut or [prompt.ids[i] for i in first] != prompt.engine_ids:
            raise ValueError("the cut would go through an image")
        ids = [prompt.ids[i] for i in keep]
        return EncodedPrompt([prompt.ids[i] for i in first if i in kept], ids, prompt.inputs)

    def _starts(self, ids: Sequence[int], i: int) -> bool:
        return i == 0 or ids[i - 1] != ids[i]


# -- Videos of a row: frames of images, an array, or a video file, to RGB frames and what a processor makes of them --


if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin


FPS = 2.0
"""Frames a second of videos that do not say, and frames taken of a second of a video file."""

MAX_FRAMES = 768
"""Frames taken of a video file at most; a longer one is shown at a lower rate."""

VIDEO_PLACEHOLDER = "<video>"


class Video(NamedTuple):
    """A video as a model is shown it: every frame counts, none are left out."""

    frames: tuple[Image, ...]
    """RGB, all of one size."""
    fps: float = FPS
    """Frames a second."""


def process_video(video: Any) -> Video:
    """A video of a data file with its pixels read.

    Args:
        video: a list of images, each as :func:`verl.data.vision.open_image` takes it; an array
            (frames, height, width, 3) of bytes; the path of a video file or its bytes; or a mapping with one of these
            under ``frames``, ``video``, ``path`` or ``bytes``. A mapping may say ``fps``, of frames how many make a
            second, of a file how many to take of a second; and of a file ``max_frames``.

    Raises:
        ValueError: it is none of these, cannot be read, or has no frames.
    """
    fps, most = None, None
    if isinstance(video, Video):
        return video
    if isinstance(video, Mapping):
        fps, most = video.get("fps"), video.get("max_frames")
        found = [video[name] for name in ("frames", "video", "bytes", "path") if video.get(name) is not None]
        if not found:
            raise ValueError(f"a video with the fields {', '.join(video)} has no frames, bytes, path or video")
        video = found[0]
    if isinstance(video, (str, os.PathLike, bytes, bytearray, memoryview)):
        return _from_file(video, float(fps or FPS), int(most or MAX_FRAMES))
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
        raise ValueError(f"the frames of a video are of {len(sizes)} sizes, {min(sizes)} and {max(sizes)} among them")
    return Video(frames, float(fps or FPS))


def _from_file(source: Any, fps: float, most: int) -> Video:
    """Evenly spread frames of a video file: ``fps`` of each second, ``most`` at the most."""
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
    wanted = max(1, min(len(frames), most, round(len(frames) / rate * fps)))
    chosen = np.linspace(0, len(frames) - 1, wanted).round().astype(int)
    return Video(tuple(frames[number].convert("RGB") for number in chosen), wanted / (len(frames) / rate))


def video_arguments(videos: Sequence[Video]) -> dict[str, Any]:
    """How a whole processor is given videos: all frames, at their rate."""
    metadata = [
        {"fps": video.fps, "total_num_frames": len(video.frames), "frames_indices": list(range(len(video.frames)))}
        for video in videos
    ]
    frames = [list(video.frames) for video in videos]
    return {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}


def video_inputs(processor: ProcessorMixin, videos: Sequence[Video]) -> dict[str, Any]:
    """What a model's processor makes of the videos of one prompt: ``pixel_values_videos``, ``video_grid_thw``, and
    the seconds between two of its steps in time, ``second_per_grid_ts``, where the model wants them.
    """
    import torch

    arguments = video_arguments(videos)
    made = dict(processor.video_processor(return_tensors="pt", **arguments))
    made.pop("video_metadata", None)
    if "second_per_grid_ts" in processor.model_input_names:
        step = processor.video_processor.temporal_patch_size
        made["second_per_grid_ts"] = torch.tensor([step / video.fps for video in videos])
    return made


def media_inputs(processor: ProcessorMixin, media: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The tensors of what one prompt shows.

    Args:
        media: ``{"image": [PIL images], "video": [Video]}``, either of which may be missing.
    """
    made: dict[str, Any] = {}
    if media.get("image"):
        made |= dict(processor.image_processor(images=list(media["image"]), return_tensors="pt"))
    if media.get("video"):
        made |= video_inputs(processor, [Video(*video) for video in media["video"]])
    return made

"""Videos of a row: frames of images, an array, or a video file, to RGB frames and what a processor makes of them.

Knows one video and the model's processor. Video files are read with PyAV, where that is installed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl.utils.dataset.vision_utils import process_image

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

__all__ = ["Video", "media_inputs", "process_video", "video_arguments"]

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
        video: a list of images, each as :func:`verl.utils.dataset.vision_utils.open_image` takes it; an array
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

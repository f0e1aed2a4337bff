"""The prompts of a table as a model reads them: rendered, and counted in tokens, those of images and videos included.

Text needs the light reader alone. Rows that show something to a model with a processor need that processor, and with it
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.data_check.prompts import PromptReader, has_processor
from verl.data_check.rows import prompt_column, read_prompt
from verl.utils.dataset.table import DataError, RowTable
from verl.utils.dataset.vision_utils import open_image, with_image_parts

if TYPE_CHECKING:
    from verl.utils.dataset.vision_utils import ImagePrompts


class Prompts:
    """Prompts by position.

    Args:
        config: the ``data`` section.
        reader: of the model's folder.
        shown: the model's processor; None: images and videos are not counted.
    """

    def __init__(
        self, table: RowTable, config: Mapping[str, Any], reader: PromptReader, shown: ImagePrompts | None = None
    ):
        self.table, self.reader, self.shown = table, reader, shown
        self.config = config
        keys = {"image": config["image_key"], "video": config["video_key"]}
        kinds = ["image", *(["video"] if shown is not None and shown.takes_videos else [])]
        self.keys = {kind: keys[kind] for kind in kinds if keys[kind] in table.column_names} if shown else {}

    def texts(self, positions: Sequence[int]) -> list[str | DataError]:
        """The prompts through the chat template; what it refuses is an error in its place."""
        prompts = self.table.select(positions).column(prompt_column(self.config))
        return [self._text(read_prompt(prompt, self.config)) for prompt in prompts]

    def lengths(self, positions: Sequence[int], texts: Sequence[str]) -> list[int]:
        """Tokens of rendered prompts.

        Raises:
            DataError: an image or video cannot be counted; names the row.
        """
        if not self.keys:
            return [len(ids) for ids in self.reader.encode(list(texts))]
        chosen = self.table.select(positions)
        held = {kind: chosen.column(key) for kind, key in self.keys.items()}
        found = []
        for number, (position, text) in enumerate(zip(positions, texts, strict=True)):
            try:
                found.append(self._length(text, {kind: column[number] or [] for kind, column in held.items()}))
            except ValueError as error:
                raise DataError(f"{self.table.where(position)}: {error}") from error
        return found

    def _length(self, text: str, held: Mapping[str, Sequence[Any]]) -> int:
        from verl.utils.dataset.video_utils import process_video

        images = [open_image(image) for image in held.get("image", ())]
        return self.shown.num_tokens(text, images, [process_video(video) for video in held.get("video", ())])

    def _text(self, prompt: Any) -> str | DataError:
        if self.keys and isinstance(prompt, str) and self.reader.template is not None:
            prompt = [{"role": "user", "content": prompt}]
        if self.keys and not isinstance(prompt, str):
            prompt = with_image_parts(prompt, list(self.keys))
        try:
            return self.reader.text(prompt)
        except DataError as error:
            return error


def processor_of(folder: str, trust_remote_code: bool = False) -> ImagePrompts | None:
    """The processor of a model that sees; None for a model of text."""
    if not has_processor(folder):
        return None
    from verl.utils.dataset.vision_utils import ImagePrompts
    from verl.utils.tokenizer import hf_processor

    processor = hf_processor(folder, trust_remote_code=trust_remote_code)
    return ImagePrompts(processor) if hasattr(processor, "image_processor") else None

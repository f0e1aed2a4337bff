"""Load tokenizers and processors as the trainer needs them: with a padding token, and without surprises."""

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

__all__ = ["decode_rows", "hf_processor", "hf_tokenizer", "set_chat_template", "set_pad_token_id"]

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def set_pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Pad with the end-of-sequence token if the tokenizer has no padding token. Masks tell the two apart."""
    if tokenizer.pad_token_id is None:
        warnings.warn(f"The tokenizer has no padding token: {tokenizer.eos_token!r} is used for padding.", stacklevel=2)
        tokenizer.pad_token_id = tokenizer.eos_token_id


def set_chat_template(reader: Any, template: str) -> None:
    """Let a tokenizer or processor write chats in another way, also where it is saved.

    Args:
        template: in Jinja; a text without braces is the file that holds it.

    Raises:
        ValueError: there is no such file.
    """
    if "{" not in template:
        path = os.path.expanduser(template)
        if not os.path.isfile(path):
            raise ValueError(
                f"actor_rollout_ref.model.custom_chat_template={template!r} is neither a Jinja template, since it has "
                f"no braces, nor a file (looked from {os.getcwd()}). Give one of them."
            )
        with open(path, encoding="utf-8") as file:
            template = file.read()
    reader.chat_template = template
    if hasattr(reader, "tokenizer"):
        reader.tokenizer.chat_template = template


def decode_rows(tokenizer: Any, rows: Sequence[Any]) -> list[str]:
    """Texts of rows of token ids, without special tokens, as ``batch_decode`` gives them.

    Args:
        rows: arrays of numpy.
    """
    if not is_plainly_fast(tokenizer):
        return tokenizer.batch_decode(rows, skip_special_tokens=True)
    # one call for all rows; transformers makes one a row
    return tokenizer.backend_tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=True)


def is_plainly_fast(tokenizer: Any) -> bool:
    """Whether a tokenizer decodes with the Rust library alone, and changes nothing of what that returns."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return False
    names = ("batch_decode", "decode", "_decode")
    own = [getattr(PreTrainedTokenizerFast, name, None) for name in names]
    own += [getattr(PreTrainedTokenizerBase, name, None) for name in names]
    return all(name not in vars(tokenizer) and getattr(type(tokenizer), name, None) in own for name in names)


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    chat_template: str | None = None,
    **kwargs: Any,
) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local folder or hub id.

    Args:
        correct_pad_token: give it a padding token if it has none (:func:`set_pad_token_id`).
        correct_gemma2: the instruct Gemma 2 ends its turns with ``<end_of_turn>`` while its tokenizer says ``<eos>``;
            take the former, or no response would ever stop.
        chat_template: to write chats with instead of its own (:func:`set_chat_template`).
        kwargs: for ``AutoTokenizer.from_pretrained``, such as ``trust_remote_code``.

    Raises:
        ValueError: none can be read there.
    """
    from transformers import AutoTokenizer

    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs = {**kwargs, "eos_token": "<end_of_turn>"}
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(name_or_path), **kwargs)
    except (OSError, ValueError) as error:  # what transformers raises for a folder or hub id that has none
        why = str(error).strip().splitlines()[0].rstrip(" :.")
        raise ValueError(
            f"{name_or_path} holds no tokenizer ({why}). Give a folder with tokenizer.json (looked from "
            f"{os.getcwd()}), or a model of the Hugging Face hub that can be reached or was downloaded before."
        ) from error
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    if chat_template:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def hf_processor(name_or_path: str, chat_template: str | None = None, **kwargs: Any) -> "ProcessorMixin | None":
    """The image/video processor of a model, or ``None`` for a model of text only.

    Args:
        chat_template: to write chats with instead of its own (:func:`set_chat_template`).
        kwargs: for ``AutoProcessor.from_pretrained``.

    Raises:
        ImportError: a package that the processor is made of is missing.
    """
    path = os.path.expanduser(name_or_path)
    if os.path.isdir(path) and not any(os.path.exists(os.path.join(path, name)) for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path, **kwargs)
    except (OSError, ValueError, KeyError):  # what transformers raises for models that have no processor
        return None
    except ImportError as error:
        raise ImportError(
            f"{name_or_path} reads images, and its processor cannot be loaded: {' '.join(str(error).split())} "
            "`bash scripts/setup_env.sh` installs torchvision, which these processors need; elsewhere take the one "
            "built for your torch."
        ) from error
    # For text models AutoProcessor falls back to the tokenizer.
    if not type(processor).__name__.endswith("Processor"):
        return None
    if chat_template:
        set_chat_template(processor, chat_template)
    return processor

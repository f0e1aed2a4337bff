"""Load tokenizers and processors as the trainer needs them: with a padding token, and without surprises."""

import ast
import fnmatch
import json
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

__all__ = ["decode_rows", "hf_processor", "hf_tokenizer", "open_tokenizer", "set_chat_template", "set_pad_token_id"]

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
        kwargs: for :func:`open_tokenizer`, such as ``trust_remote_code``.

    Raises:
        ValueError: none can be read there.
    """
    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs = {**kwargs, "eos_token": "<end_of_turn>"}
    try:
        tokenizer = open_tokenizer(os.path.expanduser(name_or_path), **kwargs)
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


# -- The class of a folder's tokenizer, without transformers' models ---------------------------------------------------

_AUTO = ("transformers.models.auto.tokenization_auto", "transformers.models.auto.modeling_auto")
_PLAIN_KWARGS = {"trust_remote_code", "local_files_only", "eos_token"}
"""Arguments of ``AutoTokenizer.from_pretrained`` that do not choose a class."""
_NO_FAMILY = {"TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer"}
"""Classes of no family: they read everything from tokenizer.json, with ``TokenizersBackend``."""


def open_tokenizer(name_or_path: str, **kwargs: Any) -> "PreTrainedTokenizerBase":
    """The tokenizer that ``AutoTokenizer.from_pretrained`` gives.

    Importing ``AutoTokenizer`` imports transformers' model code, sympy and torch's compiler: 1.7 CPU seconds more than
    the class of a tokenizer needs. A process that has not imported them reads the class from the folder's files.

    Args:
        kwargs: as those of ``AutoTokenizer.from_pretrained``.
    """
    cls = None
    if not any(name in sys.modules for name in _AUTO) and kwargs.keys() <= _PLAIN_KWARGS:
        cls = tokenizer_class(name_or_path)
    if cls is None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    kwargs.pop("trust_remote_code", None)  # of code in the folder, and `tokenizer_class` found none
    return cls.from_pretrained(name_or_path, **kwargs)


def tokenizer_class(folder: str) -> "type[PreTrainedTokenizerBase] | None":
    """The class that ``AutoTokenizer`` takes for a local folder, found without importing it.

    None where that is not certain: no folder with tokenizer.json, code of its own, a class that is not of the Rust
    library, a model type that transformers does not know, Mistral's formats.
    """
    path = Path(folder)
    if not (path / "tokenizer.json").is_file() or (tables := _auto_tables()) is None:
        return None
    try:
        of_tokenizer = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        is_model = (path / "config.json").is_file()
        of_model = json.loads((path / "config.json").read_text(encoding="utf-8")) if is_model else {}
        named, kind = of_tokenizer.get("tokenizer_class"), of_model.get("model_type")
    except (OSError, ValueError, AttributeError):  # AutoTokenizer says what is wrong with them
        return None
    has_code = "auto_map" in of_tokenizer or "auto_map" in of_model
    is_known = kind in tables.model_types if is_model else True
    is_told = named is not None or is_model and "tokenizer_class" not in of_model
    if has_code or not is_known or not is_told or tables.takes_backend(folder):
        return None
    registered = tables.class_of(kind) if is_model else None
    if registered == _UNCERTAIN:
        return None
    named = named or registered or "TokenizersBackend"
    name = named.removesuffix("Fast")
    if registered is not None and registered.removesuffix("Fast") != name:
        # the files of some families name a wrong class, and others' one of no family
        is_wrong = kind in tables.wrongly_named or of_model.get("model_name") in tables.wrongly_named
        name = registered if is_wrong or registered in _NO_FAMILY else named
    return _class_named(name)


def _class_named(name: str) -> "type[PreTrainedTokenizerBase] | None":
    import transformers

    backend = transformers.PreTrainedTokenizerFast
    if name in _NO_FAMILY or name.removesuffix("Fast") == "BloomTokenizer":
        return backend
    found = getattr(transformers, name, None) or getattr(transformers, name.removesuffix("Fast"), None)
    if found is None:
        return backend
    return found if isinstance(found, type) and issubclass(found, backend) else None


_UNCERTAIN = "?"


class _AutoTables(NamedTuple):
    """Tables by which ``AutoTokenizer`` chooses a class."""

    model_types: Collection[str]
    """Those that transformers has a configuration of."""
    classes: Mapping[str, str | None]
    """Model type -> name of the class; `_UNCERTAIN` where it depends on more than the Rust library."""
    wrongly_named: Collection[str]
    """Model types whose files on the hub name a wrong class."""
    takes_backend_names: Sequence[str]
    """Patterns of hub ids that take ``TokenizersBackend`` whatever their files name."""

    def class_of(self, kind: str) -> str | None:
        return self.classes.get(kind, "TokenizersBackend" if kind in self.wrongly_named else None)

    def takes_backend(self, path: str) -> bool:
        return any(fnmatch.fnmatch(path.lower(), pattern) for pattern in self.takes_backend_names)


@lru_cache(maxsize=1)
def _auto_tables() -> _AutoTables | None:
    """Read the tables from the source of the installed transformers; None where it is laid out otherwise."""
    import transformers

    try:
        from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

        source = Path(transformers.__file__).parent / "models" / "auto" / "tokenization_auto.py"
        tables: dict[str, Any] = {}
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                tables[ast.unparse(target)] = node.value
        pairs = (pair.elts for pair in tables["TOKENIZER_MAPPING_NAMES"].args[0].elts)
        classes = {ast.literal_eval(key): _value_with_tokenizers(value) for key, value in pairs}
        wrongly_named = ast.literal_eval(tables["MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"])
        patterns = ast.literal_eval(tables["MODEL_IDS_TO_TOKENIZERS_BACKEND"])
    except (ImportError, OSError, SyntaxError, LookupError, AttributeError, TypeError, ValueError):
        return None
    return _AutoTables(frozenset(CONFIG_MAPPING_NAMES), classes, wrongly_named, patterns)


def _value_with_tokenizers(node: ast.expr) -> str | None:
    """The value of an entry where the Rust library is installed."""
    if isinstance(node, ast.IfExp) and ast.unparse(node.test) == "is_tokenizers_available()":
        node = node.body
    return node.value if isinstance(node, ast.Constant) else _UNCERTAIN  # type: ignore[return-value]


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

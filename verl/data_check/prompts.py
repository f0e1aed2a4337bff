"""Prompts as the trainer writes and counts them, without transformers where a folder holds ``tokenizer.json``.

Knows a model folder and one prompt at a time; no files of rows. Agrees with ``hf_tokenizer`` and
``apply_chat_template`` (tests/data_check/test_prompts.py).
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.model_facts import find_folder
from verl.utils.dataset.table import DataError

_CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<｜User｜>", "<|user|>")
"""How the templates of widespread models begin a turn."""

_CONFIG, _TOKENIZER, _TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"


class PromptReader(NamedTuple):
    """How a model's tokenizer reads prompts."""

    encode: Callable[[list[str]], list[list[int]]]
    """Token ids of texts that are ready."""
    template: str | None
    """The chat template; None: prompts must be plain text."""
    variables: Mapping[str, Any]
    """What the template may name beside the messages: special tokens and ``data.apply_chat_template_kwargs``."""
    special_tokens: tuple[str, ...]
    """Texts that become one special token each."""

    def text(self, prompt: str | Sequence[Mapping[str, Any]]) -> str:
        """A prompt ready for :attr:`encode`: messages through the template, a plain string as one user message.

        Raises:
            DataError: there is no template for messages, or it refuses them.
        """
        if isinstance(prompt, str):
            if self.template is None:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if self.template is None:
            raise DataError(
                "the prompt is a chat and the tokenizer has no chat template: use an instruct model, give "
                "actor_rollout_ref.model.custom_chat_template, or write plain text into the column"
            )
        import jinja2

        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        try:
            return compiled(self.template).render(messages=messages, add_generation_prompt=True, **self.variables)
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template refuses messages with the roles {roles}: {error}") from error


def template_marks(reader: PromptReader | None) -> re.Pattern[str]:
    """Finds in a text what a chat template writes: special tokens, and marks of well-known templates."""
    special = reader.special_tokens if reader else ()
    names = {*_CHAT_MARKS, *(name for name in special if len(name) > 2 and not name.isalnum())}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def read_folder(
    name_or_path: str,
    custom_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PromptReader:
    """The reader of a model folder, or of a hub id that was downloaded before or can be reached.

    Raises:
        ValueError: there is no tokenizer.
    """
    folder = find_folder(name_or_path)
    path = os.path.expanduser(name_or_path) if folder is None else str(folder)
    file = _find(path, _TOKENIZER)
    kwargs = dict(template_kwargs or {})
    if file is None:
        return _through_transformers(path, custom_template, kwargs, trust_remote_code)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json(_find(path, _CONFIG))
    settings |= {key: value for key, value in _json(_find(path, "special_tokens_map.json")).items() if value}
    named = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    template = _custom(custom_template) or _template(path, settings)
    added = tokenizer.get_added_tokens_decoder().values()

    def encode(texts: list[str]) -> list[list[int]]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=template is None)
        return [encoding.ids for encoding in found]

    special = [token.content for token in added if token.special]
    special += [text for text in named.values() if isinstance(text, str)]
    variables = {key: text for key, text in named.items() if isinstance(text, str)}
    return PromptReader(encode, template, variables | kwargs, tuple(dict.fromkeys(special)))


def is_light_folder(name_or_path: str) -> bool:
    """Whether :func:`read_folder` needs neither transformers nor the hub."""
    folder = find_folder(name_or_path)
    return folder is not None and (folder / _TOKENIZER).is_file()


def has_processor(name_or_path: str) -> bool:
    """Whether a model folder or hub id has a processor of images."""
    path = os.path.expanduser(name_or_path)
    return any(_find(path, name) for name in ("processor_config.json", "preprocessor_config.json"))


def _through_transformers(
    path: str, custom_template: str | None, kwargs: dict[str, Any], trust_remote_code: bool
) -> PromptReader:
    """For folders without ``tokenizer.json``: slower to load, and any kind of tokenizer."""
    from verl.utils.tokenizer import hf_tokenizer

    tokenizer = hf_tokenizer(path, chat_template=custom_template, trust_remote_code=trust_remote_code)
    template = tokenizer.chat_template

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=not template, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]

    variables = {key: text for key, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return PromptReader(encode, template, variables | kwargs, tuple(tokenizer.all_special_tokens))


def _find(path: str, name: str) -> str | None:
    """A file of a model folder or of a hub id; None where there is none."""
    if os.path.isdir(path):
        file = os.path.join(path, name)
        return file if os.path.isfile(file) else None
    if path.startswith(("/", ".")):
        raise ValueError(f"the model folder {path} does not exist (looked from {os.getcwd()})")
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(path, name)
    except (OSError, ValueError):  # what it raises for a file that is not there, and without network
        return None


def _json(file: str | None) -> dict[str, Any]:
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _custom(template: str | None) -> str | None:
    """``actor_rollout_ref.model.custom_chat_template``: Jinja, or without braces the file that holds it."""
    if template and "{" not in template:
        file = Path(template).expanduser()
        if not file.is_file():
            raise ValueError(f"actor_rollout_ref.model.custom_chat_template={template!r} is neither Jinja nor a file")
        return file.read_text(encoding="utf-8")
    return template or None


def _template(path: str, settings: Mapping[str, Any]) -> str | None:
    if file := _find(path, _TEMPLATE):
        return Path(file).read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


@functools.lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """A chat template as transformers compiles it: sandboxed, with its filters, globals and ``{% generation %}``."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what the assistant says; nothing is made of it here."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)

"""Schemas of tools, of their calls and of their answers, under verl's names: plain dataclasses, read from dicts.

`model_validate` keeps entries that it does not know, so that a JSON schema comes out as it went in.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

Parts = Mapping[str, Any]
"""Class of each field that is a schema itself."""


@dataclass
class Schema:
    """Base: a dataclass that is read from a mapping and written as one."""

    _parts: ClassVar[Parts] = {}
    _given: ClassVar[frozenset[str] | None] = None
    _extra: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        """Return the schema that a mapping describes.

        Raises:
            ValueError: it is no mapping, or lacks an entry.
        """
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ValueError(f"{cls.__name__}: {values!r} is no mapping.")
        names = [field.name for field in fields(cls)]
        missing = [
            field.name
            for field in fields(cls)
            if field.name not in values and field.default is MISSING and field.default_factory is MISSING
        ]
        if missing:
            raise ValueError(
                f"{cls.__name__}: {missing[0]!r} is missing in {dict(values)!r}. Write it as OpenAI's schemas have it."
            )
        made = cls(**{name: cls._read(name, values[name]) for name in names if name in values})
        made.__dict__["_given"] = frozenset(values)
        made.__dict__["_extra"] = {name: value for name, value in values.items() if name not in names}
        return made

    @classmethod
    def _read(cls, name: str, value: Any) -> Any:
        return cls._parts[name].model_validate(value) if name in cls._parts and value is not None else value

    def model_dump(self, exclude_unset: bool = False, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return plain dicts and lists.

        Args:
            exclude_unset: without what has its default, unless it was given.
            exclude_none: without entries that are None.
        """
        options = {"exclude_unset": exclude_unset, "exclude_none": exclude_none}
        dumped: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            is_set = value != field.default if self._given is None else field.name in self._given
            if exclude_unset and not is_set or exclude_none and value is None:
                continue
            dumped[field.name] = _dump(value, options)
        return dumped | _dump(dict(self._extra), options)


def _dump(value: Any, options: Mapping[str, bool]) -> Any:
    if isinstance(value, Schema):
        return value.model_dump(**options)
    if isinstance(value, Mapping):
        return {name: _dump(item, options) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_dump(item, options) for item in value]
    return value


@dataclass
class OpenAIFunctionPropertySchema(Schema):
    """One parameter of a tool."""

    type: str | None = None
    description: str | None = None
    enum: list[Any] | None = None


@dataclass
class OpenAIFunctionParametersSchema(Schema):
    """Parameters of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] | None = None
    required: list[str] | None = None

    @classmethod
    def _read(cls, name: str, value: Any) -> Any:
        if name == "properties":
            return {key: OpenAIFunctionPropertySchema.model_validate(item) for key, item in (value or {}).items()}
        return list(value) if name == "required" and value is not None else value


@dataclass
class OpenAIFunctionSchema(Schema):
    """Name, purpose and parameters of a tool."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema | None = None
    strict: bool = False

    _parts: ClassVar[Parts] = {"parameters": OpenAIFunctionParametersSchema}


@dataclass
class OpenAIFunctionToolSchema(Schema):
    """A tool, as chat templates show it."""

    type: str
    function: OpenAIFunctionSchema

    _parts: ClassVar[Parts] = {"function": OpenAIFunctionSchema}


@dataclass
class OpenAIFunctionParsedSchema(Schema):
    """A tool call whose arguments are still text."""

    name: str
    arguments: str


@dataclass
class OpenAIFunctionCallSchema(Schema):
    """A tool call with its arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple["OpenAIFunctionCallSchema", bool]:
        """Return the call, and whether its arguments are no JSON object; then it has none."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        is_object = isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(parsed_schema.name, arguments if is_object else {}), not is_object


@dataclass
class OpenAIFunctionToolCall(Schema):
    """A tool call as a part of an assistant's message."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema | None = None

    _parts: ClassVar[Parts] = {"function": OpenAIFunctionCallSchema}


@dataclass
class ToolResponse(Schema):
    """Answer of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)

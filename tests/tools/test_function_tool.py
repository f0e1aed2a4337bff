"""Schemas from type hints and docstrings."""

import enum
import json
from typing import Annotated, Any, Literal, Optional

import pytest

from verl.tools.arguments import check_arguments
from verl.tools.function_tool import function_tool, functions_in, json_schema, schema_of, typed_arguments
from verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolResponse,
)


class Unit(enum.Enum):
    KELVIN = "K"
    CELSIUS = "C"


def weather(
    city: str,
    days: int = 1,
    unit: Unit = Unit.CELSIUS,
    kinds: Optional[list[Literal["rain", "sun"]]] = None,  # noqa: UP045 - as older code has it
    limits: dict[str, float] | None = None,
    exact: Annotated[bool, "Whether to give decimals."] = False,
    *,
    table: dict,
) -> str:
    """Say what the weather will be.

    Two sentences at most.

    Args:
        city: Name of the city,
            in English.
        days (int): How many days.
        table: Not shown.

    Returns:
        A forecast.
    """
    return "sun"


def test_a_schema_is_made_of_hints_defaults_and_docstring_without_what_rows_give():
    assert schema_of(weather).model_dump(exclude_unset=True) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say what the weather will be.\n\nTwo sentences at most.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, in English."},
                    "days": {"type": "integer", "description": "How many days.", "default": 1},
                    "unit": {"type": "string", "enum": ["K", "C"], "default": "C"},
                    "kinds": {
                        "type": "array",
                        "items": {"type": "string", "enum": ["rain", "sun"]},
                        "nullable": True,
                    },
                    "limits": {"type": "object", "additionalProperties": {"type": "number"}, "nullable": True},
                    "exact": {"type": "boolean", "description": "Whether to give decimals.", "default": False},
                },
                "required": ["city"],
            },
        },
    }


def test_fields_of_restructured_text_and_own_names_are_read():
    @function_tool(name="add", description="Sum.")
    def plus(a: int, b: float):
        """Ignored.

        :param a: the first
        :param float b: the second
        :return: the sum
        """

    function = plus.__verl_tool__.function
    assert (function.name, function.description) == ("add", "Sum.")
    assert {name: one.description for name, one in function.parameters.properties.items()} == {
        "a": "the first",
        "b": "the second",
    }


@pytest.mark.parametrize(
    "hint, schema",
    [
        (str, {"type": "string"}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (list, {"type": "array"}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, Any], {"type": "object"}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (Any, {}),
    ],
)
def test_hints_have_schemas(hint, schema):
    assert json_schema(hint, "here") == schema


def test_what_no_schema_can_say_is_refused_by_name():
    def without_hint(a):
        pass

    def with_bytes(a: complex):
        pass

    def with_many(**rest: int):
        pass

    with pytest.raises(TypeError, match="'without_hint': parameter 'a' has no type hint"):
        function_tool(without_hint)
    with pytest.raises(TypeError, match="'with_bytes', parameter 'a': JSON has no type for .*complex"):
        function_tool(with_bytes)
    with pytest.raises(TypeError, match="rest: int has no name of its own"):
        function_tool(with_many)


def test_arguments_become_the_types_of_the_hints():
    given = {"unit": "K", "kinds": ["rain"], "days": 2, "city": "Rome"}
    assert typed_arguments(weather, given) == {**given, "unit": Unit.KELVIN}

    def collect(names: tuple[str, ...], share: float, units: set[Unit]):
        pass

    typed = typed_arguments(collect, {"names": ["a"], "share": 1, "units": ["K", "C"]})
    assert typed == {"names": ("a",), "share": 1.0, "units": set(Unit)} and isinstance(typed["share"], float)


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "items": {"type": "array", "items": {"type": "number"}},
        "inner": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "maybe": {"type": "string", "nullable": True},
    },
    "required": ["n"],
}


@pytest.mark.parametrize(
    "arguments, read",
    [
        ({"n": 1}, {"n": 1}),
        ({"n": "12", "text": 7, "items": ["1.5", 2]}, {"n": 12, "text": "7", "items": [1.5, 2]}),
        ({"n": 3.0, "inner": {"x": "true"}}, {"n": 3, "inner": {"x": True}}),
        ({"n": 1, "either": None, "maybe": None, "other": [1]}, {"n": 1, "either": None, "maybe": None, "other": [1]}),
    ],
)
def test_right_arguments_pass_and_are_converted_where_formats_cannot_tell_types(arguments, read):
    checked, problems = check_arguments(arguments, SCHEMA)
    assert checked == read and not problems
    assert [type(value) for value in checked.values()] == [type(value) for value in read.values()]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({}, "n is missing"),
        ({"n": "many"}, "n must be integer, not 'many'"),
        ({"n": True}, "n must be integer, not True"),
        ({"n": 1.5}, "n must be integer, not 1.5"),
        ({"n": 1, "kind": "c"}, "kind must be one of 'a', 'b', not 'c'"),
        ({"n": 1, "items": [1, "x"]}, "items[1] must be number, not 'x'"),
        ({"n": 1, "inner": {}}, "inner.x is missing"),
        ({"n": 1, "inner": []}, "inner must be object, not []"),
        ({"n": 1, "either": "x"}, "either must be integer, not 'x'"),
        ({"n": 1, "text": ["x" * 100]}, "text must be string, not ['xxxx"),
    ],
)
def test_wrong_arguments_are_named(arguments, problem):
    problems = check_arguments(arguments, SCHEMA)[1]
    assert len(problems) == 1 and problems[0].startswith(problem)


def test_unknown_arguments_of_a_function_are_named_with_those_it_has():
    closed = check_arguments({"n": 1, "m": 2}, SCHEMA, is_closed=True)[1]
    assert closed == ["m is not a parameter; parameters are: n, text, kind, items, inner, either, maybe"]


def test_schemas_read_and_write_what_users_of_verl_know():
    whole = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "string"}}},
                "required": ["a"],
                "$defs": {"x": {"type": "null"}},
            },
        },
    }
    schema = OpenAIFunctionToolSchema.model_validate(whole)
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == whole
    assert schema.function.parameters.properties["a"].type == "array" and schema.function.strict is False
    assert schema.model_dump()["function"]["strict"] is False
    with pytest.raises(ValueError, match="OpenAIFunctionSchema: 'name' is missing"):
        OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {}})
    call, is_broken = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(
        OpenAIFunctionParsedSchema(name="f", arguments='{"a": 1}')
    )
    assert (call.arguments, is_broken) == ({"a": 1}, False)
    for arguments in ("{", "[1]"):
        broken = OpenAIFunctionParsedSchema(name="f", arguments=arguments)
        assert OpenAIFunctionCallSchema.from_openai_function_parsed_schema(broken)[1]
    made = OpenAIFunctionToolCall(id="1", function=call)
    assert made.model_dump() == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert json.dumps(made.model_dump())
    assert ToolResponse().is_empty() and ToolResponse(text="x").is_text_only()


def test_a_file_brings_its_marked_functions_and_names_what_is_wrong(tmp_path):
    path = tmp_path / "tools.py"
    path.write_text("def f(a: int):\n    return a\n")
    with pytest.raises(ValueError, match="no function in it is a tool. Mark one with @verl.tools.function_tool"):
        functions_in(str(path))
    path.write_text(
        "from verl.tools import function_tool\n\n\n@function_tool\ndef f(a: int, *, secret: str, other: int = 1):\n"
        "    return a\n\n\n@function_tool(name='g')\nasync def h():\n    return 1\n"
    )
    found = {tool.name: tool for tool in functions_in(str(path))}
    assert list(found) == ["f", "g"] and found["g"].is_async and not found["f"].is_async
    assert found["f"].row_parameters() == ({"secret", "other"}, {"secret"})
    path.write_text(path.read_text().replace("name='g'", "name='f'"))
    with pytest.raises(ValueError, match="two tools are called 'f'"):
        functions_in(str(path))

"""Tool calls by format: what a family's chat template writes is read back, and no text of a policy raises."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_models import make_tokenizer
from verl.agents.tool_parser import TOOL_FORMATS, FunctionCall, ToolParser, get_tool_parser

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "ratio": {"type": "number"},
                "exact": {"type": "boolean"},
                "fields": {"type": "array", "items": {"type": "string"}},
                "near": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
            "required": ["query"],
        },
    },
}

FAMILIES = {
    # format: (template of the trl package, what opens the turn that is generated, special tokens)
    "hermes": ("qwen3_instruct_2507", "<|im_start|>assistant\n", []),
    "llama3_json": ("llama3_2", "<|end_header_id|>\n\n", ["<|eot_id|>", "<|python_tag|>"]),
    "qwen3_coder": ("qwen3_5_nothink", "<|im_start|>assistant\n", []),
    "glm": ("glm4moe", "<|assistant|>", []),
    "gpt-oss": (
        "gptoss",
        "<|start|>assistant",
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
    ),
}
FORMATS = [*FAMILIES, "mistral"]

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAME = st.from_regex(r"[a-z_][a-z0-9_.\-]{0,15}", fullmatch=True)


def tokenizer_with(special=(), plain=()):
    tokenizer = make_tokenizer("byte")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(plain))
    return tokenizer


def parse(parser, text, tools=()):
    tokenizer = parser.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    return parser.parse(ids, tokenizer.decode(ids, skip_special_tokens=True), tools)


SPECIAL = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3_json": FAMILIES["llama3_json"][2],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "gpt-oss": FAMILIES["gpt-oss"][2],
    "mistral": ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
}
PLAIN = tokenizer_with()
PARSERS = {(name, "plain"): get_tool_parser(name, PLAIN) for name in FORMATS}
PARSERS |= {(name, "special"): get_tool_parser(name, tokenizer_with(SPECIAL[name])) for name in FORMATS}
KINDS = pytest.mark.parametrize("kind", ["plain", "special"])


def written(name, arguments, format):
    """A call as the family's models write it, for formats of JSON."""
    whole = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    harmony = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return {
        "hermes": f"<tool_call>\n{whole}\n</tool_call>",
        "llama3_json": json.dumps({"name": name, "parameters": arguments}),
        "gpt-oss": f"{harmony}{json.dumps(arguments)}<|call|>",
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
    }[format]


@KINDS
@pytest.mark.parametrize("format", ["hermes", "llama3_json", "gpt-oss", "mistral"])
@given(name=NAME, arguments=st.dictionaries(TEXT, JSON, max_size=4))
@settings(max_examples=60, deadline=None)
def test_arguments_that_are_written_as_json_are_read_back(format, kind, name, arguments):
    content, calls = parse(PARSERS[format, kind], written(name, arguments, format))
    assert content == ""
    assert [(call.name, call.arguments, call.error) for call in calls] == [(name, arguments, None)]


@KINDS
@pytest.mark.parametrize("format", ["qwen3_coder", "glm"])
@given(
    query=TEXT.filter(lambda text: "<" not in text), limit=st.integers(), exact=st.booleans(),
    fields=st.lists(TEXT.filter(lambda text: "<" not in text), max_size=3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_arguments_that_are_written_as_text_get_the_types_of_the_schema(format, kind, query, limit, exact, fields):
    values = {"query": query, "limit": str(limit), "exact": json.dumps(exact), "fields": json.dumps(fields)}
    if format == "glm":
        inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
        text = f"<tool_call>search\n{inside}</tool_call>"
    else:
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        text = f"<tool_call>\n<function=search>\n{inside}</function>\n</tool_call>"
    _, calls = parse(PARSERS[format, kind], text, [SCHEMA])
    assert calls[0].arguments == {"query": query, "limit": limit, "exact": exact, "fields": fields}


@KINDS
@pytest.mark.parametrize("format", FORMATS)
@given(
    parts=st.lists(
        TEXT
        | st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "a", "arguments": ',
                "{",
                "}",
                "[",
                "]",
                "[TOOL_CALLS]",
                "[ARGS]",
                "a",
            ]
            + ["<function=a>", "</function>", "<parameter=b>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>"]
            + [
                "</arg_value>",
                "<|python_tag|>",
                "a.call(b=",
                "<|channel|>",
                " to=functions.a",
                "<|message|>",
                "<|call|>",
            ]
            + ["</think>", "\ufdd0", "\ufdd1", "\n", '"', "NaN", "1e999", "\\ud800"]
        ),
        max_size=12,
    ),
    tools=st.sampled_from([[], [SCHEMA]]),
)
@settings(max_examples=150, deadline=None)
def test_no_text_raises_and_a_call_without_arguments_says_why(format, kind, parts, tools):
    content, calls = parse(PARSERS[format, kind], "".join(parts), tools)
    assert isinstance(content, str)
    for call in calls:
        assert (call.arguments is None) == (call.error is not None)
        assert isinstance(call.name, str) and call.raw
        json.dumps(call.arguments, ensure_ascii=False).encode()


@KINDS
@pytest.mark.parametrize("format", FORMATS)
def test_no_sequence_of_ids_raises(format, kind):
    parser = PARSERS[format, kind]
    tokenizer = parser.tokenizer
    for start in range(0, len(tokenizer), 7):
        ids = [(start * 31 + step * step) % len(tokenizer) for step in range(40)]
        parser.parse(ids, tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", ["", "Only text: 3 < 4.\n", '{"answer": 4}', "I think <b> so"])
def test_a_turn_without_calls_is_its_content(format, text):
    assert parse(PARSERS[format, "plain"], text) == (text, [])


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "glm", "mistral", "llama3_json"])
def test_text_in_front_of_a_call_is_the_content(format):
    call = {
        "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "glm": "<tool_call>f\n</tool_call>",
    }.get(format) or written("f", {}, format)
    content, calls = parse(PARSERS[format, "special"], f"Let me look.\n{call}")
    assert content == "Let me look."
    assert [(found.name, found.arguments) for found in calls] == [("f", {})]


@KINDS
def test_several_calls_keep_their_order_and_a_broken_one_is_among_them(kind):
    good, bad = (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "g", "argu</tool_call>',
    )
    _, calls = parse(PARSERS["hermes", kind], f"{good}\n{bad}\n{good}")
    assert [(call.name, call.arguments) for call in calls] == [("f", {"a": 1}), ("g", None), ("f", {"a": 1})]
    assert "no JSON" in calls[1].error


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "no JSON object"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "no JSON"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "follows"),
        ("<tool_call>" + "[" * 100_000, "nested"),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "Unicode"),
        ("<tool_call>[1, 2]</tool_call>", "no object"),
    ],
)
def test_a_broken_call_says_what_is_wrong(text, error):
    _, [call] = parse(PARSERS["hermes", "plain"], text)
    assert call.arguments is None and error in call.error


def test_arguments_may_come_as_a_text_of_json():
    _, [call] = parse(PARSERS["hermes", "plain"], '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')
    assert call.arguments == {"a": 1}


def test_an_end_marker_that_a_stop_string_took_is_not_missed():
    _, [call] = parse(PARSERS["hermes", "plain"], '<tool_call>\n{"name": "f", "arguments": {}}\n')
    assert (call.name, call.arguments) == ("f", {})


def test_markers_as_special_tokens_are_told_from_the_same_letters():
    parser = PARSERS["hermes", "special"]
    tokenizer = parser.tokenizer
    letters = [index for part in "<tool_call>" for index in tokenizer.encode(part, add_special_tokens=False)]
    ids = [*letters, *tokenizer.encode('{"name": "f", "arguments": {}}', add_special_tokens=False)]
    assert parser.parse(ids, tokenizer.decode(ids))[1] == []


@KINDS
def test_a_call_within_the_thinking_is_none(kind):
    call = '<tool_call>{"name": "%s", "arguments": {"a": "</think>"}}</tool_call>'
    content, calls = parse(PARSERS["hermes", kind], f"<think>Maybe {call % 'no'}</think>\n{call % 'yes'}")
    assert [found.name for found in calls] == ["yes"]
    assert content.startswith("<think>Maybe") and content.endswith("</think>")


def test_calls_of_mistral_in_a_list_keep_their_ids():
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "g", "arguments": {}}]'
    _, calls = parse(PARSERS["mistral", "special"], text)
    assert [(call.name, call.arguments, call.id) for call in calls] == [("f", {"a": 1}, "123456789"), ("g", {}, "")]
    _, calls = parse(
        PARSERS["mistral", "special"], '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    )
    assert [(call.name, call.arguments, call.id) for call in calls] == [("f", {"a": 1}, "abcdefghi"), ("g", {}, "")]


def test_a_python_tag_opens_a_call_of_llama():
    parser = PARSERS["llama3_json", "special"]
    _, calls = parse(parser, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}')
    assert [(call.name, call.arguments) for call in calls] == [("f", {"a": 1}), ("g", {})]
    _, [call] = parse(parser, '<|python_tag|>brave_search.call(query="who, where?")')
    assert (call.name, call.arguments) == ("brave_search", {"query": "who, where?"})


def test_harmony_parts_thinking_calls_and_the_answer():
    think = "<|channel|>analysis<|message|>Hm.<|end|>"
    parser = PARSERS["gpt-oss", "special"]
    content, [call] = parse(
        parser, f'{think}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    )
    assert (content, call.name, call.arguments) == ("Hm.", "f", {"a": 1})
    assert parse(parser, f"{think}<|start|>assistant<|channel|>final<|message|>Four.<|return|>") == ("Four.", [])


def test_an_unknown_format_is_told_with_those_that_exist():
    with pytest.raises(ValueError, match="'hermess'.*hermes.*Did you mean"):
        get_tool_parser("hermess", PLAIN)
    assert set(FORMATS) <= set(TOOL_FORMATS)


def test_verls_interface_reads_and_writes_arguments_as_json_text():
    ids = PLAIN.encode('Yes. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    content, [call] = asyncio.run(PARSERS["hermes", "plain"].extract_tool_calls(ids))
    assert (content, call.name, json.loads(call.arguments)) == ("Yes.", "f", {"a": 1})


def test_a_users_parser_of_verls_interface_is_used_from_within_a_running_loop():
    @ToolParser.register("shout")
    class Shout(ToolParser):
        async def extract_tool_calls(self, responses_ids):
            decode = asyncio.get_running_loop().run_in_executor
            text = await decode(None, self.tokenizer.decode, responses_ids)
            return "", [FunctionCall(name, '{"a": 1}' if name == "F" else "{") for name in text.split()]

    async def turn():
        parser = ToolParser.get_tool_parser("shout", PLAIN)
        return parse(parser, "F G")

    try:
        _, [good, bad] = asyncio.run(turn())
    finally:
        del TOOL_FORMATS["shout"]
    assert (good.name, good.arguments) == ("F", {"a": 1})
    assert bad.arguments is None and "no JSON" in bad.error


def test_a_users_parser_is_found_in_its_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.agents.tool_parser import ToolCall, ToolParser\n"
        "class Mine(ToolParser):\n"
        "    def parse(self, token_ids, text, tools=()):\n"
        "        return '', [ToolCall(text, {})]\n"
    )
    assert get_tool_parser(f"{file}:Mine", PLAIN).parse([], "f")[1][0].name == "f"
    with pytest.raises(TypeError, match="no subclass"):
        get_tool_parser(f"{file}:ToolCall", PLAIN)


def test_a_parser_that_parses_nothing_is_refused():
    with pytest.raises(TypeError, match="overrides neither"):
        ToolParser.register("empty")(type("Empty", (ToolParser,), {}))


TRL = importlib.util.find_spec("trl")


@pytest.mark.skipif(TRL is None, reason="the package trl has the chat templates")
@pytest.mark.parametrize("format", list(FAMILIES))
@pytest.mark.parametrize(
    "arguments",
    [
        {"query": "weather in Köln"},
        {"query": "5", "limit": 5, "exact": True, "ratio": 0.5},
        {"query": 'a "b"\n\\c', "fields": ["x", "y"], "near": {"lat": 1.5}},
        {"query": "", "near": None, "exact": False},
    ],
)
def test_a_call_that_the_real_template_renders_is_read_back(format, arguments):
    template, opens, special = FAMILIES[format]
    source = (Path(TRL.submodule_search_locations[0]) / "chat_templates" / f"{template}.jinja").read_text()
    tokenizer = tokenizer_with(special)
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(messages, chat_template=source, tools=[SCHEMA], tokenize=False)
    turn = text[text.rindex(opens) + len(opens) :]
    _, calls = parse(get_tool_parser(format, tokenizer), turn.split("<|im_end|>")[0], [SCHEMA])
    assert [(call.name, call.arguments, call.error) for call in calls] == [("search", arguments, None)]

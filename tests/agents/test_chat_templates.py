"""Chat templates of real models in conversations: each is append-only, or its report says at which turn and why not.

The templates are read from the package trl, which ships those of some thirty model families.
"""

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest

from verl.agents.conversation import ChatRenderer, Conversation
from verl.agents.templates import BY_DESIGN, ChatTemplate, TemplateRefusal, examine, example_conversation
from verl.agents.tool_parser import ToolCall
from verl.utils.tiny_model import make_tokenizer

_TRL = importlib.util.find_spec("trl")
FILES = sorted((Path(_TRL.origin).parent / "chat_templates").glob("*.jinja")) if _TRL else []
KINDS = ("messages", "reasoning", "tools")
_SPECIAL = re.compile(r"<[|｜][\w▁]+[|｜]>|</?s>|<(?:start|end)_of_\w+>|<turn\|>|<\|turn>|<\|tool_response>")

pytestmark = pytest.mark.skipif(not FILES, reason="needs the chat templates of trl")


def tokenizer_of(template):
    """A byte tokenizer with this template; the template's markers are special tokens."""
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template = template
    tokenizer.bos_token = "<s>"
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(_SPECIAL.findall(template)))})
    return tokenizer


def known_turns(messages):
    """Reader of the turns of a policy whose messages are known."""
    messages = iter(messages)

    def read_turn(token_ids, text, tools=()):
        message = next(messages)
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        return message["content"], [ToolCall(function["name"], function["arguments"], id) for id, function in functions]

    return read_turn


def play(renderer, kind, is_finished=True):
    """Have a policy write the turns of an example conversation as the template would.

    Returns (conversation, what the policy read at each turn, what it generated there).
    """
    chat, tools = example_conversation(kind)
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    renderer.read_turn = known_turns([chat[i] for i in turns])
    conversation = Conversation(renderer, chat[: turns[0]], tools=tools, response_length=10_000)
    template, prompts, generated = renderer.template, [], []
    for start, end in pairwise([*turns, len(chat)]):
        new = chat[start + 1 : end]
        header, text, after = template.render(chat[:start], tools), chat[start]["content"], ""
        if new:
            after = template.after_turn(chat[:start], chat[start].get("tool_calls", ()), new, tools)
            whole = template.render(chat[:end], tools)
            # as the template writes it, unless it leaves something out
            written = whole[len(header) : len(whole) - len(after)]
            if whole.startswith(header) and all(word in written for word in re.findall(r"\w+", text)):
                text = written
        ids = renderer.encode(text)
        if is_finished and after and (first := renderer.encode(after)[0]) in renderer.special_tokens:
            ids.append(first)
        prompts.append(conversation.ids)
        generated.append(ids)
        conversation.add_generated(ids, [-0.5] * len(ids))
        assert not new or conversation.add_messages(new)
    return conversation, prompts, generated


def renderer_of(file, **options):
    return ChatRenderer(tokenizer_of(file.read_text()), check="disable", **options)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request):
    return request.param


def test_a_template_is_append_only_or_its_report_says_where_not(file):
    renderer = renderer_of(file, uses_template_history=True)
    report = examine(renderer.template, has_tools=True)
    for kind in KINDS[: 2 if report.not_shown else 3]:
        conversation, prompts, generated = play(renderer, kind)
        rows, difference = conversation.rows(), report.differences.get(kind)
        if difference is None:
            assert len(rows) == 1
            for (before, after), written in zip(pairwise(prompts), generated, strict=False):
                assert after[: len(before) + len(written)] == before + written
        else:
            assert len(rows) > 1 and rows[1].turns[0] == difference.turn
        # what the policy read is what the template writes, whether it rewrites or not
        chat, tools = example_conversation(kind)
        starts = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        for start, prompt in zip(starts, prompts, strict=True):
            assert renderer.decode(prompt) == renderer.template.render(chat[:start], tools)


def test_the_stream_continues_with_every_template(file):
    renderer = renderer_of(file)
    for kind in KINDS[: 2 if examine(renderer.template, has_tools=True).not_shown else 3]:
        for is_finished in (True, False):
            conversation, prompts, generated = play(renderer, kind, is_finished)
            [row] = conversation.rows()
            for (before, after), written in zip(pairwise(prompts), generated, strict=False):
                assert after[: len(before) + len(written)] == before + written
            spans = [row.response_ids[first:end] for first, end in row.turn_spans]
            assert spans == generated
            assert sum(row.response_mask) == sum(map(len, generated))


def test_both_histories_give_equal_rows_where_the_template_is_append_only(file):
    renderers = [renderer_of(file, uses_template_history=is_used) for is_used in (False, True)]
    report = examine(renderers[0].template, has_tools=True)
    for kind in KINDS[: 2 if report.not_shown else 3]:
        if kind not in report.differences:
            stream, history = (play(renderer, kind)[0].rows() for renderer in renderers)
            assert stream == history


def test_every_difference_of_these_templates_is_by_design(file):
    report = examine(renderer_of(file).template, has_tools=True)
    assert all(difference.kind in BY_DESIGN for difference in report.differences.values())


def test_a_template_that_does_not_show_tools_is_refused_with_its_rendering(file):
    report = examine(renderer_of(file).template, has_tools=True)
    refusal = report.refusal("strict", uses_template_history=False)
    if report.not_shown:
        assert refusal is not None and all(what in refusal for what in report.not_shown)
        assert "first question" in refusal or "refuses" in refusal
    else:
        assert refusal is None
    assert report.refusal("disable", uses_template_history=False) is None


def test_the_report_knows_families_by_what_they_do():
    def append_only(name):
        report = examine(renderer_of(FILES[0].with_name(f"{name}.jinja")).template, has_tools=True)
        return {kind: kind not in report.differences for kind in KINDS}, report.not_shown

    everything = dict.fromkeys(KINDS, True)
    assert append_only("qwen2_5") == (everything, [])
    assert append_only("llama3_1") == (everything, [])
    assert append_only("qwen3") == (everything | {"reasoning": False}, [])
    assert append_only("glm4moe") == (everything | {"reasoning": False}, [])
    assert append_only("gemma") == (everything, ["tools", "tool calls", "tool results"])
    assert append_only("phi3")[1] == ["tools", "tool calls", "tool results"]


def test_there_are_templates_of_25_families():
    assert len(FILES) >= 25


MOVES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[CALL]{{ c.function | tojson }}{% endfor %}</s>{% endif %}"
    "{% endfor %}"
)
# the last turn is followed by a space more
CHANGES_WHITESPACE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '  ' if loop.last else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_moves_the_tools_is_refused_unless_its_history_is_followed():
    report = examine(ChatTemplate(tokenizer_of(MOVES_TOOLS)), has_tools=True)
    assert {kind: difference.kind for kind, difference in report.differences.items()} == {"tools": "history"}
    for mode in ("strict", "ignore_strippable"):
        assert "use_inference_chat_template=true" in report.refusal(mode, uses_template_history=False)
        assert report.refusal(mode, uses_template_history=True) is None


def test_whitespace_is_refused_by_strict_and_permitted_by_ignore_strippable():
    tokenizer = tokenizer_of(CHANGES_WHITESPACE)
    report = examine(ChatTemplate(tokenizer))
    assert {difference.kind for difference in report.differences.values()} == {"whitespace"}
    assert "whitespace" in report.refusal("strict", uses_template_history=False)
    assert report.refusal("ignore_strippable", uses_template_history=False) is None
    with pytest.raises(TemplateRefusal, match="tokenization_sanity_check_mode=strict"):
        ChatRenderer(tokenizer).report()
    assert ChatRenderer(tokenizer, check="ignore_strippable").report() == report


def test_a_tokenizer_without_a_template_is_named():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateRefusal, match="custom_chat_template"):
        examine(ChatTemplate(tokenizer))


def test_disable_checks_nothing_and_says_so():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    report = ChatRenderer(tokenizer, check="disable").report()
    assert not report.is_append_only
    [line] = report.lines()
    assert line.startswith("not checked: ") and "never" in line


@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'], ids=["object", "JSON text"])
@pytest.mark.parametrize("reads", ["c.function.arguments | tojson", "'' + c.function.arguments"])
def test_arguments_of_calls_are_written_as_the_template_reads_them(arguments, reads):
    template = ChatTemplate(
        tokenizer_of(
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ " + reads + " }}{% endfor %}{% endfor %}"
        )
    )
    call = {"id": "call00000", "type": "function", "function": {"name": "x", "arguments": arguments}}
    assert template.render([{"role": "assistant", "tool_calls": [call]}]) == '{"a": "é"}'


def test_a_turn_that_does_not_end_with_the_tokenizers_last_token_is_told():
    tokenizer = make_tokenizer()
    assert "generation_config.json" not in examine(ChatTemplate(tokenizer)).lines()[0]
    tokenizer.eos_token = "<|unk|>"
    assert "'<|unk|>': generation_config.json must name what ends it" in examine(ChatTemplate(tokenizer)).lines()[0]

"""Which tokens of a conversation are learned, under templates of several kinds."""

import pytest

from tests.support.tiny_models import make_tokenizer
from verl.data.turns import MaskRefusal, TurnTokens

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "no"},
]
# as Qwen3 has it: reasoning of turns before the last question is left out, and the last turn always has a block
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_with(template=None):
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def learned(messages, template=None, tools=(), arguments=None, tolerant=False):
    """The learned stretches of a conversation as texts."""
    tokenizer = tokenizer_with(template)
    ids, mask = TurnTokens(tokenizer, arguments, tolerant).encode(messages, tools)
    whole = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **(arguments or {}))
    assert tokenizer.decode(ids) == whole and len(ids) == len(mask)  # the template's text of the whole conversation
    stretches, last = [], False
    for token, is_in in zip(ids, mask, strict=True):
        if is_in:
            stretches = [*stretches[:-1], [*stretches[-1], token]] if last else [*stretches, [token]]
        last = is_in
    return [tokenizer.decode(part) for part in stretches]


@pytest.mark.parametrize("template", [None, MARKED])
def test_every_turn_of_the_assistant_is_learned_with_the_token_that_ends_it(template):
    assert learned(CHAT, template) == ["yes<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize("template", [None, MARKED])
@pytest.mark.parametrize("key", ["weight", "loss_mask"])
def test_a_turn_of_weight_0_is_not_learned(key, template):
    chat = [*CHAT[:2], {**CHAT[2], key: 0}, CHAT[3], {**CHAT[4], key: 1}]
    plain = tokenizer_with(template)
    ids, mask = TurnTokens(plain).encode(chat)
    assert plain.decode([token for token, is_in in zip(ids, mask, strict=True) if is_in]) == "no<|im_end|>"


def test_tools_are_shown_and_calls_learned_but_not_their_results():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    tokenizer = tokenizer_with()
    ids, mask = TurnTokens(tokenizer).encode([*chat, CHAT[4]], tools)
    text = tokenizer.decode([token for token, is_in in zip(ids, mask, strict=True) if is_in])
    assert text == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>no<|im_end|>'
    assert '"parameters"' in tokenizer.decode(ids)


def test_a_template_that_thinks_in_the_last_turn_alone():
    chat = [*CHAT[:4], {**CHAT[4], "reasoning_content": "hm"}]
    assert learned(chat, THINKING) == ["yes<|im_end|>", "<think>\nhm\n</think>\n\nno<|im_end|>"]
    # without thinking the block belongs to the prompt of the last turn, and the one before is otherwise asked for
    with pytest.raises(MaskRefusal, match="otherwise than when it asks for that turn"):
        learned(chat, THINKING, arguments={"enable_thinking": False})
    assert learned(CHAT[:2] + CHAT[4:], THINKING, arguments={"enable_thinking": False}) == ["no<|im_end|>"]


def test_reasoning_that_the_template_leaves_out_is_refused_unless_tolerated():
    chat = [*CHAT[:2], {**CHAT[2], "reasoning_content": "hm"}, *CHAT[3:]]
    with pytest.raises(MaskRefusal, match="does not show the reasoning of turn 2"):
        learned(chat, THINKING)
    assert learned(chat, THINKING, tolerant=True)[0] == "yes<|im_end|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # asks with a header that finished turns do not have
        ("{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'assistant:now ' }}{% endif %}", "otherwise than when it asks"),
        # leaves out the turn's text
        ("{% for m in messages %}{{ m.role + ':' + m.content[:1] + '<|im_end|>' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}", "does not show a message of the policy"),
        # marks one text of two
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{{ 'x' }}{% endgeneration %}",
         "marks 1 texts"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_masked_is_refused_with_the_reason(template, reason):
    with pytest.raises(ValueError, match=reason):
        learned(CHAT, template)


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        (CHAT[:2], "no turn of the assistant to learn"),
        (CHAT[2:], "begins with a turn of the assistant"),
        ([*CHAT[:4], {**CHAT[4], "weight": 0.5}, CHAT[3]], "must be 0 or 1"),
        ([{**CHAT[1], "weight": 1}, CHAT[2]], "only turns of the assistant"),
        ([CHAT[1], {"role": "assistant", "content": "a<|im_end|>b"}], "which ends a turn"),
    ],
)
def test_a_conversation_without_an_answer_to_learn_is_refused(chat, reason):
    with pytest.raises(MaskRefusal, match=reason):
        TurnTokens(tokenizer_with()).encode(chat)

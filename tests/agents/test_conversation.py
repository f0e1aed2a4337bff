"""Conversations as tokens: what is generated stays as it is, what follows is what the chat template writes."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from verl.agents.base import SingleTurnAgentLoop
from verl.agents.conversation import ChatRenderer, Conversation, check_chat_template
from verl.agents.templates import TemplateRefusal
from verl.utils.tiny_model import END, START, make_tokenizer

TOKENIZER = make_tokenizer("byte")
END_ID = TOKENIZER.convert_tokens_to_ids(END)
ASK = [{"role": "user", "content": "2 + 2?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

THINKING = (  # drops what was thought before the last message of the user
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def renderer(template=None, **options):
    tokenizer = make_tokenizer("byte")
    if template:
        tokenizer.chat_template = template
    return ChatRenderer(tokenizer, **options)


def finished(text):
    return [*TOKENIZER.encode(text, add_special_tokens=False), END_ID]


def talk(conversation, *turns):
    """Alternate generated ids and lists of messages."""
    for turn in turns:
        if isinstance(turn[0], dict):
            assert conversation.add_messages(turn)
        else:
            conversation.add_generated(turn, [-1.0 - 0.1 * i for i in range(len(turn))], "stop")
    return conversation


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
token_ids = st.lists(st.integers(3, len(TOKENIZER) - 1), min_size=1, max_size=8)
answers = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(token_ids, st.booleans(), st.lists(answers, min_size=1, max_size=3)), max_size=4), texts)
def test_the_mask_covers_the_generated_tokens_and_nothing_else(rounds, question):
    conversation = Conversation(renderer(), [{"role": "user", "content": question}], response_length=100_000)
    generated = []
    for ids, is_finished, messages in rounds:
        generated.append(ids + [END_ID] * is_finished)
        before = conversation.ids
        conversation.add_generated(generated[-1], [-float(i) for i in range(1, len(generated[-1]) + 1)])
        assert conversation.ids == before + generated[-1]
        assert conversation.add_messages(messages)
    [row] = conversation.rows()
    assert row.ids == conversation.ids
    assert [i for i, own in zip(row.response_ids, row.response_mask, strict=True) if own] == sum(generated, [])
    assert [row.response_ids[first:end] for first, end in row.turn_spans] == generated
    for log_prob, own in zip(row.response_logprobs, row.response_mask, strict=True):
        assert (log_prob == 0.0) is (own == 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, st.lists(answers, min_size=1, max_size=3)), max_size=4), texts)
def test_the_stream_reads_as_the_template_writes_it(rounds, question):
    conversation = Conversation(renderer(), [{"role": "user", "content": question}], response_length=100_000)
    for text, messages in rounds:
        conversation.add_generated(finished(text))
        assert conversation.add_messages(messages)
    rendered = conversation.renderer.template.render(conversation.messages)
    assert conversation.renderer.decode(conversation.ids) == rendered
    assert conversation.ids == conversation.renderer.encode(rendered)


def test_a_missing_end_marker_is_inserted_and_masked():
    more = [{"role": "user", "content": "more"}]
    whole = talk(Conversation(renderer(), ASK), finished("four"), more).rows()[0]
    cut = talk(Conversation(renderer(), ASK), finished("four")[:-1], more).rows()[0]
    assert cut.ids == whole.ids
    assert cut.turn_spans == [(0, 4)] and whole.turn_spans == [(0, 5)]
    assert (sum(cut.response_mask), sum(whole.response_mask)) == (4, 5)


def test_nothing_is_inserted_after_the_last_turn():
    conversation = talk(Conversation(renderer(), ASK), finished("four")[:-1])
    assert conversation.rows()[0].response_ids == finished("four")[:-1]


def test_an_end_marker_in_an_answer_is_not_taken_for_the_turns_own():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    conversation = talk(Conversation(renderer(plain), ASK), finished("4"), [{"role": "user", "content": f"a{END}b"}])
    text = conversation.renderer.decode(conversation.ids)
    assert text == f"user: 2 + 2?\nassistant: 4{END}\nuser: a{END}b\nassistant: "


def test_a_marker_that_takes_in_whitespace_does_so_after_a_turn():
    eager = renderer(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    names = ("<|user|>", "<|assistant|>", "<|end|>")
    eager.tokenizer.add_tokens([AddedToken(name, rstrip=True, special=True) for name in names], special_tokens=True)
    conversation = Conversation(eager, ASK)
    answer = eager.encode("four<|end|>")
    talk(conversation, answer, [{"role": "user", "content": "more"}])
    assert conversation.ids == eager.encode(eager.template.render(conversation.messages))


def test_a_turn_that_a_stop_text_ended_is_not_ended_twice():
    bars = renderer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</{{ m.role }}>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    written = bars.encode("four</assistant>")
    conversation = talk(Conversation(bars, ASK), written, [{"role": "user", "content": "more"}])
    assert bars.decode(conversation.ids) == bars.template.render(conversation.messages).replace(
        "four</assistant></assistant>", "four</assistant>"
    )


def test_one_turn_is_that_of_the_single_turn_agent_bit_for_bit():
    prompt = TOKENIZER.encode("anything", add_special_tokens=False)
    completion = SimpleNamespace(token_ids=[9, 200, 77, END_ID], log_probs=[-0.1, -3.25, -1e-7, -2.0])

    async def single_turn():
        async def generate(**request):
            return completion

        loop = SingleTurnAgentLoop(SimpleNamespace(), SimpleNamespace(generate=generate), TOKENIZER)
        return await loop.run({}, raw_prompt_ids=prompt)

    expected = asyncio.run(single_turn())
    for is_used in (False, True):
        conversation = Conversation(renderer(uses_template_history=is_used), ASK, prompt_ids=prompt)
        conversation.add_generated(completion.token_ids, completion.log_probs, "stop")
        [row] = conversation.rows()
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
            assert getattr(row, name) == getattr(expected, name)


# -- Windows ---------------------------------------------------------------------------------------------------------


def test_an_answer_that_leaves_no_room_is_refused_and_changes_nothing():
    conversation = talk(Conversation(renderer(), ASK, response_length=60), finished("four"))
    ids, messages = conversation.ids, list(conversation.messages)
    assert not conversation.add_messages([{"role": "user", "content": "x" * 60}])
    assert (conversation.ids, conversation.messages, conversation.room) == (ids, messages, 55)
    assert conversation.add_messages([{"role": "user", "content": "x"}])
    assert conversation.room == 60 - len(conversation.rows()[0].response_ids)


def test_a_prompt_beyond_its_window_begins_in_the_response_masked():
    short, whole = (Conversation(renderer(prompt_length=length), ASK, response_length=50) for length in (10, None))
    assert short.ids == whole.ids
    assert short.room == 50 - (len(whole.ids) - 10)
    row = talk(short, finished("four")).rows()[0]
    assert len(row.prompt_ids) == 10
    assert row.turn_spans == [(len(whole.ids) - 10, len(row.response_ids))]
    assert sum(row.response_mask) == 5


def test_a_prompt_that_leaves_no_room_is_refused_by_name():
    with pytest.raises(ValueError, match=r"rollout.prompt_length=10 and a response window of 5"):
        Conversation(renderer(prompt_length=10), ASK, response_length=5)


# -- The template's history ------------------------------------------------------------------------------------------


def test_where_the_template_drops_thoughts_each_turn_is_a_row():
    options = {"uses_template_history": True, "prompt_length": 500}
    conversation = Conversation(renderer(THINKING, **options), ASK, response_length=500)
    generated = [finished(f"<think>hm {i}</think>{i}") for i in range(3)]
    read = []
    for i, ids in enumerate(generated):
        read.append(conversation.ids)
        talk(conversation, ids, *([[{"role": "user", "content": "more"}]] if i < 2 else []))
    rows = conversation.rows()
    assert [row.turns for row in rows] == [[0], [1], [2]]
    assert [row.prompt_ids for row in rows] == read
    assert [row.response_ids for row in rows] == generated
    assert all(row.response_mask == [1] * len(row.response_ids) for row in rows)
    assert "hm 0" not in conversation.renderer.decode(read[1])


def test_what_the_template_keeps_stays_in_one_row():
    conversation = Conversation(renderer(THINKING, uses_template_history=True), ASK)
    result, more = [{"role": "tool", "content": "7"}], [{"role": "user", "content": "more"}]
    thought = finished("<think>hm</think>4")
    talk(conversation, thought, result, thought, result, thought, more, thought)
    assert [row.turns for row in conversation.rows()] == [[0, 1, 2], [3]]


def test_a_history_that_was_rewritten_may_fill_its_own_window():
    conversation = Conversation(
        renderer(THINKING, uses_template_history=True, prompt_length=60), ASK, response_length=60
    )
    for _ in range(3):
        talk(conversation, finished("<think>" + "x" * 30 + "</think>4"), [{"role": "user", "content": "?"}])
    assert len(conversation.rows()) == 3
    for row in conversation.rows():
        assert len(row.prompt_ids) <= 60 and len(row.response_ids) <= 60


def test_ids_that_spell_the_history_otherwise_are_kept():
    merged = make_tokenizer("byte")
    merged.add_tokens(["four"])  # canonical for the text; the policy spelled it in letters
    conversation = Conversation(ChatRenderer(merged, uses_template_history=True), ASK)
    letters = [*merged.convert_tokens_to_ids(list("four")), END_ID]
    talk(conversation, letters, [{"role": "user", "content": "more"}], letters)
    assert [row.turns for row in conversation.rows()] == [[0, 1]]
    assert conversation.rows()[0].response_ids[:5] == letters


def test_whitespace_alone_begins_no_row_with_ignore_strippable():
    strips = THINKING.replace("{{ text }}", "{{ text | trim }}")
    more = [{"role": "user", "content": "more"}]
    rows = {}
    for check in ("strict", "ignore_strippable"):
        conversation = Conversation(renderer(strips, uses_template_history=True, check=check), ASK)
        rows[check] = talk(conversation, finished("four \n"), more, finished("four")).rows()
    assert [len(rows[check]) for check in rows] == [2, 1]


def test_the_templates_history_needs_the_messages_of_the_prompt():
    conversation = Conversation(renderer(uses_template_history=True), (), prompt_ids=[5, 6])
    talk(conversation, finished("four"))
    with pytest.raises(ValueError, match="data.return_raw_chat=true"):
        conversation.add_messages([{"role": "user", "content": "more"}])


def test_a_prompt_of_ids_alone_can_be_answered():
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    more = [{"role": "user", "content": "more"}]
    conversation = talk(Conversation(renderer(strict), (), prompt_ids=[5, 6]), finished("a"), more, finished("b"), more)
    follows = f"\n{START}user\nmore{END}\n{START}assistant\n"
    assert conversation.renderer.decode(conversation.ids[2:]) == f"a{END}{follows}b{END}{follows}"


# -- Tools -----------------------------------------------------------------------------------------------------------


def test_a_call_and_its_result_read_as_the_template_writes_them():
    conversation = Conversation(renderer(), ASK, tools=TOOLS)
    turn = conversation.add_generated(finished('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'))
    [call] = turn.tool_calls
    assert (call.name, call.arguments, call.id) == ("add", {"a": 2}, "call00000")
    assert conversation.add_messages([{"role": "tool", "tool_call_id": call.id, "content": "4"}])
    text = conversation.renderer.template.render(conversation.messages, TOOLS)
    assert conversation.renderer.decode(conversation.ids) == text


def test_a_broken_call_is_answered_like_any_other():
    conversation = Conversation(renderer(), ASK, tools=TOOLS)
    ids = finished("<tool_call>\n{oh\n</tool_call>")
    [call] = conversation.add_generated(ids).tool_calls
    assert call.error
    assert conversation.add_messages([{"role": "tool", "tool_call_id": call.id, "content": call.error}])
    assert conversation.renderer.decode(conversation.ids).endswith(f"{call.error}{END}\n{START}assistant\n")
    assert conversation.rows()[0].response_ids[: len(ids)] == ids


def test_without_tools_markup_of_a_call_is_text():
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    conversation = Conversation(renderer(), ASK)
    assert conversation.add_generated(finished(text)).tool_calls == []
    assert conversation.messages[-1] == {"role": "assistant", "content": text}


def test_tools_that_the_template_does_not_show_are_refused():
    with pytest.raises(TemplateRefusal, match="does not show tools, tool calls"):
        Conversation(renderer(THINKING), ASK, tools=TOOLS)


RULES_FOR_CALLS = (  # as some templates have them: ids of nine letters, results only after calls
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
    "{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and not (loop.previtem.tool_calls or loop.previtem.role == 'tool') %}"
    "{{ raise_exception('a result of no call') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ tools | tojson if loop.first }}{{ m.content }}"
    "{{ m.tool_calls | map(attribute='function') | list | tojson if m.tool_calls }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("text", ['<tool_call>{"name": "add", "arguments": {}}</tool_call>', "no call at all"])
def test_results_are_shown_by_a_template_that_refuses_those_of_no_call(text):
    conversation = Conversation(renderer(RULES_FOR_CALLS), ASK, tools=TOOLS)
    ids = [call.id for call in conversation.add_generated(finished(text)).tool_calls]
    results = [{"role": "tool", "tool_call_id": id, "content": "4"} for id in ids or ["unknown00"]]
    assert conversation.add_messages([*results, {"role": "tool", "tool_call_id": "other0000", "content": "5"}])
    tail = f"{text}{END}\n{START}tool\n4{END}\n{START}tool\n5{END}\n{START}assistant\n"
    assert conversation.renderer.decode(conversation.ids).endswith(tail)


def test_marks_of_reasoning_stay_in_a_turn_though_they_are_special_tokens():
    marked = renderer()
    marked.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    turn = Conversation(marked, ASK).add_generated(marked.encode(f"<think>hm</think>4{END}"))
    assert turn.text == "<think>hm</think>4"


# -- Refusals and options --------------------------------------------------------------------------------------------


def test_images_in_later_turns_are_refused_by_name():
    conversation = talk(Conversation(renderer(), ASK), finished("four"))
    with pytest.raises(NotImplementedError, match="role 'tool' has a part of type 'image'"):
        conversation.add_messages([{"role": "tool", "content": [{"type": "image"}]}])


def test_log_probs_must_be_one_a_token():
    with pytest.raises(ValueError, match="2 log-probs for 3 tokens"):
        Conversation(renderer(), ASK).add_generated([7, 8, 9], [-1.0, -1.0])


def test_a_turn_without_log_probs_leaves_the_row_without():
    assert talk(Conversation(renderer(), ASK)).rows()[0].response_logprobs == []
    conversation = Conversation(renderer(), ASK)
    conversation.add_generated(finished("four"), None)
    assert conversation.rows()[0].response_logprobs is None


def config(template_kwargs=None, makes_rows=False, **changes):
    multi_turn = {
        "enable": True,
        "use_inference_chat_template": False,
        "tokenization_sanity_check_mode": "strict",
        "format": "hermes",
        "tool_config_path": None,
        "function_tool_path": None,
        **changes,
    }
    agent = SimpleNamespace(default_agent_loop="single_turn_agent")
    rollout = SimpleNamespace(multi_turn=SimpleNamespace(**multi_turn), agent=agent, prompt_length=64)
    data = SimpleNamespace(apply_chat_template_kwargs=template_kwargs or {})
    env = SimpleNamespace(makes_rows=makes_rows)
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), data=data, env=env)


def test_a_configuration_has_one_renderer_and_its_template_arguments():
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template = "{{ mood }}: {{ messages[0].content }}"
    one, same, other = (ChatRenderer.of(tokenizer, None, config({"mood": mood})) for mood in ("glad", "glad", "sad"))
    assert one is same and one is not other
    assert one.decode(one.prompt_ids(ASK)) == "glad: 2 + 2?"
    assert other.decode(other.prompt_ids(ASK)) == "sad: 2 + 2?"


def test_the_report_is_printed_before_anything_is_generated(capsys):
    tokenizer = make_tokenizer("byte")
    reports = [check_chat_template(tokenizer, None, config(tool_config_path="tools.yaml")) for _ in range(2)]
    assert reports[0].is_append_only and reports[0].has_tools and reports[1] is reports[0]
    printed = capsys.readouterr().out
    assert printed.count("append-only") == 1 and "tools, tool calls and tool results are shown" in printed


def test_a_run_of_single_turns_asks_nothing_of_the_template():
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template = None
    assert check_chat_template(tokenizer, None, config(enable=False)) is None
    for conversations in (config(), config(enable=False, makes_rows=True)):
        with pytest.raises(TemplateRefusal, match="custom_chat_template"):
            check_chat_template(tokenizer, None, conversations)


def test_images_of_the_prompt_stay_where_the_data_set_encoded_them():
    parts = THINKING.replace("{% set text = m.content %}", "{% set text = m.content if m.content is string else 'I' %}")
    seen = [{"role": "user", "content": [{"type": "image"}]}]
    options = {"uses_template_history": True}
    prompt = renderer(parts).prompt_ids(seen)
    kept = Conversation(renderer(parts, **options), seen, prompt_ids=prompt)
    talk(kept, finished("four"), [{"role": "user", "content": "more"}])
    assert kept.ids[: len(prompt)] == prompt and len(kept.rows()) == 1
    rewritten = talk(Conversation(renderer(parts, **options), seen, prompt_ids=prompt), finished("<think>hm</think>4"))
    with pytest.raises(NotImplementedError, match="where the chat template keeps the history"):
        rewritten.add_messages([{"role": "user", "content": "more"}])
    with pytest.raises(NotImplementedError, match="type 'image'"):
        Conversation(renderer(parts), seen)

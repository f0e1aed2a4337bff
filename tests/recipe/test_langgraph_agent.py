"""The LangGraph recipe: a graph with a tool, against rollout servers that answer with given texts."""

import pytest

from tests.support.sessions import run_loop, tokenizer_with_tools

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")

from recipe.langgraph_agent.example.create_dataset import rows  # noqa: E402
from recipe.langgraph_agent.example.math_expression import MathExpressionReactAgentLoop, calculate  # noqa: E402

CALL = '<tool_call>{"name": "calculate", "arguments": {"a": 2, "operand": "@", "b": 1}}</tool_call>'


def test_the_graph_calls_its_tool_and_its_turns_are_one_row():
    tokenizer = tokenizer_with_tools()
    answers = [f"First.{CALL}", f"{CALL}{CALL}", "#### 4"]
    output = run_loop(tokenizer, answers=answers, loop_class=MathExpressionReactAgentLoop)
    assert not isinstance(output, Exception), output
    assert output.status == "completed" and output.reward_score is None and len(output.turn_spans) == 3
    text = tokenizer.decode(output.prompt_ids + output.response_ids)
    assert text.count("<|im_start|>tool\n4<|im_end|>") == 3 and "a @ b is 3 * a - 2 * b" in text


def test_a_limit_of_turns_ends_the_graph_with_a_status():
    output = run_loop(tokenizer_with_tools(), answers=[CALL] * 9, turns=2, loop_class=MathExpressionReactAgentLoop)
    assert output.status == "max_assistant_turns" and len(output.turn_spans) == 2


def test_the_data_sets_answers_are_what_the_tool_computes():
    import re

    for row in rows(50, seed=3):
        text = row["extra_info"]["expression"]
        while match := re.search(r"\((-?\d+) ([-+*@]) (-?\d+)\)", text):
            a, operand, b = match.groups()
            text = text.replace(match[0], str(calculate.func(int(a), int(b), operand)), 1)
        assert text == row["reward_model"]["ground_truth"]

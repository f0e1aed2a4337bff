"""The switch ``multi_turn.enable``: verl's recipes, which leave ``rollout.mode`` alone, run agent loops."""

import pytest

from .helpers import notes, problems, typed

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
ON = f"{TURNS}.enable=true"
TOOLS, USERS = f"{TURNS}.tool_config_path=tools.yaml", f"{TURNS}.interaction_config_path=users.yaml"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("words", "loop"),
    [
        ([TOOLS], "tool_agent"),
        ([f"{TURNS}.function_tool_path=tools.py"], "tool_agent"),
        ([USERS], "interaction_agent"),
        ([TOOLS, USERS], "tool_agent"),
        ([TOOLS, f"{ROLLOUT}.agent.default_agent_loop=mine"], "mine"),
    ],
)
def test_rows_without_a_name_go_to_the_agent_loop_of_what_is_named(mode, words, loop):
    config = typed(ON, f"{ROLLOUT}.mode={mode}", *words)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.mode, rollout.agent.default_agent_loop) == ("async", loop)
    assert config.data.return_raw_chat
    assert config.data.tool_config_path == rollout.multi_turn.tool_config_path


@pytest.mark.parametrize("word", ["function=pkg://tests:agent", "command=[python,agent.py]"])
def test_an_agent_outside_that_is_named_turns_agent_loops_on(word):
    config = typed(f"{ROLLOUT}.agent.openai_agent.{word}")
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.mode, rollout.agent.default_agent_loop) == ("async", "openai_agent") and config.data.return_raw_chat
    other = typed(f"{ROLLOUT}.agent.openai_agent.{word}", f"{ROLLOUT}.agent.default_agent_loop=mine")
    assert other.actor_rollout_ref.rollout.agent.default_agent_loop == "mine"


def test_what_the_switch_changes_is_said():
    text = notes(ON, TOOLS, f"{ROLLOUT}.mode=sync", "data.return_raw_chat=false")
    assert f"{ON} runs agent loops: {ROLLOUT}.mode=async is used instead of sync" in text
    assert "data.return_raw_chat=true is used" in text
    assert "instead of sync" not in notes(ON, TOOLS, f"{ROLLOUT}.mode=async")


@pytest.mark.parametrize("option", ["max_assistant_turns=3", "format=glm", "tool_config_path=a.yaml"])
def test_an_option_of_conversations_without_them_is_said(option):
    assert f"{TURNS}.{option} has no effect: {ROLLOUT}.mode=sync generates one turn" in notes(f"{TURNS}.{option}")


def test_tools_that_only_some_rows_ask_for_and_a_switch_without_anybody_are_said():
    assert f"Set {TURNS}.enable=true for all rows" in notes(TOOLS, f"{ROLLOUT}.mode=async")
    assert "no tools and no simulated users are named" in notes(ON)
    assert "enable" not in notes(ON, f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml", f"{ROLLOUT}.mode=async")


def test_a_format_of_tool_calls_is_known_before_anything_starts():
    assert problems(ON, TOOLS, f"{TURNS}.format=qwen3_coder") == ""
    assert problems(ON, TOOLS, f"{TURNS}.format=my_parser.py:Mine") == ""
    assert "format=hermess is not a known format of tool calls; did you mean 'hermes'" in problems(
        f"{TURNS}.format=hermess"
    )
    assert "format=kimi is not supported yet" in problems(f"{TURNS}.format=kimi")


@pytest.mark.parametrize("word", ["completion_callback=mine", "num_repeat_rollouts=2"])
def test_what_verl_had_and_is_not_here_is_refused_by_name(word):
    assert "that is not built" in problems(f"+{TURNS}.{word}")


def test_missing_files_are_named(tmp_path):
    from verl.config.checks.run import missing_files

    config = typed(
        ON, f"{TURNS}.tool_config_path={tmp_path}/no.yaml", f"{TURNS}.interaction_config_path={tmp_path}/u.yaml"
    )
    text = " ".join(problem.text for problem in missing_files(config))
    assert "no.yaml does not exist" in text and "u.yaml does not exist" in text and "Give a YAML file" in text

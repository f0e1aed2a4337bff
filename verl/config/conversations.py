"""Options that conversations of several turns decide, set before others follow them."""

from collections.abc import Callable
from typing import Any

from verl.config.tree import put_key

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
DEFAULT_LOOP = f"{ROLLOUT}.agent.default_agent_loop"

TOOLS = (f"{TURNS}.tool_config_path", f"{TURNS}.function_tool_path")
"""Options that name tools; a conversation with tools may have a user too."""
USERS = f"{TURNS}.interaction_config_path"
OUTSIDE = (f"{ROLLOUT}.agent.openai_agent.function", f"{ROLLOUT}.agent.openai_agent.command")
"""Options that name an agent outside."""


def hold_conversations(tree: dict, given: set[str], peek: Callable[[str], Any]) -> list[str]:
    """Let ``multi_turn.enable`` choose agent loops, as verl's recipes mean it, which leave ``rollout.mode`` alone.

    An agent outside that is named does the same.

    Args:
        tree: the composed tree; it is changed.
        given: dotted keys the user set.
        peek: value of a key, interpolations resolved; None if that fails.

    Returns:
        what became of options that say otherwise.
    """
    is_enabled, outside = peek(f"{TURNS}.enable") is True, [key for key in OUTSIDE if peek(key)]
    if not is_enabled and not outside:
        return []
    cause = f"{TURNS}.enable=true" if is_enabled else outside[0]
    messages = []
    if peek(f"{ROLLOUT}.mode") == "sync":
        put_key(tree, f"{ROLLOUT}.mode", "async")
        messages.append(f"{cause} runs agent loops: {ROLLOUT}.mode=async is used instead of sync")
    if not peek("data.return_raw_chat"):
        put_key(tree, "data.return_raw_chat", True)
        if "data.return_raw_chat" in given:
            messages.append(f"{cause} needs the messages of prompts: data.return_raw_chat=true is used")
    if DEFAULT_LOOP not in given:
        if outside:
            put_key(tree, DEFAULT_LOOP, "openai_agent")
        elif any(peek(key) for key in TOOLS):
            put_key(tree, DEFAULT_LOOP, "tool_agent")
        elif peek(USERS):
            put_key(tree, DEFAULT_LOOP, "interaction_agent")
    return messages

"""Validators of conversations of several turns: tools, simulated users and the agent loops that need them."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import IsGiven, contradictions, problem, validator
from verl.config.conversations import DEFAULT_LOOP, OUTSIDE, TOOLS, TURNS, USERS
from verl.config.ppo import ROLLOUT, PPOConfig
from verl.config.rollout import SINGLE_TURN
from verl.config.tree import show

contradictions(
    __name__,
    {
        f"{TURNS}.enable with {ROLLOUT}.mode!=async": f"only agent loops hold conversations. Set {ROLLOUT}.mode=async.",
        f"{DEFAULT_LOOP}=interaction_agent with {USERS}=null": (
            f"no simulated user is named who could answer. Name a YAML file of interactions in {USERS}."
        ),
        f"{DEFAULT_LOOP}=openai_agent with {OUTSIDE[0]}=null if {OUTSIDE[1]}=null, "
        f"{ROLLOUT}.agent.agent_loop_config_path=null": (
            f"no agent is named. Set it to path/file.py:function, or {OUTSIDE[1]} to a program."
        ),
        f"{OUTSIDE[0]}!=null with {OUTSIDE[1]}!=null": "an episode has one agent. Set one of the two.",
        f"{DEFAULT_LOOP}=openai_agent with data.return_raw_chat=false": (
            "an agent outside reads messages. Set data.return_raw_chat=true."
        ),
    },
)


@validator("error")
def tool_agent_requires_tools(config: PPOConfig) -> Iterator[Problem]:
    if config.actor_rollout_ref.rollout.mode != "async" or get_path(config, DEFAULT_LOOP) != "tool_agent":
        return
    # a conversation with a user alone is what interaction_agent holds
    if not any(get_path(config, key) for key in TOOLS):
        yield problem(config, DEFAULT_LOOP, f"names an agent loop without tools. Set {TOOLS[0]} or {TOOLS[1]}.", *TOOLS)


@validator("error")
def prompts_are_measured_with_the_tools_they_show(config: PPOConfig) -> Iterator[Problem]:
    for key in TOOLS:
        name = key.rpartition(".")[2]
        if config.data[name] != get_path(config, key):
            text = (
                f"differs from {key}={show(get_path(config, key))}, whose tools the prompts show. Set only the latter."
            )
            yield problem(config, f"data.{name}", text, key)


@validator("warning")
def conversations_without_anyone_to_answer(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    named = [key for key in (*TOOLS, USERS) if get_path(config, key)]
    is_alone = rollout.mode == "async" and agent.default_agent_loop == SINGLE_TURN
    if is_alone and turns.enable and not named and not agent.agent_loop_config_path and not config.env.makes_rows:
        text = (
            f"{TURNS}.enable=true has no effect on rows without agent_name: no tools and no simulated users are named"
        )
        yield Problem(f"{TURNS}.enable", text, (*TOOLS, USERS))
    elif is_alone and named:
        settings = ", ".join(f"{key}={show(get_path(config, key))}" for key in named)
        text = (
            f"{settings}: only for rows whose agent_name asks for it; {DEFAULT_LOOP}={SINGLE_TURN} generates one turn "
            f"for the others" + ("" if is_given(DEFAULT_LOOP) else f". Set {TURNS}.enable=true for all rows")
        )
        yield Problem(named[0], text, tuple(named[1:]))

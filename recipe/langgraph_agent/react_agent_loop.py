"""Agent loop of LangGraph agents: a graph talks to the policy through LangChain's `ChatOpenAI`."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

try:
    from langchain_core.runnables import RunnableConfig
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
except ImportError as error:
    raise ImportError(
        "recipe.langgraph_agent needs the packages langgraph and langchain-openai. Install them with "
        "pip install langgraph langchain-openai, or write the agent with the openai client alone "
        "(examples/agentic/openai_agent)."
    ) from error

from verl.agents.outside_agent import OpenAIAgentLoop


class ReactAgentLoop(OpenAIAgentLoop):
    """One episode: a graph that lets the policy call tools until it answers without a call.

    A subclass sets ``tools`` and, for another graph, overrides `build_graph`. Its name is given by an entry of
    ``rollout.agent.agent_loop_config_path``.
    """

    tools: ClassVar[Sequence[Any]] = ()
    """LangChain tools, such as functions under ``@tool``."""

    @classmethod
    def build_graph(cls) -> Any:
        """Return the compiled graph. Its state has ``messages``; a node finds its model by `model_of`."""
        graph = StateGraph(MessagesState)
        graph.add_node("agent", call_model)
        graph.add_edge(START, "agent")
        if cls.tools:
            graph.add_node("tools", ToolNode(list(cls.tools)))
            graph.add_conditional_edges("agent", tools_condition)
            graph.add_edge("tools", "agent")
        else:
            graph.add_edge("agent", END)
        return graph.compile()

    @classmethod
    @lru_cache
    def graph(cls) -> Any:
        """Return the graph, which all episodes share."""
        return cls.build_graph()

    async def agent(self, base_url: str, api_key: str, row: dict[str, Any]) -> Any:
        model: Any = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0)
        if self.tools:
            model = model.bind_tools(list(self.tools))
        turns = self.config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns
        # two steps of the graph a turn; sessions have a limit of their own, with a status
        options = {"configurable": {"model": model}, "recursion_limit": 2 * (turns or 500) + 3}
        state = await self.graph().ainvoke({"messages": row["messages"]}, options)
        return await self.reward(state, row)

    async def reward(self, state: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
        """Return the episode's reward (see `OpenAIAgentLoop.agent`); None: the run's reward function gives it."""
        return None


def model_of(config: Mapping[str, Any]) -> Any:
    """Return the model of this episode, with the tools bound, from the configuration that a node gets."""
    return config["configurable"]["model"]


async def call_model(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    """Node of the graph: one turn of the policy."""
    return {"messages": [await model_of(config).ainvoke(state["messages"])]}

"""Agent loops without a run: a policy by script in place of rollout servers, and the outputs of rows."""

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tests.support.composing import load_over
from verl.agents.base import TrainerConfig, agent_loop
from verl.agents.manager import AsyncLLMServerManager
from verl.envs.host import close_hosts
from verl.utils.tiny_model import END, make_tokenizer
from verl.workers.rollout.base import Completion

BASE = (
    "env.train.tags=[FrozenLake]",
    "actor_rollout_ref.model.path=none",
    "trainer.total_training_steps=1",
    "trainer.device=cpu",
)


@lru_cache
def tokenizer() -> Any:
    return make_tokenizer()


class ScriptedPolicy:
    """Answers with text, in place of a client of rollout servers.

    Args:
        say: from the number of the call in its session, and the text of the prompt, the policy's text. Text without the
            end marker counts as cut.
        seconds: of one answer.
    """

    def __init__(self, say: Callable[[int, str], str], seconds: float = 0.0):
        self.say, self.seconds = say, seconds
        self.calls: dict[Any, int] = {}
        self.prompts: list[list[int]] = []

    async def generate(self, request: Any, session: str | None = None, priority: int = 0, **_: Any) -> Completion:
        number = self.calls.get(session, 0)
        self.calls[session] = number + 1
        self.prompts.append(list(request.prompt_ids))
        await asyncio.sleep(self.seconds)
        text = self.say(number, tokenizer().decode(list(request.prompt_ids)))
        ids = tokenizer().encode(text, add_special_tokens=False)[: request.sampling.max_tokens]
        is_whole = bool(ids) and ids[-1] == tokenizer().convert_tokens_to_ids(END)
        return Completion(ids, [-1.0] * len(ids), "stop" if is_whole else "length")


def config_of(*words: str) -> Any:
    return load_over(BASE, words).config


async def episode(config: Any, policy: Any, row: dict[str, Any], number: int = 0, max_tokens: int = 200) -> Any:
    """Output of a row's agent loop."""
    servers = AsyncLLMServerManager(policy, number, name=str(number))
    arguments = {"trainer_config": TrainerConfig(config), "server_manager": servers, "tokenizer": tokenizer()}
    return await agent_loop(row["agent_name"])(**arguments).run({"max_tokens": max_tokens}, **row)


def episodes(config: Any, policy: Any, rows: Sequence[dict[str, Any]], **options: Any) -> list[Any]:
    """Outputs of rows, or the exceptions that their loops raised, in an event loop of their own."""

    async def all_rows() -> list[Any]:
        try:
            tasks = [episode(config, policy, row, number, **options) for number, row in enumerate(rows)]
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            close_hosts(asyncio.get_running_loop())

    return asyncio.run(all_rows())

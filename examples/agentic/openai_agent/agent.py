"""An agent that knows the `openai` package and nothing of verl: asks, criticises, asks again, and scores both answers.

For training it is named by ``actor_rollout_ref.rollout.agent.openai_agent.function``. Against any other server:

    OPENAI_API_KEY=... python agent.py https://api.openai.com/v1 gpt-4o-mini "Say something about a cat."
"""

import asyncio
import sys

from openai import AsyncOpenAI


def share_of_digits(text: str, length: int = 8) -> float:
    """The reward: how many of the first characters are digits."""
    return min(1.0, sum(character.isdigit() for character in text) / length)


async def hold(client: AsyncOpenAI, messages: list[dict], model: str = "policy") -> list[str]:
    """Two turns; returns the policy's answers."""
    answers: list[str] = []
    for critique in ("Digits only!", None):
        completion = await client.chat.completions.create(model=model, messages=messages, max_tokens=10)
        answers.append(completion.choices[0].message.content or "")
        messages = [*messages, {"role": "assistant", "content": answers[-1]}, {"role": "user", "content": critique}]
    return answers


async def solve(base_url: str, api_key: str, row: dict) -> dict:
    """One episode.

    Args:
        base_url, api_key: of the session, for an OpenAI client.
        row: of the data; ``messages`` is its prompt.

    Returns:
        the reward, rewards of the turns, and numbers for the metrics.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answers = await hold(client, row["messages"])
    scores = [share_of_digits(answer) for answer in answers]
    return {"reward": sum(scores) / len(scores), "success": min(scores) == 1.0}


if __name__ == "__main__":
    url, name, question = sys.argv[1:]
    print(asyncio.run(hold(AsyncOpenAI(base_url=url), [{"role": "user", "content": question}], name)))

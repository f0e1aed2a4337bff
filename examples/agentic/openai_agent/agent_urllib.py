"""The agent of agent.py with the standard library alone: it blocks, so it runs in a thread or a process of its own."""

import json
import urllib.request


def share_of_digits(text: str, length: int = 8) -> float:
    """The reward: how many of the first characters are digits."""
    return min(1.0, sum(character.isdigit() for character in text) / length)


def solve(base_url: str, api_key: str, row: dict) -> dict:
    """One episode: two turns of the policy, both scored."""
    messages, scores = row["messages"], []
    for critique in ("Digits only!", None):
        body = {"model": "policy", "messages": messages, "max_tokens": 10}
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"},
        )
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        scores.append(share_of_digits(message["content"]))
        messages = [*messages, message, {"role": "user", "content": critique}]
    return {"reward": sum(scores) / len(scores), "success": min(scores) == 1.0}

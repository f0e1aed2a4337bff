"""Reward functions in the shapes users write them; one file, chosen by ``custom_reward_function.name``."""

import asyncio
import re

from helpers import count_digits as count_too

from verl import DataProto  # noqa: F401  (users import it for type hints)
from verl.utils.reward_score import default_compute_score, gsm8k  # noqa: F401
from verl.utils.reward_score.gsm8k import extract_solution  # noqa: F401

from .helpers import count_digits

gate = asyncio.Semaphore(4)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "openai/gsm8k":
        return gsm8k.compute_score(solution_str, ground_truth, method="strict")
    return float(bool(re.search(r"\d", solution_str)))


def keywords(solution_str, ground_truth, **kwargs):
    assert {"data_source", "extra_info"} <= set(kwargs)
    return count_digits(solution_str) + count_too(solution_str)


def columns(data_source, solution_str, ground_truth, extra_info, weight=1.0, names=None, **_):
    assert type(names) is list and names == ["a", "b"] and extra_info["index"] >= 0
    return {
        "score": weight * count_digits(solution_str),
        "acc": solution_str.isdigit(),
        "pred": solution_str[:2],
        "note": None if len(solution_str) % 2 else "even",
    }


async def awaited(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    async with gate:
        await asyncio.sleep(0.001)
    return {"score": 0.5, "acc": True}


def batch(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    return [{"score": scale * count_digits(text), "chars": len(text)} for text in solution_strs]


def sometimes_a_dict(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0 if len(solution_str) % 2 else {"score": 1.0, "format": 0.5}

"""Limits of requests and tokens a minute, on a clock that moves only while everybody waits."""

import asyncio
import json

import pytest

from tests.rewards.test_reward_servers import post, served
from verl.config.reward import RewardRouterConfig
from verl.rewards.router import Pace, Router, estimated_tokens, used_tokens


class FakeClock(asyncio.SelectorEventLoop):
    """An event loop whose time is that for which its callbacks have waited, and which wakes ``late`` seconds after."""

    def __init__(self, late=0.0):
        super().__init__()
        self.now = 1000.0
        select = self._selector.select

        def skip(timeout=None):
            self.now += timeout + late if timeout else 0.0
            return select(0)

        self._selector.select = skip

    def time(self):
        return self.now


def begun(scenario, late=0.0) -> list[float]:
    """Seconds after the start at which the requests of ``scenario(begin)`` began."""
    loop, times = FakeClock(late), []

    async def run():
        async def begin(pace, tokens=0):
            await pace.turn(tokens)
            times.append(round(loop.time() - 1000.0, 6))

        await scenario(begin)

    try:
        loop.run_until_complete(asyncio.wait_for(run(), 1e6))
    finally:
        loop.close()
    return times


def test_requests_begin_at_an_even_pace_and_without_a_limit_at_once():
    async def four(begin, requests):
        pace = Pace(requests, None)
        await asyncio.gather(*(begin(pace) for _ in range(4)))

    assert begun(lambda begin: four(begin, 30)) == [0, 2, 4, 6]
    assert begun(lambda begin: four(begin, None)) == [0, 0, 0, 0]


@pytest.mark.parametrize("limits", [(30, None), (None, 600)])
def test_a_loop_that_wakes_late_keeps_the_pace(limits):
    async def four(begin):
        pace = Pace(*limits)
        await asyncio.gather(*(begin(pace, 20) for _ in range(4)))

    assert begun(four, late=0.5) == [0, 2.5, 4.5, 6.5]


def test_tokens_are_spread_over_the_minute_in_turn():
    async def scenario(begin):
        pace = Pace(None, 600)
        await asyncio.gather(*(begin(pace, tokens) for tokens in (100, 50, 1200, 10)))

    assert begun(scenario) == [0, 10, 15, 135]


def test_the_slower_of_two_limits_holds():
    async def scenario(begin):
        pace = Pace(60, 600)
        await asyncio.gather(*(begin(pace, tokens) for tokens in (5, 100, 5)))

    assert begun(scenario) == [0, 1, 11]


def test_an_answer_that_took_less_lets_those_that_wait_begin_earlier():
    async def scenario(begin):
        pace = Pace(None, 600)
        await begin(pace, 1000)
        waiting = asyncio.gather(begin(pace, 100), begin(pace, 100))
        await asyncio.sleep(3)
        pace.correct(1000, 200)
        await waiting

    assert begun(scenario) == [0, 20, 30]


def test_an_answer_that_took_more_delays_those_that_wait_and_is_owed_after_a_pause():
    async def scenario(begin):
        pace = Pace(None, 600)
        await begin(pace, 100)
        waiting = asyncio.ensure_future(begin(pace, 100))
        await asyncio.sleep(3)
        pace.correct(100, 200)
        await waiting
        await asyncio.sleep(100)  # a pause saves nothing up
        pace.correct(100, 200)
        await begin(pace, 1)

    assert begun(scenario) == [0, 20, 130]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "12345678", "max_tokens": 10}, 12),
        ({"prompt": "ééé"}, 2),
        ({"messages": [{"content": "1234"}, {"content": [{"text": "1234"}]}], "max_completion_tokens": 5, "n": 3}, 17),
        ({"messages": [{"content": [{"image_url": {"url": "data:image/png;base64,AAAA"}}]}]}, 0),
        ({"input": [[1, 2, 3], [4]], "model": "a long name of a model"}, 4),
        ({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 7}}, 9),
        ({"text": "1234", "sampling_params": {"max_new_tokens": 7, "n": 2}}, 15),
        ({"prompt": ["1234", "1234"], "max_tokens": 10, "n": 2}, 42),
        ({"prompt": [[1, 2], [3]], "max_tokens": 10}, 23),
        ([1, 2], 0),
    ],
)
def test_a_request_counts_as_its_text_or_ids_and_the_tokens_it_asks_for(body, tokens):
    assert estimated_tokens(json.dumps(body).encode()) == tokens


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}', 7),
        (b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', 7),
        (b'[{"meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}, {"meta_info": {"prompt_tokens": 2}}]', 6),
        (b'{"data": []}', None),
        (b"data: {}", None),
        (b"\xff", None),
    ],
)
def test_an_answer_counts_as_what_the_server_says(answer, tokens):
    assert used_tokens(answer) == tokens


def test_the_router_counts_requests_by_their_text_and_answers_by_their_usage(monkeypatch):
    steps = []

    async def turn(pace, tokens):
        steps.append(tokens)

    monkeypatch.setattr(Pace, "turn", turn)
    monkeypatch.setattr(Pace, "correct", lambda pace, estimated, tokens: steps.append((estimated, tokens)))

    def answer(path, body):
        return 200, {"usage": {"total_tokens": 9}} if body["max_tokens"] == 8 else {}

    with served(answer) as (url, _):
        router = Router(RewardRouterConfig(tokens_per_minute=1000, model="judge"), [url])
        for asked in (8, 16):
            assert post(router.address, "/v1/completions", {"prompt": "1234", "max_tokens": asked})[0] == 200
        router.close()
    assert steps == [9, (9, 9), 17]

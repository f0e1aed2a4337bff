"""First-complete scheduling of groups, and the history of response lengths."""

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.buffer.over_sampling import first_complete_groups
from verl.trainer.buffer.partial_rollouts import LengthHistory, prompt_key


class Scripted:
    """Groups whose samples end after given turns of the event loop, or when stopped."""

    def __init__(self, durations):
        self.durations = durations
        self.stopped = set()
        self.started = []

    async def _run(self, group, turns):
        self.started.append(group)
        for _ in range(turns):
            await asyncio.sleep(0)
            if group in self.stopped:
                return False
        return True

    @property
    def groups(self):
        return [
            [lambda g=number, t=turns: self._run(g, t) for turns in group]
            for number, group in enumerate(self.durations)
        ]

    async def stop(self, numbers):
        self.stopped.update(numbers)


def run_groups(durations, count, **options):
    script = Scripted(durations)
    result = asyncio.run(first_complete_groups(script.groups, count, script.stop, **options))
    return result, script


def test_the_batch_is_the_groups_that_are_complete_first():
    result, script = run_groups([[50, 2], [3, 4], [90], [1, 1]], 2)
    assert result.batch == [3, 1] and result.surplus == []
    assert script.stopped == {0, 2}


def test_required_groups_are_waited_for_and_the_others_stopped_meanwhile():
    result, script = run_groups([[60], [3], [5], [30]], 2, required={0})
    assert result.batch == [1, 0] and script.stopped == {2, 3}


def test_keep_going_lets_the_others_run_until_the_required_are_complete():
    result, script = run_groups([[60], [3], [5], [90]], 2, required={0}, keep_going=True)
    assert result.batch == [1, 0] and result.surplus == [2] and script.stopped == {3}


def test_groups_complete_at_the_same_moment_come_in_the_order_of_their_numbers():
    assert run_groups([[4], [4], [4]], 2)[0].batch == [0, 1]


def test_an_error_of_one_sample_ends_all_and_leaves_no_task():
    async def fails():
        raise ValueError("the engine died")

    async def main():
        script = Scripted([[50], [50, 60]])
        with pytest.raises(ValueError, match="the engine died"):
            await first_complete_groups([*script.groups, [fails]], 2, script.stop)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(main()) == []


def test_requesting_more_groups_than_there_are_is_refused():
    with pytest.raises(ValueError, match="3 of 2 groups are requested and 0 are required"):
        run_groups([[1], [1]], 3)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_group_is_in_the_batch_surplus_or_stopped(data):
    turns = st.integers(0, 6).map(lambda t: 10 * t)  # far enough apart for the event loop to tell them apart
    durations = data.draw(st.lists(st.lists(turns, min_size=1, max_size=3), min_size=1, max_size=8))
    count = data.draw(st.integers(0, len(durations)))
    required = data.draw(st.sets(st.integers(0, len(durations) - 1), max_size=count))
    result, script = run_groups(durations, count, required=required, keep_going=data.draw(st.booleans()))
    assert len(result.batch) == count and required <= set(result.batch)
    ended = [*result.batch, *result.surplus]
    assert len(ended) == len(set(ended))
    assert set(range(len(durations))) - set(ended) <= script.stopped
    latest = max((max(durations[g]) for g in set(result.batch) - required), default=0)
    assert all(max(durations[g]) >= latest for g in result.surplus)


# -- length history ---------------------------------------------------------------------------------------------------


def test_the_mean_moves_half_way_to_what_was_seen():
    history = LengthHistory()
    history.observe("a", [100, 200])
    assert history.expected("a") == 150
    history.observe("a", [50])
    assert history.expected("a") == 100


def test_an_aborted_response_counts_as_no_shorter_than_expected():
    history = LengthHistory()
    history.observe("a", [100])
    history.observe("a", [], aborted=[10])
    assert history.expected("a") == 100
    history.observe("a", [], aborted=[300])
    assert history.expected("a") == 200


def test_a_new_prompt_is_expected_to_be_like_the_known_ones():
    history = LengthHistory()
    assert history.expected("new") == 0
    history.observe("a", [10])
    history.observe("b", [30])
    assert history.expected("new") == 20


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 99), max_size=4)), max_size=12), st.data())
def test_a_history_read_back_goes_on_as_the_one_that_was_saved(observations, data):
    whole, first = LengthHistory(), LengthHistory()
    at = data.draw(st.integers(0, len(observations)))
    shuffled = [(key, data.draw(st.permutations(ended))) for key, ended in observations]
    for key, ended in observations:
        whole.observe(key, ended)
    for key, ended in shuffled[:at]:
        first.observe(key, ended)
    second = LengthHistory()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for key, ended in shuffled[at:]:
        second.observe(key, ended)
    assert second.state_dict() == whole.state_dict()


def test_prompts_have_keys_of_their_own():
    prompts = [tuple(random.Random(i).choices(range(100), k=5)) for i in range(200)]
    assert len({prompt_key(prompt) for prompt in prompts}) == len(set(prompts))
    assert prompt_key([1, 2]) == prompt_key((1, 2)) != prompt_key([2, 1])

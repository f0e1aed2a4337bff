"""Rows of transformers' engine that join and leave a running decode draw what they draw alone."""

import pytest

from tests.workers.rollout.conftest import FAMILIES
from tests.workers.rollout.test_contract import some_prompts
from verl.workers.rollout.base import Request, SamplingParams

SAMPLING = [
    SamplingParams(14, ignore_eos=True),
    SamplingParams(5, want_log_probs=True),
    SamplingParams(9, temperature=0.5),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_the_same_however_its_rows_meet(family, synced):
    rollout = synced(family, max_num_seqs=5)
    requests = [Request(prompt, SAMPLING[i % 3], seed=i) for i, prompt in enumerate(some_prompts(9))]
    expected = [completion.token_ids for completion in rollout.generate(requests, 1)]
    request_ids, ended = [], {}
    for request in requests:
        request_ids.append(rollout.submit(request, 1))
        ended |= rollout.step()
        ended |= rollout.step()
        assert sum(batch.num_live for batch in rollout._running) <= 5
    while rollout.num_running:
        ended |= rollout.step()
    assert [ended[request_id].token_ids for request_id in request_ids] == expected


def test_rows_that_join_share_a_forward_and_columns_of_those_who_left_are_given_back(synced):
    rollout = synced("qwen2")
    for i in range(40):
        rollout.submit(Request((5, 6, 7), SamplingParams(20, ignore_eos=True), seed=i), 1)
        rollout.step()
    (batch,) = rollout._running
    assert batch.num_live == 19 and batch.length < 50
    rollout.abort(range(40))
    assert rollout.num_running == 0 and not rollout._running


def test_the_cache_bounds_what_runs_and_the_rest_waits_its_turn(synced, monkeypatch):
    rollout = synced("qwen2")
    monkeypatch.setattr(rollout, "_cache_room", lambda: 0)
    request_ids = [rollout.submit(Request((5, 6), SamplingParams(3, ignore_eos=True), seed=i), 1) for i in range(3)]
    order = []
    while rollout.num_running:
        order += rollout.step()
        assert sum(batch.num_live for batch in rollout._running) <= 1
    assert order == request_ids

"""Responses scored while others are generated get the scores they get with the batch, by one call each."""

import logging
import multiprocessing
import socket
import time
from array import array

import numpy as np
import pytest

from tests.rewards.managers.batches import TOKENIZER, batch_of
from tests.rewards.managers.test_managers import config, write
from verl.protocol import DataProto
from verl.rewards.managers.early import EarlyScoring
from verl.rewards.managers.scoring import compute_reward, load_reward_manager
from verl.sandbox.messages import encode, framed
from verl.sandbox.pool import Pool, SandboxedFunction, Source
from verl.sandbox.supervisor import Limits
from verl.single_controller.mailbox import Mailbox, sender
from verl.workers.generation import RolloutRole
from verl.workers.rollout.base import Completion

TEXTS = ["5", "a longer one", "5", "none of it", "", "55"]
FUNCTIONS = {
    "def": "def compute_score(data_source, solution_str, ground_truth, extra_info):\n",
    "async def": "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n",
}
BODY = """    import random
    with open(CALLS, "a") as file:
        file.write(solution_str + "\\n")
    if solution_str == "none of it":
        raise ValueError("no answer")
    return {"score": len(solution_str) + random.random(), "turns": extra_info["num_turns"]}
"""


def generate(address: list, seeds: list, batch: DataProto) -> None:
    """A rank of a rollout, which reports its responses in another order than they are asked for."""
    role = RolloutRole.__new__(RolloutRole)
    role.rollout = type("Engine", (), {"tensor_parallel_size": 1})
    rows = [row.tolist() for row in batch.ragged("responses").rows()]
    with role.reporting({"completions_to": address}, seeds) as ended:
        for place in reversed(range(len(seeds))):
            ended(place, Completion(rows[place], None, "stop"))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_early_scores_are_those_of_the_batch(tmp_path, kind):
    calls = tmp_path / "calls.txt"
    path = write(tmp_path, f"CALLS = {str(calls)!r}\n{FUNCTIONS[kind]}{BODY}")
    if kind == "async def":  # awaited calls share a generator
        path = write(tmp_path, open(path).read().replace("random.random()", "0.25"))
    settings = config(path, on_error="zero_and_count")
    late = compute_reward(batch_of(TEXTS), load_reward_manager(settings, TOKENIZER, 0))
    calls.unlink()
    manager, batch, seeds = load_reward_manager(settings, TOKENIZER, 0), batch_of(TEXTS), list(range(7, 13))
    assert manager.begins_early
    early = EarlyScoring(manager, "127.0.0.1")
    try:
        arguments = (early.open(batch, seeds), seeds, batch)
        rank = multiprocessing.get_context("fork").Process(target=generate, args=arguments)
        rank.start()
        rank.join()  # it waits until the driver has read what it sent
        known = [text for kept in manager._kept_texts for text in kept.values()]
        assert sorted(known) == sorted(set(TEXTS))
        rewards, columns = compute_reward(batch, manager)
    finally:
        early.close()
    assert rewards.equal(late[0]) and columns == late[1]
    assert sorted(calls.read_text().splitlines()) == sorted(TEXTS)


def test_turns_of_a_conversation_reach_the_function_and_a_changed_response_is_scored_again(tmp_path):
    calls = tmp_path / "calls.txt"
    path = write(tmp_path, f"CALLS = {str(calls)!r}\n{FUNCTIONS['def']}{BODY}")
    manager = load_reward_manager(config(path), TOKENIZER, 0)
    batch = batch_of(["5", "ab"])
    early = EarlyScoring(manager, "127.0.0.1")
    address = early.open(batch, [1, 2])
    with sender(address) as send:  # in this process, without a connection
        for seed, row in zip([1, 2], batch.ragged("responses").rows(), strict=True):
            send([seed, array("i", row.tolist()).tobytes(), 4])
        send([3, b"", 2])  # of a batch that nobody expects
    early.close()
    changed = batch_of(["5", "abc"])
    changed.non_tensor_batch["__num_turns__"] = np.array([4, 4], dtype=np.int32)
    rewards, columns = compute_reward(changed, manager)
    assert columns["turns"] == [4, 4] and rewards.sum(-1).floor().tolist() == [1.0, 3.0]
    assert sorted(calls.read_text().splitlines()) == ["5", "ab", "abc"]
    assert manager.next_round() == 0 and manager.next_round() == 1


def test_a_response_that_waits_for_its_group_keeps_its_reward_and_begins_once(tmp_path):
    calls = tmp_path / "calls.txt"
    path = write(tmp_path, f"CALLS = {str(calls)!r}\n{FUNCTIONS['def']}{BODY}")
    manager, batch = load_reward_manager(config(path), TOKENIZER, 0), batch_of(["5", "ab"])
    early = EarlyScoring(manager, "127.0.0.1")
    batch.non_tensor_batch["__num_turns__"] = np.array([2, 2], dtype=np.int32)
    rows = [{name: values[i] for name, values in batch.non_tensor_batch.items()} for i in range(2)]
    ids = [row.tolist() for row in batch.ragged("responses").rows()]
    early.next_round(kept=3)
    for seed in (7, 8, 7):  # the last comes again: a sample that went on from its log
        early.begin(seed, rows[seed - 7], ids[seed - 7], 2)
    early.begin(9, {"data_source": "without a goal"}, ids[0], 2)
    for _ in range(3):
        early.next_round(kept=3)
    first = compute_reward(batch, manager)[1]["score"]
    assert sorted(calls.read_text().splitlines()) == ["5", "ab"] and [int(score) for score in first] == [1, 2]


def test_a_manager_that_needs_the_batch_waits_for_it(tmp_path):
    path = write(
        tmp_path, "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return []\n"
    )
    assert not load_reward_manager(config(path, reward_manager="batch"), TOKENIZER, 0).begins_early


def test_calls_begun_while_others_are_awaited_run_beside_them_and_processes_start_when_calls_wait(tmp_path):
    slow = "import time\ndef compute_score(text):\n    time.sleep(0.2)\n    return 1\n"
    awaited = (  # none of ten ends before all have begun
        "import asyncio\nbegun = []\nasync def compute_score(text):\n    begun.append(text)\n"
        "    while len(begun) < 10:\n        await asyncio.sleep(0.01)\n    return 1\n"
    )
    pools = []
    for name, code in (("slow", slow), ("awaited", awaited)):
        (tmp_path / f"{name}.py").write_text(code)
        pools.append(Pool(Source(str(tmp_path / f"{name}.py"), "compute_score"), Limits(), workers=3, grows=True))
    several, one = map(SandboxedFunction, pools)
    assert len(several.pool.pids) == 1
    several.begin([((str(i),), {}) for i in range(6)])
    for i in range(10):  # the first are under way when the last begin
        one.begin([((str(i),), {})])
        time.sleep(0.01)
    assert [result.score for result in one.rows([((str(i),), {}) for i in range(10)])] == [1.0] * 10
    assert len(one.pool.pids) == 1
    assert [result.score for result in several.rows([((str(i),), {}) for i in range(6)])] == [1.0] * 6
    assert 1 < len(several.pool.pids) <= 3
    for pool in pools:
        pool.close()


def test_a_function_that_cannot_be_loaded_says_so_where_its_results_are_asked_for(tmp_path):
    (tmp_path / "broken.py").write_text("def compute_score(text):\n    return 1\n")
    pool = Pool(Source(str(tmp_path / "broken.py"), "compute_score"), Limits())
    function = SandboxedFunction(pool)
    pool.close()
    (tmp_path / "broken.py").write_text("raise KeyError('half of it')\n")
    function.begin([(("a",), {})])
    with pytest.raises(RuntimeError, match="half of it"):
        function.rows([(("a",), {})])


def test_a_mailbox_takes_messages_of_its_own_workers_only(caplog):
    got: list = []
    mailbox = Mailbox("127.0.0.1", got.extend)
    host, port, _ = mailbox.address
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(framed(encode("a guess")) + framed(encode([1, b"", 2])))
        assert stranger.recv(1) == b""  # closed
    mailbox.close()
    assert got == []
    with caplog.at_level(logging.WARNING), sender([host, port, "gone"]) as send:
        assert send is None
    assert "gets the results at the end" in caplog.text

"""Reward models and judges on servers: the router in front of them, who is asked, and what a failure says."""

import asyncio
import json
import os
import threading
import urllib.error
import urllib.request
from array import array
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForSequenceClassification

from tests.rewards.managers.batches import TOKENIZER, batch_of
from tests.single_controller.roles import Counter
from tests.support.composing import load_over
from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.config.reward import RewardModelConfig, RewardModelModelConfig, RewardRouterConfig
from verl.preflight.estimates import memory_plan
from verl.rewards.managers.early import EarlyScoring
from verl.rewards.router import Router, close_router, router_of
from verl.rewards.scorers import http_json
from verl.single_controller import get_controller
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.mailbox import sender
from verl.trainer.ppo.placement import REWARD_POOL, Role, default_pools, default_roles, start_worker_groups
from verl.utils.tiny_model import make_tiny_model
from verl.workers.reward_server import RewardServerError, RewardServerWorker, ServedRewardModel, score_of


@contextmanager
def served(answer):
    """A server with ``answer(path, body) -> (status, fields)``; yields its URL, and the requests it gets."""
    seen: list = []
    loop = asyncio.new_event_loop()

    async def handle(request):
        body = await request.json() if request.can_read_body else None
        seen.append(SimpleNamespace(path=request.path, body=body, key=request.headers.get("Authorization")))
        status, fields = answer(request.path, body)
        return web.json_response(fields, status=status)

    async def start():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def post(address: str, path: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else {}


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(http_json, "FIRST_PAUSE_S", 0.01)


def test_pauses_grow_to_half_a_minute_and_are_as_long_as_a_server_says():
    for tries, expected in ((1, 0.5), (3, 2.0), (40, 30.0)):
        assert 0.75 * expected <= http_json.pause_s(tries) <= 1.25 * expected
    assert http_json.pause_s(1, "7") == 7 and http_json.pause_s(1, "1000") == 30
    assert http_json.pause_s(1, "Wed, 21 Oct 2015 07:28:00 GMT") < 1


def test_the_router_tries_another_server_and_names_them_when_all_fail(short_pauses, monkeypatch):
    monkeypatch.setenv("VERL_REWARD_API_KEY", "the key")

    def broken(path, body):
        return 503, {"error": "loading"}

    def good(path, body):
        return 200, {"data": [{"id": "judge-7b"}]} if path == "/v1/models" else {"asked": body}

    with served(broken) as (first, at_first), served(good) as (second, at_second):
        router = Router(RewardRouterConfig(tries=2, model=None), [f"{first}/v1", second])
        host = router.address.partition("/")[0]
        for _ in range(3):
            status, answer = post(router.address, "/v1/chat/completions", {"messages": []})
            assert (status, answer) == (200, {"asked": {"messages": [], "model": "judge-7b"}})
        assert {one.key for one in at_second} == {"Bearer the key"} and {one.key for one in at_first} <= {
            "Bearer the key"
        }
        assert post(host, "/v1/chat/completions", {})[0] == 404  # only who knows the address
        router.use([first], None)
        status, answer = post(router.address, "/v1/chat/completions", {"model": "m"})
        assert status == 502 and first in answer["error"]["message"] and "2 tries" in answer["error"]["message"]
        with served(lambda path, body: (401, {"error": "no key"})) as (locked, at_locked):
            router.use([locked], None)
            assert post(router.address, "/classify", {"input": [1]})[0] == 401 and len(at_locked) == 1
        router.close()


def test_a_classifier_on_servers_gives_the_score_of_each_response(short_pauses, tmp_path):
    make_tiny_model(tmp_path / "rm", family="qwen2", size="tiny")

    def classify(path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "rm"}]}
        assert body["use_activation"] is False
        return 200, {"data": [{"probs": [float(len(body["input"]))]}]}

    batch = batch_of(["5", "abc", ""], raw_prompt=["q"] * 3)
    with served(classify) as (url, seen):
        model = RewardModelModelConfig(path=str(tmp_path / "rm"), input_tokenizer="policy")
        config = RewardModelConfig(enable=True, server_urls=url, model=model)
        router = router_of(config)
        model = ServedRewardModel(config, TOKENIZER, router)
        scored = model.compute_rm_score(batch)
        lengths = scored.column("rm_tokens")
        assert scored.ragged("rm_scores").padded().sum(-1).tolist() == [*lengths[:2].tolist(), 0.0]
        asked = len(seen)
        model.compute_rm_score(batch)  # every text is known
        assert len(seen) == asked
        model.next_round()
        model.next_round()
        early = EarlyScoring(model, "127.0.0.1")
        with sender(early.open(batch, [3, 4, 5])) as send:  # two of three responses end before the batch is whole
            for seed, row in zip([5, 3], [2, 0], strict=True):
                send([seed, array("i", list(batch.ragged("responses").rows())[row].tolist()).tobytes()])
        early.close()
        assert [len(texts) for texts in model._begun] == [2, 0]
        assert model.compute_rm_score(batch).column("rm_scores").equal(scored.column("rm_scores"))
        assert len([one for one in seen if one.path == "/classify"]) == 6
        last = batch.ragged("responses").layout.lengths - 1
        assert scored.column("rm_scores")[torch.arange(2), last[:2]].tolist() == lengths[:2].tolist()
        at_once = ServedRewardModel(config.with_values({"use_reward_loop": False}), TOKENIZER, router)
        for _ in range(4):
            at_once.compute_rm_score(batch)
        assert len(at_once._begun) == 2  # no answer of a batch long ago is kept
        close_router()
    assert score_of([{"embedding": [0.5]}]) == 0.5
    with served(lambda path, body: (200, {"data": [{"probs": [0.1, 0.9], "id": "two"}]})) as (url, _):
        config = RewardModelConfig(enable=True, server_urls=[url], model=config.model)
        with pytest.raises(RewardServerError, match="response 0 of the batch has no score"):
            ServedRewardModel(config, TOKENIZER, router_of(config)).compute_rm_score(batch)
        close_router()
    with served(lambda path, body: (401, {"error": "no key"})) as (url, seen):
        config = RewardModelConfig(enable=True, server_urls=[url], model=config.model)
        with pytest.raises(RewardServerError, match="key into the environment variable VERL_REWARD_API_KEY"):
            ServedRewardModel(config, TOKENIZER, router_of(config)).compute_rm_score(batch)
        assert len(seen) <= 3  # once a text at most: a refusal is not tried again
        close_router()


def cache_bytes(rollout):
    if rollout.config.name == "vllm":
        return rollout.memory_parts()["rollout cache"]
    return sum(rollout.call_schedulers("tests.rewards.test_reward_servers:held_cache"))


def held_cache(extension):
    return extension._memory["kv_cache"].held


ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_classifier_in_a_rollout_engine_gives_the_scores_of_transformers(engine, tmp_path):
    folder = make_tiny_model(
        tmp_path / "rm",
        head="sequence",
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.3,
    )
    rollout = {"name": engine, "dtype": "float32", "max_num_seqs": 4}
    model = RewardModelModelConfig(path=folder, input_tokenizer="policy")
    config = RewardModelConfig(enable=True, rollout=rollout, model=model, max_length=30)
    assert config.shares_devices
    own = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    batch = batch_of(["5", "abc", "", "a long response"], raw_prompt=["q"] * 4)
    worker = RewardServerWorker(config, "rm")
    worker.init_model()
    router = router_of(config)
    try:
        address = worker.start_server("a token")
        assert post(address.removeprefix("http://"), "/classify", {"input": [5], "use_activation": False})[0] == 401
        router.use([address], "a token")
        served_model = ServedRewardModel(config, TOKENIZER, router, worker)
        for _ in range(2):  # it wakes, scores and sleeps again
            assert worker.rollout.is_asleep and not served_model.begins_early and cache_bytes(worker.rollout) == 0
            scored = served_model.compute_rm_score(batch)
            served_model.next_round(kept=0)
        worker.stop_server()
        worker.rollout.wake()
        assert cache_bytes(worker.rollout) > 0
        router.use([worker.start_server("a token")], "a token")  # as one with devices of its own, which is awake
        served_model = ServedRewardModel(config, TOKENIZER, router)
        asleep, scored = scored, served_model.compute_rm_score(batch)
        torch.testing.assert_close(asleep.column("rm_scores"), scored.column("rm_scores"), rtol=1e-4, atol=1e-5)
        assert scored.column("rm_tokens_cut").bool().tolist() == [False, False, False, True]
        rows, _ = served_model.retokenizer(["q"] * 4, list(batch.ragged("responses").rows()))
        with torch.no_grad():
            expected = torch.stack([own(input_ids=row[None]).logits.flatten()[-1] for row in rows])
        assert expected.std() > 0.1
        found = torch.tensor(
            [json.loads(answer.result()[1])["data"][0]["probs"][0] for answer in served_model._begin(rows)]
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found[2] = 0  # no token to hold it
        assert scored.ragged("rm_scores").padded().sum(-1).equal(found)
        status, answer = router.post("classify", {"input": [5] * 31, "use_activation": False}).result(20)[:2]
        assert status == 400 and b"A text of 31 tokens" in answer
    finally:
        worker.stop_server()
        close_router()
        getattr(worker.rollout, "close", lambda: None)()


JUDGED = """
import aiohttp

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                        reward_model_tokenizer):
    question = {"messages": [{"role": "user", "content": f"Judge {solution_str}"}], "max_tokens": 4, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/v1/chat/completions", json=question) as answer:
            answer.raise_for_status()
            text = (await answer.json())["choices"][0]["message"]["content"]
    return {"score": len(reward_model_tokenizer(text)["input_ids"]), "answer": text}
"""


def test_a_judge_in_a_rollout_engine_of_its_own_scores_the_responses_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    task = make_task(tmp_path / "task")
    (tmp_path / "judged.py").write_text(JUDGED)
    run_job(
        overrides(
            task,
            custom_reward_function__path=tmp_path / "judged.py",
            reward_model__enable_resource_pool=True,
            reward_model__nnodes=1,
            reward_model__n_gpus_per_node=1,
            reward_model__rollout="{name: hf, prompt_length: 256, response_length: 8, dtype: float32}",
            reward_model__model__path=task["actor_rollout_ref.model.path"],
            trainer__total_training_steps=1,
            trainer__logger="[file]",
            trainer__test_freq=-1,
            trainer__rollout_data_dir=tmp_path / "dump",
            data__train_batch_size=2,
            actor_rollout_ref__actor__ppo_mini_batch_size=2,
        )
    )
    rows = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().splitlines()]
    assert all(1 <= row["score"] <= 5 and isinstance(row["answer"], str) for row in rows)
    step = read_metrics(tmp_path / "metrics.jsonl")[-1]
    step = step.get("data", step)
    assert step["critic/score/mean"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))


def test_a_reward_model_with_devices_of_its_own_has_a_pool():
    words = ["enable=true", "enable_resource_pool=true", "nnodes=2", "n_gpus_per_node=3"]
    config = load_over((), [f"reward_model.{word}" for word in words]).config
    pools = default_pools(config, default_roles(config))
    assert pools.resource_pool_spec[REWARD_POOL] == [3, 3] and pools.mapping[Role.RewardModel] == REWARD_POOL
    assert config.world_size_of(config.reward_model) == 6 and config.processes_beside == {"reward model": 6}


class Placed(Counter):
    def __init__(self, config, role):
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure(self, settings):
        """As a role's worker."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_model_in_an_engine_has_processes_of_its_own_on_the_devices_of_training(ranks):
    words = ["reward_model.enable=true", "reward_model.rollout.name=vllm", f"trainer.n_gpus_per_node={ranks}"]
    config = load_over((), [*words, "trainer.controller=local"]).config
    assert default_roles(config)[Role.RewardModel] is RewardServerWorker
    assert config.world_size_of(config.reward_model) == ranks and not config.processes_beside
    roles, controller = dict.fromkeys([Role.ActorRollout, Role.RewardModel], Placed), get_controller("local")
    pools = default_pools(config, roles)
    groups = start_worker_groups(config, roles, pools, controller, 1, "cpu")
    try:
        assert [*groups] == [Role.RewardModel, Role.ActorRollout]  # loaded, and asleep, before the others
        engine, policy = (group.place() for group in groups.values())
        assert [one["LOCAL_RANK"] for one in engine] == [one["LOCAL_RANK"] for one in policy]
        assert not {one["pid"] for one in engine} & {os.getpid(), *(one["pid"] for one in policy)}
    finally:
        controller.stop()


def test_the_doctor_counts_the_engine_of_a_reward_model_on_the_devices_of_training(tmp_path):
    make_tiny_model(tmp_path / "model")
    words = [f"{role}.model.path={tmp_path / 'model'}" for role in ("actor_rollout_ref", "reward_model")]
    words += ["trainer.device=cuda", "reward_model.enable=true"]
    engine = "reward_model.rollout={name: vllm, gpu_memory_utilization: 0.25}"
    plain, shared = (
        {phase.phase: phase for phase in memory_plan(load_over((), rest).config, 80 << 30)}
        for rest in (words, [*words, engine])
    )
    parts = shared["reward model"].parts
    assert parts["reward engine weights"] + parts["reward engine cache"] == 20 << 30
    assert parts["process"] == 2 * plain["reward model"].parts["process"]
    assert "reward_model.rollout.gpu_memory_utilization" in shared["reward model"].way_out

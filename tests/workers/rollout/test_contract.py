"""What every rollout engine promises, asked of each in the same words. Transformers itself is the oracle."""

import random
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest
import torch

from tests.support.tiny_models import join_batch
from tests.workers.rollout.conftest import weights_of
from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS
from verl.config.distillation import DistillationConfig, TeacherModelConfig
from verl.config.engine import MixedPrecisionConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import Request, SamplingParams, StaleWeightsError, WeightSyncError
from verl.workers.rollout.server.server import RolloutServer
from verl.workers.rollout.weights.canary import canary_prompts, generate_canary
from verl.workers.rollout.weights.sync import sync_weights
from verl.workers.teacher import TeacherWorker
from verl.workers.teacher_server import ServedTeacher

ENGINES = ["hf", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang"))]
FUSED = "model.layers.1.mlp.up_proj.weight"  # one of two tensors that engines fuse into one


@pytest.fixture(params=ENGINES)
def ready(request, built, reference):
    """Build the engine under test with a family and sync it with the reference as version 1."""

    def make(family="tied", **changes):
        rollout = built(request.param, family, **changes)
        rollout.wake()
        sync_weights(weights_of(reference(family), rollout.weights_dtype), rollout, version=1)
        return rollout

    return make


def some_prompts(count, longest=20, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(4, 100) for _ in range(rng.randrange(1, longest + 1))) for _ in range(count)]


def mixed_requests():
    """Twelve requests over five prompts, each with its own sampling and seed."""
    prompts = some_prompts(5)
    sampling = [
        SamplingParams(12, want_log_probs=True),
        SamplingParams(7, temperature=0.6, top_k=9, want_log_probs=True),
        SamplingParams(12, top_p=0.8, temperature=2.0, want_log_probs=True),
        SamplingParams(9, do_sample=False, want_log_probs=True),
    ]
    return [Request(prompts[i * 7 % 5], sampling[i % 4], seed=100 + i) for i in range(12)]


def tokens_of(rollout, requests, version=1):
    return [completion.token_ids for completion in rollout.generate(requests, version)]


def processed_log_probs(model, request, tokens):
    """The log-probs of ``tokens`` under the distribution the request asks to draw from, computed the plain way."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0, len(request.prompt_ids) - 1 : -1]
    logits, sampling = logits.double(), request.sampling
    if not sampling.is_greedy:
        logits = logits / sampling.temperature
        if sampling.top_k > 0:
            logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
        probs, order = logits.softmax(-1).sort(-1, descending=True)
        outside = torch.zeros_like(logits, dtype=bool).scatter(-1, order, probs.cumsum(-1) - probs >= sampling.top_p)
        logits[outside] = -torch.inf
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@contextmanager
def a_noisy_line(rollout, noise):
    """Let ``noise(name, tensor) -> pairs`` change what reaches the engine."""
    update = rollout.update_weights

    def over_the_line(version, buckets):
        return update(version, ([pair for item in bucket for pair in noise(*item)] for bucket in buckets))

    rollout.update_weights = over_the_line
    try:
        yield
    finally:
        del rollout.update_weights


def only(name, change):
    return lambda sent, tensor: change(sent, tensor.clone()) if sent == name else [(sent, tensor)]


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["tied", "untied"])
def test_greedy_text_equals_transformers_generate(family, ready, reference):
    prompts = some_prompts(6)
    requests = [Request(prompt, SamplingParams(60, do_sample=False, ignore_eos=True)) for prompt in prompts]
    for prompt, completion in zip(prompts, ready(family).generate(requests, 1), strict=True):
        expected = reference(family).generate(
            torch.tensor([prompt]), max_new_tokens=60, min_new_tokens=60, do_sample=False, eos_token_id=None
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert completion.finish_reason == "length"


def test_completions_come_in_order_and_do_not_depend_on_other_requests(ready):
    rollout, requests = ready(), mixed_requests()
    alone = [tokens_of(rollout, [request])[0] for request in requests]
    order = random.Random(1).sample(range(12), 12)
    shuffled = tokens_of(rollout, [requests[i] for i in order] + requests[:4])
    assert shuffled == [alone[i] for i in order] + alone[:4]
    assert len(set(map(tuple, alone))) > 8
    # each is reported as it ends: the first of the batch is the longest by far, however late the others are begun
    slow = Request(requests[0].prompt_ids, SamplingParams(100, do_sample=False, ignore_eos=True))
    ended: dict[int, list[int]] = {}
    rollout.generate([slow, *requests], 1, lambda place, completion: ended.update({place: completion.token_ids}))
    assert [ended[i + 1] for i in range(12)] == alone
    assert list(ended)[-1] == 0 and len(ended[0]) == 100


def test_another_seed_gives_another_response_and_the_same_seed_the_same(ready):
    sampling = SamplingParams(16, ignore_eos=True, temperature=2.0)
    sampled = tokens_of(ready(), [Request(some_prompts(1)[0], sampling, seed) for seed in (5, 6, 5, -1, 2**63)])
    assert sampled[0] == sampled[2] and len(set(map(tuple, sampled))) == 4


@pytest.mark.parametrize("family", ["tied", "untied"])
def test_log_probs_are_those_of_the_distribution_that_was_sampled(family, ready, reference):
    requests = mixed_requests()
    for request, completion in zip(requests, ready(family).generate(requests, 1), strict=True):
        expected = processed_log_probs(reference(family), request, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def check_served_as_a_teacher(rollout, prompts, k=5):
    """A teacher in this engine, or on a server with it, gives the columns that it gives in a training engine."""
    folder = rollout.spec.folder
    config = ActorRolloutRefConfig().with_values({"model.path": folder})
    server = RolloutServer(rollout, 1, tokenizer=hf_tokenizer(folder))
    try:
        entries = {"local": {"model_path": folder}, "served": {"server_urls": server.start()}}
        rows = [torch.tensor(prompt) for prompt in prompts]
        data = join_batch([row[:1] for row in rows], [row[1:] for row in rows], 8, 24, torch.Generator())
        found = {}
        for name, entry in entries.items():
            options = DistillationConfig(teacher_models={name: entry}).with_values(
                {
                    "distillation_loss.loss_mode": "forward_kl_topk",
                    "distillation_loss.topk": k,
                    "teacher.strategy": "local",
                    "teacher.log_prob_micro_batch_size_per_gpu": 2,
                    "teacher.fsdp_config.mixed_precision": MixedPrecisionConfig(param_dtype="fp32"),
                }
            )
            worker = TeacherWorker(config, "teacher", "cpu", distillation=options)
            worker.init_model()
            found[name] = worker.compute_teacher_log_prob(data)
        ServedTeacher("served", TeacherModelConfig(**entries["served"])).check(server.tokenizer)
    finally:
        server.stop()
    worker.served, worker.rollouts = {}, {"served": rollout}
    found["in the worker"] = worker.compute_teacher_log_prob(data)
    expected = found.pop("local")
    for other in found.values():
        for column in (TEACHER_LOG_PROBS, TOP_LOG_PROBS):
            torch.testing.assert_close(other.ragged(column).values, expected.ragged(column).values, atol=1e-4, rtol=0)
        assert torch.equal(other.ragged(TOP_IDS).values, expected.ragged(TOP_IDS).values)


def test_prompts_are_scored_under_the_model_itself_with_their_likeliest_tokens(ready, reference):
    rollout, prompts, k = ready("untied"), some_prompts(4, seed=9), 5
    sampling = SamplingParams(1, temperature=0.3, top_k=2, prompt_log_probs=k)
    requests = [Request(prompt, sampling) for prompt in prompts]
    completions = rollout.generate(requests, 1)
    ids = [rollout.submit(request, 1) for request in requests]
    stepped = {}
    while len(stepped) < len(ids):
        stepped |= rollout.step()
    for prompt, one, other in zip(prompts, completions, (stepped[i] for i in ids), strict=True):
        with torch.no_grad():
            log_p = reference("untied")(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        own, best = log_p.gather(1, torch.tensor(prompt)[1:, None])[:, 0], log_p.topk(k)
        for found in (one.prompt_log_probs, other.prompt_log_probs):
            assert found.log_probs == pytest.approx(own.tolist(), abs=1e-4)
            torch.testing.assert_close(torch.tensor(found.top_log_probs).reshape(-1, k), best.values, atol=1e-4, rtol=0)
            assert torch.tensor(found.top_ids).reshape(-1, k).tolist() == best.indices.tolist()
    check_served_as_a_teacher(rollout, [prompt for prompt in prompts if len(prompt) > 1])
    alone = rollout.generate([Request(prompts[0], SamplingParams(1, prompt_log_probs=n)) for n in (0, None)], 1)
    assert len(alone[0].prompt_log_probs.log_probs) == len(prompts[0]) - 1 and alone[1].prompt_log_probs is None


def test_first_tokens_follow_the_softmax(ready, reference):
    num_samples, request = 3000, Request(some_prompts(1, seed=3)[0], SamplingParams(1, temperature=2.0))
    requests = [Request(request.prompt_ids, request.sampling, seed) for seed in range(num_samples)]
    counts = torch.bincount(torch.tensor(tokens_of(ready(), requests))[:, 0], minlength=100).double()
    with torch.no_grad():
        logits = reference("tied")(torch.tensor([request.prompt_ids])).logits[0, -1].double()
    expected = (logits / 2).softmax(-1) * num_samples
    common = expected >= 5
    observed = torch.cat([counts[: len(expected)][common], counts[: len(expected)][~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    degrees = len(expected) - 1
    assert degrees >= 3
    assert ((observed - expected) ** 2 / expected).sum() < degrees + 4 * (2 * degrees) ** 0.5


def test_a_response_ends_with_its_first_stop_token(ready):
    rollout, prompts = ready(), some_prompts(20)
    free = SamplingParams(40, temperature=2.0, ignore_eos=True)
    unstopped = tokens_of(rollout, [Request(prompt, free, i) for i, prompt in enumerate(prompts)])
    own, stops = rollout.stop_token_ids, (unstopped[0][3], unstopped[1][9], unstopped[2][30])
    rollout.stop_token_ids = set(stops[:2])
    stopping = SamplingParams(40, temperature=2.0, stop_token_ids=stops[2:])
    try:
        completions = rollout.generate([Request(prompt, stopping, i) for i, prompt in enumerate(prompts)], 1)
    finally:
        rollout.stop_token_ids = own
    for whole, completion in zip(unstopped, completions, strict=True):
        first = next((i for i, token in enumerate(whole) if token in stops), None)
        assert completion.token_ids == (whole if first is None else whole[: first + 1])
        assert completion.finish_reason == ("length" if first is None else "stop")
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_rows_stop_at_their_own_max_tokens_and_at_the_models_length(ready):
    rollout, prompt = ready(), some_prompts(1)[0]
    requests = [Request(prompt, SamplingParams(n, ignore_eos=True), n) for n in (1, 30, 3, 8, 8, 2)]
    assert [len(tokens) for tokens in tokens_of(rollout, requests)] == [1, 30, 3, 8, 8, 2]
    room = rollout.max_model_len
    assert len(tokens_of(rollout, [Request((5,) * (room - 4), SamplingParams(9, ignore_eos=True))])[0]) == 4
    with pytest.raises(ValueError, match=f"{room} tokens does not fit.*max_model_len={room}.*data.max_prompt_length"):
        rollout.generate([Request((5,) * room, SamplingParams(1))], 1)


def test_log_probs_are_returned_only_to_who_asked(ready):
    prompt = some_prompts(1)[0]
    requests = [Request(prompt, SamplingParams(2, want_log_probs=wanted)) for wanted in (True, False)]
    asked, silent = ready().generate(requests, 1)
    assert len(asked.log_probs) == len(asked.token_ids) and silent.log_probs is None


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["tied", "untied"])
@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 1 << 30])
def test_an_update_changes_the_output_to_that_of_the_new_weights(family, bucket_bytes, ready, reference):
    rollout, requests = ready(family), mixed_requests()
    before = tokens_of(rollout, requests)  # also fills the engine's prefix cache under the old weights
    generator = torch.Generator().manual_seed(7)
    model = reference(family)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        receipt = sync_weights(weights_of(model), rollout, version=2, bucket_bytes=bucket_bytes)
        completions = rollout.generate(requests, 2)
        for request, completion in zip(requests, completions, strict=True):
            expected = processed_log_probs(model, request, completion.token_ids)
            assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
        assert receipt.num_bytes == sum(tensor.nbytes for _, tensor in weights_of(model))
    finally:
        model.load_state_dict(old)
    assert [completion.token_ids for completion in completions] != before


def flip_a_bit(name, tensor):
    tensor.view(torch.int32)[5, 7] ^= 1
    return [(name, tensor)]


FAULTS = {
    "a flipped bit": (only(FUSED, flip_a_bit), FUSED),
    "swapped rows": (only(FUSED, lambda n, t: [(n, t[[1, 0, *range(2, len(t))]])]), FUSED),
    "zeros": (only(FUSED, lambda n, t: [(n, torch.zeros_like(t))]), FUSED),
    "a lost fused tensor": (only(FUSED, lambda n, t: []), "up_proj|gate_up_proj"),
    "a lost tensor": (only("model.norm.weight", lambda n, t: []), "model.norm.weight"),
    "a transposed tensor": (only(FUSED, lambda n, t: [(n, t.T.contiguous()[:, :77])]), FUSED),
    "a tensor sent twice": (only(FUSED, lambda n, t: [(n, t)] * 2), f"{FUSED} was sent twice"),
    "an unknown name": (only(FUSED, lambda n, t: [(n, t), (n.replace("up", "upp"), t)]), "upp_proj"),
    "a neighbour's name": (only(FUSED, lambda n, t: [(n.replace("up_", "gate_"), t)]), "gate_proj"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_caught_and_nothing_is_generated_until_a_good_sync(fault, ready, reference):
    noise, names = FAULTS[fault]
    rollout = ready()
    for _ in range(2):  # an engine may load a second time by other means, and again as at first after a failure
        with a_noisy_line(rollout, noise), pytest.raises(WeightSyncError, match=names):
            sync_weights(weights_of(reference("tied")), rollout, version=3)
    with pytest.raises(StaleWeightsError):
        rollout.generate([Request((5,), SamplingParams(1))], expect_version=3)
    sync_weights(weights_of(reference("tied")), rollout, version=3)
    assert rollout.version == 3


# -- versions and sleep ------------------------------------------------------------------------------------------------


def test_weights_of_another_version_are_never_generated_with(ready):
    with pytest.raises(StaleWeightsError, match="wants weights of version 2, but the rollout holds version 1"):
        ready().generate([Request((5, 6), SamplingParams(2))], expect_version=2)


def test_a_sleeping_rollout_refuses_to_generate_and_to_load_and_forgets_its_version(ready, reference):
    rollout, request = ready(), Request((5, 6), SamplingParams(2))
    rollout.sleep()
    assert rollout.is_asleep and rollout.version is None
    with pytest.raises(StaleWeightsError, match="asleep"):
        rollout.generate([request], 1)
    with pytest.raises(WeightSyncError, match="asleep"):
        sync_weights(weights_of(reference("tied")), rollout, version=1)
    rollout.wake()
    with pytest.raises(StaleWeightsError, match="no confirmed weights"):
        rollout.generate([request], 1)


ORDERS = {
    "as a step does": ["sleep2", "weights", "sync", "kv_cache"],
    "all at once": ["sleep1", "both", "sync"],
    "cache first": ["sleep1", "kv_cache", "weights", "sync"],
    "sync before the cache, twice": ["sleep2", "weights", "sync", "sync", "kv_cache"],
    "asleep twice": ["sleep1", "sleep2", "both", "sync"],
    "asleep again half awake": ["sleep2", "weights", "sleep1", "both", "sync"],
    "asleep again with the cache": ["sleep2", "kv_cache", "sleep2", "weights", "kv_cache", "sync"],
    "awake twice": ["both", "weights", "sync", "both"],
}


@pytest.mark.parametrize("order", ORDERS)
def test_sleep_and_wake_are_legal_in_any_order_and_change_nothing_after_a_sync(order, ready, reference):
    rollout, requests = ready(), mixed_requests()
    before = tokens_of(rollout, requests)
    for step in ORDERS[order]:
        if step.startswith("sleep"):
            rollout.sleep(level=int(step[-1]))
        elif step == "sync":
            sync_weights(weights_of(reference("tied")), rollout, version=2)
        else:
            rollout.wake(("weights", "kv_cache") if step == "both" else (step,))
    assert not rollout.is_asleep
    assert tokens_of(rollout, requests, version=2) == before


def test_sleep_gives_memory_back(ready, reference):
    rollout = ready("wide")
    tokens_of(rollout, [Request(prompt, SamplingParams(4)) for prompt in some_prompts(4)])
    processes = [psutil.Process(pid) for pid in getattr(rollout, "pids", [None])]  # engines may be other processes
    weights = sum(parameter.nbytes for parameter in reference("wide").parameters())
    assert weights > 40 << 20
    awake = sum(process.memory_info().rss for process in processes)
    rollout.sleep(level=2)
    asleep = sum(process.memory_info().rss for process in processes)
    rollout.wake()
    assert awake - asleep > 0.9 * weights


def test_weights_that_are_read_from_the_folder_are_version_zero(built, ready, request):
    name = request.node.callspec.params["ready"]
    rollout, requests = built(name, load_format="auto"), mixed_requests()
    assert tokens_of(rollout, requests, version=0) == tokens_of(ready(), requests)
    rollout.sleep()
    rollout.wake()
    with pytest.raises(StaleWeightsError):  # version 0 does not come back by itself
        rollout.generate(requests, 0)


def test_a_canary_of_an_engine_has_the_log_probs_of_its_weights(ready, reference):
    rollout, prompts = ready(), canary_prompts(lambda text: [4 + ord(c) % 90 for c in text], 8, 64)
    rollout.monitor.take_metrics({})  # what other tests asked the engine for
    canary = generate_canary(rollout, prompts, version=1)
    assert canary.version == 1 and len(canary.tokens) == len(prompts) == 8 and max(map(len, prompts)) == 8
    model = reference("tied")
    with torch.no_grad():
        last = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]).log_softmax(-1)
    torch.testing.assert_close(torch.tensor(canary.log_probs), last.max(-1).values, atol=2e-4, rtol=0)
    assert not rollout.monitor.take_metrics({}).get("requests")


# -- requests from outside ---------------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    """Start a server over an engine that holds version 1; stopped at the end."""
    with ExitStack() as stack:

        def start(engine):
            server = RolloutServer(engine, 1)
            server.start()
            stack.callback(server.stop)
            return server

        yield start


HOSTILE = {
    "a token beyond the vocabulary": {"prompt_ids": [10**9]},
    "a bias beyond the vocabulary": {"sampling": {"extra": {"logit_bias": {"1000000000": 1}}}},
    "a ban beyond the vocabulary": {"sampling": {"banned_token_ids": [10**9]}},
    "a tiny temperature": {"sampling": {"temperature": 1e-320}},
    "a bias that overflows": {"sampling": {"extra": {"logit_bias": {"5": 1e39}}}},
    "an unknown parameter": {"sampling": {"extra": {"no_such_parameter": 1}}},
}


def test_hostile_requests_are_refused_before_a_served_engine_sees_them(ready, serve):
    server = serve(ready())

    def post(changes):
        body = {"prompt_ids": [5, 6], "seed": 1, **changes}
        body["sampling"] = {"max_tokens": 4, "ignore_eos": True, **changes.get("sampling", {})}
        return httpx.post(f"{server.address}/generate", json=body, timeout=60)

    before = post({}).json()
    refused = {name: post(changes) for name, changes in HOSTILE.items()}
    assert {name: answer.status_code for name, answer in refused.items()} == dict.fromkeys(HOSTILE, 400)
    # taken or refused as the engine can, they end no other request
    extreme = [{"temperature": 100.0}, {"temperature": 1e30}, {"top_p": 1e-30}, {"repetition_penalty": 1e3}]
    answers = [post({"sampling": sampling}) for sampling in extreme]
    assert {answer.status_code for answer in answers} <= {200, 400}, [answer.text for answer in answers]
    assert post({}).json()["token_ids"] == before["token_ids"] and server.loop.error is None

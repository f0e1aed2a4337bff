import random

import pytest
import torch

from tests.workers.rollout.conftest import FAMILIES, rollout_config
from verl.workers.rollout.base import Request, SamplingParams, StaleWeightsError
from verl.workers.rollout.hf.model import GrowingLayer
from verl.workers.rollout.hf.rollout import HFRollout

VOCAB = 100


def some_prompts(count, longest=20, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, longest + 1))) for _ in range(count)]


def mixed_requests():
    """Twelve requests over five prompts, each with its own sampling and seed."""
    prompts = some_prompts(5)
    sampling = [
        SamplingParams(12, want_log_probs=True),
        SamplingParams(7, temperature=0.6, top_k=9, want_log_probs=True),
        SamplingParams(12, top_p=0.8, want_log_probs=True),
        SamplingParams(9, do_sample=False, want_log_probs=True),
    ]
    return [Request(prompts[i * 7 % 5], sampling[i % 4], seed=100 + i) for i in range(12)]


def teacher_forced(model, prompt, tokens):
    """Logits before each of ``tokens``, one row at a time, (len(tokens), V) float64."""
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt) + list(tokens)])).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def processed_log_probs(logits, sampling):
    """log-softmax of what may be sampled, by sorting: the plain way to write it."""
    if sampling.is_greedy:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k > 0:
        kth = logits.sort(-1, descending=True).values[:, sampling.top_k - 1, None]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    outside = probs.cumsum(-1) - probs >= sampling.top_p
    outside = torch.zeros_like(outside).scatter(-1, order, outside)
    return logits.masked_fill(outside, float("-inf")).log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers_generate(family, synced, reference):
    prompts = some_prompts(6)
    sampling = SamplingParams(75, do_sample=False, ignore_eos=True)
    rollout = synced(family, max_num_batched_tokens=30)
    completions = rollout.generate([Request(prompt, sampling) for prompt in prompts], expect_version=1)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = reference(family).generate(
            torch.tensor([prompt]), max_new_tokens=75, min_new_tokens=75, do_sample=False, eos_token_id=None
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert completion.finish_reason == "length"


def test_completions_come_in_the_order_of_the_requests(synced):
    rollout = synced()
    requests = mixed_requests()
    together = rollout.generate(requests, expect_version=1)
    alone = [rollout.generate([request], expect_version=1)[0] for request in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) > 8


@pytest.mark.parametrize(
    "changes",
    [{"max_num_seqs": 1}, {"max_num_seqs": 5}, {"max_num_batched_tokens": 25}, {"gpu_memory_utilization": 1e-9}],
    ids=str,
)
def test_sampled_tokens_do_not_depend_on_how_requests_are_batched(changes, synced):
    requests = mixed_requests()
    expected = synced().generate(requests, expect_version=1)
    order = random.Random(1).sample(range(12), 12)
    shuffled = synced(**changes).generate([requests[i] for i in order], expect_version=1)
    for i, completion in zip(order, shuffled, strict=True):
        assert completion.token_ids == expected[i].token_ids
        assert completion.log_probs == pytest.approx(expected[i].log_probs, abs=1e-4)


def test_another_seed_gives_another_response_and_the_same_seed_the_same(synced):
    prompt, sampling = some_prompts(1)[0], SamplingParams(16, ignore_eos=True, temperature=2.0)
    requests = [Request(prompt, sampling, seed) for seed in (5, 6, 5, -1, 2**63)]
    generated = [tuple(c.token_ids) for c in synced().generate(requests, expect_version=1)]
    assert generated[0] == generated[2] and len(set(generated)) == 4


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 2.5}, {"top_k": 8, "temperature": 3.0}, {"top_p": 0.8, "temperature": 3.0}],
    ids=str,
)
def test_first_tokens_follow_the_softmax(sampling, synced, reference):
    num_samples = 20_000
    prompt, params = some_prompts(1, seed=3)[0], SamplingParams(1, **sampling)
    requests = [Request(prompt, params, seed) for seed in range(num_samples)]
    generated = torch.tensor([c.token_ids[0] for c in synced().generate(requests, expect_version=1)])
    probs = processed_log_probs(teacher_forced(reference(), prompt, [0]), params)[0].exp()
    counts = torch.bincount(generated, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    common = probs * num_samples >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * num_samples
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    assert degrees >= 3
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_later_tokens_follow_the_softmax_too(synced, reference):
    prompt, params = (
        some_prompts(1, seed=4)[0],
        SamplingParams(3, ignore_eos=True, temperature=1.5, want_log_probs=True),
    )
    completions = synced().generate([Request(prompt, params, seed) for seed in range(3000)], expect_version=1)
    # E[-log p] over samples is the entropy of the sequence; each step's surprise has mean zero around its entropy
    surprise = torch.tensor([c.log_probs for c in completions]).double()
    with torch.no_grad():
        rows = torch.tensor([list(prompt) + c.token_ids for c in completions])
        log_probs = (reference()(rows).logits[:, len(prompt) - 1 : -1].double() / 1.5).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    error = (-surprise - entropy).mean(0)
    deviation = (-surprise - entropy).std(0) / len(completions) ** 0.5
    assert (error.abs() < 4 * deviation).all()


@pytest.mark.parametrize("family", ["qwen2", "mistral_window_7"])
def test_log_probs_are_those_of_the_distribution_that_was_sampled(family, synced, reference):
    requests = mixed_requests()
    for request, completion in zip(requests, synced(family).generate(requests, expect_version=1), strict=True):
        logits = teacher_forced(reference(family), request.prompt_ids, completion.token_ids)
        expected = processed_log_probs(logits, request.sampling)
        expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_log_probs_are_returned_only_on_request(synced):
    prompt = some_prompts(1)[0]
    requests = [Request(prompt, SamplingParams(2, want_log_probs=wanted)) for wanted in (True, False)]
    asked, silent = synced().generate(requests, expect_version=1)
    assert len(asked.log_probs) == len(asked.token_ids) and silent.log_probs is None


def test_a_response_ends_with_its_first_stop_token(synced):
    rollout, prompts = synced(), some_prompts(30)  # so many that ended rows stay in the batch for a while
    free = SamplingParams(40, temperature=2.0, ignore_eos=True)
    unstopped = [c.token_ids for c in rollout.generate([Request(p, free, i) for i, p in enumerate(prompts)], 1)]
    stops = (unstopped[0][3], unstopped[1][9], unstopped[2][30])
    rollout.stop_token_ids = set(stops[:2])
    stopping = SamplingParams(40, temperature=2.0, stop_token_ids=stops[2:])
    completions = rollout.generate([Request(p, stopping, i) for i, p in enumerate(prompts)], 1)
    for whole, completion in zip(unstopped, completions, strict=True):
        first = next((i for i, token in enumerate(whole) if token in stops), None)
        assert completion.token_ids == (whole if first is None else whole[: first + 1])
        assert completion.finish_reason == ("length" if first is None else "stop")
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_every_end_token_of_the_generation_config_stops(model_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder())
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    assert HFRollout(str(tmp_path), rollout_config()).stop_token_ids == {2, 7}


def test_prompt_caches_are_freed_once_they_are_in_the_decode_cache(synced, monkeypatch):
    from transformers.cache_utils import DynamicLayer

    kept = []
    monkeypatch.setattr(DynamicLayer, "reset", lambda self: kept.append(self))  # some releases keep the memory
    fill = GrowingLayer.fill

    def watched(self, parts, owner):
        fill(self, parts, owner)
        kept.extend(part for part in parts if part.keys is not None or part.values is not None)

    monkeypatch.setattr(GrowingLayer, "fill", watched)
    synced("qwen2").generate([Request((5, 6, 7), SamplingParams(4, ignore_eos=True))], expect_version=1)
    assert not kept


def test_memory_that_was_never_filled_is_never_read(synced, monkeypatch):
    requests = mixed_requests()
    expected = synced().generate(requests, 1)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(float("nan"))
    )
    generated = synced(max_num_batched_tokens=25).generate(requests, 1)
    assert [c.token_ids for c in generated] == [c.token_ids for c in expected]


def test_rows_stop_at_their_own_max_tokens(synced):
    prompt = some_prompts(1)[0]
    requests = [Request(prompt, SamplingParams(n, ignore_eos=True), n) for n in (1, 30, 3, 8, 8, 2)]
    assert [len(c.token_ids) for c in synced().generate(requests, 1)] == [1, 30, 3, 8, 8, 2]


def test_a_response_ends_where_the_model_length_ends(synced):
    rollout = synced(max_model_len=12)
    requests = [Request((5,) * length, SamplingParams(50, ignore_eos=True)) for length in (4, 11)]
    assert [len(c.token_ids) for c in rollout.generate(requests, 1)] == [8, 1]
    with pytest.raises(ValueError, match="12 tokens does not fit.*max_model_len=12.*data.max_prompt_length"):
        rollout.generate([Request((5,) * 12, SamplingParams(1))], 1)


def test_a_length_beyond_the_models_context_is_refused_at_the_start(model_folder):
    with pytest.raises(ValueError, match="max_model_len=4096 .*context of 2048.*max_position_embeddings"):
        HFRollout(model_folder(), rollout_config(max_model_len=4096))
    HFRollout(model_folder(), rollout_config(max_model_len=4096), override_config={"max_position_embeddings": 4096})


def test_a_prompt_is_read_once_for_all_its_responses_and_ended_rows_leave_the_batch(synced):
    rollout, seen = synced(), []
    rollout.generate([Request((5,), SamplingParams(1))], 1)  # the first request waits for the trial of the model
    rollout.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    prompts = [(5, 6, 7), (8, 9, 10, 11)]
    requests = [Request(p, SamplingParams(2 + 3 * i, ignore_eos=True), i) for i in range(4) for p in prompts]
    rollout.generate(requests, 1)
    assert seen[0] == (2, 4)
    rows = [shape[0] for shape in seen[1:]]
    assert rows == [8] + [6] * 3 + [4] * 3 + [2] * 3


def test_no_requests_give_no_completions(synced):
    assert synced().generate([], expect_version=1) == []


def test_non_finite_logits_stop_the_generation(synced):
    rollout = synced()
    rollout.model.get_output_embeddings().weight[3, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="logits are not finite.*actor.optim.lr"):
        rollout.generate([Request((5, 6), SamplingParams(3))], 1)


def test_half_precision_holds_half_the_bytes_and_nearly_the_same_distribution(synced, reference):
    rollout, prompt = synced(dtype="bfloat16"), some_prompts(1)[0]
    assert {tensor.dtype for tensor in rollout.model.parameters()} == {torch.bfloat16}
    sampling = SamplingParams(10, ignore_eos=True, want_log_probs=True)
    (completion,) = rollout.generate([Request(prompt, sampling)], 1)
    exact = teacher_forced(reference(), prompt, completion.token_ids).log_softmax(-1)
    exact = exact.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    gap = (torch.tensor(completion.log_probs) - exact).abs()
    assert 1e-6 < gap.mean() < 0.2


def test_a_sleeping_rollout_holds_no_weights_and_refuses_to_generate(synced):
    rollout = synced()
    request = Request((5, 6), SamplingParams(2))
    rollout.sleep()
    assert sum(p.untyped_storage().nbytes() for p in rollout.model.parameters()) == 0
    assert rollout.is_asleep and rollout.version is None
    with pytest.raises(StaleWeightsError, match="asleep"):
        rollout.generate([request], 1)
    rollout.wake(("kv_cache",))
    assert rollout.is_asleep
    rollout.wake(("weights",))
    with pytest.raises(StaleWeightsError, match="no confirmed weights"):
        rollout.generate([request], 1)


def test_generating_under_another_version_is_refused(synced):
    rollout = synced()
    with pytest.raises(StaleWeightsError, match="wants weights of version 2, but the rollout holds version 1"):
        rollout.generate([Request((5, 6), SamplingParams(2))], expect_version=2)


def test_sleeping_and_waking_changes_nothing_after_a_new_sync(synced, reference):
    from tests.workers.rollout.conftest import weights_of
    from verl.workers.rollout.weights.sync import sync_weights

    rollout, requests = synced(), mixed_requests()
    before = rollout.generate(requests, 1)
    for version in (2, 3):
        rollout.sleep(level=version - 1)
        rollout.wake()
        sync_weights(weights_of(reference()), rollout, version)
        assert rollout.generate(requests, version) == before


def test_dummy_weights_are_not_read_and_others_are_version_zero(model_folder, synced):
    requests = mixed_requests()
    assert HFRollout(model_folder(), rollout_config()).version is None
    loaded = HFRollout(model_folder(), rollout_config(load_format="auto"))
    assert loaded.generate(requests, 0) == synced().generate(requests, 1)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2"),
    ],
)
def test_impossible_sampling_parameters_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_tokens": 1} | bad)


def test_prepacked_weights_compute_what_plain_ones_do_and_are_freed_in_sleep(synced, monkeypatch):
    rollout, prompt = synced(dtype="bfloat16"), some_prompts(1)[0]
    ids = torch.tensor([list(prompt)])
    prepacked = rollout._prepacked
    if not prepacked.full_bytes:
        pytest.skip("this CPU or torch has no bf16 products of oneDNN")
    with torch.inference_mode():
        plain = rollout.model(ids).logits.float().log_softmax(-1)
        prepacked.prepack()
        assert prepacked.num_bytes == prepacked.full_bytes > 0
        found = rollout.model(ids).logits.float().log_softmax(-1)
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
        # queries, keys and values really came from one product
        products = []
        whole = torch.ops.mkldnn._linear_pointwise
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: products.append(a) or whole(*a))
        rollout.model(ids)
    layers = rollout.model_config.num_hidden_layers
    assert len(products) == 5 * layers + 1  # with output, gate, up and down projections, and the head
    held = rollout.memory_parts()["rollout weights"]
    rollout.sleep(2)
    assert held > prepacked.full_bytes and rollout.memory_parts()["rollout weights"] == 0

"""Sampling exactly as asked, by every engine: each setting against its closed form or against transformers."""

import pytest
import torch

from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.test_contract import ENGINES, some_prompts, tokens_of
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.weights.sync import sync_weights

WITH_VLLMS_NAMES = [engine for engine in ENGINES if getattr(engine, "values", (engine,))[0] in ("hf", "vllm")]


@pytest.fixture(scope="module")
def engines(model_folder):
    """name -> that engine, built once."""
    started = {}

    def start(name):
        if name not in started:
            config = rollout_config(max_num_seqs=64, max_num_batched_tokens=512, use_fire_sampling=True)
            started[name] = get_rollout_class(name)(model_folder("tied"), config)
        return started[name]

    return start


@pytest.fixture(params=ENGINES)
def rollout(request, engines, reference):
    engine = engines(request.param)
    engine.wake()
    sync_weights(weights_of(reference("tied"), engine.weights_dtype), engine, version=1)
    return engine


@pytest.fixture(scope="module")
def text_of(model_folder):
    tokenizer = hf_tokenizer(model_folder("tied"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def distributions(model, request, tokens):
    """Log-probs (T, V) that each of ``tokens`` was to be sampled with, computed the plain way, a token at a time."""
    with torch.no_grad():
        rows = model(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0, len(request.prompt_ids) - 1 : -1]
    return torch.stack([_distribution(row, request, tokens[:t]) for t, row in enumerate(rows.double())])


def _distribution(logits, request, sampled):
    sampling, extra = request.sampling, request.sampling.extra
    for token, bias in {**extra.get("logit_bias", {}), **dict.fromkeys(sampling.banned_token_ids, -torch.inf)}.items():
        logits[token] += bias
    if len(sampled) < extra.get("min_tokens", 0):
        logits[list(sampling.stop_token_ids)] = -torch.inf
    for token in {*request.prompt_ids, *sampled}:
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token in set(sampled):
        logits[token] -= extra.get("frequency_penalty", 0) * sampled.count(token) + extra.get("presence_penalty", 0)
    if sampling.is_greedy:
        return logits.log_softmax(-1)
    hot = not sampled and sampling.first_token_temperature is not None
    logits /= sampling.first_token_temperature if hot else sampling.temperature
    probs = logits.softmax(-1)
    logits[probs < sampling.min_p * probs.max()] = -torch.inf
    top_k = sampling.first_token_top_k if hot and sampling.first_token_top_k > 0 else sampling.top_k
    if top_k > 0:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    probs, order = logits.softmax(-1).sort(descending=True)
    logits[order[probs.cumsum(-1) - probs >= sampling.top_p]] = -torch.inf
    return logits.log_softmax(-1)


SETTINGS = {
    "min_p": {"min_p": 0.3, "temperature": 1.5},
    "min_p and top_p": {"min_p": 0.05, "top_p": 0.8, "temperature": 1.5},
    "repetition penalty": {"repetition_penalty": 1.7},
    "repetition penalty below 1, greedy": {"repetition_penalty": 0.7, "do_sample": False},
    "bans": {"banned_token_ids": tuple(range(4, 60))},
    "a hot first token": {"first_token_temperature": 30.0, "temperature": 0.7},
    "a hot first token of few": {"first_token_temperature": 30.0, "first_token_top_k": 3, "top_p": 0.9},
    "a hot first token under all others": {
        "first_token_temperature": 5.0, "min_p": 0.2, "top_k": 12, "repetition_penalty": 1.3, "temperature": 0.8},
    "top_k=0": {"top_k": 0},
    "frequency": {"extra": {"frequency_penalty": 1.5}},
    "presence": {"extra": {"presence_penalty": -1.0, "frequency_penalty": 0.3}},
}  # fmt: skip


def requests_of(settings, length=12, count=6):
    sampling = SamplingParams(**{"max_tokens": length, "want_log_probs": True, **settings})
    return [Request(prompt, sampling, seed) for seed, prompt in enumerate(some_prompts(count, longest=9))]


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_sampled_from_the_requested_distribution(setting, rollout, reference):
    requests = requests_of(SETTINGS[setting])
    for request, completion in zip(requests, rollout.generate(requests, 1), strict=True):
        expected = distributions(reference("tied"), request, completion.token_ids)
        sampled = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(sampled.tolist(), abs=1e-4)


@pytest.mark.parametrize("setting", ["min_p", "a hot first token of few"])
def test_first_tokens_are_as_frequent_as_they_are_likely(setting, rollout, reference):
    num_samples, request = 2000, requests_of(SETTINGS[setting], length=1)[3]
    sampled = tokens_of(rollout, [Request(request.prompt_ids, request.sampling, seed) for seed in range(num_samples)])
    counts = torch.bincount(torch.tensor(sampled)[:, 0], minlength=100).double()
    expected = distributions(reference("tied"), request, sampled[0])[0].exp() * num_samples
    kept = expected > 0
    assert 2 <= kept.sum() <= 20 and not counts[: len(expected)][~kept].any()
    deviations = (counts[: len(expected)][kept] - expected[kept]) ** 2 / expected[kept]
    assert deviations.sum() < kept.sum() + 5 * (2 * kept.sum()) ** 0.5


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_greedy_text_with_a_repetition_penalty_equals_transformers(penalty, rollout, reference):
    prompts = some_prompts(4)
    sampling = SamplingParams(40, do_sample=False, ignore_eos=True, repetition_penalty=penalty)
    for prompt, tokens in zip(prompts, tokens_of(rollout, [Request(p, sampling) for p in prompts]), strict=True):
        expected = reference("tied").generate(
            torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None,
            repetition_penalty=penalty,
        )  # fmt: skip
        assert tokens == expected[0, len(prompt) :].tolist()


def test_responses_do_not_depend_on_requests_with_other_settings_in_the_same_batch(rollout, text_of):
    settings = [*SETTINGS.values(), {"stop": tuple("abcdefgh"), "ignore_eos": True, "temperature": 2.0}]
    requests = [request for each in settings for request in requests_of(each, count=2)]
    alone = [tokens_of(rollout, [request])[0] for request in requests]
    assert tokens_of(rollout, requests[::-1]) == alone[::-1]


def test_greedy_ignores_what_only_shapes_chance(rollout):
    plain, shaped = ({"do_sample": False}, {"do_sample": False, "min_p": 0.9, "top_k": 2, "top_p": 0.1,
                     "temperature": 1.7, "first_token_temperature": 9.0})  # fmt: skip
    assert tokens_of(rollout, requests_of(plain)) == tokens_of(rollout, requests_of(shaped))


def test_a_banned_token_is_never_sampled_even_if_it_is_the_likeliest(rollout):
    (free,) = tokens_of(rollout, requests_of({"do_sample": False}, count=1))
    (bound,) = tokens_of(rollout, requests_of({"do_sample": False, "banned_token_ids": tuple(free)}, count=1))
    assert not set(free) & set(bound)


def test_a_response_ends_with_the_token_that_completes_a_stop_text(rollout, text_of):
    prompts = some_prompts(12)
    free = SamplingParams(40, temperature=2.0, ignore_eos=True, want_log_probs=True)
    whole = rollout.generate([Request(prompt, free, i) for i, prompt in enumerate(prompts)], 1)
    special = next((text_of([t]) for c in whole for t in c.token_ids[3:] if t < 3), "<|im_start|>")
    stop = (text_of(whole[0].token_ids[7:10]), text_of(whole[1].token_ids[20:21]), special)
    stopping = SamplingParams(40, temperature=2.0, ignore_eos=True, want_log_probs=True, stop=stop)
    ended = rollout.generate([Request(prompt, stopping, i) for i, prompt in enumerate(prompts)], 1)
    for before, after in zip(whole, ended, strict=True):
        lengths = range(1, 41)
        end = next((n for n in lengths if any(s in text_of(before.token_ids[:n]) for s in stop)), None)
        assert after.token_ids == before.token_ids[:end] and len(after.log_probs) == len(after.token_ids)
        assert after.finish_reason == ("length" if end is None else "stop")
    assert len(ended[0].token_ids) <= 10 and {c.finish_reason for c in ended} == {"stop", "length"}


def test_a_stop_text_in_the_prompt_ends_nothing(rollout, text_of):
    (prompt,) = some_prompts(1)
    request = Request(prompt, SamplingParams(6, do_sample=False, ignore_eos=True, stop=(text_of(list(prompt)),)))
    assert len(tokens_of(rollout, [request])[0]) == 6


def test_a_sampling_parameter_the_engine_lacks_is_named(rollout):
    sampling = SamplingParams(2, extra={"frequencypenalty": 0.5})
    for refused in (lambda: rollout.check_sampling(sampling), lambda: tokens_of(rollout, [Request((5,), sampling)])):
        with pytest.raises(ValueError, match="frequencypenalty=0.5"):
            refused()
    rollout.check_sampling(SamplingParams(2, extra={"frequency_penalty": 0.5}))


BY_VLLMS_NAMES = {  # 2 is the model's own end
    "biases": {"extra": {"logit_bias": {"7": 4.0, 8: -3.5}}, "banned_token_ids": (9,)},
    "least tokens": {"extra": {"min_tokens": 9}, "stop_token_ids": (2, *range(20, 80))},
}


@pytest.mark.parametrize("rollout", WITH_VLLMS_NAMES, indirect=True)
@pytest.mark.parametrize("setting", BY_VLLMS_NAMES)
def test_parameters_with_vllms_names_mean_what_they_mean_there(setting, rollout, reference):
    requests = requests_of(BY_VLLMS_NAMES[setting])
    for request, completion in zip(requests, rollout.generate(requests, 1), strict=True):
        bias = {int(token): value for token, value in request.sampling.extra.get("logit_bias", {}).items()}
        asked = SamplingParams(**{**vars(request.sampling), "extra": {**request.sampling.extra, "logit_bias": bias}})
        expected = distributions(reference("tied"), Request(request.prompt_ids, asked), completion.token_ids)
        sampled = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(sampled.tolist(), abs=1e-4)
        assert len(completion.token_ids) > request.sampling.extra.get("min_tokens", 0)


@pytest.mark.parametrize("rollout", WITH_VLLMS_NAMES, indirect=True)
def test_only_allowed_tokens_are_sampled(rollout):
    sampled = tokens_of(rollout, requests_of({"extra": {"allowed_token_ids": [30, 31, 32]}, "temperature": 2.0}))
    assert {token for tokens in sampled for token in tokens} == {30, 31, 32}

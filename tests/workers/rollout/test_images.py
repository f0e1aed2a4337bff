"""Prompts with images in every engine; transformers with its own processor is the oracle."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.images import MIXED, asked, make_tiny_vl_model, picture
from tests.workers.rollout.conftest import rollout_config, weights_of
from verl.models.multimodal import modality_tokens, token_kinds
from verl.utils.tokenizer import hf_processor
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.weights.sync import sync_weights

ENGINES = ["hf", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang"))]
GREEDY = SamplingParams(12, do_sample=False, ignore_eos=True, want_log_probs=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_tiny_vl_model(tmp_path_factory.mktemp("seeing"), initializer_range=0.25, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def processor(folder):
    return hf_processor(folder)


@pytest.fixture
def model(folder):
    """Sharp predictions that hang on the image: each test may change it."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name and parameter.ndim > 1:
                parameter.mul_(5)
    return model


@pytest.fixture(scope="session")
def built(folder):
    rollouts = {}

    def build(name):
        if name not in rollouts:
            config = rollout_config(max_num_seqs=16, max_num_batched_tokens=128, limit_images=2)
            rollouts[name] = get_rollout_class(name)(folder, config)
        return rollouts[name]

    return build


@pytest.fixture(params=ENGINES)
def rollout(request, built, model):
    rollout = built(request.param)
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=1)
    return rollout


def requests_for(processor, sampling=GREEDY, prompts=MIXED):
    found = []
    for number, (text, images) in enumerate(prompts):
        ids = processor.tokenizer(asked(processor, text, images)[0])["input_ids"]
        found.append(Request(tuple(ids), sampling, number, {"image": images} if images else None))
    return found


def greedy_text(model, processor, count=12):
    """What transformers' own generate makes of the prompts."""
    never = list(modality_tokens(model.config))
    for text, images in MIXED:
        inputs = asked(processor, text, images)[1]
        model.base_model.rope_deltas = None
        out = model.generate(
            **inputs,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=never,
        )
        yield out[0, inputs["input_ids"].shape[1] :].tolist()


def log_probs_of(model, processor, prompt, tokens, temperature=1.0):
    inputs = asked(processor, *prompt)[1]
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], 1)
    seen = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask", "mm_token_type_ids")}
    model.base_model.rope_deltas = None
    kinds = token_kinds(model.config, ids).int()
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **seen)
    logits = out.logits[0, -len(tokens) - 1 : -1] / temperature
    logits[:, list(modality_tokens(model.config))] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_greedy_text_equals_transformers_generate(rollout, model, processor):
    completions = rollout.generate(requests_for(processor), 1)
    expected = list(greedy_text(model, processor))
    assert [completion.token_ids for completion in completions] == expected
    assert len(set(map(tuple, expected))) == len(MIXED), "the images make a difference"


def test_log_probs_are_those_of_the_model_that_sees_the_images(rollout, model, processor):
    sampling = SamplingParams(10, temperature=1.3, ignore_eos=True, want_log_probs=True)
    prompts = MIXED * 2
    for prompt, completion in zip(
        prompts, rollout.generate(requests_for(processor, sampling, prompts), 1), strict=True
    ):
        expected = log_probs_of(model, processor, prompt, completion.token_ids, 1.3)
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_response_does_not_depend_on_the_images_with_it(rollout, processor):
    sampling = SamplingParams(10, temperature=1.5, ignore_eos=True)
    requests = requests_for(processor, sampling)
    together = [completion.token_ids for completion in rollout.generate(requests[::-1], 1)][::-1]
    assert together == [rollout.generate([request], 1)[0].token_ids for request in requests]


def test_requests_with_images_may_come_one_by_one(rollout, processor):
    requests = requests_for(processor)
    expected = [completion.token_ids for completion in rollout.generate(requests, 1)]
    request_ids, ended = [rollout.submit(request, 1) for request in requests], {}
    while rollout.num_running:
        ended |= rollout.step()
    assert [ended[request_id].token_ids for request_id in request_ids] == expected


def test_a_sync_reaches_the_vision_tower_and_what_was_seen_is_forgotten(rollout, model, processor):
    before = [completion.token_ids for completion in rollout.generate(requests_for(processor), 1)]
    with torch.no_grad():
        model.base_model.visual.merger.mlp[2].weight.mul_(-1)
    receipt = sync_weights(weights_of(model), rollout, version=2)
    assert "visual.merger.mlp.2.weight" in receipt.checksums
    after = [completion.token_ids for completion in rollout.generate(requests_for(processor), 2)]
    assert after == list(greedy_text(model, processor))
    changed = [one != other for one, other in zip(before, after, strict=True)]
    assert changed == [bool(images) for _, images in MIXED]


def test_placeholders_of_images_are_never_generated(rollout, model, processor):
    """In every state the model prefers one of two such tokens, by far."""
    config = model.config
    with torch.no_grad():
        model.lm_head.weight[config.image_token_id] = 300
        model.lm_head.weight[config.video_token_id] = -300
    sync_weights(weights_of(model), rollout, version=1)
    prompts, never = MIXED * 4, set(modality_tokens(config))
    free = model.generate(**asked(processor, *MIXED[1])[1], max_new_tokens=3, do_sample=False)[0, -3:]
    assert set(free.tolist()) <= never, "without the bias it samples nothing else"
    sampling = SamplingParams(16, ignore_eos=True, want_log_probs=True)
    completions = rollout.generate(requests_for(processor, sampling, prompts), 1)
    completions += rollout.generate(requests_for(processor), 1)
    assert not never & {token for completion in completions for token in completion.token_ids}
    for prompt, completion in zip(prompts, completions, strict=False):
        expected = log_probs_of(model, processor, prompt, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected, abs=1e-3)


def test_images_that_do_not_fit_their_prompt_are_refused(rollout, processor):
    (request,) = requests_for(processor, prompts=MIXED[:1])
    for images, text in (
        ([], r"1 placeholder tokens and 0 images"),
        ([picture()] * 2, r"1 placeholder tokens and 2 images.*one token 102 for each image"),
        ([picture()] * 3, r"3 images, more than actor_rollout_ref.rollout.limit_images=2"),
    ):
        with pytest.raises(ValueError, match=text):
            rollout.generate([Request(request.prompt_ids, GREEDY, media={"image": images})], 1)
    with pytest.raises(ValueError, match="1 placeholder tokens 102 and 0 images. Give its images along"):
        rollout.generate([Request(request.prompt_ids, GREEDY)], 1)
    is_hf = type(rollout).__name__ == "HFRollout"
    with pytest.raises(ValueError, match="1 placeholder tokens and 0 images" if is_hf else "media of kind video"):
        rollout.generate([Request(request.prompt_ids, GREEDY, media={"video": []})], 1)


def test_a_model_of_text_refuses_images(synced):
    with pytest.raises(ValueError, match="model of type 'qwen2' reads text only"):
        synced().generate([Request((5, 6), GREEDY, media={"image": [picture()]})], 1)

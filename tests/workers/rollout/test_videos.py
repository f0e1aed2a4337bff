"""Videos through the rollout of transformers: what its own ``generate`` says, and what log-probs its forward gives."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.images import SHOWN, asked, film, make_tiny_vl_model
from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.test_images import log_probs_of
from verl.models.multimodal import modality_tokens
from verl.utils.tokenizer import hf_processor
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.vision import check_media
from verl.workers.rollout.weights.sync import sync_weights

GREEDY = SamplingParams(8, do_sample=False, ignore_eos=True, want_log_probs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vl_model(tmp_path_factory.mktemp("seeing"), initializer_range=0.25, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(folder):
    """Sharp predictions that hang on what is shown."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name and parameter.ndim > 1:
                parameter.mul_(5)
    return model


@pytest.fixture(scope="module")
def rollout(folder, model):
    rollout = get_rollout_class("hf")(folder, rollout_config(max_num_seqs=16, max_num_batched_tokens=128))
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=1)
    return rollout


def requests(processor, sampling=GREEDY):
    found = []
    for number, (text, images, videos) in enumerate(SHOWN):
        ids = processor.tokenizer(asked(processor, text, images, videos)[0])["input_ids"]
        shown = {"image": images, "video": [film(*video) for video in videos]}
        media = {kind: held for kind, held in shown.items() if held}
        found.append(Request(tuple(ids), sampling, number, media or None))
    return found


def test_greedy_text_equals_transformers_generate(rollout, model, folder):
    processor, never = hf_processor(folder), list(modality_tokens(model.config))
    expected = []
    for shown in SHOWN:
        inputs = asked(processor, *shown)[1]
        model.base_model.rope_deltas = None
        out = model.generate(
            **inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=None, suppress_tokens=never
        )
        expected.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    completions = rollout.generate(requests(processor), 1)
    assert [completion.token_ids for completion in completions] == expected
    assert len(set(map(tuple, expected))) == len(SHOWN), "what is shown makes a difference"


def test_log_probs_are_those_of_the_model_that_sees_the_videos(rollout, model, folder):
    processor = hf_processor(folder)
    sampling = SamplingParams(6, temperature=1.3, ignore_eos=True, want_log_probs=True)
    for shown, completion in zip(SHOWN, rollout.generate(requests(processor, sampling), 1), strict=True):
        expected = log_probs_of(model, processor, shown, completion.token_ids, 1.3)
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_videos_that_do_not_fit_their_prompt_are_refused(rollout, folder):
    request = requests(hf_processor(folder))[0]
    for media, message in (
        ({"video": list(request.media["video"]) * 2}, "1 placeholder tokens and 2 videos"),
        ({"image": [], "video": []}, "1 placeholder tokens and 0 videos"),
        (None, "1 placeholder tokens 103 and 0 videos. Give its videos along .*rollout.mode=sync"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout.generate([Request(request.prompt_ids, GREEDY, media=media)], 1)


def test_other_engines_refuse_videos_by_name(rollout, folder):
    request = requests(hf_processor(folder))[0]
    with pytest.raises(ValueError, match="media of kind video.*Use rollout.name=hf for videos"):
        check_media(request, rollout.model.config, None)

"""Conversations with every rollout engine: what the actor scores is what the engine generated, at every turn."""

import pytest
import torch

from tests.workers.rollout.conftest import weights_of
from tests.workers.rollout.test_contract import ENGINES
from verl.agents.conversation import ChatRenderer, Conversation
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.weights.sync import sync_weights

NUM_CONVERSATIONS, NUM_TURNS = 6, 4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_actor_scores_what_the_engine_generated(engine, built, reference, model_folder):
    rollout = built(engine, "tied", max_model_len=512)
    rollout.wake()
    sync_weights(weights_of(reference("tied"), rollout.weights_dtype), rollout, version=1)
    renderer = ChatRenderer(hf_tokenizer(model_folder("tied")))
    talks = [
        Conversation(renderer, [{"role": "user", "content": f"question {i}"}], response_length=400)
        for i in range(NUM_CONVERSATIONS)
    ]
    generated: list[list[int]] = [[] for _ in talks]
    for turn in range(NUM_TURNS):
        # some turns are cut, others end at the end marker
        sampling = SamplingParams(12 + 3 * turn, temperature=1.0, want_log_probs=True)
        requests = [Request(tuple(talk.ids), sampling, seed=100 * turn + i) for i, talk in enumerate(talks)]
        for talk, ids, completion in zip(talks, generated, rollout.generate(requests, 1), strict=True):
            talk.add_generated(completion.token_ids, completion.log_probs, completion.finish_reason)
            ids += completion.token_ids
            assert talk.add_messages([{"role": ("tool", "user")[turn % 2], "content": f"answer {turn}"}])
    for talk, ids in zip(talks, generated, strict=True):
        [row] = talk.rows()
        mask = torch.tensor(row.response_mask).bool()
        assert torch.tensor(row.response_ids)[mask].tolist() == ids
        with torch.no_grad():
            logits = reference("tied")(torch.tensor([row.ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        scored = logits.log_softmax(-1).gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0]
        assert torch.tensor(row.response_logprobs)[mask].tolist() == pytest.approx(scored[mask].tolist(), abs=1e-4)
        assert not torch.tensor(row.response_logprobs)[~mask].any()

"""Scores of a reward model are those transformers gives, however rows are cut and spread, in its own template."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.batch import WHOLE
from verl.batch.ragged import Ragged
from verl.config.engine import MixedPrecisionConfig
from verl.config.reward import RewardModelConfig
from verl.models.loader import ModelSpec
from verl.protocol import DataProto
from verl.utils.tiny_model import make_digit_judge, make_tokenizer
from verl.workers.engine import MicroBatching, Want, build_engine
from verl.workers.fsdp_workers import RewardModelWorker
from verl.workers.reward_model import ChatRetokenizer, last_token_batch, max_input_tokens, scores_at_last_token

SPLITS = [MicroBatching(size=1), MicroBatching(size=3), MicroBatching(max_tokens=60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("judge"), head="sequence", seed=1)


def rows_of(data):
    return list(data.ragged("input_ids").rows())


def scores(strategy, folder, rows, split=WHOLE):
    """This rank's share of the rows' scores."""
    engine = build_engine(strategy, ModelSpec(folder, "reward", compute_dtype="fp32"))
    place = engine.topology
    mine = rows[place.dp_rank :: place.dp_size]
    return engine.infer(last_token_batch(mine), Want.VALUES, split).ragged("values").values


@pytest.mark.parametrize("family, head", [("qwen2", "sequence"), ("llama", "token"), ("gpt2", "sequence")])
def test_scores_are_those_of_transformers_own_forward_pass_row_by_row(family, head, tmp_path):
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512} if family == "gpt2" else {}
    make_tiny_model(tmp_path, family, head=head, seed=1, **sizes)
    rows = rows_of(make_batch(5))
    auto = AutoModelForSequenceClassification if head == "sequence" else AutoModelForTokenClassification
    own = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.stack([own(input_ids=row[None]).logits.flatten()[-1] for row in rows])
    assert expected.std() > 1e-3
    torch.testing.assert_close(scores("local", str(tmp_path), rows), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", SPLITS)
def test_scores_do_not_depend_on_how_the_rows_are_cut(folder, split):
    rows = rows_of(make_batch(7))
    torch.testing.assert_close(
        scores("local", folder, rows, split), scores("local", folder, rows), rtol=1e-4, atol=1e-5
    )


def test_scores_do_not_depend_on_the_ranks_that_share_the_rows(folder):
    rows = rows_of(make_batch(7))
    whole = scores("local", folder, rows)
    for rank, theirs in enumerate(run_ranks(2, scores, "fsdp2", folder, rows, MicroBatching(size=2))):
        torch.testing.assert_close(theirs, whole[rank::2], rtol=1e-4, atol=1e-5)


def test_a_judge_made_by_hand_says_the_share_of_digits(tmp_path):
    make_digit_judge(tmp_path)
    tokenizer = make_tokenizer()
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("ab12", "no digits", "777", "x1y2z3w4")]
    shares = torch.tensor([0.5, 0.0, 1.0, 0.5])
    expected = shares / (1 + shares**2 / 100).sqrt()
    torch.testing.assert_close(scores("local", str(tmp_path), rows), expected, rtol=1e-4, atol=1e-5)


# -- the worker --------------------------------------------------------------------------------------------------------


def worker(folder, **settings):
    values = {
        "model.path": folder,
        "model.input_tokenizer": None,
        "strategy": "local",
        "micro_batch_size_per_gpu": 2,
        "model.fsdp_config.mixed_precision": MixedPrecisionConfig(param_dtype="fp32"),
        **settings,
    }
    made = RewardModelWorker(RewardModelConfig().with_values(values), "rm")
    made.init_model()
    return made


def test_the_score_stands_at_the_last_response_token_and_nowhere_else(folder):
    data = make_batch(6)
    scored = worker(folder).compute_rm_score(data)
    column, lengths = scored.column("rm_scores"), data.ragged("responses").layout.lengths
    expected = scores("local", folder, rows_of(data))
    torch.testing.assert_close(column[torch.arange(6), lengths - 1], expected, rtol=1e-4, atol=1e-5)
    assert (column != 0).sum() == 6
    assert scored.column("rm_tokens").tolist() == [len(row) for row in rows_of(data)]
    assert not scored.column("rm_tokens_cut").any()


def test_an_empty_response_has_no_place_for_a_score():
    responses = Ragged.from_rows([torch.arange(3), torch.arange(0), torch.arange(1)], 4)
    assert scores_at_last_token(torch.tensor([1.0, 2.0, 3.0]), responses).padded().tolist() == [
        [0, 0, 1, 0],
        [0, 0, 0, 0],
        [3, 0, 0, 0],
    ]


JUDGES_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"


def conversations(answers=("hello", "2 + 2 = 4")):
    """Rows as the policy's rollout leaves them, with an end of turn after each answer."""
    policy = make_tokenizer()
    prompt, responses = torch.tensor(policy("Say it.")["input_ids"]), []
    for answer in answers:
        responses.append(torch.tensor([*policy(answer)["input_ids"], policy.eos_token_id]))
    whole = Ragged.from_rows([torch.cat([prompt, response]) for response in responses], 40)
    data = DataProto.from_ragged(
        {
            "input_ids": whole,
            "attention_mask": whole.like(torch.ones_like(whole.values)),
            "responses": Ragged.from_rows(responses, 16),
        }
    )
    chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it."}], "Say it."]
    data.non_tensor_batch["raw_prompt"] = np.fromiter(chats, dtype=object, count=2)
    return policy, data


def test_a_conversation_is_rendered_again_in_the_judges_template():
    policy, data = conversations()
    judge = make_tokenizer("byte")
    judge.chat_template = JUDGES_TEMPLATE
    texts = ChatRetokenizer(policy, judge).texts(data.non_tensor_batch["raw_prompt"], data.ragged("responses").rows())
    assert texts == [
        "[system: Be brief.][user: Say it.][assistant: hello]",
        "[user: Say it.][assistant: 2 + 2 = 4]",
    ]


def test_a_template_that_takes_no_system_message_is_named():
    policy, data = conversations()
    judge = make_tokenizer()
    judge.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    rewriter = ChatRetokenizer(policy, judge)
    with pytest.raises(ValueError, match=r"roles system, user, assistant \(no system role\). Leave out or rename"):
        rewriter.texts(data.non_tensor_batch["raw_prompt"], data.ragged("responses").rows())


def test_the_judge_reads_its_own_tokens_of_that_text(tmp_path):
    folder = make_tiny_model(tmp_path, head="sequence", tokenizer="byte", seed=1)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": JUDGES_TEMPLATE}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    policy_folder = tmp_path / "policy"
    policy, data = conversations()
    policy.save_pretrained(policy_folder)
    judge = make_tokenizer("byte")
    expected = [
        torch.tensor(judge(text, add_special_tokens=False)["input_ids"])
        for text in ("[system: Be brief.][user: Say it.][assistant: hello]", "[user: Say it.][assistant: 2 + 2 = 4]")
    ]
    rewriting = worker(folder, **{"model.input_tokenizer": str(policy_folder)})
    scored = rewriting.compute_rm_score(data)
    assert scored.column("rm_tokens").tolist() == [len(row) for row in expected]
    found = scored.column("rm_scores").sum(-1)
    torch.testing.assert_close(found, scores("local", folder, expected), rtol=1e-4, atol=1e-5)

    cut = worker(folder, **{"model.input_tokenizer": str(policy_folder), "max_length": 40}).compute_rm_score(data)
    assert cut.column("rm_tokens").tolist() == [40, 37] and cut.column("rm_tokens_cut").tolist() == [12, 0]
    found = cut.column("rm_scores").sum(-1)
    torch.testing.assert_close(found, scores("local", folder, [r[:40] for r in expected]), rtol=1e-4, atol=1e-5)


def test_without_a_limit_a_judge_reads_as_much_as_it_has_positions_for(folder):
    config = worker(folder).reward_model.model_config
    assert max_input_tokens(None, config) == 2048 and max_input_tokens(100, config) == 100

import pytest

from verl.utils.tiny_model import make_tokenizer
from verl.workers.rollout.sampling import StopText


def ended_at(text, stop, prompt="Say: ", kind="byte", **options):
    """Number of tokens after which a response that goes on as ``text`` ends, and the text of those tokens."""
    tokenizer = make_tokenizer(kind)
    watcher = StopText(tokenizer.decode, stop, tokenizer(prompt)["input_ids"], **options)
    ids = tokenizer(text)["input_ids"]
    end = next((n for n, token in enumerate(ids, 1) if watcher.ends_with(token)), None)
    return end, tokenizer.decode(ids[:end])


def test_the_token_that_completes_a_text_ends_the_response():
    assert ended_at("one, two, three", ["two"]) == (8, "one, two")
    assert ended_at("one, two, three", ["three", "tw"]) == (7, "one, tw")
    assert ended_at("one", ["two"])[0] is None


@pytest.mark.parametrize("stop", ["é", "日本", "n 日"])
def test_a_character_of_several_tokens_counts_once_it_is_whole(stop):
    text = "café in 日本語"
    _, ended = ended_at(text, [stop])
    assert ended == text[: text.index(stop) + len(stop)]


def test_text_of_the_prompt_is_no_text_of_the_response():
    assert ended_at("! Who?", ["there!"], prompt="Who is there")[0] is None
    assert ended_at("o is there! Who?", ["Who"], prompt="Wh") == (15, "o is there! Who")


def test_a_response_may_follow_no_text_at_all():
    assert ended_at("abc", ["ab"], prompt="") == (2, "ab")


def test_what_is_complete_too_early_does_not_count_later_either():
    assert ended_at("stop and stop", ["stop"], min_tokens=4)[0] == 13
    assert ended_at("stop and go", ["stop"], min_tokens=4)[0] is None


def test_special_tokens_are_text():
    assert ended_at("done<|im_end|>more", ["<|im_end|>"], kind="char")[1] == "done<|im_end|>"


def test_a_word_keeps_the_space_a_tokenizer_hides_at_the_start_of_a_text():
    pieces = {1: " the", 2: " end", 3: "ing"}
    decode = lambda ids: "".join(pieces[token] for token in ids).removeprefix(" ")  # noqa: E731
    watcher = StopText(decode, [" end"], [1])
    assert watcher.ends_with(2)

"""Simulated users: their file, who answers a row, what an answer must be, and that each conversation is ended."""

import asyncio
import time

import pytest

from verl.interactions.base import BaseInteraction
from verl.interactions.session import InteractionSession
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config, interactions_of

GSM8K = "  - name: gsm8k\n    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n    config: {}\n"
USER = """
from verl.interactions.base import BaseInteraction

class EchoInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, messages[-1]["content"] + self.config["mark"], 0.5, {"said": 1, "text": "x"}
"""


def written(tmp_path, text, name="users.yaml"):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


@pytest.fixture
def users(tmp_path):
    file = written(tmp_path, USER, "my_user.py")
    own = f"  - class_name: {file}:EchoInteraction\n    config: {{mark: '!'}}\n"
    return written(tmp_path, f"interaction:\n{own}{GSM8K}")


def turns(session, *texts):
    """What the user says to each turn, from the start to the end of the conversation."""

    async def talk():
        await session.start()
        messages, answers = [{"role": "user", "content": "2 + 2?"}], []
        for text in texts:
            messages.append({"role": "assistant", "content": text})
            answers.append(await session.answer(messages))
            messages.append({"role": "user", "content": answers[-1].content})
        await session.close()
        await session.close()
        return answers

    return asyncio.run(talk())


def test_a_file_gives_interactions_by_name_or_by_that_of_their_class(users):
    made = initialize_interactions_from_config(users)
    assert list(made) == ["echo", "gsm8k"]
    assert made["echo"].name == "echo" and made["echo"].config["mark"] == "!"
    assert interactions_of(users)["gsm8k"] is interactions_of(users)["gsm8k"]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("interaction: []\n", ValueError, "lists no interaction"),
        ("tools: []\n", ValueError, "lists no interaction"),
        ("- 1\n", ValueError, "lists no interaction"),
        ("interaction:\n  - name: a\n", ValueError, "no class_name"),
        (f"interaction:\n{GSM8K}{GSM8K}", ValueError, "two interactions are named 'gsm8k'"),
        ("interaction:\n  - class_name: pathlib.Path\n", TypeError, "is no interaction"),
        ("interaction:\n  - class_name: nowhere.Nobody\n", ModuleNotFoundError, "nowhere"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path, text, error, words):
    with pytest.raises(error, match=words):
        initialize_interactions_from_config(written(tmp_path, text))


def test_a_missing_file_names_the_option():
    with pytest.raises(FileNotFoundError, match="interaction_config_path=/no/such.yaml"):
        initialize_interactions_from_config("/no/such.yaml")


def test_a_row_names_its_user_and_a_row_that_names_none_gets_gsm8k(users):
    row = {"extra_info": {"interaction_kwargs": {"name": "echo", "ground_truth": None}}}
    [answer] = turns(InteractionSession.of_row(users, row), "hello")
    assert (answer.content, answer.score, answer.is_last, answer.info) == ("hello!", 0.5, False, {"said": 1})
    [answer] = turns(InteractionSession.of_row(users, {"interaction_kwargs": {"ground_truth": "4"}}), "#### 4")
    assert answer.is_last and answer.score == 1.0
    with pytest.raises(ValueError, match="name='gsm8' is no interaction.*echo, gsm8k.*Did you mean"):
        InteractionSession.of_row(users, {"interaction_kwargs": {"name": "gsm8"}})


def test_gsm8k_asks_again_until_the_answer_is_right_and_forgets_the_conversation(users):
    session = InteractionSession.of_row(users, {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "1200"}})
    answers = turns(session, "It is #### 5", "", "1,200")
    assert [(answer.score, answer.is_last) for answer in answers] == [(0.0, False), (0.0, False), (1.0, True)]
    assert "incorrect" in answers[0].content and "correct" in answers[2].content
    assert session.interaction._answers == {}


def test_gsm8k_without_an_answer_refuses_the_row(users):
    with pytest.raises(ValueError, match="has no ground_truth"):
        turns(InteractionSession.of_row(users, {"interaction_kwargs": {"name": "gsm8k"}}), "4")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (None, TypeError, "must return"),
        ((False, "x", 1.0), TypeError, "must return"),
        ((False, None, 1.0, {}), TypeError, "must return"),
        ((False, "x", float("nan"), {}), ValueError, "finite"),
        ((False, "x", "1", {}), ValueError, "finite"),
    ],
)
def test_an_answer_of_another_form_is_an_error_and_never_a_reward_of_zero(given, error, words):
    class Wrong(BaseInteraction):
        async def generate_response(self, instance_id, messages, **kwargs):
            return given

    with pytest.raises(error, match=words):
        turns(InteractionSession(Wrong({"name": "wrong"}), {}), "x")


def test_plain_functions_may_block_and_a_user_that_hangs_is_named_in_time():
    class Slow(BaseInteraction):
        def generate_response(self, instance_id, messages, seconds, **kwargs):
            time.sleep(seconds)
            return True, "", None, {}

    async def both():
        fast, hung = (InteractionSession(Slow({"name": "slow"}), {"seconds": s}, 1.0, 0.2) for s in (0.05, 0.5))
        await asyncio.gather(fast.start(), hung.start())
        messages = [{"role": "assistant", "content": ""}]
        ticks = asyncio.create_task(asyncio.sleep(0.01))
        answered = await asyncio.gather(fast.answer(messages), hung.answer(messages), return_exceptions=True)
        return ticks.done(), answered

    is_free, [answer, error] = asyncio.run(both())
    assert is_free and answer.is_last and answer.score is None
    assert isinstance(error, TimeoutError) and "slow" in str(error) and "env.step_timeout" in str(error)


def test_a_user_without_an_answer_of_its_own_says_what_to_write():
    with pytest.raises(NotImplementedError, match="has no generate_response"):
        turns(InteractionSession(BaseInteraction({}), {}), "x")


def test_the_conversation_of_a_row_ends_with_the_users_last_word_and_each_score_rewards_its_turn(users):
    from verl.agents.episode import AssistantTurn
    from verl.agents.interaction_agent import InteractionEnvironment

    async def episode():
        row = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "4"}}
        environment = InteractionEnvironment(InteractionSession.of_row(users, row))
        assert await environment.start(row) is None
        replies = []
        for number, text in enumerate(("5", "4")):
            turn = AssistantTurn(number, text, [], "stop", messages=[{"role": "assistant", "content": text}])
            replies.append(await environment.reply(turn))
        await environment.close()
        return replies

    first, last = asyncio.run(episode())
    assert first.messages[0]["role"] == "user" and (first.reward, first.is_last) == (0.0, False)
    assert (last.reward, last.is_last, last.terminated, last.info) == (1.0, True, True, {"success": True})

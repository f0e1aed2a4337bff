"""The episode loop: who speaks when, how episodes end, what is kept of one that goes on later."""

import asyncio
from types import SimpleNamespace

import pytest

from verl.agents.base import EpisodeStatus
from verl.agents.episode import ConversationEnvironment, EpisodeLimits, EpisodeLoop, Reply, ReplyLog
from verl.agents.outputs import token_rewards, turn_spans
from verl.config.env import EnvConfig
from verl.config.rollout import RolloutConfig
from verl.utils.tiny_model import END, make_tokenizer
from verl.workers.rollout.base import Completion

TOKENIZER = make_tokenizer("byte")
END_ID = TOKENIZER.convert_tokens_to_ids(END)


class Counting(ConversationEnvironment):
    """Answers with the number of the turn, three times; a turn that says its number earns 1."""

    made: list["Counting"] = []

    def __init__(self, turns=3):
        self.turns, self.seen, self.calls, self.closed, self.resumed = turns, [], [], 0, 0
        Counting.made.append(self)

    async def start(self, row):
        self.calls.append("start")
        return Reply([{"role": "user", "content": "0"}], state_id="0")

    async def reply(self, turn):
        self.seen.append(turn.text)
        self.calls.append(turn.number)
        number = turn.number + 1
        messages = [{"role": "user", "content": str(number)}]
        return Reply(
            messages,
            reward=float(turn.text == str(turn.number)),
            terminated=number == self.turns,
            state_id=str(number),
            info={"success": number == self.turns},
        )

    async def resume(self, row, turns, replies):
        self.resumed += 1
        assert len(replies) == len(turns) + 1
        self.seen = [turn.text for turn in turns]

    async def finish(self):
        return {"reward_score": 0.5}

    async def close(self):
        self.closed += 1


class Loop(EpisodeLoop):
    environment_class = Counting
    turn_limits = EpisodeLimits()

    def environment(self, row):
        return self.environment_class()

    def limits(self, row):
        return self.turn_limits


class Servers:
    """Gives the next of a list of texts as generated tokens; a text ending in ``...`` is cut by the limit of tokens."""

    def __init__(self, *texts, log=None):
        self.texts, self.requests = list(texts), []
        self.replies, self.is_stopped = log or ReplyLog(), False

    async def generate(self, request_id=None, *, prompt_ids, sampling_params, image_data=None):
        self.requests.append((list(prompt_ids), sampling_params))
        text = self.texts.pop(0)
        if isinstance(text, BaseException):
            raise text
        if callable(text):
            await text()
        is_cut = text.endswith("...")
        ids = TOKENIZER.encode(text, add_special_tokens=False) + [END_ID] * (not is_cut)
        ids = ids[: sampling_params["max_tokens"]]
        is_cut = is_cut or ids[-1] != END_ID
        return Completion(ids, [-1.0] * len(ids), "length" if is_cut else "stop")


def run(*texts, limits=None, window=200, cls=Loop, timeout=None, servers=None):
    servers = servers or Servers(*texts)
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=RolloutConfig()),
        data=SimpleNamespace(apply_chat_template_kwargs={}),
        env=EnvConfig(episode_timeout=timeout),
    )

    async def go():
        loop = cls(config, servers, TOKENIZER)
        loop.turn_limits = limits or EpisodeLimits()
        return await loop.run({"max_tokens": window}, raw_prompt_ids=[])

    Counting.made.clear()
    return asyncio.run(go()), servers


def test_turns_and_answers_alternate_and_every_reward_is_on_the_last_token_of_its_turn():
    output, servers = run("0", "wrong", "2")
    assert output.status is EpisodeStatus.COMPLETED and output.turn_rewards == [1.0, 0.0, 1.0]
    assert output.turn_state_ids == ["0", "1", "2"] and output.num_turns == 6
    assert [message["content"] for message in output.messages] == ["0", "0", "1", "wrong", "2", "2"]
    whole = output.prompt_ids + output.response_ids
    for ids, _ in servers.requests:
        assert whole[: len(ids)] == ids
    rewards = token_rewards(output)
    ends = [end - 1 for _, end in turn_spans(output)]
    assert [rewards[end] for end in ends] == [1.0, 0.0, 1.5] and sum(rewards) == 2.5
    assert [output.response_ids[end] for end in ends] == [END_ID] * 3
    [environment] = Counting.made
    assert environment.closed == 1 and environment.seen == ["0", "wrong", "2"]


def test_without_spans_the_turns_are_the_runs_of_the_mask():
    output, _ = run("0", "1", "2")
    spans = output.turn_spans
    output.turn_spans = None
    assert turn_spans(output) == [tuple(span) for span in spans]
    output.turn_rewards = [1.0]
    with pytest.raises(ValueError, match="turn_rewards has 1 entries and the response 3 turns"):
        token_rewards(output)


@pytest.mark.parametrize(
    ("limits", "window", "status", "turns"),
    [
        (EpisodeLimits(assistant_turns=2), 200, "max_assistant_turns", 2),
        (EpisodeLimits(user_turns=1), 200, "max_user_turns", 2),
        (EpisodeLimits(), 20, "max_tokens", 1),
        (EpisodeLimits(tokens_per_turn=1), 200, "completed", 3),
    ],
)
def test_each_limit_has_its_status_and_the_rewards_so_far_count(limits, window, status, turns):
    output, _ = run("0", "1", "2", limits=limits, window=window)
    assert str(output.status) == status and len(output.turn_rewards) == turns
    assert output.turn_rewards == [1.0] * turns  # also that of the last turn, whose answer nobody reads
    assert len(output.response_ids) <= window


class Unscored(Loop):
    scores_turns = False


def test_tools_are_not_called_for_a_turn_that_nobody_follows():
    output, _ = run("0", "1 and more...", limits=EpisodeLimits(tokens_per_turn=8), cls=Unscored)
    assert output.status is EpisodeStatus.TURN_TOKENS and Counting.made[0].seen == ["0"]
    output, _ = run("0", "1", limits=EpisodeLimits(assistant_turns=2), cls=Unscored)
    assert output.status is EpisodeStatus.COMPLETED and Counting.made[0].seen == ["0"]


class Slow(Counting):
    async def reply(self, turn):
        if turn.number == 1:
            await asyncio.sleep(60)
        return await super().reply(turn)


class SlowLoop(Loop):
    environment_class = Slow


def test_an_episode_that_is_out_of_time_keeps_its_turns():
    output, _ = run("0", "1", "2", cls=SlowLoop, timeout=0.5)
    assert output.status is EpisodeStatus.TIMEOUT and output.turn_rewards == [1.0, 0.0]
    assert Counting.made[0].closed == 1


class Broken(Counting):
    async def reply(self, turn):
        raise KeyError("lost")


class BrokenLoop(Loop):
    environment_class = Broken


def test_an_environment_that_raises_is_closed_and_its_error_is_the_loops():
    with pytest.raises(KeyError):
        run("0", cls=BrokenLoop)
    assert Counting.made[0].closed == 1


def stopped_after(count, texts):
    """Run an episode that a scheduler stops in the turn after ``count`` turns; return its log."""
    servers = Servers(*texts[:count], asyncio.CancelledError())

    def stop():
        servers.is_stopped = True

    servers.is_stopped = True
    with pytest.raises(asyncio.CancelledError):
        run(servers=servers)
    return servers.replies


TEXTS = ["0", "1", "2"]


def test_a_stopped_episode_goes_on_in_its_environment_which_is_asked_nothing_twice():
    log = stopped_after(2, TEXTS)
    environment = log.environment
    assert environment.closed == 0 and len(log.replies) == 3
    output, _ = run(servers=Servers(*TEXTS, log=log))
    plain, _ = run(*TEXTS)
    for name in ("prompt_ids", "response_ids", "response_mask", "turn_rewards", "turn_state_ids", "status"):
        assert getattr(output, name) == getattr(plain, name), name
    assert environment.calls == ["start", 0, 1, 2] and environment.closed == 1 and environment.resumed == 0


def test_after_a_restart_the_environment_is_brought_back_and_the_answers_are_the_kept_ones():
    log = ReplyLog.from_state(stopped_after(2, TEXTS).state())
    output, _ = run(servers=Servers(*TEXTS, log=log))
    [environment] = Counting.made
    assert environment.resumed == 1 and environment.calls == [2] and environment.seen == TEXTS
    plain, _ = run(*TEXTS)
    assert output.response_ids == plain.response_ids and output.turn_rewards == plain.turn_rewards


def test_a_turn_that_is_generated_anew_gets_a_new_environment():
    log = stopped_after(2, TEXTS)
    first = log.environment
    log.truncate(2)  # the tokens of the second turn were thrown away
    output, _ = run(servers=Servers("0", "x", "2", log=log))
    assert first.closed == 1 and output.turn_rewards == [1.0, 0.0, 1.0]
    assert Counting.made[-1].seen == ["0", "x", "2"]


def test_states_that_are_no_text_have_names():
    import numpy as np

    one, same, other = (Reply(state_id=np.array(values)) for values in ([1, 2], [1, 2], [1, 3]))
    assert one.state_id == same.state_id != other.state_id and isinstance(one.state_id, str)

"""Episodes in environments: what the policy reads, its rewards and limits, and episodes that go on after a restart."""

import asyncio
import json
from collections import Counter, defaultdict

import numpy as np
import pytest

from tests.support.episodes import ScriptedPolicy, config_of, episode, episodes, tokenizer
from verl.agents.base import EpisodeStatus
from verl.agents.env_agent import EnvRow
from verl.envs.host import EnvironmentFailure, EnvironmentHost, close_hosts

CODE = '''
import asyncio, random, time

class Count:
    """Says its number; the policy must say the next. 9 ends it."""
    made = 0
    def __init__(self, start=0, drift=False):
        self.start, self.drift = start, drift
        Count.made += 1
    def reset(self, *, seed, add=0, how="", **task):
        if how:
            raise RuntimeError(how)
        self.at, self.steps = self.start + seed % 5 + add, 0
        return str(self.at), {}
    @property
    def state_id(self):
        return self.at
    def step(self, action):
        self.steps += 1
        text = action.strip()
        valid = text.isdigit()
        right = valid and int(text) == self.at + 1
        self.at += right
        done, before = self.at >= 9, f"{time.perf_counter_ns()} " if self.drift else ""
        info = {"valid_action": valid, "success": done, "steps": self.steps}
        return before + str(self.at), float(right), done, False, info
    def frame(self):
        return f"[{self.at}]"

class Slow(Count):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)

class Messages:
    async def reset(self, *, seed):
        return [{"role": "system", "content": "Rules"}, {"role": "user", "content": "go"}], {}
    async def step(self, action):
        await asyncio.sleep(0)
        return "same", 0.5, False, action == "stop", {}
'''
NEXT = "<|im_end|>"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("env") / "count.py"
    path.write_text(CODE)
    return str(path)


@pytest.fixture
def config(file):
    """A configuration with the environments above as tags; the entry Count gets further fields."""

    def make(*words, kind="Count", **entry):
        registry = {"Count": {"type": f"{file}:{kind}", **entry}, "Messages": {"type": f"{file}:Messages"}}
        words = ["data.max_prompt_length=64", "data.max_response_length=200", *words]
        return config_of(*words).with_values({"env.registry": registry})

    return make


def counts(number, prompt):
    """The policy that says the next number."""
    return str(int(prompt.split("user")[-1].split(NEXT)[0].split()[-1]) + 1) + NEXT


def row(seed=0, tag="Count", **more):
    return {"agent_name": "env_agent", "env_tag": tag, "env_seed": seed, "raw_prompt_ids": [], **more}


def text_of(output):
    return tokenizer().decode(output.prompt_ids + output.response_ids)


def test_an_episode_is_a_conversation_with_rewards_on_its_turns(config):
    [output] = episodes(config(), ScriptedPolicy(counts), [row(seed=1)])
    assert output.status == EpisodeStatus.COMPLETED
    assert output.turn_rewards == [1.0] * 8 and output.reward_score == 0.0
    assert output.turn_state_ids == list(range(1, 9))
    assert output.extra_fields["episode_info"] == {
        "success": True, "steps": 8, "valid_action": 1.0, "reward": 8.0, "turns": 8
    }  # fmt: skip
    assert output.extra_fields["env_tag"] == "Count" and output.extra_fields["format_penalty"] == 0.0
    assert [message["content"] for message in output.messages][:4] == ["1", "2", "2", "3"]
    generated = [
        tokenizer().decode(output.response_ids[first:last], skip_special_tokens=True)
        for first, last in output.turn_spans
    ]
    assert generated == [str(number) for number in range(2, 10)]
    assert sum(output.response_mask) == sum(last - first for first, last in output.turn_spans)


def test_the_tag_says_what_the_policy_reads(config):
    template = "{turn}/{max_steps}, {turns_left} left {kept}: {observation}"
    made = config(max_steps=2, system_prompt="Count up.", turn_template=template)
    [output] = episodes(made, ScriptedPolicy(counts), [row()])
    assert [(message["role"], message["content"]) for message in output.messages] == [
        ("system", "Count up."),
        ("user", "1/2, 2 left {kept}: 0"),
        ("assistant", "1"),
        ("user", "2/2, 1 left {kept}: 1"),
        ("assistant", "2"),
    ]
    # the last action counts, though the policy does not read the answer
    assert output.status == EpisodeStatus.ASSISTANT_TURNS and output.turn_rewards == [1.0, 1.0]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"turn_template": "go"}, "has no {observation}"),
        ({"turn_template": "{observation} {turns_left}"}, "max_assistant_turns"),
    ],
)
def test_a_template_that_hides_the_environment_is_refused(config, entry, words):
    [failure] = episodes(config(**entry), ScriptedPolicy(counts), [row()])
    assert isinstance(failure, ValueError) and words in str(failure) and "env.registry.Count" in str(failure)


def test_invalid_actions_are_punished_apart_from_the_reward(config):
    made = config("env.train.format_penalty=-0.25", max_steps=4)
    policy = ScriptedPolicy(lambda number, prompt: "what" + NEXT if number % 2 else counts(number, prompt))
    [output] = episodes(made, policy, [row()])
    assert output.turn_rewards == [1.0, -0.25, 1.0, -0.25]
    info = output.extra_fields["episode_info"]
    assert (info["reward"], info["valid_action"], output.extra_fields["format_penalty"]) == (2.0, 0.5, -0.5)
    [own] = episodes(config("env.train.format_penalty=-0.25", max_steps=2, format_penalty=0.0), policy, [row()])
    assert own.extra_fields["format_penalty"] == 0.0


def test_limits_of_the_tag_come_before_those_of_the_conversation(config):
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    words = [f"{multi_turn}.max_assistant_turns=2", f"{multi_turn}.max_tokens_per_turn=1"]
    policy = ScriptedPolicy(lambda number, prompt: "abc" + NEXT)
    [output] = episodes(config(*words), policy, [row()])
    assert [last - first for first, last in output.turn_spans] == [1, 1]
    [output] = episodes(config(*words, max_steps=3, max_tokens_per_step=3), policy, [row()])
    assert [last - first for first, last in output.turn_spans] == [3, 3, 3]
    assert output.status == EpisodeStatus.ASSISTANT_TURNS


def test_environments_may_be_async_and_give_messages(config):
    policy = ScriptedPolicy(lambda number, prompt: ("stop" if number == 2 else "go") + NEXT)
    [output] = episodes(config(), policy, [row(tag="Messages")])
    assert output.status == EpisodeStatus.TRUNCATED and output.turn_rewards == [0.5] * 3
    assert output.messages[0] == {"role": "system", "content": "Rules"}
    first, second, third = output.turn_state_ids
    assert first != second == third and isinstance(first, str)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_fails_is_named_and_the_others_are_whole(config, workers):
    rows = [row(seed=1), row(seed=7, env_kwargs={"how": "no luck"}), row(seed=2, env_kwargs={"add": 2, "how": None})]
    first, failure, third = episodes(config(f"env.num_workers={workers}"), ScriptedPolicy(counts), rows)
    assert isinstance(failure, EnvironmentFailure) and failure.kind == "raised"
    assert "environment 'Count' (seed 7)" in str(failure) and "no luck" in str(failure)
    assert "environment 'Count': reset failed, raised" in failure.cause
    assert (len(first.turn_rewards), len(third.turn_rewards)) == (8, 5)


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        (
            {"env_tag": "A", "env_seed": np.int64(3), "env_kwargs": {"a": np.array([1, 2]), "b": None}},
            (3, {"a": [1, 2]}),
        ),
        ({"env_tag": "A", "env_kwargs": '{"a": 1}', "index": 5}, (5, {"a": 1})),
        ({"extra_info": {"env_tag": "A", "env_seed": 4, "env_kwargs": {}}, "env_seed": None}, (4, {})),
    ],
)
def test_a_row_says_its_environment_in_columns_or_in_extra_info(columns, found):
    read = EnvRow.of(columns)
    assert (read.tag, (read.seed, read.task)) == ("A", found)


@pytest.mark.parametrize(
    ("columns", "words"),
    [({}, "env_tag is None"), ({"env_seed": 0.5}, "env_seed"), ({"env_kwargs": [1]}, "env_kwargs")],
)
def test_a_row_without_an_environment_is_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        EnvRow.of({"env_tag": "A", **columns} if columns else {})


def test_frames_of_validation_episodes_are_kept(config, tmp_path):
    made = config(f"env.render_save_dir={tmp_path}/frames", max_steps=2)
    episodes(made, ScriptedPolicy(counts), [row(seed=3, validate=True), row(seed=4)])
    [text] = (tmp_path / "frames").glob("*.txt")
    assert text.name == "Count_3_2.0.txt" and text.read_text() == "[3]\n\n[4]\n\n[5]\n"


# -- episodes that go on ---------------------------------------------------------------------------------------------
class Stopping:
    """Client of one sample, which stops at a call, as schedulers do between two steps."""

    def __init__(self, policy, log, at):
        self.policy, self.replies, self.at, self.is_stopped = policy, log, at, False
        self.turns = []

    async def generate(self, request, session=None, priority=0):
        if len(self.turns) == self.at:
            self.is_stopped = True
            raise asyncio.CancelledError
        self.turns.append(await self.policy.generate(request, session=session))
        return self.turns[-1]

    def restart(self):
        raise AssertionError


def continued(config, through_checkpoint):
    """An episode that is stopped after three turns and goes on; returns its output and that of one that is not."""
    from verl.agents.episode import ReplyLog

    async def main():
        try:
            whole = await episode(config, ScriptedPolicy(counts), row(seed=1))
            log = ReplyLog()
            stopping = Stopping(ScriptedPolicy(counts), log, 3)
            with pytest.raises(asyncio.CancelledError):
                await episode(config, stopping, row(seed=1))
            assert log.environment is not None
            if through_checkpoint:
                state = json.loads(json.dumps(log.state()))
                await log.close()
                log = ReplyLog.from_state(state)
            again = Stopping(Replayed(stopping.turns), log, None)
            return whole, await episode(config, again, row(seed=1))
        finally:
            close_hosts(asyncio.get_running_loop())

    return asyncio.run(main())


class Replayed(ScriptedPolicy):
    """The turns that were kept, then new ones."""

    def __init__(self, turns):
        super().__init__(counts)
        self.kept = list(turns)

    async def generate(self, request, session=None, **_):
        return self.kept.pop(0) if self.kept else await super().generate(request, session)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("through_checkpoint", [False, True])
def test_an_episode_that_goes_on_is_the_one_that_was_not_stopped(config, through_checkpoint, workers):
    whole, output = continued(config(f"env.num_workers={workers}"), through_checkpoint)
    for name in ("prompt_ids", "response_ids", "response_mask", "turn_rewards", "turn_spans", "turn_state_ids"):
        assert getattr(output, name) == getattr(whole, name), name
    assert output.extra_fields["episode_info"] == whole.extra_fields["episode_info"]


def test_an_environment_that_does_not_repeat_itself_is_named(config):
    with pytest.raises(EnvironmentFailure, match=r"'Count' \(seed 1\).*answer 1 is.*seed of reset"):
        continued(config(kwargs={"drift": True}, max_steps=8), True)


# -- many ------------------------------------------------------------------------------------------------------------
class MeetingPolicy(ScriptedPolicy):
    """Gives no first answer before ``episodes`` of them are asked for, and so for each of the next answers."""

    def __init__(self, episodes):
        super().__init__(counts)
        self.episodes, self.asked, self.complete = episodes, Counter(), defaultdict(asyncio.Event)

    async def generate(self, request, session=None, **_):
        number = self.calls.get(session, 0)
        self.asked[number] += 1
        if self.asked[number] == self.episodes:
            self.complete[number].set()
        await asyncio.wait_for(self.complete[number].wait(), 200)
        return await super().generate(request, session)


@pytest.mark.parametrize(("workers", "kind"), [(0, "Count"), (2, "Slow")])
def test_a_thousand_episodes_at_a_time(config, workers, kind):
    made = config(f"env.num_workers={workers}", kind=kind, max_steps=3)
    outputs = episodes(made, MeetingPolicy(1000), [row(seed=number) for number in range(1000)])
    assert [sum(output.turn_rewards) for output in outputs] == [3.0] * 1000


def test_hosts_of_a_closed_loop_are_gone():
    async def main():
        return EnvironmentHost.of(config_of().env)

    first = asyncio.run(main())
    assert asyncio.run(main()) is not first

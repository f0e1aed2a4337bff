"""Agent loop ``env_agent``: an environment (`verl.envs`) speaks first and answers each turn, whose text is the action.

A row has ``env_tag``, an entry of ``env.registry`` or the name of an environment, and may have ``env_seed`` and
``env_kwargs``, the arguments of ``reset`` (as columns, or in ``extra_info``).
"""

import asyncio
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl.agents.base import AgentLoopOutput, register
from verl.agents.episode import AssistantTurn, ConversationEnvironment, EpisodeLimits, EpisodeLoop, Reply
from verl.config.env import EnvTagConfig
from verl.envs.host import EnvironmentFailure, EnvironmentHost, HostedEnvironment
from verl.envs.worker import Answer

_FIELDS = re.compile(r"\{(observation|turn|turns_left|max_steps)\}")
PENALTY_COLUMN = "format_penalty"
"""Sum of an episode's format penalties, which are in its turn rewards and not in ``episode_info["reward"]``."""


@dataclass
class EnvRow:
    """The environment that a row of data asks for."""

    tag: str
    seed: int = 0
    task: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "EnvRow":
        """Read a row's columns, or its ``extra_info``.

        Raises:
            ValueError: it names no environment, or its seed or its task is of another type.
        """
        more = row.get("extra_info")
        more = more if isinstance(more, Mapping) else {}
        tag, seed, task = (
            row[name] if row.get(name) is not None else more.get(name) for name in ("env_tag", "env_seed", "env_kwargs")
        )
        if not isinstance(tag, str) or not tag:
            raise ValueError(
                f"env_agent: the row's env_tag is {tag!r}; it must name an entry of env.registry or an environment. "
                "Give the data a column env_tag, or extra_info.env_tag."
            )
        seed = _plain(row.get("index", more.get("index", 0)) if seed is None else seed)
        if not isinstance(seed, int):
            raise ValueError(f"env_agent: the row's env_seed is {seed!r}; it must be an integer.")
        if isinstance(task, str):
            task = json.loads(task)
        if not isinstance(task, (Mapping, type(None))):
            raise ValueError(f"env_agent: the row's env_kwargs are {task!r}; they must be a dict, or one as JSON text.")
        # parquet gives every row the keys of all rows, null where it has none
        return cls(tag, seed, {str(key): _plain(value) for key, value in (task or {}).items() if value is not None})


def _plain(value: Any) -> Any:
    """A value of a row without numpy's types, which environments need not know."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class EnvironmentConversation(ConversationEnvironment):
    """An environment, as what answers the policy in one episode.

    Args:
        host: runs the environment.
        tag_config: ``env.registry.<tag>``.
        max_steps: turns of the episode at most; None: no limit.
        format_penalty: added to the reward of a turn whose ``info["valid_action"]`` is False.
        frames_folder: folder for the frames of the episode; None: none are asked for.
    """

    def __init__(
        self,
        host: EnvironmentHost,
        row: EnvRow,
        tag_config: EnvTagConfig,
        max_steps: int | None,
        format_penalty: float,
        frames_folder: str | None = None,
    ):
        self.host, self.row, self.tag_config = host, row, tag_config
        self.max_steps, self.format_penalty, self.frames_folder = max_steps, format_penalty, frames_folder
        self.frames: list[str] = []
        self._environment: HostedEnvironment | None = None
        self._turns, self._valid, self._reward, self._penalty = 0, 0, 0.0, 0.0
        self._check_template()

    def _check_template(self) -> None:
        template, key = self.tag_config.turn_template, f"env.registry.{self.row.tag}.turn_template"
        names = set(_FIELDS.findall(template))
        if "observation" not in names:
            raise ValueError(
                f"{key}={template!r} has no {{observation}}: the policy would not see the environment. Add it."
            )
        if names & {"turns_left", "max_steps"} and self.max_steps is None:
            raise ValueError(
                f"{key}={template!r} reads the number of turns, which has no limit. Set env.registry.{self.row.tag}."
                "max_steps or actor_rollout_ref.rollout.multi_turn.max_assistant_turns."
            )

    async def start(self, row: Mapping[str, Any]) -> Reply:
        self._environment = await self.host.open(self.row.tag, self.tag_config)
        answer = await self._environment.reset(self.row.seed, self.row.task)
        await self._keep_frame()
        messages = self._messages(answer, 1)
        if self.tag_config.system_prompt is not None:
            if messages and messages[0]["role"] == "system":
                raise ValueError(
                    f"env.registry.{self.row.tag}.system_prompt is set, and the environment begins with a message of "
                    "role system itself. Leave one of them out."
                )
            messages = [{"role": "system", "content": self.tag_config.system_prompt}, *messages]
        return Reply(messages, state_id=_state_id(answer), info=answer.info)

    async def reply(self, turn: AssistantTurn) -> Reply:
        assert self._environment is not None  # `start` or `resume` came first
        answer = await self._environment.step(turn.text)
        await self._keep_frame()
        self._turns += 1
        is_valid = bool(answer.info.get("valid_action", True))
        penalty = 0.0 if is_valid else self.format_penalty
        self._valid += is_valid
        self._reward += answer.reward
        self._penalty += penalty
        # sums so far: the last answer has those of the episode, also where it was given before a restart
        totals: dict[str, Any] = {
            "valid_action": self._valid / self._turns,
            "reward": self._reward,
            "turns": self._turns,
        }
        if self.format_penalty:
            totals[PENALTY_COLUMN] = self._penalty
        return Reply(
            self._messages(answer, self._turns + 1),
            reward=answer.reward + penalty,
            terminated=answer.terminated,
            truncated=answer.truncated,
            state_id=_state_id(answer),
            info={**answer.info, **totals},
        )

    async def resume(self, row: Mapping[str, Any], turns: Sequence[AssistantTurn], replies: Sequence[Reply]) -> None:
        """Repeat the episode in a fresh environment, from its seed and the actions so far.

        Raises:
            EnvironmentFailure: it does not answer as before.
        """
        again = [await self.start(row)]
        for turn in turns[: len(replies) - 1]:
            again.append(await self.reply(turn))
        for number, (before, now) in enumerate(zip(replies, again, strict=True)):
            if _visible(before) != _visible(now):
                raise EnvironmentFailure(
                    "not_reproducible",
                    f"environment {self.row.tag!r} (seed {self.row.seed}): when the episode is repeated after a "
                    f"restart, answer {number} is {str(_visible(now)):.500}, and was {str(_visible(before)):.500}. Let "
                    "all randomness of the environment come from the seed of reset.",
                )

    def _messages(self, answer: Answer, turn: int) -> list[dict[str, str]]:
        """What the policy reads before turn ``turn``, counted from 1."""
        if answer.text is None or self.tag_config.turn_template == "{observation}":
            return answer.messages
        left = None if self.max_steps is None else self.max_steps - turn + 1
        values = {"observation": answer.text, "turn": turn, "turns_left": left, "max_steps": self.max_steps}
        # not str.format: templates may have other braces
        text = _FIELDS.sub(lambda found: str(values[found[1]]), self.tag_config.turn_template)
        return [{"role": "user", "content": text}]

    async def _keep_frame(self) -> None:
        if self.frames_folder is not None and self._environment is not None:
            frame = await self._environment.frame()
            self.frames += [frame] if frame is not None else []

    async def finish(self) -> Mapping[str, Any]:
        if self.frames_folder is not None and self.frames:
            tag = re.sub(r"[^\w.-]", "_", self.row.tag)
            name = f"{tag}_{self.row.seed}_{self._reward:.1f}"
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, write_frames, self.frames_folder, name, self.frames)
        return {}

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()


def _state_id(answer: Answer) -> Any:
    if answer.state_id is not None:
        return answer.state_id
    return blake2b(
        json.dumps(answer.messages, sort_keys=True).encode(errors="surrogatepass"), digest_size=12
    ).hexdigest()


def _visible(reply: Reply) -> tuple:
    """What the policy and the trainer see of an answer."""
    messages = [(message["role"], message["content"]) for message in reply.messages]
    return messages, None if reply.reward is None else round(reply.reward, 9), reply.terminated, reply.truncated


@register("env_agent")
class EnvAgentLoop(EpisodeLoop):
    """Each turn's text is an action in the row's environment, whose rewards are those of the turns."""

    def environment(self, row: Mapping[str, Any]) -> EnvironmentConversation:
        asked, env = EnvRow.of(row), self.config.env
        tag_config = env.tag(asked.tag)
        penalty = env.train.format_penalty if tag_config.format_penalty is None else tag_config.format_penalty
        return EnvironmentConversation(
            EnvironmentHost.of(env),
            asked,
            tag_config,
            self.limits(row).assistant_turns,
            penalty,
            env.render_save_dir if row.get("validate") else None,
        )

    def limits(self, row: Mapping[str, Any]) -> EpisodeLimits:
        """Return those of ``rollout.multi_turn``, or of the row's tag where it has some."""
        limits, tag = super().limits(row), self.config.env.tag(EnvRow.of(row).tag)
        limits.assistant_turns = tag.max_steps or limits.assistant_turns
        limits.tokens_per_turn = tag.max_tokens_per_step or limits.tokens_per_turn
        return limits

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        result = await super().run(sampling_params, **row)
        outputs = result if isinstance(result, list) else [result]
        for output in outputs:
            info = dict(output.extra_fields.get("episode_info") or {})
            own = {"env_tag": EnvRow.of(row).tag, PENALTY_COLUMN: info.get(PENALTY_COLUMN, 0.0)}
            output.extra_fields = {**output.extra_fields, **own}
            # all is in the turns: no reward function is called
            output.reward_score = 0.0
        return result


def write_frames(folder: str, name: str, frames: Sequence[str]) -> None:
    """Write an episode's frames as text; as a GIF too where the package pillow is installed."""
    place = Path(folder).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.txt").write_text("\n\n".join(frames) + "\n", errors="replace")
        _write_gif(place / f"{name}.gif", frames)
    except OSError as error:
        warnings.warn(f"env.render_save_dir={folder}: frames of {name} cannot be written: {error}", stacklevel=2)


def _write_gif(path: Path, frames: Sequence[str]) -> None:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return
    lines = [line for frame in frames for line in frame.splitlines()]
    width = min(1600, 8 + 7 * max(map(len, lines), default=0))
    height = min(1600, 8 + 16 * max(frame.count("\n") + 1 for frame in frames))
    images = []
    for frame in frames:
        image = Image.new("L", (width, height), 255)
        ImageDraw.Draw(image).multiline_text((4, 4), frame, fill=0)
        images.append(image)
    images[0].save(path, save_all=True, append_images=images[1:], duration=500, loop=0)

"""Episodes of a batch: their metrics, and one record a trajectory for dumps and traces.

Reads the object columns that agent loops add (`EPISODE_COLUMNS`), which may be None in some rows. Batches of single
turns have none of them, and cost a look at the names. Knows no agent loop and no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.protocol import DataProto

EPISODE_COLUMNS = ("turn_rewards", "turn_spans", "turn_state_ids", "episode_info")
"""A row in which one of these is not None has turns. In a batch with the column ``episode_status`` every row is one."""

FAILED = "error"
"""Status of an episode that failed: no metric but the share of such episodes sees it."""

_OK_OUTCOMES, _TIMEOUT = ("ok",), "timeout"
_UNKNOWN_TOOL = "unknown"
_TOOL_NAME = re.compile(r"[\w.:-]{1,64}")

Decode = Callable[[list[list[int]]], list[str]]
Tool = Mapping[str, Any]


@dataclass
class Episode:
    """One trajectory of a batch."""

    rows: list[int]
    """Its rows in the batch: one, or one a turn where the chat template rewrites the history."""
    label: str
    """``env/<tag>``, without a tag ``agent/<name>``: the beginning of its metrics' names."""
    reward: float
    turns: int
    """Turns of the policy."""
    messages: int
    """Messages of all sides, the prompt counting as one."""
    status: str | None = None
    seconds: float | None = None
    uid: str | None = None
    has_turns: bool = True
    """False: a single turn, among rows that are more."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the environment or the agent loop report of it."""
    error: str | None = None
    """Why it failed."""
    tool_calls: Sequence[Tool] = ()

    @property
    def failed(self) -> bool:
        return self.status == FAILED


def episodes_of(batch: DataProto, scores: Sequence[float] | None = None) -> list[Episode]:
    """Return the episodes of a batch in the order of their first rows; none of a batch of single turns.

    Args:
        scores: of each row; None: the sums of ``token_level_scores``.
    """
    columns, count = batch.non_tensor_batch, len(batch)
    present = [columns[name] for name in EPISODE_COLUMNS if name in columns]
    messages: Sequence[int] = columns["__num_turns__"].tolist() if "__num_turns__" in columns else [2] * count
    has_turns = [messages[i] > 2 or any(column[i] is not None for column in present) for i in range(count)]
    if not any(has_turns) and "episode_status" not in columns:
        return []
    if scores is None:
        scores = batch.row_sums("token_level_scores").tolist()
    together: dict[Any, list[int]] = {}
    ids = columns.get("trajectory_id", [None] * count)
    for i in range(count):
        if has_turns[i] or "episode_status" in columns:
            together.setdefault(i if ids[i] is None else ("id", ids[i]), []).append(i)
    episodes = [_episode(columns, rows, scores, messages) for rows in together.values()]
    for episode in episodes:
        episode.has_turns = has_turns[episode.rows[0]] or episode.failed
    return episodes


def _episode(columns: Mapping[str, Any], rows: list[int], scores: Sequence[float], messages: Sequence[int]) -> Episode:
    first = rows[0]
    value = _reader(columns, first)
    turns = sum(len(spans) for i in rows if (spans := _reader(columns, i)("turn_spans", "turn_rewards")) is not None)
    seconds = value("episode_seconds", "rollout_seconds")
    tag, name, status, uid = (value(name) for name in ("env_tag", "agent_name", "episode_status", "uid"))
    calls = value("tool_calls")
    return Episode(
        rows=rows,
        label=f"agent/{name or 'default'}" if tag is None else f"env/{tag}",
        reward=float(sum(scores[i] for i in rows)),
        turns=turns or int(messages[first]) // 2,
        messages=int(messages[first]),
        status=None if status is None else str(status),
        seconds=None if seconds is None else float(seconds),
        uid=None if uid is None else str(uid),
        info=dict(value("episode_info") or {}),
        error=value("episode_error"),
        tool_calls=[call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list | tuple) else (),
    )


def _reader(columns: Mapping[str, Any], row: int) -> Callable[..., Any]:
    """Return a function that gives a row's value of the first of several columns that has one, else None."""

    def value(*names: str) -> Any:
        return next((columns[name][row] for name in names if name in columns and columns[name][row] is not None), None)

    return value


# -- metrics -----------------------------------------------------------------------------------------------------------
def episode_metrics(episodes: Sequence[Episode], prefix: str = "") -> dict[str, float]:
    """Return the metrics of episodes; nothing of none. Failed episodes count in ``error`` and among statuses only.

    Args:
        prefix: of every name: ``val-`` for validation.

    Returns:
        Of each environment ``env/<tag>/{success,reward,turns,valid_action,truncated,error}`` and every further number
        of ``episode_info`` (means; shares for ``truncated``, ended by a limit, and ``error``), where there is no tag
        ``agent/<agent_name>/...``. ``tool/<name>/{calls,error,timeout,seconds}``: calls an episode, the shares of them
        that failed and that took too long, and the seconds of a call; failures of a kind as ``tool/<name>/<kind>``.
        ``agent/status/<status>``: shares of all. ``agent_loop/slowest_{s,turns}``: those of the slowest episode.
    """
    metrics: dict[str, float] = {}
    for label in dict.fromkeys(episode.label for episode in episodes):
        own = [episode for episode in episodes if episode.label == label]
        metrics |= {f"{prefix}{label}/{name}": value for name, value in _means(own).items()}
    metrics |= {f"{prefix}tool/{name}": value for name, value in _tool_metrics(episodes).items()}
    statuses = [episode.status for episode in episodes if episode.status is not None]
    if statuses:
        for status in dict.fromkeys([*_known_statuses(), *statuses]):
            metrics[f"{prefix}agent/status/{status}"] = statuses.count(status) / len(episodes)
    if (slowest := slowest_of(episodes)) is not None:
        metrics[f"{prefix}agent_loop/slowest_s"] = slowest.seconds
        metrics[f"{prefix}agent_loop/slowest_turns"] = float(slowest.turns)
    return metrics


def slowest_of(episodes: Sequence[Episode]) -> Episode | None:
    """Return the episode that took longest, failed or not; None where no seconds are known."""
    timed = [episode for episode in episodes if episode.seconds is not None]
    return max(timed, key=lambda episode: episode.seconds, default=None)


def _means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of the episodes of one environment or agent loop."""
    done = [episode for episode in episodes if not episode.failed]
    means: dict[str, float] = {}
    if done:
        means["reward"] = sum(episode.reward for episode in done) / len(done)
        means["turns"] = sum(episode.turns for episode in done) / len(done)
    for name in dict.fromkeys(name for episode in done for name in episode.info):
        values = [episode.info[name] for episode in done if name in episode.info]
        numbers = [float(value) for value in values if isinstance(value, bool | int | float | np.number | np.bool_)]
        if numbers:
            means[name] = sum(numbers) / len(numbers)
    statuses = [episode.status for episode in done if episode.status is not None]
    if statuses:
        means["truncated"] = sum(status != "completed" for status in statuses) / len(statuses)
    means["error"] = (len(episodes) - len(done)) / len(episodes)
    return means


def _tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    done = [episode for episode in episodes if not episode.failed]
    calls: dict[str, list[Tool]] = {}
    for episode in done:
        for call in episode.tool_calls:
            calls.setdefault(_tool_name(call), []).append(call)
    metrics = {}
    for name, own in sorted(calls.items()):
        outcomes = [str(call.get("outcome", _OK_OUTCOMES[0])) for call in own]
        seconds = [float(call["seconds"]) for call in own if call.get("seconds") is not None]
        metrics[f"{name}/calls"] = len(own) / len(done)
        metrics[f"{name}/error"] = sum(outcome not in (*_OK_OUTCOMES, _TIMEOUT) for outcome in outcomes) / len(own)
        metrics[f"{name}/timeout"] = outcomes.count(_TIMEOUT) / len(own)
        for kind in sorted({*outcomes} - {*_OK_OUTCOMES, _TIMEOUT, FAILED}):
            if _TOOL_NAME.fullmatch(kind):
                metrics[f"{name}/{kind}"] = outcomes.count(kind) / len(own)
        if seconds:
            metrics[f"{name}/seconds"] = sum(seconds) / len(seconds)
    return metrics


def _tool_name(call: Tool) -> str:
    """Name of the tool in metrics: the policy writes it, so that any text that is no tool's is one name."""
    name, outcome = str(call.get("name", "")), str(call.get("outcome", ""))
    return name if _TOOL_NAME.fullmatch(name) and not outcome.startswith(_UNKNOWN_TOOL) else _UNKNOWN_TOOL


def _known_statuses() -> list[str]:
    from verl.agents.base import EpisodeStatus  # agent loops have run: it is loaded

    return [str(status) for status in EpisodeStatus.__members__.values()]


# -- records -----------------------------------------------------------------------------------------------------------
@dataclass
class _Segment:
    """Response tokens ``start`` to ``end`` of a row."""

    row: int
    start: int
    end: int
    turn: int | None
    """Number of the policy's turn; None: tokens that it read."""


def trajectory_records(
    batch: DataProto, episodes: Sequence[Episode], decode: Decode | None
) -> list[tuple[list[int], dict[str, Any]]]:
    """Return, for each episode with turns, its rows and what a line of JSON says of it besides the usual columns.

    ``turns`` is a list of ``{role, text, generated, span, reward, seconds, state}``: turns of the policy
    (``generated``) and what it read between them. ``span`` are first and last + 1 of its response tokens; null: the
    policy did not read it, or it is in the prompt of the next row. Turns of the policy are the decoded tokens, special
    ones too; what it read is the text of the messages, where there are any.

    Args:
        decode: ids to texts; None: turns have no text.
    """
    slowest = slowest_of(episodes)
    episodes = [episode for episode in episodes if episode.has_turns]
    responses = [row.tolist() for row in batch.ragged("responses").rows()]
    spans = _spans(batch, [i for episode in episodes for i in episode.rows])
    segments = [_segments(episode, spans, responses) for episode in episodes]
    texts: Iterator[str] = iter(())
    if decode is not None:
        texts = iter(decode([responses[part.row][part.start : part.end] for parts in segments for part in parts]))
    records = []
    for episode, parts in zip(episodes, segments, strict=True):
        decoded = None if decode is None else [next(texts) for _ in parts]
        record = _metadata(batch, episode)
        if episode is slowest:
            record["slowest"] = True
        record["turns"] = _turns(batch, episode, parts, decoded)
        records.append((episode.rows, record))
    return records


def _metadata(batch: DataProto, episode: Episode) -> dict[str, Any]:
    """What is known of a whole episode; what is not known is left out."""
    value = _reader(batch.non_tensor_batch, episode.rows[0])
    names = ("agent_name", "env_tag", "trajectory_id")
    record: dict[str, Any] = {name: value(name) for name in names} | {"status": episode.status}
    record |= {"error": episode.error, "num_turns": episode.messages, "seconds": episode.seconds}
    record["info"] = {name: plain(item) for name, item in episode.info.items()} or None
    record["tool_calls"] = plain(episode.tool_calls) or None
    record["num_rows"] = len(episode.rows) if len(episode.rows) > 1 else None
    return {name: item for name, item in record.items() if item is not None}


def plain(value: Any) -> Any:
    """Return the JSON form of a value that a user's code made; text of what has none."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _segments(episode: Episode, spans: Mapping[int, Sequence[tuple[int, int]]], responses: Sequence) -> list[_Segment]:
    """Divide an episode's responses at its turns. Of several rows, what was read between turns is in the prompts."""
    parts, turn, is_one_row = [], 0, len(episode.rows) == 1
    for row in () if episode.failed else episode.rows:
        end = 0
        for first, last in spans[row]:
            if first > end and is_one_row:
                parts.append(_Segment(row, end, first, None))
            parts.append(_Segment(row, first, last, turn))
            turn, end = turn + 1, last
        if end < len(responses[row]) and is_one_row:
            parts.append(_Segment(row, end, len(responses[row]), None))
    return parts


def _spans(batch: DataProto, rows: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the policy's turns in the responses: ``turn_spans``, else the runs of ones in ``response_mask``."""
    column = batch.non_tensor_batch.get("turn_spans", [None] * len(batch))
    spans = {i: [(int(first), int(last)) for first, last in column[i]] for i in rows if column[i] is not None}
    without = [i for i in rows if i not in spans]
    masks = batch.ragged("response_mask").rows() if without else []
    for i in without:
        edges = np.flatnonzero(np.diff(np.pad(masks[i].numpy() != 0, 1).astype(np.int8)))
        spans[i] = [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
    return spans


def _turns(
    batch: DataProto, episode: Episode, parts: Sequence[_Segment], texts: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Turns of an episode in their order, see `trajectory_records`."""
    columns, rows = batch.non_tensor_batch, episode.rows
    rewards, states = (_joined(columns, name, rows) for name in ("turn_rewards", "turn_state_ids"))
    seconds = _reader(columns, rows[0])("turn_seconds") or ()
    count = sum(part.turn is not None for part in parts)
    between = _messages_after(_reader(columns, rows[0])("messages"), count)
    shown, last = [], -1
    for number, part in enumerate(parts):
        if part.turn is None:
            read = between.pop(last, None)
            entry = {"role": _roles(read), "generated": False, "span": [part.start, part.end]}
            if texts is not None:
                entry["text"] = texts[number] if read is None else _text(read)
            shown.append(entry)
            continue
        if (read := between.pop(last, None)) is not None:  # not among the response's tokens
            shown.append(_unread(read, texts is not None))
        last = part.turn
        entry = {"role": "assistant", "generated": True, "span": [part.start, part.end]}
        if len(rows) > 1:
            entry["row"] = rows.index(part.row)
        if texts is not None:
            entry["text"] = texts[number]
        for name, values in (("reward", rewards), ("seconds", seconds), ("state", states)):
            if last < len(values) and values[last] is not None:
                entry[name] = plain(values[last])
        shown.append(entry)
    if (read := between.pop(last, None)) is not None:
        shown.append(_unread(read, texts is not None))
    return shown


def _unread(messages: Sequence[Mapping[str, Any]], has_text: bool) -> dict[str, Any]:
    entry = {"role": _roles(messages), "generated": False, "span": None}
    return {**entry, "text": _text(messages)} if has_text else entry


def _joined(columns: Mapping[str, Any], name: str, rows: Sequence[int]) -> list[Any]:
    values = [_reader(columns, i)(name) for i in rows]
    return [item for value in values if value is not None for item in value]


def _messages_after(messages: Any, turns: int) -> dict[int, list[Mapping[str, Any]]]:
    """Return the messages behind each turn of the policy, by its number; nothing where they do not match the turns.

    The policy's turns are the last messages of role assistant: earlier ones are of the prompt. A data column of the
    same name may hold something else.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return {}
    places = [i for i, message in enumerate(messages) if message.get("role") == "assistant"][-turns:] if turns else []
    if len(places) < turns or not turns:
        return {}
    ends = [*places[1:], len(messages)]
    after = {k: list(messages[start + 1 : end]) for k, (start, end) in enumerate(zip(places, ends, strict=True))}
    return {k: between for k, between in after.items() if between}


def _roles(messages: Sequence[Mapping[str, Any]] | None) -> str:
    return ", ".join(dict.fromkeys(str(m.get("role")) for m in messages)) if messages else "observation"


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(_content(message.get("content")) for message in messages)


def _content(content: Any) -> str:
    """Text of a message; of a part that is no text, its type in brackets."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, Mapping) else {"text": str(part)} for part in content]
    return "".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in parts)

"""Data and reward, tried before the run: rendered prompts, a histogram of lengths, scores of gold and of garbage.

Reads tokenizer.json and the chat template themselves, so that nothing heavy is imported.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import Problem
from verl.config.model_facts import find_folder, read_json
from verl.config.ppo import PPOConfig
from verl.doctor.data import DataFacts
from verl.utils.py_functional import excerpt

_GARBAGE = "I do not know."
_SHOWN = 3
_SOURCES = 8
"""Data sources whose scorers are tried at most."""


class Preview(NamedTuple):
    lines: list[str]
    errors: list[Problem]
    warnings: list[Problem]


def preview(config: PPOConfig, data: DataFacts) -> Preview:
    """What the first rows look like, and what the reward function says of them."""
    found = Preview([], [], [])
    if not data.rows or config.data.prompt_key not in data.rows[0]:
        return found
    _show_prompts(config, data, found)
    _try_reward(config, data, found)
    return found


# -- prompts ------------------------------------------------------------------------------------------------------


def _show_prompts(config: PPOConfig, data: DataFacts, found: Preview) -> None:
    reader = _reader(config)
    if reader is None:
        found.lines.append("  prompts are not shown: no tokenizer.json at hand")
        return
    tokenizer, render = reader
    try:
        texts = [render(row[config.data.prompt_key]) for row in data.rows]
    except Exception as error:  # a template is a program of its author's
        why = f"{type(error).__name__}: {error}"
        key = "actor_rollout_ref.model.custom_chat_template"
        found.errors.append(
            Problem(
                "data.prompt_key",
                f"data.prompt_key={config.data.prompt_key}: the chat template cannot write the first "
                f"rows ({why}). Give messages with role and content, or another template ({key}).",
                (key,),
            )
        )
        return
    for text in texts[:_SHOWN]:
        found.lines.append(f"  prompt  {excerpt(text, 160)}")
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    found.lines.extend(_histogram(lengths, config.data.max_prompt_length))
    limit, overlong = (
        config.data.max_prompt_length,
        [i for i, length in enumerate(lengths) if length > config.data.max_prompt_length],
    )
    if overlong and len(overlong) == len(lengths):
        found.errors.append(
            Problem(
                "data.max_prompt_length",
                f"data.max_prompt_length={limit} is less than every one of the first {len(lengths)} "
                f"prompts has ({min(lengths)} to {max(lengths)} tokens). Raise it.",
                ("data.train_files",),
            )
        )
    elif overlong and config.data.truncation == "error" and not config.data.filter_overlong_prompts:
        row = overlong[0]
        found.errors.append(
            Problem(
                "data.max_prompt_length",
                f"data.max_prompt_length={limit} is less than row {row} of data.train_files has "
                f"({lengths[row]} tokens; {len(overlong)} of the first {len(lengths)} have more), and "
                f"data.truncation=error. "
                f"Raise it to {max(lengths)}, or set data.filter_overlong_prompts=true.",
                ("data.truncation",),
            )
        )
    elif overlong and config.data.truncation != "error" and len(overlong) * 10 > len(lengths):
        found.warnings.append(
            Problem(
                "data.max_prompt_length",
                f"data.max_prompt_length={limit} cuts {len(overlong)} of the first {len(lengths)} "
                f"prompts (data.truncation={config.data.truncation}). Raise it to {max(lengths)}.",
                ("data.truncation",),
            )
        )


def _histogram(lengths: list[int], limit: int) -> list[str]:
    width = max(1, -(-max(lengths) // 6))
    counts = Counter(length // width for length in lengths)
    tallest = max(counts.values())
    bars = [
        f"  {bin * width:>6} to {bin * width + width - 1:<6} {'#' * max(1, 40 * counts[bin] // tallest)} {counts[bin]}"
        for bin in range(min(counts), max(counts) + 1)
        if counts[bin]
    ]
    head = f"  tokens of the first {len(lengths)} prompts (data.max_prompt_length={limit})"
    return [head, *bars]


def _reader(config: PPOConfig) -> tuple[Any, Callable[[Any], str]] | None:
    """The tokenizer, and what turns a prompt into text; None without a tokenizer.json."""
    folder = find_folder(config.data.tokenizer or config.actor_rollout_ref.model.path)
    if folder is None or not (folder / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    template = _template(folder, config.actor_rollout_ref.model.custom_chat_template)
    tokens = read_json(folder / "tokenizer_config.json")
    special = {name: _text(tokens.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    extra = dict(config.data.apply_chat_template_kwargs)

    def render(prompt: Any) -> str:
        if template is None and isinstance(prompt, str):
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if template is None:
            raise ValueError("the tokenizer has no chat template")
        return template.render(messages=messages, add_generation_prompt=True, **special, **extra)

    return Tokenizer.from_file(str(folder / "tokenizer.json")), render


def _text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, Mapping) else token or ""


def _template(folder: Path, custom: str | None) -> Any:
    text = custom
    if custom and "{" not in custom:
        text = Path(custom).expanduser().read_text(encoding="utf-8") if Path(custom).expanduser().is_file() else None
    if not text:
        file = folder / "chat_template.jinja"
        text = (
            file.read_text(encoding="utf-8")
            if file.exists()
            else read_json(folder / "tokenizer_config.json").get("chat_template")
        )
    if isinstance(text, list):  # several, by name
        text = next((entry["template"] for entry in text if entry.get("name") == "default"), None)
    if not text:
        return None
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(text)


def _raise(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


# -- reward -------------------------------------------------------------------------------------------------------


def _try_reward(config: PPOConfig, data: DataFacts, found: Preview) -> None:
    """Score the truth of one row of each data source, and garbage, with the built-in scorers."""
    is_theirs = config.reward_model.enable or config.custom_reward_function.path is not None
    if is_theirs or config.reward_model.reward_manager not in ("naive", "batch"):
        return  # a model, or the user's code: neither is run here
    sources: dict[str, dict] = {}
    for row in data.rows:
        sources.setdefault(str(row.get(config.data.reward_fn_key)), row)
    for source, row in list(sources.items())[:_SOURCES]:
        goal = row.get("reward_model")
        if not isinstance(goal, Mapping) or "ground_truth" not in goal:
            text = f"data.train_files: a row of {source!r} has reward_model={excerpt(goal, 60)}, which holds no "
            text += "ground_truth. Write {style: rule, ground_truth: ...} into it."
            found.errors.append(Problem("data.train_files", text))
            continue
        try:
            _compare(source, goal["ground_truth"], row, found)
        except Exception as error:  # of a scorer about this row, as the run would meet it
            text = (
                f"data.reward_fn_key={config.data.reward_fn_key}: rows say {source!r}, and scoring one fails: {error}"
            )
            key = "custom_reward_function.path"
            found.errors.append(Problem("data.reward_fn_key", f"{text} Correct the row, or set {key}.", (key,)))


def _compare(source: str, truth: Any, row: Mapping[str, Any], found: Preview) -> None:
    gold, text = max((_score(source, text, truth), text) for text in _golds(truth, row))
    garbage = _score(source, _GARBAGE, truth)
    found.lines.append(f"  reward  {source}: {gold:g} for {excerpt(text, 40)}, {garbage:g} for {_GARBAGE!r}")
    if gold == garbage:
        text = (
            f"data.train_files: the scorer of {source!r} gives {gold:g} to the ground truth "
            f"{excerpt(str(truth), 40)} and to {_GARBAGE!r} alike. Look at reward_model.ground_truth of the rows."
        )
        found.warnings.append(Problem("data.train_files", text))


def _golds(truth: Any, row: Mapping[str, Any]) -> list[str]:
    """Responses that should score well: the truth as common scorers want it written."""
    answer = dict(row.get("extra_info") or {}).get("answer")
    texts = [str(truth), f"#### {truth}", f"\\boxed{{{truth}}}", f"<answer>{truth}</answer>", "0123456789"]
    return [*texts, *([answer] if isinstance(answer, str) else [])]


def _score(source: str, text: str, truth: Any) -> float:
    from verl.utils.reward_score import default_compute_score

    result = default_compute_score(source, text, truth)
    return float(result["score"] if isinstance(result, Mapping) else result)

"""Options of ``main_generation`` and ``main_eval``: the tree of ``main_ppo`` with shorter names, and a few more.

``model.path`` is ``actor_rollout_ref.model.path``, ``data.path`` is ``data.val_files``, and so on: both spellings are
understood, on the command line and in YAML. So the words of a training generate and evaluate as that run would.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.base import option, section
from verl.config.data import DataConfig
from verl.config.ppo import ACTOR, MODEL, ROLLOUT, PPOConfig
from verl.config.tree import flatten, pop_key, put_key

_VALIDATION = f"{ROLLOUT}.val_kwargs"

_SECTIONS = {
    "model": MODEL,
    "rollout": ROLLOUT,
    "actor": ACTOR,
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
    "data.path": "data.val_files",
    "data.batch_size": "data.val_batch_size",
    "data.max_samples": "data.val_max_samples",
    "data.data_source_key": "data.reward_fn_key",
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "do_sample", "n", "repetition_penalty", "stop", "stop_token_ids")


@dataclass
class GenerationDataConfig(DataConfig):
    """Prompts, and the file of their responses."""

    output_path: str | None = None
    """Parquet file of the responses: the columns of the data, and ``responses``, ``response_lengths`` and
    ``finish_reasons``, each a list a row. Null: named after data and model, in the current folder."""

    overwrite: bool = False
    """Let ``output_path`` be replaced. False: responses that are there are kept, those that lack are added, and a file
    of another model, of other prompts or of other sampling is refused."""


@dataclass
class GenerationConfig(PPOConfig):
    """The configuration of ``verl.trainer.main_generation``."""

    config_name: ClassVar[str] = "generation"
    short_names: ClassVar[Mapping[str, str]] = {**_SECTIONS, "data.n_samples": f"{ROLLOUT}.n"}

    data: GenerationDataConfig = section(GenerationDataConfig)
    """Prompts, and the file of their responses."""


@dataclass
class EvaluationDataConfig(GenerationDataConfig):
    """Responses to score, or prompts to generate them for, and how they count."""

    response_key: str = "responses"
    """Column of the responses to a prompt: a list of texts, or one text."""

    reward_model_key: str = "reward_model"
    """Column with the known answer: ``{"ground_truth": ...}``, or the answer itself."""

    results_path: str | None = None
    """JSON file of the figures. Null: next to the responses, ending in ``.eval.json``."""

    correct_from: float = 1.0
    """Least score of a response that counts as correct in ``pass@k``, where the scorer reports no ``acc``."""

    confidence: float = option(0.95, above=0, below=1)
    """Probability that the confidence intervals cover."""


@dataclass
class EvaluationConfig(PPOConfig):
    """The configuration of ``verl.trainer.main_eval``."""

    config_name: ClassVar[str] = "evaluation"
    short_names: ClassVar[Mapping[str, str]] = {
        **_SECTIONS,
        "data.n_samples": f"{_VALIDATION}.n",
        **{f"rollout.{name}": f"{_VALIDATION}.{name}" for name in _SAMPLING},
    }

    data: EvaluationDataConfig = section(EvaluationDataConfig)
    """Responses, or prompts to generate them for, and how they count."""


_WORD = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=@\s]+)(?P<rest>=.*|)", re.DOTALL)


def long_name(key: str, names: Mapping[str, str]) -> str:
    """The option's own key, of the longest short name that ``key`` is or stands below."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if found := names.get(".".join(parts[:length])):
            return ".".join([found, *parts[length:]])
    return key


def long_words(words: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Words of a command line with the options' own keys. ``rollout.n`` gives way to ``data.n_samples``."""
    if not names:
        return list(words)
    found = [match for match in map(_WORD.fullmatch, words)]
    has_count = any(match and match["key"] == "data.n_samples" for match in found)
    return [
        word if match is None else f"{match['mark'] or ''}{long_name(match['key'], names)}{match['rest']}"
        for word, match in zip(words, found, strict=True)
        if not (has_count and match and match["key"] == "rollout.n")
    ]


def adopt_short_names(tree: dict[str, Any], names: Mapping[str, str]) -> bool:
    """Move what stands under short names in a composed tree to the options' own keys, in place; was anything moved?"""
    moved: dict[str, Any] = {}
    for short in sorted(names, key=lambda name: name.count(".")):  # data.n_samples goes before rollout.n
        if short.startswith("actor_rollout_ref."):
            continue  # every composed tree has it, following what it is short for
        present, value = pop_key(tree, short)
        if present:
            leaves = flatten(value, f"{short}.") if isinstance(value, dict) else [(short, value)]
            moved |= {long_name(key, names): leaf for key, leaf in leaves}
    for key, value in moved.items():
        put_key(tree, key, value)
    return bool(moved)

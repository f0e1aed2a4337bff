"""What the managers that call a Python function share: reading samples, checking results, placing rewards."""

import functools
import inspect
import logging
import math
import traceback
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.py_functional import excerpt
from verl.utils.ragged import Ragged
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn, RewardError

logger = logging.getLogger(__name__)

_CALLERS = ("verl.workers.reward_manager", "verl.utils.py_functional")
ON_ERROR = ("stop", "zero_and_count")

REWARD_ERROR_KEY = "reward_error"
"""Column of ``reward_extra_info`` under ``on_error=zero_and_count``: 1.0 where scoring failed, else 0.0."""


@dataclass(frozen=True)
class Sample:
    """What a reward function is told about one response."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why a sample has no score."""

    error: BaseException


class RuleRewardManager(AbstractRewardManager):
    """A manager that scores decoded responses with a Python function. Subclasses say how the function is called.

    Args:
        on_error: when the function raises or returns no finite number: ``stop`` the run with everything named, or
            ``zero_and_count``: reward 0 (and ``acc`` 0), counted in the extra column ``reward_error``.
        max_concurrent: how many calls of an ``async def`` function run at once.
        reward_kwargs: handed to every call of the function.
    """

    parameters: tuple[str, ...]
    """Names under which the function receives its arguments."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        on_error: str = "stop",
        max_concurrent: int = 64,
        **reward_kwargs: Any,
    ):
        if on_error not in ON_ERROR:
            raise ValueError(f"reward_model.on_error={on_error!r} is not known: use {' or '.join(ON_ERROR)}.")
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.on_error = on_error
        self.max_concurrent = max_concurrent
        self.reward_kwargs = reward_kwargs
        self._has_warned = False
        self._check_signature()

    @abstractmethod
    def score(self, samples: list[Sample]) -> list[Any]:
        """The function's result for each sample, or a :class:`Failure`."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        if "rm_scores" in data.keys():  # a reward model has scored the batch
            rewards = data.column("rm_scores")
            return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards
        responses = data.ragged("responses")
        samples = self.read(data, responses)
        scores, columns = self._collect(samples, self.score(samples), _in_words(data))
        if self.num_examine:
            self._print(data, samples, scores, columns)
        rewards = place_on_last_token(scores, responses)
        return {"reward_tensor": rewards, "reward_extra_info": columns} if return_dict else rewards

    def read(self, data: DataProto, responses: Ragged) -> list[Sample]:
        """The samples of a batch; responses are decoded in one go, without special tokens."""
        rows = data.non_tensor_batch
        for name, why in ((self.reward_fn_key, "data.reward_fn_key"), ("reward_model", "its ground_truth is the goal")):
            if name not in rows:
                raise RewardError(
                    f"The batch has no column {name!r} ({why}); its columns are {', '.join(rows)}. Write it into the "
                    "data file, or register a reward manager that does without."
                )
        ends = responses.layout.lengths.cumsum(0)[:-1].tolist()
        ids = np.split(responses.values.cpu().numpy(), ends)  # the tokenizer takes arrays faster than lists
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        nothing = [None] * len(data)
        turns, infos = rows.get("__num_turns__", nothing), rows.get("extra_info", nothing)
        samples = []
        for i, (source, text, goal) in enumerate(
            zip(rows[self.reward_fn_key], texts, rows["reward_model"], strict=True)
        ):
            if not isinstance(goal, Mapping) or "ground_truth" not in goal:
                raise RewardError(
                    f"Sample {i} (data_source={source!r}): reward_model={excerpt(goal)} holds no ground_truth. Write "
                    '{"style": "rule", "ground_truth": ...} into the data file; it may be empty.'
                )
            info = infos[i] if isinstance(infos[i], Mapping) else {}
            samples.append(Sample(source, text, goal["ground_truth"], {**info, "num_turns": turns[i]}))
        return samples

    def _collect(
        self, samples: list[Sample], results: Sequence[Any], batch: str
    ) -> tuple[list[float], dict[str, list]]:
        """Numbers and extra columns of the results; errors stop here or are counted."""
        scores: list[float] = []
        columns: dict[str, list] = {}
        failures: list[tuple[int, BaseException]] = []
        for i, result in enumerate(results):
            try:
                if isinstance(result, Failure):
                    raise result.error
                scores.append(to_number(result))
            except (Exception, SystemExit) as error:
                if self.on_error == "stop":
                    raise RewardError(
                        f"{self._describe(i, samples[i], error, batch)}\n"
                        f"Correct the function{self._key()}, or give such samples 0 and count them with "
                        "reward_model.on_error=zero_and_count."
                    ) from None  # the message holds the traceback
                failures.append((i, error))
                scores.append(0.0)
                continue
            if isinstance(result, Mapping):
                for name, value in result.items():
                    columns.setdefault(name, [None] * len(samples))[i] = value
        if "score" in columns:
            columns["score"] = list(scores)
        if self.on_error != "stop":
            failed = {i for i, _ in failures}
            columns[REWARD_ERROR_KEY] = [float(i in failed) for i in range(len(samples))]
            if "acc" in columns:  # what validation reports: a column with gaps would drop out of it
                columns["acc"] = [0.0 if i in failed else acc for i, acc in enumerate(columns["acc"])]
        if failures:
            i, error = failures[0]
            told = self._describe(i, samples[i], error, batch)
            logger.warning(
                "The reward function failed on %d of %d samples; they get 0 (reward_model.on_error=%s). The first: %s",
                *(len(failures), len(samples), self.on_error, told.splitlines()[0] if self._has_warned else told),
            )
            self._has_warned = True
        return scores, columns

    def _describe(self, i: int, sample: Sample, error: BaseException, batch: str) -> str:
        """What failed in one line, then the function's own frames, then the sample: the end is what is read first."""
        cause = "".join(traceback.format_exception_only(type(error), error)).strip()
        frames = _users_frames(error.__traceback__)
        trace = "".join(traceback.format_exception(type(error), error, frames)) if frames else f"{cause}\n"
        place = f"data_source={sample.data_source!r}, index={sample.extra_info.get('index')}"
        return (
            f"{name_of(self.compute_score)} failed on sample {i} of the {batch} ({place}): {cause.splitlines()[0]}\n"
            f"{trace}"
            f"  sample: {i} of the {batch}, {place}\n"
            f"  response: {excerpt(sample.solution_str)}\n"
            f"  ground_truth: {excerpt(sample.ground_truth)}"
        )

    def _key(self) -> str:
        return "" if self.compute_score is default_compute_score else " (custom_reward_function.path)"

    def _print(self, data: DataProto, samples: list[Sample], scores: list[float], columns: dict[str, list]) -> None:
        """Show the first samples of each data source. Only these prompts are decoded."""
        shown: dict[str, int] = {}
        for i, sample in enumerate(samples):
            if shown.setdefault(sample.data_source, 0) >= self.num_examine:
                continue
            shown[sample.data_source] += 1
            prompt = data[i : i + 1].ragged("prompts").values
            print("[prompt]", self.tokenizer.decode(prompt, skip_special_tokens=True))
            print("[response]", sample.solution_str)
            print("[ground_truth]", sample.ground_truth)
            for name, values in {"score": scores, **columns}.items():
                print(f"[{name}]", values[i])

    def _check_signature(self) -> None:
        """Find out now, not after the first rollout, that the function cannot be called."""
        function, keywords = self.compute_score, {**dict.fromkeys(self.parameters), **self.reward_kwargs}
        while isinstance(function, functools.partial):
            function, keywords = function.func, {**function.keywords, **keywords}
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # builtins may not tell
            return
        try:
            signature.bind(**keywords)
        except TypeError as error:
            hint = ""
            for manager, sign in (("batch", "data_sources"), ("naive", "data_source")):
                if sign in signature.parameters and sign not in self.parameters:
                    hint = f" Its parameters are those of reward_model.reward_manager={manager}: set that."
            raise TypeError(
                f"{name_of(function)} has the parameters {signature} and is called with the keywords "
                f"{', '.join(keywords)}: {error}.{hint} Name its parameters so, or let it take **kwargs."
            ) from None


def _in_words(data: DataProto) -> str:
    """``validation batch at step 3``, as far as the batch says so."""
    facts = data.meta_info
    step = f" at step {facts['global_steps']}" if "global_steps" in facts else ""
    return f"{'validation ' if facts.get('validate') else ''}batch{step}"


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame outside the packages that call reward functions; None if there is none."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
        frames = frames.tb_next
    return frames


def to_number(result: Any) -> float:
    """The score of a reward function's result.

    Raises:
        TypeError: it is neither a number nor a dict with one under ``score``.
        ValueError: it is not finite.
    """
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"the function returned a dict without 'score'; its keys are {', '.join(map(str, result))}")
        score = result["score"]
    if isinstance(score, (Tensor, np.ndarray)) and math.prod(score.shape) == 1:
        score = score.item()
    if not isinstance(score, (float, int, np.number, np.bool_)):  # bool is an int
        raise TypeError(
            f"the function returned {excerpt(score)} of type {type(score).__name__}; a score is a float, an int, "
            "a bool, or a dict that holds one under 'score'"
        )
    score = float(score)
    if not math.isfinite(score):
        raise ValueError(f"the function returned {score}; a score must be finite")
    return score


def place_on_last_token(scores: Sequence[float], responses: Ragged) -> Tensor:
    """(B, R) float32: the score on the last token of each response; of an empty response, on its first place."""
    layout = responses.layout
    rewards = torch.zeros(len(scores), layout.width, dtype=torch.float32)
    last = (layout.starts + layout.lengths - 1).clamp(min=0)
    rewards[torch.arange(len(scores)), last.cpu()] = torch.tensor(scores, dtype=torch.float32)
    return rewards


def name_of(function: Any) -> str:
    """``compute_score (path/to/file.py)`` for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"The reward function {name}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")

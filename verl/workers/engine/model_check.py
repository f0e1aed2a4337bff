"""A trial at the start, on the model itself: what training takes for granted must hold of this model.

No list of families knows which code mixes rows, draws random numbers when it trains, or cannot run at all. Two
forward passes over short rows tell (``Engine._try``): a row alone in inference mode, and the same row together with
another one, padded or packed, in train mode, must get the same scores without a random number. Where they do not,
further passes find out which of the two is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.attention.packing import Packing
from verl.models.attention.varlen_kernels import AttentionOptions
from verl.workers.engine.micro_batch import MicroBatch

LENGTHS = (7, 12)
PROMPT = 4
"""Tokens that both rows begin with."""
TOLERANCE = {torch.float32: 1e-3}
"""Median difference over the spread of the scores; a model whose rows see each other is far beyond."""
COARSE = 0.1
"""The same for half precision."""
MOST_CLASSES = 12
"""Classes of modules that are tried one by one for the one that is random."""


def alone(config: Any, never: tuple[int, ...], packed: bool) -> MicroBatch:
    """Return the row that is compared, by itself: of packed rows the longer one, which stands behind the other; of
    padded rows the shorter one, which has padding.
    """
    first, second = _rows(config, never)
    return _padded([second if packed else first])


def padded(config: Any, never: tuple[int, ...]) -> MicroBatch:
    """Two random rows side by side, the shorter one, which is looked at, last."""
    return _padded(_rows(config, never)[::-1])


def packed(config: Any, never: tuple[int, ...], share_prompts: bool) -> MicroBatch:
    """Two random rows one behind another; with ``share_prompts`` the second leaves its prompt to the first."""
    rows, length = _rows(config, never), LENGTHS[0]
    ids, positions = torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])
    cells = torch.cat([torch.arange(length - 1), torch.arange(length, len(ids) - 1)])
    if not share_prompts:
        return _micro_batch(rows, ids[None], positions[None], cells, Packing.of_lengths(LENGTHS))
    runs = torch.cat([torch.arange(length), torch.arange(length + PROMPT, len(ids))])
    place = torch.cat([torch.arange(length), torch.arange(PROMPT), torch.arange(length, len(runs))])
    packing = Packing.with_shared_keys((length, LENGTHS[1] - PROMPT), place.split(LENGTHS))
    return _micro_batch(rows, ids[runs][None], positions[runs][None], place[cells], packing)


def _rows(config: Any, never: tuple[int, ...]) -> list[Tensor]:
    vocab = config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    usable = torch.tensor([token for token in range(vocab // 4, vocab)[:4096] if token not in never])
    first, second = (usable[torch.randint(len(usable), (length,), generator=draw)] for length in LENGTHS)
    return [first, torch.cat([first[:PROMPT], second[PROMPT:]])]


def _padded(rows: list[Tensor]) -> MicroBatch:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    cells = torch.cat([number * ids.shape[1] + torch.arange(len(row) - 1) for number, row in enumerate(rows)])
    return _micro_batch(rows, ids, None, cells, None)


def _micro_batch(
    rows: list[Tensor], ids: Tensor, positions: Tensor | None, cells: Tensor, packing: Packing | None
) -> MicroBatch:
    targets = torch.cat([row[1:] for row in rows])
    shape = len(rows), max(map(len, rows)) - 1
    return MicroBatch(ids, positions, cells, targets, torch.arange(len(targets)), shape, {}, packing=packing)


# -- verdicts ------------------------------------------------------------------------------------------------------


def difference(expected: Tensor, found: Tensor) -> float:
    """Return the median difference of the last row's scores, (t,), from those it gets alone, over their spread."""
    found = found[-len(expected) :]
    spread = expected.float().std().clamp_min(1e-6)
    return float(((found - expected).abs().float() / spread).median().nan_to_num(math.inf))


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference that rounding explains."""
    return TOLERANCE.get(dtype, COARSE)


def check_packed(apart: float, dtype: torch.dtype, name: str) -> None:
    """Judge the difference between rows alone and packed.

    Raises:
        ValueError: it is more than rounding.
    """
    if not apart <= tolerance(dtype):
        raise ValueError(
            f"model.use_remove_padding=true: {name} does not score rows packed together as it scores each alone (they "
            f"differ by {apart:.1e} of the scores' spread): some layer mixes tokens of different rows. Set "
            "model.use_remove_padding=false."
        )


def check_attention_options(config: Any, asked: list[AttentionOptions], name: str) -> None:
    """Layers must ask for the windows and caps that the config speaks of: short rows would not show a missing one.

    Raises:
        ValueError: they do not.
    """
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    cuts = bool(window) and window < (getattr(text, "max_position_embeddings", None) or math.inf)
    has_windows = cuts and getattr(text, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    has_caps = bool(getattr(text, "attn_logit_softcapping", None))
    lost = "sliding_window" if has_windows and not any(a.window for a in asked) else None
    lost = "attn_logit_softcapping" if has_caps and not any(a.softcap for a in asked) else lost
    if lost or not asked:
        what = f"its {lost}={getattr(text, lost)}" if lost else "its rows' lengths"
        raise ValueError(
            f"model.use_remove_padding=true: {name} does not hand {what} to its attention function, so that packed "
            "rows would see what they must not. Set model.use_remove_padding=false."
        )


@contextmanager
def runs_here(model: Any) -> Iterator[None]:
    """Around forward passes of transformers' code: what it raises names the model.

    Raises:
        ValueError: with the reason and what to use.
    """
    try:
        yield
    except Exception as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(
            f"model.path={model.name_or_path!r} (model_type={model.config.model_type!r}) cannot be trained here: a "
            f"forward pass of {type(model).__name__} over short rows raised {type(error).__name__}: {reason}. Check "
            "model.override_config and the packages this model needs, or use a model of another family."
        ) from error


# -- randomness ----------------------------------------------------------------------------------------------------


def candidates(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules that may be what is random in train mode, to be left in inference mode: those of one class, then all but
    the layers that are recomputed, which go by their train mode, then all.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    others = [module for module in model.modules() if not isinstance(module, GradientCheckpointingLayer)]
    by_class: dict[type, list[nn.Module]] = {}
    for module in others:
        # torch's own know nothing random but dropout, which is off
        if not type(module).__module__.startswith("torch.nn"):
            by_class.setdefault(type(module), []).append(module)
    yield from list(by_class.values())[:MOST_CLASSES]
    yield others
    yield list(model.modules())


def train_mode(model: nn.Module, but: Iterable[nn.Module] = ()) -> None:
    """Switch ``model`` to train mode, ``but`` for some of its modules."""
    model.train()
    for module in but:
        module.training = False


def classes_of(modules: Iterable[nn.Module]) -> str:
    """Their classes' names, for people."""
    names = list(dict.fromkeys(type(module).__name__.removeprefix("FSDP") for module in modules))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def drew(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether any generator moved between two ``random_state``s."""

    def plain(state: Mapping[str, Any]) -> list[Any]:
        flat = [part for name in sorted(state) for part in (state[name] if name == "numpy" else [state[name]])]
        return [part.tolist() if isinstance(part, Tensor) else part for part in flat]

    return plain(before) != plain(after)


def refuse_random(name: str, model_type: str, in_training: bool) -> None:
    """Raise for a model that cannot be made to compute the same twice.

    Raises:
        ValueError: always.
    """
    when = "in train mode scores tokens otherwise than in inference" if in_training else "draws random numbers"
    raise ValueError(
        f"model_type={model_type!r}: {name} {when}, by something that is no dropout and cannot be switched off, so "
        "that importance ratios would be random on the policy's own samples. Use a model of another family."
    )

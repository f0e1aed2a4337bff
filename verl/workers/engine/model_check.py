"""Check of a model at the start: forward passes must be deterministic, and rows must not influence each other.

No list of families knows which code mixes rows, uses random numbers in train mode, or cannot run at all. Two forward
passes over short rows tell: a single row in inference mode, and the same row together with another one, padded or
packed, in train mode, must get the same scores without random numbers. Where they do not, further passes find out
which of the two is the cause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.batch.ragged import Ragged
from verl.checkpoint.checkpoint_manager import random_state
from verl.models.attention.kernels import AttentionOptions, Packing
from verl.models.attention.packed import use_packed_attention
from verl.workers.engine.micro_batch import MicroBatch

if TYPE_CHECKING:
    from verl.workers.engine.engine import Engine

logger = logging.getLogger(__name__)

LENGTHS = (7, 12)
PROMPT = 4
"""Tokens of the prompt of both rows."""
TOLERANCE = {torch.float32: 1e-3}
"""Median difference over the spread of the scores; a model that mixes rows is far beyond."""
COARSE = 0.1
"""The same for half precision."""
MOST_CLASSES = 12
"""Classes of modules that are tested one by one for random numbers."""


@torch.no_grad()
def check_forward_passes(engine: Engine) -> None:
    """Switch to packed rows where configured, and check the engine's forward passes; adapt the engine, or refuse.

    Sets ``engine.one_row_per_micro_batch`` and ``engine.modules_in_eval_mode`` where the model needs it.
    """
    engine.module.eval()
    spec = engine.spec
    rows = _random_rows(engine)
    must_repeat = engine.is_trained and not spec.has_dropout
    # one of the two rows alone: of packed rows the second; of padded rows the shorter one, which has padding next to it
    alone = _padded([rows[1 if spec.remove_padding else 0]]).to(engine.device)
    with raises_model_error(engine.module):
        expected = _scores(engine, alone)
    if spec.remove_padding:
        use_packed_attention(engine.module)
        micro = engine.shard_sequence(_packed(rows, spec.share_prompts))
    else:
        micro = _padded(rows[::-1]).to(engine.device)
    with nullcontext() if spec.remove_padding else raises_model_error(engine.module):
        is_right = must_repeat and not _train_mode_differs(engine, micro, expected)
        engine.module.eval()
        if is_right:
            return
        scores = _scores(engine, micro)
    _check_rows_independent(engine, engine.reduce([difference(expected, scores)], "max")[0])
    if must_repeat:
        _find_random_modules(engine, micro, scores)
    elif engine.is_trained and engine.topology.rank == 0:
        logger.warning(
            "model.override_config switches dropout on: importance ratios are random even on the policy's own "
            "samples, so part of them is clipped"
        )


def _check_rows_independent(engine: Engine, deviation: float) -> None:
    """Refuse packed rows that influence each other; run padded rows that do one by one.

    Args:
        deviation: of the scores of a row next to another one from those of the row alone.
    """
    limit = TOLERANCE.get(engine.spec.compute_torch_dtype, COARSE)
    if deviation <= limit:
        return
    if engine.spec.remove_padding:
        raise ValueError(
            f"model.use_remove_padding=true: {type(engine.module).__name__} does not score rows packed together as it "
            f"scores each alone (they differ by {deviation:.1e} of the scores' spread): some layer mixes tokens of "
            "different rows. Set model.use_remove_padding=false."
        )
    engine.one_row_per_micro_batch = True
    if engine.topology.rank == 0:
        logger.warning(
            "model_type=%r: a row next to a longer one does not score as it does alone (they differ by %.1e of the "
            "scores' spread), so every micro-batch has one row",
            engine.module.config.model_type,
            deviation,
        )


def _find_random_modules(engine: Engine, micro: MicroBatch, expected: Tensor) -> None:
    """Find the modules, if any, that must stay in inference mode for train mode to score as inference does."""
    if not _train_mode_differs(engine, micro, expected):
        engine.module.eval()
        return
    engine.module.eval()
    when = "uses random numbers" if _differs(engine, micro, expected) else None
    for modules in () if when else _candidates(engine.module):
        engine.modules_in_eval_mode = modules
        if not _train_mode_differs(engine, micro, expected):
            break
    else:
        raise ValueError(
            f"model_type={engine.module.config.model_type!r}: {type(engine.module).__name__} "
            f"{when or 'scores tokens differently in train mode and in inference'}, by code that is not dropout and "
            "cannot be switched off, so that importance ratios would be random on the policy's own samples. Use a "
            "model of another family."
        )
    engine.module.eval()
    if engine.topology.rank == 0:
        names = list(dict.fromkeys(type(part).__name__.removeprefix("FSDP") for part in engine.modules_in_eval_mode))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        message = "%s: train mode is random in modules of the class %s; they are trained in inference mode"
        logger.warning(message, type(engine.module).__name__, ", ".join(names[:4]) + more)


def _candidates(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield sets of modules to leave in inference mode, in search of the ones that are random in train mode.

    First those of each class, then all but the layers that are recomputed, which depend on their train mode, then all.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    others = [module for module in model.modules() if not isinstance(module, GradientCheckpointingLayer)]
    by_class: dict[type, list[nn.Module]] = {}
    for module in others:
        # of torch's own modules only dropout is random, and it is off
        if not type(module).__module__.startswith("torch.nn"):
            by_class.setdefault(type(module), []).append(module)
    yield from list(by_class.values())[:MOST_CLASSES]
    yield others
    yield list(model.modules())


def _train_mode_differs(engine: Engine, micro: MicroBatch, expected: Tensor) -> bool:
    engine.train_mode()
    return _differs(engine, micro, expected)


def _differs(engine: Engine, micro: MicroBatch, expected: Tensor) -> bool:
    """Whether a forward pass uses random numbers or deviates from ``expected``, on any rank."""
    before = _plain(random_state(engine.device))
    deviation = difference(expected, _scores(engine, micro))
    is_random = before != _plain(random_state(engine.device))
    strict = min(1e-2, TOLERANCE.get(engine.spec.compute_torch_dtype, COARSE))
    # a deviation that is not a number is too large
    return bool(engine.reduce([float(is_random or not deviation <= strict)], "max")[0])


def _plain(state: Mapping[str, Any]) -> list[Any]:
    """Numbers of a ``random_state``, which can be compared."""
    flat = [part for name in sorted(state) for part in (state[name] if name == "numpy" else [state[name]])]
    return [part.tolist() if isinstance(part, Tensor) else part for part in flat]


def _scores(engine: Engine, micro: MicroBatch) -> Tensor:
    """Run ``micro`` and return its scores, (t,); of packed rows also check the layers' attention options."""
    options: list[AttentionOptions] = []
    if micro.packing is None:
        scores = engine._score(micro)
    else:
        scores = engine._score(micro, record=options.append)
        check_attention_options(engine.module.config, options, type(engine.module).__name__)
    return scores.log_probs if engine.spec.head == "lm" else scores.values


def difference(expected: Tensor, scores: Tensor) -> float:
    """Return the median difference of the last row's scores, (t,), from ``expected``, over their spread."""
    scores = scores[-len(expected) :]
    # the median: one token whose probabilities are nearly equal may differ by more than rounding
    spread = expected.float().std().clamp_min(1e-6)
    return float(((scores - expected).abs().float() / spread).median().nan_to_num(math.inf))


# -- rows ----------------------------------------------------------------------------------------------------------


def _random_rows(engine: Engine) -> list[Tensor]:
    """Two random rows of ``LENGTHS`` tokens with the same prompt."""
    vocab, excluded = engine.module.config.get_text_config().vocab_size, engine.head.excluded_tokens
    # all ranks must try the same rows; the lower quarter of a vocabulary holds special tokens and single bytes
    generator = torch.Generator().manual_seed(0)
    usable = torch.tensor([token for token in range(vocab // 4, vocab)[:4096] if token not in excluded])
    first, second = (usable[torch.randint(len(usable), (length,), generator=generator)] for length in LENGTHS)
    return [first, torch.cat([first[:PROMPT], second[PROMPT:]])]


def _padded(rows: list[Tensor]) -> MicroBatch:
    """Right padded rows; the last one's scores are compared."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    valid_positions = torch.cat([number * ids.shape[1] + torch.arange(len(row) - 1) for number, row in enumerate(rows)])
    return _micro_batch(rows, ids, None, valid_positions, None)


def _packed(rows: list[Tensor], share_prompts: bool) -> MicroBatch:
    """Two rows in one sequence; with ``share_prompts`` their prompt runs once."""
    length = LENGTHS[0]
    ids, positions = torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])
    valid_positions = torch.cat([torch.arange(length - 1), torch.arange(length, len(ids) - 1)])
    if not share_prompts:
        return _micro_batch(rows, ids[None], positions[None], valid_positions, Packing.of_lengths(LENGTHS))
    kept_tokens = torch.cat([torch.arange(length), torch.arange(length + PROMPT, len(ids))])
    index = torch.cat([torch.arange(length), torch.arange(PROMPT), torch.arange(length, len(kept_tokens))])
    packing = Packing.with_shared_keys((length, LENGTHS[1] - PROMPT), index.split(LENGTHS))
    return _micro_batch(rows, ids[kept_tokens][None], positions[kept_tokens][None], index[valid_positions], packing)


def _micro_batch(
    rows: list[Tensor], ids: Tensor, positions: Tensor | None, valid_positions: Tensor, packing: Packing | None
) -> MicroBatch:
    targets = torch.cat([row[1:] for row in rows])
    response = Ragged.from_rows([row[1:] for row in rows], max(map(len, rows)) - 1).layout
    return MicroBatch(ids, positions, valid_positions, targets, response, {}, packing=packing)


# -- errors -----------------------------------------------------------------------------------------------------------


def check_attention_options(config: Any, options: list[AttentionOptions], name: str) -> None:
    """Check that layers pass the config's window and softcap to attention: short rows would not show a missing one.

    Raises:
        ValueError: they do not.
    """
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    cuts = bool(window) and window < (getattr(text, "max_position_embeddings", None) or math.inf)
    has_windows = cuts and getattr(text, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    has_caps = bool(getattr(text, "attn_logit_softcapping", None))
    missing = "sliding_window" if has_windows and not any(a.window for a in options) else None
    missing = "attn_logit_softcapping" if has_caps and not any(a.softcap for a in options) else missing
    if missing or not options:
        argument = f"its {missing}={getattr(text, missing)}" if missing else "its rows' lengths"
        raise ValueError(
            f"model.use_remove_padding=true: {name} does not pass {argument} to its attention function, so packed "
            "rows would attend to tokens they must not. Set model.use_remove_padding=false."
        )


@contextmanager
def raises_model_error(model: Any) -> Iterator[None]:
    """Turn errors of the model's code within the block into one that names the model.

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

"""Which tensor columns of an RL batch have no padding, and in which window: prompt, response, or both."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl.batch.layout import Layout
from verl.batch.ragged import CountedPositions, Fill, JoinedTokens, Ragged

WINDOWS = {"prompts": "prompt", "input_ids": "all", "attention_mask": "all", "position_ids": "all"} | dict.fromkeys(
    "responses response_mask loss_mask old_log_probs ref_log_prob rollout_log_probs entropys values rm_scores "
    "token_level_scores token_level_rewards advantages returns rollout_is_weights selected_tokens "
    "response_weights sum_pi_squared rollout_versions "
    "teacher_log_probs teacher_topk_log_probs teacher_topk_ids".split(),
    "response",
)


_TOKEN_IDS = ("input_ids", "prompts", "responses")


def join_windows(prompt: Ragged, response: Ragged) -> dict[str, Ragged]:
    """Return the columns of whole sequences, (B, P + R), from prompts (B, P) and responses (B, R).

    ``input_ids``, ``attention_mask`` (ones) and ``position_ids`` that count each row from 0.
    """
    tokens = JoinedTokens.of(prompt, response)
    return {"input_ids": tokens, "attention_mask": tokens.constant(1), "position_ids": CountedPositions(tokens.layout)}


def register_ragged_column(name: str, window: str) -> None:
    """Declare that column ``name`` (B, width, ...) has values on valid tokens of ``window`` only.

    Such a column travels without its padding and comes back with zeros there. ``window``: "all", "prompt" or
    "response". Register where the column is made, before it is sent.
    """
    if window not in ("all", "prompt", "response"):
        raise ValueError(f"register_ragged_column({name!r}): window={window!r} is none of 'all', 'prompt', 'response'.")
    WINDOWS[name] = window


def window_layouts(columns: Mapping[str, Tensor | Ragged]) -> dict[str, Layout]:
    """Return the layout of each window: by the attention mask, else of a packed column of that window."""
    packed = {name: column.layout for name, column in columns.items() if isinstance(column, Ragged)}
    layouts = {WINDOWS[name]: layout for name, layout in packed.items() if name in WINDOWS}
    mask = columns.get("attention_mask")
    if mask is None or len(mask.shape) != 2:
        return layouts
    layouts["all"] = whole = packed["attention_mask"] if isinstance(mask, Ragged) else Layout.from_mask(mask)
    shapes = {name: columns[name].shape for name in ("prompts", "responses") if name in columns}
    widths = {name: shape[1] for name, shape in shapes.items() if len(shape) > 1}
    if sum(widths.values()) > whole.width or (len(widths) == 2 and sum(widths.values()) != whole.width):
        return layouts  # a mask of prompts alone holds no responses
    if "prompts" in widths:
        layouts["prompt"] = whole.window(0, widths["prompts"])
    if "responses" in widths:
        layouts["response"] = whole.window(whole.width - widths["responses"], whole.width)
    return layouts


def pack_column(name: str, column: Tensor, layouts: Mapping[str, Layout], pad_token_id: int | None) -> Ragged | None:
    """Pack a padded column; None if it is unknown, its window is, or its shape is not that of its window."""
    layout = layouts.get(WINDOWS.get(name, ""))
    if layout is None or column.shape[:2] != (len(layout), layout.width):
        return None
    fill: Fill = "position" if name == "position_ids" else 0
    if name in _TOKEN_IDS and column.ndim == 2:
        fill = pad_token_id or 0
        padded_rows = (layout.lengths < layout.width).nonzero()[:1]
        if len(padded_rows):  # the value that its padding has
            row = int(padded_rows)
            fill = column[row, 0 if layout.starts[row] > 0 else layout.lengths[row]].item()
    return Ragged.from_padded(column, layout, fill)

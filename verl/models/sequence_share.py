"""The part of a packed sequence that one of several ranks computes, and how the parts become whole again.

Knows tokens, cells and groups of ranks; no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from verl.utils.ulysses import Group, gather_uneven


@dataclass(frozen=True)
class SequenceShare:
    """Tokens [``start``, ``start + length``) of a sequence of ``size * length``, and the cells read among them."""

    group: Group
    rank: int
    size: int
    length: int
    """Tokens of each rank."""
    cells: Tensor
    """(n,): positions in this rank's tokens that predict a token."""
    picked: Tensor
    """(n,): which of the micro-batch's t cells these are."""
    counts: tuple[int, ...]
    """n of each rank."""
    place: Tensor
    """(t,): where each of the t cells comes in the ranks' results one after the other."""

    @classmethod
    def of(cls, cells: Tensor, tokens: int, group: Group, rank: int, size: int) -> SequenceShare:
        """Cut a sequence of ``tokens``, a multiple of ``size``; ``cells`` (t,) are positions in it, in host memory."""
        length = tokens // size
        owner = cells // length
        order = torch.argsort(owner, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        counts = torch.bincount(owner, minlength=size).tolist()
        picked = (owner == rank).nonzero().flatten()
        return cls(group, rank, size, length, cells[picked] - rank * length, picked, tuple(counts), place)

    def to(self, device: torch.device | str) -> SequenceShare:
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("cells", "picked", "place")}
        return replace(self, **moved)

    @property
    def start(self) -> int:
        return self.rank * self.length

    def part(self, whole: Tensor, dim: int = -1) -> Tensor:
        """This rank's tokens of something that all ranks have, along ``dim``."""
        return whole.narrow(dim, self.start, self.length)

    def gather(self, results: Tensor) -> Tensor:
        """Results (n,) at this rank's cells to those at all t cells, on every rank; differentiable."""
        return gather_uneven(results, self.counts, self.group).index_select(0, self.place)


def slice_language_model(model: Any) -> None:
    """Let the text part of a vision-language model take this rank's tokens of embeddings made from the whole sequence.

    Images are seen whole on every rank, since their features are laid into the embeddings by counting placeholders.
    """
    language_model: nn.Module = model.base_model.language_model
    language_model.register_forward_pre_hook(_slice_inputs, with_kwargs=True)


def _slice_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    share: SequenceShare | None = kwargs.get("share")
    if share is None:
        return None
    sliced = dict(kwargs)
    sliced["inputs_embeds"] = share.part(kwargs["inputs_embeds"], 1)
    if kwargs.get("position_ids") is not None:
        sliced["position_ids"] = share.part(kwargs["position_ids"])
    # Qwen3-VL adds features of several depths of the tower to the states at placeholders
    seen, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if seen is not None and features is not None:
        sliced["visual_pos_masks"] = share.part(seen, 1)
        first = int(seen[:, : share.start].sum())
        count = int(sliced["visual_pos_masks"].sum())
        sliced["deepstack_visual_embeds"] = [layer[first : first + count] for layer in features]
    return args, sliced

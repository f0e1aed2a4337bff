"""Arithmetic on the valid tokens of a masked (B, R) tensor, so that padding costs nothing.

A batch of 1024 x 4096 holds perhaps 300,000 sampled tokens; everything else is padding. ``ValidTokens`` lays the
tokens of each row side by side (holes left by tool output close up) and the rows one after another, each starting at
a multiple of ``BLOCK``; the gaps this leaves hold zeros. Elementwise formulas then run on the flat vector as they are
written in a paper, and "the next token" is the next position.

Masks and arithmetic only; independent of the algorithms.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.batch.layout import Layout
from verl.batch.ragged import Column, Ragged, RowValues

BLOCK = 64
"""Tokens per block: long enough for efficient matrix products, short enough to waste little on the ends of rows."""

PADDED_BELOW = 1 << 16
"""Masks with fewer positions than this stay padded: packing would cost more than it saves."""


class ValidTokens:
    """The positions of the ones of a (B, R) mask, laid out flat.

    ``lengths`` (B,) counts the ones of each row, ``total`` all of them. Packed vectors have shape (M,), where M is
    a multiple of ``BLOCK``.
    """

    def __init__(self, mask: Tensor):
        self.shape = mask.shape
        mask = mask.long() if mask.dtype == torch.bool else mask
        self.lengths = mask.sum(-1).long()
        # waits for an accelerator, as does the check for holes below: `valid_tokens` does without this class there
        self._lay_out()

        # where a row's tokens are its first ones, whole blocks are copied from here, which is far faster than an index
        self.source = self.row * self.blocks_per_row + self.block_in_row
        self.valid_positions = self.packed_positions = None
        if int(self._clear_gaps(_blocks(mask).index_select(0, self.source)).sum()) != self.total:
            # A row has a hole or starts late: its tokens are moved one by one, in order.
            self.valid_positions = mask.reshape(-1).nonzero().squeeze(-1)
            self.packed_positions = self._is_valid().nonzero().squeeze(-1)

    def _lay_out(self) -> None:
        """Set the layout by blocks from ``lengths`` and ``shape``."""
        self.total = int(self.lengths.sum())
        device = self.lengths.device
        # rows without a token have no block; all index arithmetic is by block, 64 times less than by token
        num_blocks = (self.lengths + BLOCK - 1) // BLOCK
        end_block = num_blocks.cumsum(0)
        self.first_block = end_block - num_blocks
        self.row = torch.repeat_interleave(num_blocks)
        self.block_in_row = torch.arange(len(self.row), device=device) - self.first_block[self.row]
        is_used = num_blocks > 0
        self.last = end_block[is_used] - 1
        ones_in_last = (self.lengths - (num_blocks - 1) * BLOCK)[is_used]
        self.gap = torch.arange(BLOCK, device=device) >= ones_in_last.unsqueeze(-1)
        self.blocks_per_row = -(-self.shape[-1] // BLOCK)

    def _is_valid(self) -> Tensor:
        """(M,) bool: False in gaps."""
        ones = torch.ones(len(self.row), BLOCK, dtype=torch.bool, device=self.lengths.device)
        return self._clear_gaps(ones).view(-1)

    def pack(self, x: Any) -> Tensor:
        """(B, R) to (M,); differentiable. Values at masked positions never enter a result, even NaN."""
        return _Pack.apply(x, self)

    def unpack(self, flat: Tensor) -> Tensor:
        """(M,) to (B, R), zero where masked, whatever the gaps hold."""
        num_rows, width = self.shape
        if self.valid_positions is not None:
            out = flat.new_zeros(num_rows * width)
            out[self.valid_positions] = flat[self.packed_positions]
            return out.view(num_rows, width)
        out = flat.new_zeros(num_rows * self.blocks_per_row, BLOCK)
        out.index_copy_(0, self.source, flat.view(-1, BLOCK))
        # whole blocks were copied, and whatever stood in their gaps
        return self._clear_gaps(out, self.source[self.last]).view(num_rows, -1)[:, :width]

    def spread(self, per_row: Tensor) -> Tensor:
        """Give every token its row's number: (B,) to (B, R), zero where masked."""
        return self.unpack(self.repeat(per_row))

    def repeat(self, per_row: Tensor) -> Tensor:
        """Give every token its row's number, packed: (B,) to (M,), zero in gaps."""
        return self.clear_gaps(per_row[self.row].unsqueeze(-1).repeat(1, BLOCK).view(-1))

    def row_sum(self, flat: Tensor) -> Tensor:
        """Sum each row: (M,) to (B,); differentiable. Gaps must hold zeros."""
        # inside blocks first: index_add then moves 64 times fewer numbers
        return flat.new_zeros(self.shape[0]).index_add(0, self.row, flat.view(-1, BLOCK).sum(-1))

    def row_max(self, flat: Tensor) -> Tensor:
        """The largest of each row, (M,) to (B,), or zero if none is above it. Gaps must hold zeros."""
        largest = flat.view(-1, BLOCK).amax(-1)
        # the zeros it starts from take part, and are the floor
        return flat.new_zeros(self.shape[0]).scatter_reduce(0, self.row, largest, "amax")

    def mean(self, flat: Tensor) -> Tensor:
        """Mean over all ones of the mask; zero if there are none. Gaps must hold zeros."""
        return flat.sum() / max(self.total, 1)

    def next(self, flat: Tensor) -> Tensor:
        """Give each token the value of the next token of its row, and the last token zero. Gaps must hold zeros."""
        # a row's first token lands on the last place of the row before it, a token or a gap: that place is set to 0
        following = flat.roll(-1)
        following.view(-1, BLOCK)[self.last, -1] = 0
        return following

    def suffix_sum(self, flat: Tensor, decay: float) -> Tensor:
        """y_t = x_t + decay * y_(t+1) along each row. Gaps must hold zeros.

        Inside blocks by one matrix product; the heads of a row's blocks are a shorter row, summed in the same way.
        """
        # a loop over tokens would take thousands of tiny steps; the powers of decay inside a block stay accurate
        blocks = flat.view(-1, BLOCK) @ _decays(BLOCK, decay, flat)
        # one place more than blocks: the zero to the right of a row's last block
        heads = flat.new_zeros(self.shape[0] * (self.blocks_per_row + 1))
        here = self.row * (self.blocks_per_row + 1) + self.block_in_row
        heads[here] = blocks[:, 0]
        from_right = discounted_suffix_sum(heads.view(self.shape[0], -1), decay**BLOCK).reshape(-1)[here + 1]
        return blocks.addr_(from_right, _powers(BLOCK, decay, flat)).view(-1)

    def prefix_sum(self, flat: Tensor) -> Tensor:
        """y_t = x_t + y_(t-1) along each row, in float64; gaps are zero. Gaps must hold zeros."""
        sums = flat.double().cumsum(0)  # over all rows: what came before each row's block is taken off again
        before = torch.cat([sums.new_zeros(1), sums[BLOCK - 1 :: BLOCK][:-1]])  # each block
        starts = (torch.arange(len(self.row), device=flat.device) - self.block_in_row).unsqueeze(-1)
        return self.clear_gaps((sums.view(-1, BLOCK) - before[starts]).view(-1))

    def clear_gaps(self, flat: Tensor) -> Tensor:
        """Zero the gaps of ``flat`` (M,), in place."""
        self._clear_gaps(flat.view(-1, BLOCK))
        return flat

    def _gather(self, x: Tensor) -> Tensor:
        if self.valid_positions is not None:
            flat = x.new_zeros(len(self.row) * BLOCK)
            flat[self.packed_positions] = x.reshape(-1)[self.valid_positions]
            return flat
        return self._clear_gaps(_blocks(x).index_select(0, self.source)).view(-1)

    def _clear_gaps(self, blocks: Tensor, last: Tensor | None = None) -> Tensor:
        last = self.last if last is None else last
        blocks[last] = blocks[last].masked_fill_(self.gap, 0)
        return blocks


class RaggedTokens(ValidTokens):
    """``ValidTokens`` of a mask without padding: columns come and go as `Ragged`, of the layout of the mask."""

    def __init__(self, mask: Ragged):
        self.shape, self.column = mask.shape, mask
        self.is_own = None if is_whole(mask) else mask.values != 0
        self.lengths = mask.layout.lengths if self.is_own is None else row_sums(mask.like(self.is_own.long()))
        self._lay_out()
        # gaps before each row: what its tokens move by
        shift = self.first_block * BLOCK - (self.lengths.cumsum(0) - self.lengths)
        moved = shift.repeat_interleave(self.lengths, output_size=self.total)
        self.at = moved.add_(torch.arange(self.total, device=moved.device))

    def pack(self, x: Any) -> Tensor:
        """(T,) to (M,). Values at masked positions never enter a result."""
        values = x.values if self.is_own is None else x.values[self.is_own]
        out = values.new_zeros(len(self.row) * BLOCK)
        out[self.at] = values
        return out

    def unpack(self, flat: Tensor) -> Any:
        """(M,) to (T,), zero where masked."""
        values = flat.index_select(0, self.at)
        if self.is_own is not None:
            values = values.new_zeros(len(self.is_own)).masked_scatter_(self.is_own, values)
        return self.column.like(values)


def is_whole(mask: Ragged) -> bool:
    """Whether a mask without padding has no zero."""
    is_constant = mask.values.stride() == (0,)  # one value, repeated in place
    return bool((mask.values[:1] if is_constant else mask.values).all())


def tokens_of(mask: Column) -> ValidTokens:
    """The valid tokens of a mask (B, R), of padded columns or of those without padding."""
    return RaggedTokens(mask) if isinstance(mask, Ragged) else ValidTokens(mask)


def row_sums(column: Column) -> Tensor:
    """Sum each row: (B, R) to (B,)."""
    if isinstance(column, RowValues) and column.at is not None:
        return column.numbers
    return column.layout.sum(column.values) if isinstance(column, Ragged) else column.sum(-1)


def token_counts(mask: Column) -> Tensor:
    """Count the ones of each row of a mask: (B, R) to (B,) int64."""
    if not isinstance(mask, Ragged):
        return (mask != 0).sum(-1)
    return mask.layout.lengths if is_whole(mask) else mask.layout.sum((mask.values != 0).long())


def values_of(column: Any) -> Tensor:
    """(B, R), or the values (T,) of a column without padding."""
    return column.values if isinstance(column, Ragged) else column


def as_column(values: Tensor, mask: Column) -> Column:
    """A column of these values that has padding if the mask has."""
    return mask.like(values) if isinstance(mask, Ragged) else values


class PaddedTokens:
    """The interface of ``ValidTokens`` with (B, R) kept: for small masks, and for accelerators, where counts wait."""

    def __init__(self, mask: Tensor):
        self.shape = mask.shape
        self.is_valid = mask.bool()
        self.lengths = mask.sum(-1)
        self.total = self.lengths.sum()  # a tensor: int() would wait for the device

    def pack(self, x: Any) -> Tensor:
        """Zero the masked positions; their gradient is zero too, even if they are NaN."""
        # not x * mask: NaN times 0 is NaN, in the value and in the gradient
        return torch.where(self.is_valid, x, 0)

    def repeat(self, per_row: Tensor) -> Tensor:
        """Give every token its row's number: (B,) to (B, R), zero where masked."""
        return torch.where(self.is_valid, per_row.unsqueeze(-1), 0)

    def row_sum(self, x: Tensor) -> Tensor:
        """Sum each row: (B, R) to (B,)."""
        return x.sum(-1)

    def row_max(self, x: Tensor) -> Tensor:
        """The largest of each row, (B, R) to (B,), or zero if none is above it. Masked positions must hold zeros."""
        return x.amax(-1).clamp(min=0) if x.shape[-1] else x.new_zeros(len(x))

    def mean(self, x: Tensor) -> Tensor:
        """Mean over all ones of the mask; zero if there are none. Masked positions must hold zeros."""
        return x.sum() / self.total.clamp(min=1)


class FlatTokens(PaddedTokens):
    """The interface of ``ValidTokens`` on columns without padding: (T,) values kept in place, zero where masked."""

    def __init__(self, mask: Ragged):
        self.shape, self.layout = mask.shape, mask.layout
        self.lengths, self.is_valid = mask.layout.lengths, None
        # of an accelerator the answer would be waited for
        if mask.device.type != "cpu" or not is_whole(mask):
            self.is_valid = mask.values != 0
            self.lengths = mask.layout.sum(self.is_valid.double()).long()
        self.total = self.lengths.sum()

    def pack(self, x: Any) -> Tensor:
        """The values (T,) of a column, themselves if no token is masked."""
        values = values_of(x)
        return values if self.is_valid is None else torch.where(self.is_valid, values, 0)

    def repeat(self, per_row: Tensor) -> Tensor:
        """Give every token its row's number: (B,) to (T,), zero where masked."""
        return self.pack(self.layout.spread(per_row))

    def row_sum(self, x: Tensor) -> Tensor:
        """Sum each row: (T,) to (B,)."""
        return _RowSum.apply(x, self.layout)

    def row_max(self, x: Tensor) -> Tensor:
        """The largest of each row, (T,) to (B,), or zero if none is above it."""
        return torch.segment_reduce(x, "max", lengths=self.layout.lengths, unsafe=True, initial=0)


def valid_tokens(mask: Column) -> ValidTokens | PaddedTokens:
    """Choose the cheapest way to visit the ones of a mask, (B, R) or without padding."""
    if isinstance(mask, Ragged):
        # a column is read-only, so that what its mask says is worked out once
        if "_tokens" not in vars(mask):
            vars(mask)["_tokens"] = FlatTokens(mask)
        return vars(mask)["_tokens"]
    return ValidTokens(mask) if mask.device.type == "cpu" and mask.numel() >= PADDED_BELOW else PaddedTokens(mask)


def discounted_suffix_sum(x: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_(t+1) along the last dim of a dense (B, n), in O(log n) matrix products."""
    num_rows, n = x.shape
    if n <= 2 * BLOCK:  # one product is cheaper than to split
        return x @ _decays(n, decay, x)
    blocks = _blocks(x) @ _decays(BLOCK, decay, x)
    heads = blocks[:, 0].reshape(num_rows, -1)
    from_right = F.pad(discounted_suffix_sum(heads, decay**BLOCK)[:, 1:], (0, 1))
    blocks.addr_(from_right.reshape(-1), _powers(BLOCK, decay, x))
    return blocks.view(num_rows, -1)[:, :n]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: ValidTokens) -> Tensor:
        ctx.tokens = tokens
        return tokens._gather(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.unpack(grad), None


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.sum(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.spread(grad), None


def _blocks(x: Tensor) -> Tensor:
    """(B, R) to (B * ceil(R / BLOCK), BLOCK), zero padded; no copy when BLOCK divides R."""
    short = -x.shape[-1] % BLOCK
    return (F.pad(x, (0, short)) if short else x).reshape(-1, BLOCK)


def _decays(n: int, decay: float, like: Tensor) -> Tensor:
    """(n, n) matrix with decay^(j - k) at [j, k] for j >= k: a row vector times it is that row's suffix sum."""
    steps = torch.arange(n, device=like.device)
    # no negative exponents: of decay 0 they would be infinite
    distance = (steps[:, None] - steps[None, :]).clamp(min=0)
    return torch.tril(_power(decay, distance)).to(like.dtype)


def _powers(n: int, decay: float, like: Tensor) -> Tensor:
    """(n,) decay^n ... decay^1: the distance of each token of a block to the next block's head."""
    return _power(decay, torch.arange(n, 0, -1, device=like.device)).to(like.dtype)


def _power(decay: float, exponents: Tensor) -> Tensor:
    # float64: float32 loses digits of decay^64 for a decay near 1
    return torch.full_like(exponents, decay, dtype=torch.float64) ** exponents

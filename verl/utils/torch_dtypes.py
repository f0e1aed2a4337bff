"""Names of floating point types: what a user may write, and the torch dtype it means."""

from __future__ import annotations

import torch

_NAMES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: ("fp32", "float32", "float", "32", "32-true"),
    torch.bfloat16: ("bf16", "bfloat16", "bf16-mixed", "bf16-true"),
    torch.float16: ("fp16", "float16", "half", "16", "16-mixed", "16-true"),
    torch.float64: ("fp64", "float64", "double", "64"),
}


class PrecisionType:
    """Translate between names of precisions and torch dtypes."""

    @staticmethod
    def to_dtype(precision: str | int | torch.dtype) -> torch.dtype:
        """The dtype of a name such as ``"bf16"``; a dtype is returned as it is.

        Raises:
            ValueError: for an unknown name.
        """
        if isinstance(precision, torch.dtype):
            return precision
        name = str(precision).removeprefix("torch.").lower()
        for dtype, names in _NAMES.items():
            if name in names:
                return dtype
        known = ", ".join(names[0] for names in _NAMES.values())
        raise ValueError(f"precision {precision!r} is unknown: use one of {known}")

    @staticmethod
    def to_str(dtype: torch.dtype) -> str:
        """The short name of a dtype, as ``"bf16"``."""
        if dtype not in _NAMES:
            raise ValueError(f"dtype {dtype} has no name here: use one of {', '.join(map(str, _NAMES))}")
        return _NAMES[dtype][0]

    @staticmethod
    def supported_type(precision: str | int | torch.dtype) -> bool:
        """True if ``to_dtype`` understands it."""
        return precision in _NAMES or str(precision).removeprefix("torch.").lower() in PrecisionType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Every name ``to_dtype`` understands."""
        return [name for names in _NAMES.values() for name in names]

    @staticmethod
    def is_fp16(precision: str | int | torch.dtype) -> bool:
        return PrecisionType.to_dtype(precision) is torch.float16

    @staticmethod
    def is_fp32(precision: str | int | torch.dtype) -> bool:
        return PrecisionType.to_dtype(precision) is torch.float32

    @staticmethod
    def is_bf16(precision: str | int | torch.dtype) -> bool:
        return PrecisionType.to_dtype(precision) is torch.bfloat16

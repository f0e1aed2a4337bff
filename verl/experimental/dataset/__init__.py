"""Public names of :mod:`verl.utils.dataset` for user code."""

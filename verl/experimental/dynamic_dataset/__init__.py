"""Public names of :mod:`verl.utils.dataset.dynamicgen_dataset` for user code."""

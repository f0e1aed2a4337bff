"""Rows of a batch: stored, compared, divided over ranks, balanced. ``DataProto`` is in ``verl/protocol.py``."""

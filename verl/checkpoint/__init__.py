"""Checkpoints of engines: files on disk, their layout, and which are kept."""

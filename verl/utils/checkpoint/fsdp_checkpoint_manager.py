"""Public address of the checkpoint manager; one class serves every engine."""

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager as FSDPCheckpointManager

__all__ = ["FSDPCheckpointManager"]

"""Weight transfer from a training engine to a rollout engine."""

"""How weights get from the training engine to a rollout engine."""

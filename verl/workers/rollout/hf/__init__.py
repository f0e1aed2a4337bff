"""The rollout engine on transformers: continuous batching with a key-value cache of its own."""

"""Reward functions: where a configuration has them, how they are called, and how they do on right and wrong answers."""

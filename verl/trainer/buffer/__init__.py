"""Rollout buffer: prompts and rollouts of training steps, and the policies that choose them."""

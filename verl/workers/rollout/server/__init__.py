"""Rollout servers: one engine behind HTTP, its client, and the OpenAI protocol."""

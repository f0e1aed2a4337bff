"""The rollout engine on SGLang, whose scheduler is a process of its own."""

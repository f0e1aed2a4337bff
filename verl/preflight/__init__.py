"""What can be known about a run before it starts: configuration, machine, models, data, rewards; one check for all.

``verl doctor``, ``verl check``, ``main_ppo --check``, ``trainer.dry_run=true`` and the start of a run ask it, and
show the same findings. No Ray, no weights; no torch and no transformers where tokenizer.json and texts are enough.
"""

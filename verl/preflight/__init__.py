"""Checks before a run starts: configuration, machine, models, data, rewards.

``verl doctor``, ``verl check``, ``main_ppo --check``, ``trainer.dry_run=true`` and the start of a run share them and
report the same findings. No Ray, no weights; torch only if there is no tokenizer.json, or images.
"""

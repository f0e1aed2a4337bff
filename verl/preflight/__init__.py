"""What can be known about a run before it starts: configuration, machine, models, data, rewards; one check for all.

``verl doctor``, ``verl check``, ``main_ppo --check``, ``trainer.dry_run=true`` and the start of a run ask it and
show the same findings. No Ray, no weights; neither torch nor transformers where a tokenizer.json and rows of text are enough.
"""

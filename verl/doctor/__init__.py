"""``python -m verl.doctor KEY=VALUE ...``: what a run would do, and what would go wrong, before anything starts.

Composes the very command line of ``verl.trainer.main_ppo``; opens no model, starts no process, imports no torch.
"""

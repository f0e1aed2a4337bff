"""From a checkpoint of training to a Hugging Face folder: ``python -m verl.model_merger merge|test``."""

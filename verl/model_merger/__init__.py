"""From a checkpoint to a Hugging Face folder: ``verl merge RUN``, or ``python -m verl.model_merger merge|test``."""

"""Look at data before a run does: columns, bad rows, rendered prompts, lengths, and rewards of right and wrong answers.

:func:`verl.data_check.preview.preview` is for programs, ``python -m verl.data_check`` for people. Neither loads torch
or transformers where the model has a ``tokenizer.json`` and the rows are text.
"""

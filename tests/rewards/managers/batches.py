"""Small batches of text, as they come back from the rollout."""

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer("byte")
PROMPT_LENGTH, RESPONSE_LENGTH = 8, 16


def objects(values: list) -> np.ndarray:
    return np.fromiter(values, dtype=object, count=len(values))


def batch_of(responses: list[str], truths: list | None = None, source="digits", **columns: list) -> DataProto:
    """Responses that end with EOS (an empty text has no token at all), padded as FORMATS says; prompts are ``q``."""
    size, width = len(responses), PROMPT_LENGTH + RESPONSE_LENGTH
    ids = torch.full((size, width), TOKENIZER.pad_token_id)
    mask = torch.zeros(size, width, dtype=torch.int64)
    ids[:, PROMPT_LENGTH - 1] = TOKENIZER("q")["input_ids"][0]
    mask[:, PROMPT_LENGTH - 1] = 1
    for i, text in enumerate(responses):
        tokens = TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] if text else []
        ids[i, PROMPT_LENGTH : PROMPT_LENGTH + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        mask[i, PROMPT_LENGTH : PROMPT_LENGTH + len(tokens)] = 1
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "prompts": ids[:, :PROMPT_LENGTH],
            "responses": ids[:, PROMPT_LENGTH:],
        },
        {
            "data_source": objects([source] * size if isinstance(source, str) else source),
            "reward_model": objects([{"style": "rule", "ground_truth": t} for t in truths or ["5"] * size]),
            "extra_info": objects([{"index": 100 + i} for i in range(size)]),
            **{name: objects(values) for name, values in columns.items()},
        },
    )

"""Make a random model with a real tokenizer, offline: for tests, smoke runs, measurements and the quick start.

    python -m verl.utils.tiny_model ~/models/tiny

writes a Hugging Face folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` open. The tokenizer has one token a
character (or byte) and a chat template. With ``--judge digits`` it is a reward model that likes digits.
"""

from __future__ import annotations

import argparse
import os
import string
from pathlib import Path
from typing import Any, Literal

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "2.5M": {"hidden_size": 256, "intermediate_size": 832, "num_hidden_layers": 3, "num_attention_heads": 4},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
"""``tiny`` runs in milliseconds; ``2.5M`` parameters learn a task with a dense reward in half a minute of CPU time. The
larger ones have the layers of Qwen2.5."""

_QWEN = {
    "0.5B": {"vocab_size": 151936, "tie_word_embeddings": True},
    "1.5B": {"vocab_size": 151936, "tie_word_embeddings": True},
    "7B": {"vocab_size": 152064, "num_key_value_heads": 4, "tie_word_embeddings": False},
}
"""What `save_config` takes from Qwen2.5 beside the layers."""

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"

_PRINTABLE = sorted(set(string.printable) - set(string.whitespace))

# plain messages, and tools in the hermes format: the schemas first, a call as JSON between its marks
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(kind: Literal["char", "byte"] = "char") -> Any:
    """A tokenizer without merges.

    Args:
        kind: ``char``: printable ASCII and newline, 100 tokens, a tenth of them digits; other text is dropped.
            ``byte``: all 256 bytes, so every text survives.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind not in ("char", "byte"):
        raise ValueError(f"tokenizer kind {kind!r} is unknown: use 'char' or 'byte'")
    special = [PAD, START, END, UNKNOWN]
    # byte-level in both cases: transformers rebuilds the tokenizer of some families (Qwen2) from its vocabulary alone
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "char":
        letters = [split.pre_tokenize_str(char)[0][0] for char in ["\n", " ", *_PRINTABLE]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(special + letters)}, []))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    folder: str | os.PathLike,
    family: str = "qwen2",
    size: str = "tiny",
    tokenizer: Literal["char", "byte"] = "char",
    seed: int = 0,
    head: Literal["lm", "sequence", "token"] = "lm",
    **config_overrides: Any,
) -> str:
    """Save a random model, its tokenizer and its generation config to ``folder``.

    Args:
        family: a transformers model type with a causal language model, as ``qwen2``, ``llama``, ``gemma2``.
        size: one of ``SIZES``.
        seed: the same seed gives the same weights.
        head: ``sequence``, ``token``: a classifier of texts or of tokens with one label, as reward models are.
        config_overrides: further entries of the model's config.

    Returns:
        The folder, as a string.
    """
    import torch
    import transformers

    if size not in SIZES:
        raise ValueError(f"size={size!r} is unknown: use one of {', '.join(SIZES)}")
    text = make_tokenizer(tokenizer)
    shape = dict(SIZES[size])
    shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    config = transformers.AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(text),
            "max_position_embeddings": 2048,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": text.eos_token_id,
            "pad_token_id": text.pad_token_id,
            **({} if head == "lm" else {"num_labels": 1}),
            **shape,
            **config_overrides,
        },
    )
    made_as = {"lm": "CausalLM", "sequence": "SequenceClassification", "token": "TokenClassification"}[head]
    # the caller's generator stays where it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"AutoModelFor{made_as}").from_config(config, dtype=torch.float32)
    if head == "lm":
        ends = {"eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id}
        model.generation_config = transformers.GenerationConfig(**ends)
    return save_model(model, text, folder)


def save_config(folder: str | os.PathLike, size: str, **changes: Any) -> str:
    """Save a Qwen2 config in the shape of ``size``, with ``changes``, for who makes the weights in memory."""
    from transformers import AutoConfig

    shape = {"vocab_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True, **SIZES[size]}
    shape.update(_QWEN.get(size, {}) | changes)
    AutoConfig.for_model("qwen2", max_position_embeddings=32768, **shape).save_pretrained(folder)
    return str(folder)


def make_digit_judge(folder: str | os.PathLike, tokenizer: Literal["char", "byte"] = "char") -> str:
    """Save a reward model made by hand: with m the share of digits among a text's tokens, its score is
    m / sqrt(1 + m^2 / 100), which is m but for half a percent.

    One layer attends to all tokens alike and adds a tenth of m to a hidden unit, from which the head reads it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    text, width = make_tokenizer(tokenizer), 16
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(text),
        hidden_size=width,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_labels=1,
        pad_token_id=text.pad_token_id,
    )
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    digits = set(text.convert_tokens_to_ids(list(string.digits)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        for token in range(len(text)):
            model.model.embed_tokens.weight[token, 0 if token in digits else 1] = 1.0
        [layer] = model.model.layers
        layer.self_attn.v_proj.weight[0, 0] = width**-0.5  # the norm before it multiplies by sqrt(width)
        layer.self_attn.o_proj.weight[2, 0] = 0.1
        model.score.weight[0, 2] = 10 * width**-0.5
    return save_model(model, text, folder)


def save_model(model: Any, tokenizer: Any, folder: str | os.PathLike) -> str:
    """Save a model and its tokenizer or processor; returns the folder."""
    from verl.utils.model import without_progress_bars

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with without_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Command line: ``python -m verl.utils.tiny_model FOLDER [--size 2.5M] [--family qwen2] [--judge digits]``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder")
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--size", default="2.5M", choices=sorted(SIZES))
    parser.add_argument("--tokenizer", default="char", choices=["char", "byte"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", choices=["digits"], help="a reward model that likes digits instead")
    args = parser.parse_args()
    if args.judge:
        print(make_digit_judge(args.folder, args.tokenizer))
        return
    print(make_tiny_model(args.folder, args.family, args.size, args.tokenizer, args.seed))


if __name__ == "__main__":
    main()

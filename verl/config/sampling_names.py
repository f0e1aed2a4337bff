"""Names of engines' sampling parameters, as users write them under ``rollout``: which are handed on, which are not.

Engines judge the values, and the names once more: each refuses at the start what the installed version lacks.
"""

BY_HF = ("frequency_penalty", "presence_penalty", "logit_bias", "min_tokens", "allowed_token_ids")
"""What ``hf`` understands of ``sampling_kwargs``, with the meaning of vLLM's SamplingParams."""

HANDED_ON = (
    *BY_HF,
    "bad_words",
    "custom_params",
    "ebnf",
    "extra_args",
    "json_schema",
    "min_new_tokens",
    "no_stop_trim",
    "regex",
    "repetition_detection",
    "skip_reading_prefix_cache",
    "stop_regex",
    "structural_tag",
    "structured_outputs",
    "thinking_token_budget",
)
"""Accepted directly under ``rollout`` and ``rollout.val_kwargs``; they become entries of ``sampling_kwargs``."""

_TOKENS = "the trainer reads token ids, and always gets them"
DECIDED: dict[str, str] = {
    "max_tokens": "set data.max_response_length",
    "max_new_tokens": "set data.max_response_length",
    "truncate_prompt_tokens": "set data.truncation",
    "seed": "set trainer.seed: every response gets its own seed from it",
    "sampling_seed": "set trainer.seed: every response gets its own seed from it",
    "logprobs": "set rollout.calculate_log_probs=true for those of the sampled tokens",
    "prompt_logprobs": "prompts are not scored by the rollout",
    "best_of": "set rollout.n, and choose among the responses in the reward",
    "detokenize": _TOKENS,
    "output_kind": _TOKENS,
    "skip_special_tokens": _TOKENS,
    "spaces_between_special_tokens": _TOKENS,
    "include_stop_str_in_output": "the tokens that complete a stop text are always kept",
    "first_token_temperature": "set rollout.use_fire_sampling and rollout.fire_temperature",
}
"""Parameters that verl sets itself, and the way out for who gives them."""

OWN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "do_sample",
    "n",
)
"""Parameters with a key of their own."""

RESHAPE = (
    *BY_HF,
    "bad_words",
    "custom_params",
    "ebnf",
    "extra_args",
    "json_schema",
    "min_new_tokens",
    "regex",
    "structural_tag",
    "structured_outputs",
    "thinking_token_budget",
)
"""Parameters after which tokens are sampled from another distribution than softmax(logits / temperature)."""

AT_LEAST = ("min_tokens", "min_new_tokens")
"""Parameters that count a response's tokens down: a response that goes on asks for what is left."""

OF_WHOLE_RESPONSES = (
    "bad_words",
    "ebnf",
    "frequency_penalty",
    "json_schema",
    "presence_penalty",
    "regex",
    "repetition_detection",
    "stop_regex",
    "structural_tag",
    "structured_outputs",
    "thinking_token_budget",
)
"""Parameters that look at the response so far, of which an engine knows only what it drew itself."""

"""Stop texts inside SGLang's scheduler: checked as `hf` checks them, so that all engines keep the same tokens.

SGLang's own need its tokenizer from the start on, look at the text of a few last tokens at once and count a text that
was there before the first of them. Imported in SGLang's processes only.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req

from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.sampling import Decode, StopText
from verl.workers.rollout.sglang.requests import STOP


def install_stop_texts(tokenizer_path: str, trust_remote_code: bool) -> None:
    """Make this process's SGLang end requests at the texts that stand under `STOP` in their ``custom_params``.

    The tokenizer is read when the first of them comes.
    """
    theirs = Req._check_str_based_finish

    @lru_cache
    def decode() -> Decode:
        tokenizer = hf_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code)
        return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def ends(request: Any, *args: Any, **kwargs: Any) -> bool:
        stops = (request.sampling_params.custom_params or {}).get(STOP)
        if stops is not None and _ends_at_stop_text(request, stops, decode):
            return True
        return theirs(request, *args, **kwargs)

    Req._check_str_based_finish = ends


def _ends_at_stop_text(request: Any, stops: list[Any], decode: Any) -> bool:
    """Read the request's new tokens; end it at the one that completes a stop text."""
    if not hasattr(request, "verl_watcher"):
        request.verl_watcher = _stop_watcher(request, stops, decode())
    watcher, num_before = request.verl_watcher, stops[0]
    for count in range(watcher.num_tokens - num_before, len(request.output_ids)):
        if watcher.ends_with(request.output_ids[count]):
            request.finished_reason = FINISH_MATCHED_STR(matched="")
            request.finished_len = count + 1
            return True
    return False


def _stop_watcher(request: Any, stops: list[Any], decode: Decode) -> StopText:
    """The watcher of a request, which has read what of its prompt belongs to the response."""
    num_before, *texts = stops
    prompt = list(request.origin_input_ids_unpadded)
    split = len(prompt) - num_before
    watcher = StopText(decode, texts, prompt[:split], request.sampling_params.min_new_tokens + num_before)
    for token in prompt[split:]:
        watcher.ends_with(token)
    return watcher

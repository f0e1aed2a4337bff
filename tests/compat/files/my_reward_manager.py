"""Reward managers of a project, written for verl: a loop over items, registered under names of their own."""

from collections import defaultdict

import torch

from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register


@register("per_token")
class PerTokenRewardManager:
    """Scores the text and charges for length."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", length_price=0.0):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.length_price = length_price

    def __call__(self, data: DataProto, return_dict=False):
        if "rm_scores" in data.batch.keys():
            return {"reward_tensor": data.batch["rm_scores"]} if return_dict else data.batch["rm_scores"]
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        already_printed = {}
        for i in range(len(data)):
            data_item = data[i]
            prompt_ids = data_item.batch["prompts"]
            prompt_length = prompt_ids.shape[-1]
            valid_prompt_length = data_item.batch["attention_mask"][:prompt_length].sum()
            prompt_str = self.tokenizer.decode(prompt_ids[-valid_prompt_length:], skip_special_tokens=True)
            valid_response_length = data_item.batch["attention_mask"][prompt_length:].sum()
            valid_response_ids = data_item.batch["responses"][:valid_response_length]
            response_str = self.tokenizer.decode(valid_response_ids, skip_special_tokens=True)
            score = self.compute_score(
                data_source=data_item.non_tensor_batch[self.reward_fn_key],
                solution_str=response_str,
                ground_truth=data_item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=data_item.non_tensor_batch.get("extra_info", None),
            )
            reward_extra_info["acc"].append(float(score > 0.5))
            reward_tensor[i, valid_response_length - 1] = score - self.length_price * valid_response_length
            source = data_item.non_tensor_batch[self.reward_fn_key]
            if already_printed.setdefault(source, 0) < self.num_examine:
                already_printed[source] += 1
                print("[seen]", prompt_str.split()[-1], len(response_str))
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor


@register("tensor_only")
class TensorOnlyRewardManager:
    """As written before ``return_dict`` and ``reward_fn_key``."""

    def __init__(self, tokenizer, num_examine, compute_score=None, **kwargs):
        self.tokenizer = tokenizer

    def __call__(self, data: DataProto):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i, text in enumerate(self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True)):
            reward_tensor[i, 0] = text.count("1")
        return reward_tensor

"""A project's estimators and policy losses, in the shapes people wrote them over the releases of verl."""

from collections import defaultdict

import torch

import verl.utils.torch_functional as verl_F
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("group_mean")
def group_mean(token_level_rewards, response_mask, index, config=None, **kwargs):
    scores = token_level_rewards.sum(dim=-1)
    groups = defaultdict(list)
    with torch.no_grad():
        for i in range(scores.shape[0]):
            groups[index[i]].append(scores[i])
        for i in range(scores.shape[0]):
            scores[i] = scores[i] - torch.stack(groups[index[i]]).mean()
        scores = scores.unsqueeze(-1) * response_mask
    return scores, scores


@register_adv_est("no_baseline")
def no_baseline(token_level_rewards, response_mask):
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages


@register_adv_est("whitened")
def whitened(token_level_rewards, response_mask, gamma, index, norm_adv_by_std_in_grpo=True, config=None):
    assert config.get("gamma", 1.0) == gamma == config.gamma
    scores = token_level_rewards.sum(-1, keepdim=True) * response_mask
    advantages = verl_F.masked_whiten(scores, response_mask) * response_mask
    return advantages, advantages


@register_policy_loss("two_values")
def two_values(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    ratio = torch.exp(log_prob - old_log_prob)
    losses = -advantages * ratio
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    return loss, {"actor/my_ratio": ratio.mean().detach().item()}


@register_policy_loss("four_values")
def four_values(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    ratio = torch.exp(log_prob - old_log_prob)
    free = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - config.clip_ratio, 1 + config.clip_ratio)
    loss = agg_loss(loss_mat=torch.maximum(free, clipped), loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    clipfrac = verl_F.masked_mean(torch.gt(clipped, free).float(), response_mask)
    return loss, clipfrac, verl_F.masked_mean(old_log_prob - log_prob, response_mask), torch.tensor(0.0)


@register_policy_loss("keywords")
def keywords(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    assert kwargs["config"].policy_loss.get("loss_mode") == "keywords"
    return agg_loss(-advantages * torch.exp(log_prob - old_log_prob), response_mask, kwargs["loss_agg_mode"]), {}


@register_policy_loss("no_config")
def no_config(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode):
    loss = agg_loss(-advantages * torch.exp(log_prob - old_log_prob), response_mask, loss_agg_mode)
    return loss, torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)


@register_policy_loss("own_names")
def own_names(old_lp, new_lp, adv, mask, agg_mode, cfg):
    loss = agg_loss(-adv * torch.exp(new_lp - old_lp), mask, agg_mode)
    return loss, torch.tensor(0.0), torch.tensor(0.0), torch.tensor(float(cfg.clip_ratio))

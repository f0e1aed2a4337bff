"""From sampled responses to a training batch: masks, reward shaping, KL in the reward, advantages.

Functions of the driver: they read and write columns of a DataProto and know nothing of workers or models.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.advantages.common import NonFiniteError, find_turns, require_finite
from verl.algorithms.advantages.gigpo import STATE_COLUMN, anchor_groups, anchor_metrics
from verl.algorithms.kl import kl_penalty as kl_estimate
from verl.algorithms.registry import does_take_ragged
from verl.algorithms.reward_shaping import (
    Moments,
    centre_and_spread,
    clip_scores,
    clip_tokens,
    cut_at_limit,
    merge_moments,
    onto_sampled_tokens,
    overlong_penalty,
    rescore,
    right_or_short,
    whiten_tokens,
    within_difficulty,
)
from verl.algorithms.valid_tokens import is_whole
from verl.batch.balancing import log_seqlen_unbalance
from verl.batch.layout import Layout
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost, row_lengths
from verl.batch.ragged import Column, Ragged, RowValues
from verl.batch.windows import WINDOWS
from verl.config.actor import ActorConfig
from verl.config.algorithm import AlgorithmConfig
from verl.config.critic import CriticConfig
from verl.config.ppo import PPOConfig
from verl.data.vision import pixels_of
from verl.protocol import DataProto
from verl.telemetry.metric import FlopsCounter
from verl.utils.py_functional import derive_seed
from verl.utils.torch_functional import masked_mean


def compute_response_mask(data: DataProto) -> Tensor:
    """Mark the real tokens of single-turn responses: the last R columns of ``attention_mask``, (B, R)."""
    width = data.ragged("responses").layout.width
    return data.column("attention_mask")[:, -width:]


def response_column(data: DataProto, name: str) -> Tensor:
    """Return a column of the responses with padding trimmed, (B, longest response)."""
    return data.ragged(name).trim_padding()


def put_response_column(data: DataProto, name: str, column: Tensor) -> None:
    """Set a column of the responses from a window that begins with them, (B, R) or (B, longest response)."""
    layout = data.ragged("responses").layout
    window = Layout(layout.starts, layout.lengths, column.shape[1])
    data.put(name, Ragged(Ragged.from_padded(column, window).values, layout))


def keep_model_inputs(data: DataProto) -> None:
    """Take ``multi_modal_data`` out: models read ``multi_modal_inputs``, or ``multi_modal_pixels`` in their place.

    These are tensors, of which a rank gets each once a step. Images that are not RGB stay, and go with every call.
    """
    rows = data.non_tensor_batch.get("multi_modal_data")
    if rows is not None and "multi_modal_inputs" not in data.non_tensor_batch:
        made = {id(row): pixels_of(row or {}) for row in rows}  # the responses to one prompt share theirs
        if None in made.values():
            return
        data.non_tensor_batch["multi_modal_pixels"] = np.fromiter((made[id(row)] for row in rows), object, len(rows))
    data.non_tensor_batch.pop("multi_modal_data", None)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl", scores: str = "token_level_scores"
) -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL to the reference from the scores: r_t = score_t - beta * KL_t, and let the controller see the KL.

    Reads the column named ``scores``, ``old_log_probs``, ``ref_log_prob``, ``response_mask``, each (B, R); sets
    ``token_level_rewards`` (B, R). ``beta`` is the controller's coefficient before this batch moves it.

    Source: Ziegler et al. 2019, section 2.2 (arXiv:1909.08593).
    """
    mask = response_column(data, "response_mask")
    kl = kl_estimate(response_column(data, "old_log_probs"), response_column(data, "ref_log_prob"), kl_penalty) * mask
    beta = kl_ctrl.value
    put_response_column(data, "token_level_rewards", response_column(data, scores) - beta * kl)
    current_kl = masked_mean(kl, mask=mask, axis=-1).mean().item()
    kl_ctrl.update(current_kl=current_kl, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}


def difficulty_of(data: DataProto) -> Tensor:
    """Return the difficulty of each row's prompt, (B,): its ``difficulty``, or that in its ``extra_info``.

    Raises:
        ValueError: a row has none, or none that is a finite number.
    """
    rows = _column_or_extra(data, "difficulty")
    for number, value in enumerate(rows):
        if not isinstance(value, (int, float, np.number)) or not np.isfinite(value):
            raise ValueError(
                f"actor_rollout_ref.actor.difficulty_loss_weight=true: row {number} of the batch has difficulty="
                f"{value!r}, and must have a number, 0 for easy to 1 for hard. Add a column 'difficulty' to the data, "
                "or put it into extra_info, or set the option to false."
            )
    return torch.tensor([float(value) for value in rows])


def turn_states(data: DataProto) -> list[Any] | None:
    """Return the states in which each row's turns began: the column ``turn_state_ids``, or that in ``extra_info``.

    None where no row has any; a row without has None.
    """
    rows = _column_or_extra(data, STATE_COLUMN)
    return None if all(row is None for row in rows) else rows


def _column_or_extra(data: DataProto, name: str) -> list[Any]:
    """Return the values of a column, or of that name in each row's ``extra_info``; None where a row has none."""
    if name in data.non_tensor_batch:
        return list(data.non_tensor_batch[name])
    infos = data.non_tensor_batch.get("extra_info", [None] * len(data))
    return [info.get(name) if isinstance(info, Mapping) else None for info in infos]


def gigpo_metrics(data: DataProto) -> dict[str, float]:
    """Return metrics of the turns of responses, and of those that ``gigpo`` can compare."""
    turns = find_turns(data.ragged("token_level_rewards"), data.ragged("response_mask"))
    return anchor_metrics(anchor_groups(turns, data.non_tensor_batch["uid"], turn_states(data)), len(data))


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Run the named estimator; adds ``advantages`` and ``returns``, both (B, R).

    Built-in estimators see the columns of the responses without padding, others as tensors trimmed to the longest of
    them. A reward on a masked token is moved to the sampled token it answers before (`onto_sampled_tokens`): most
    estimators read no other.
    An estimator receives those of the following arguments that it names: ``token_level_rewards``, ``response_mask``,
    ``index`` (the prompts' uid), ``values``, ``reward_baselines``, ``gamma``, ``lam``, ``norm_adv_by_std_in_grpo``,
    ``num_repeat``, ``step_gamma``, ``whiten_advantages`` (where ``advantage.whiten`` is set), ``config``,
    ``turn_state_ids`` (see `turn_states`), ``non_tensor_batch`` (all of its columns by name), and any other column of
    the batch under its own name.
    """
    available: dict[str, Any] = {
        "index": data.non_tensor_batch.get("uid"),
        "gamma": gamma,
        "lam": lam,
        "num_repeat": num_repeat,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "step_gamma": getattr(config, "step_gamma", None),
        "whiten_advantages": getattr(getattr(config, "advantage", None), "whiten", None),
        STATE_COLUMN: turn_states(data),
        "non_tensor_batch": data.non_tensor_batch,
        "config": config,
    }
    available = {name: value for name, value in available.items() if value is not None}
    if "response_mask" not in data.keys():
        data.put("response_mask", compute_response_mask(data))
    if "token_level_rewards" in data.keys():
        move_to_sampled_tokens(data, "token_level_rewards")
    advantages, returns = _call_by_name(get_adv_estimator_fn(adv_estimator), available, data, adv_estimator)
    for column, values in (("advantages", advantages), ("returns", returns)):
        if isinstance(values, Ragged):
            if not values.is_finite():
                _require_finite(column, adv_estimator, values.values, values.layout.row_numbers)
            data.put(column, values)
            continue
        sampled = response_column(data, "response_mask") != 0
        if values.shape == sampled.shape:
            _require_finite(column, adv_estimator, values[sampled], sampled.nonzero()[:, 0])
        put_response_column(data, column, values)
    return data


def _require_finite(column: str, adv_estimator: str, values: Tensor, rows: Tensor) -> None:
    """Refuse NaN and infinity on valid tokens (T,) of ``rows`` (T,)."""
    # one sum for the usual case: it is finite if all are, and seldom if one is not
    if values.sum().isfinite() or not len(bad := rows[~values.isfinite()].unique().tolist()):
        return
    raise NonFiniteError(
        f"{column} of algorithm.adv_estimator={adv_estimator} are NaN or infinite in {len(bad)} of the "
        f"batch's rows (first: {bad[:5]}), though the rewards are finite: an update would spoil every "
        "weight. Look at the estimator, at values it divides by, and at the log-probs or values it reads."
    )


def columns_read_early(adv_estimator: str) -> list[str]:
    """The columns of the pass before the update that an estimator names as arguments."""
    named = inspect.signature(get_adv_estimator_fn(adv_estimator)).parameters
    return [name for name in ("old_log_probs", "entropys", "sum_pi_squared") if name in named]


def check_estimator_waits(adv_estimator: str) -> None:
    """Refuse ``actor.skip_old_log_probs`` with an estimator that reads what it leaves out.

    Raises:
        ValueError: it names such a column.
    """
    if early := columns_read_early(adv_estimator):
        raise ValueError(
            f"actor_rollout_ref.actor.skip_old_log_probs=true with algorithm.adv_estimator={adv_estimator}: the "
            f"estimator reads {', '.join(early)}, which are then known after the update only. Set "
            "skip_old_log_probs=false, or choose another estimator."
        )


def _call_by_name(fn: Callable, available: Mapping[str, Any], data: DataProto, name: str) -> tuple[Any, Any]:
    """Call ``fn`` with the arguments it names, taken from ``available`` first and from the batch's columns second."""
    arguments: dict[str, Any] = {}
    parameters = inspect.signature(fn).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = set(data.keys())
    read: Callable[[DataProto, str], Any] = _without_padding if does_take_ragged(fn) else _trimmed
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        if p.name in available:
            arguments[p.name] = available[p.name]
        elif p.name in names:
            arguments[p.name] = read(data, p.name)
        elif p.name in data.non_tensor_batch:
            arguments[p.name] = data.non_tensor_batch[p.name]
        elif p.default is p.empty:
            raise ValueError(
                f"algorithm.adv_estimator={name} needs {p.name!r}, which this batch does not have. "
                f"Columns: {', '.join(sorted(names))}; values: {', '.join(sorted(available))}. "
                f"Produce that column before the advantages, or give the argument a default."
            )
    if takes_all:
        columns = {name: read(data, name) for name in ("token_level_rewards", "response_mask")}
        arguments = {**available, **columns, **arguments}
    result, rows = fn(**arguments), len(data)
    # a lone (2, R) tensor would come apart into two rows
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if is_pair and all(isinstance(x, Tensor | Ragged) and len(x.shape) == 2 and x.shape[0] == rows for x in result):
        return result[0], result[1]
    parts = result if isinstance(result, (tuple, list)) else [result]
    shapes = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in parts)
    raise ValueError(
        f"algorithm.adv_estimator={name} returned {shapes} for {rows} responses, and must return advantages and "
        f"returns, both ({rows}, response length). Change the function's last line."
    )


def _trimmed(data: DataProto, name: str) -> Tensor:
    """Return a response column with padding trimmed, any other as it is."""
    return response_column(data, name) if WINDOWS.get(name) == "response" else data.column(name)


def _without_padding(data: DataProto, name: str) -> Any:
    """Return a response column as it is kept, any other as it is."""
    return data.ragged(name) if WINDOWS.get(name) == "response" else data.column(name)


def move_to_sampled_tokens(data: DataProto, name: str) -> None:
    """Move the rewards in column ``name`` (B, R) to tokens of ``response_mask``; see `onto_sampled_tokens`."""
    own, column = data.ragged("response_mask"), data.ragged(name)
    if is_whole(own):
        return
    if isinstance(column, RowValues) and column.at is not None:
        if len(left := _tokens_answered(own, column.at)) == 0 or torch.equal(left, column.at):
            return
        data.put(name, RowValues(column.numbers, column.layout, left))
        return
    rewards, mask = (response_column(data, column) for column in (name, "response_mask"))
    moved = onto_sampled_tokens(rewards, mask)
    if moved is not rewards:
        put_response_column(data, name, moved)


def _tokens_answered(mask: Ragged, at: Tensor) -> Tensor:
    """Return (B,): the sampled token that token ``at`` (B,) of each row answers, by a mask (B, R).

    That is the last one up to it, or the first of the row; of a row without any, ``at`` itself.
    """
    own, places = np.flatnonzero(mask.values.cpu().numpy()), at.cpu().numpy()
    offsets = mask.layout.offsets.cpu().numpy()
    firsts, lasts = offsets[:-1], offsets[1:]
    before = np.searchsorted(own, firsts + places, side="right") - 1  # number of the nearest in `own`
    first = np.searchsorted(own, firsts)
    chosen = np.maximum(before, first)
    has_own = first < np.searchsorted(own, lasts)
    found = own[np.minimum(chosen, max(len(own) - 1, 0))] if len(own) else firsts
    return torch.from_numpy(np.where(has_own, found - firsts, places)).to(at.device)


def attach_reward(data: DataProto, scores: Column, extra: Mapping[str, Any]) -> DataProto:
    """Put a reward manager's result (B, R) into the batch: ``token_level_scores`` and its extra columns.

    Rewards on tool output or on padding are moved to the sampled token before; where the policy sampled none, to the
    response. The names of the extra columns are in ``meta_info["reward_extra_keys"]``. ``uid``
    is the trainer's own.

    Raises:
        ValueError: a response without a single token has a reward.
    """
    layout = data.ragged("responses").layout
    if isinstance(scores, Tensor):
        # padded to another width by a user's manager; rewards on padding go where those on tool output go
        window = Layout(layout.starts, layout.lengths, scores.shape[1])
        is_token, sums = window.mask().to(scores.device), scores.sum(-1)
        has_reward = (scores != 0).any(-1)
    else:
        sums = scores.row_sums()
        has_reward = sums != 0
    if empty := (has_reward & (layout.lengths == 0).to(sums.device)).nonzero().squeeze(-1).tolist():
        raise ValueError(
            f"row {empty[0]} of the batch has a response without any token, and the reward "
            f"{sums[empty[0]].item():g}, which has no token to belong to. Have rollouts return at least one "
            "token, masked if the policy did not sample it, or give such responses a reward of 0."
        )
    if isinstance(scores, Ragged):
        data.put("token_level_scores", scores.with_layout(layout))
        if "response_mask" in data.keys():
            move_to_sampled_tokens(data, "token_level_scores")
    else:
        if "response_mask" in data.keys():
            is_own = Ragged(data.ragged("response_mask").values, window).padded().to(scores.device) != 0
            is_token = torch.where(is_own.any(-1, keepdim=True), is_own, is_token != 0)
        put_response_column(data, "token_level_scores", onto_sampled_tokens(scores, is_token))
    names = [name for name, column in extra.items() if len(column) == len(data)]
    if "uid" in names:
        raise ValueError(
            "the reward function returned a value named 'uid', by which the trainer finds the responses to one "
            "prompt. Return it under another name."
        )
    for name in names:
        data.non_tensor_batch[name] = np.fromiter(extra[name], dtype=object, count=len(data))
    data.meta_info["reward_extra_keys"] = names
    return data


# -- ``algorithm.{reward_shaping,sample_mask,advantage}``: scores, masks and advantages of a batch ---------------------
class Shaping:
    """The shaping of a run's batches, one after the other; remembers the running moments of the scores.

    Args:
        algorithm: the ``algorithm`` section.
        response_length: tokens at which responses are truncated.
        source_key: column that holds the data source of each row.
    """

    def __init__(self, algorithm: AlgorithmConfig, response_length: int, source_key: str = "data_source"):
        self.rewards, self.advantage = algorithm.reward_shaping, algorithm.advantage
        self.sample_mask = algorithm.sample_mask
        self.estimator = algorithm.adv_estimator
        self.response_length = response_length
        self.source_key = source_key
        self.running: dict[str, Moments] = {}

    @property
    def whitens_after(self) -> bool:
        """Whether advantages are whitened here: configured, and not done by an estimator that has the argument."""
        parameters = inspect.signature(get_adv_estimator_fn(self.estimator)).parameters
        return self.advantage.whiten is True and "whiten_advantages" not in parameters

    def shape_scores(self, batch: DataProto) -> dict[str, float]:
        """Add ``token_level_rewards`` (B, R), which KL has not touched yet; returns metrics."""
        options, norm = self.rewards, self.rewards.norm
        does_change = options.overlong_buffer.enable or norm.mean or norm.std or options.clip is not None
        does_change = does_change or options.clip_range is not None
        if not does_change and (options.scale, options.shift) == (1, 0):
            batch.put("token_level_rewards", batch.ragged("token_level_scores"))
            return {}
        metrics: dict[str, float] = {}
        given, mask = (response_column(batch, name) for name in ("token_level_scores", "response_mask"))
        scores = given.double().sum(-1)
        require_finite("token_level_scores", scores)
        if options.overlong_buffer.enable:
            lengths, overlong = batch.ragged("responses").layout.lengths, options.overlong_buffer
            penalty = overlong_penalty(lengths, self.response_length, overlong.len, overlong.penalty_factor)
            scores = scores + penalty
            metrics["reward_shaping/overlong_fraction"] = (penalty < 0).double().mean().item()
            metrics["reward_shaping/overlong_penalty"] = penalty.mean().item()
        if norm.mean or norm.std:
            centre, spread = self._centre_and_spread(batch, scores, metrics)
        else:
            centre, spread = torch.zeros_like(scores), torch.ones_like(scores)
        scores = (scores - centre) / spread * options.scale + options.shift
        if options.clip_range is not None:
            low, high = options.clip_range
            scores, metrics["reward_shaping/clip_range_fraction"] = clip_scores(scores, high, low)
        if options.clip is not None:
            scores, metrics["reward_shaping/clip_fraction"] = clip_scores(scores, options.clip)
        put_response_column(batch, "token_level_rewards", rescore(given, mask, scores, options.scale / spread))
        return metrics

    def _centre_and_spread(self, batch: DataProto, scores: Tensor, metrics: dict) -> tuple[Tensor, Tensor]:
        """Return mean and spread that normalise the scores; update the running moments, and add them to ``metrics``."""
        norm = self.rewards.norm
        sources: list[str] | None = None
        if {"running", "source"} & {norm.mean, norm.std}:
            column = batch.non_tensor_batch.get(self.source_key)
            sources = ["all"] * len(batch) if column is None else [str(source) for source in column]
        if sources is not None and "running" in (norm.mean, norm.std):
            self.running = merge_moments(self.running, scores, sources)
            for source in dict.fromkeys(sources):
                metrics[f"reward_shaping/running_mean/{source}"] = self.running[source].mean
                metrics[f"reward_shaping/running_std/{source}"] = self.running[source].std
        return centre_and_spread(scores, batch.non_tensor_batch["uid"], norm.mean, norm.std, self.running, sources)

    def finish_rewards(self, batch: DataProto) -> dict[str, float]:
        """Bound and whiten ``token_level_rewards``, and take responses out of the loss; returns metrics.

        A response is taken out by zeros in its ``response_mask``. Its score still counts in its group.
        """
        metrics: dict[str, float] = {}
        if self.rewards.clip is not None:
            rewards, mask = (response_column(batch, name) for name in ("token_level_rewards", "response_mask"))
            rewards, metrics["reward_shaping/token_clip_fraction"] = clip_tokens(rewards, mask, self.rewards.clip)
            put_response_column(batch, "token_level_rewards", rewards)
        if self.rewards.whiten:
            rewards, mask = (response_column(batch, name) for name in ("token_level_rewards", "response_mask"))
            put_response_column(batch, "token_level_rewards", whiten_tokens(rewards, mask))
        return metrics | self._mask_samples(batch)  # last: a masked response still counts in its group

    def _mask_samples(self, batch: DataProto) -> dict[str, float]:
        dropped: dict[str, Tensor] = {}
        lengths = batch.ragged("responses").layout.lengths
        if self.sample_mask.drop_truncated:
            # by finish_reason; without that column, a response that fills the window counts as truncated
            reasons = batch.non_tensor_batch.get("finish_reason")
            dropped["truncated"] = cut_at_limit(lengths, self.response_length, reasons)
        scores = batch.row_sums("token_level_scores")
        if self.sample_mask.error_max_len is not None:
            dropped["long_error"] = ~right_or_short(scores, lengths, self.sample_mask.error_max_len)
        if self.sample_mask.difficulty is not None:
            dropped["difficulty"] = ~within_difficulty(
                scores, batch.non_tensor_batch["uid"], *self.sample_mask.difficulty
            )
        if not dropped:
            return {}
        out = torch.stack(list(dropped.values())).any(0)
        batch.put("response_mask", batch.ragged("response_mask").zero_rows(out))
        metrics = {f"sample_mask/{why}_fraction": rows.double().mean().item() for why, rows in dropped.items()}
        return {**metrics, "sample_mask/kept_fraction": 1 - out.double().mean().item()}

    def shape_advantages(self, batch: DataProto) -> dict[str, float]:
        """Whiten and bound ``advantages``; ``returns`` stay as they are. Returns metrics."""
        whitens = self.whitens_after
        if not whitens and self.advantage.clip is None:
            return {}
        metrics: dict[str, float] = {}
        advantages, mask = (response_column(batch, name) for name in ("advantages", "response_mask"))
        if whitens:
            advantages = whiten_tokens(advantages, mask)
        if self.advantage.clip is not None:
            advantages, metrics["critic/advantage_clip_frac"] = clip_tokens(advantages, mask, self.advantage.clip)
        put_response_column(batch, "advantages", advantages)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of each data source, as JSON values for a checkpoint."""
        return {source: list(moments) for source, moments in self.running.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the moments of the checkpoint."""
        self.running = {source: Moments(*moments) for source, moments in state.items()}


# -- Plan of the data-parallel partition of a batch, made once on the driver: row cost, optimizer steps, balance metrics


_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def row_cost(model_path: str) -> RowCost:
    """Return the cost of a row for the model in this folder, by its ``config.json``; a default where that lacks it."""
    file = Path(model_path).expanduser() / "config.json"
    shape = json.loads(file.read_text()) if file.is_file() else {}
    shape = shape.get("text_config") or shape
    if not all(shape.get(name) for name in _SHAPE):
        return RowCost()
    return RowCost(FlopsCounter(SimpleNamespace(**shape)).break_even())


def partition_plan(config: PPOConfig, cost: RowCost, step: int) -> PartitionPlan:
    """Return the plan by which the calls of training step ``step`` divide their rows among ranks.

    Args:
        config: the whole tree.
    """
    shared, critic = config.actor_rollout_ref, config.critic
    seed = derive_seed(config.trainer.seed, "shuffle", step)

    def update(role: ActorConfig | CriticConfig, n: int) -> CallPlan:
        return CallPlan(role.use_dynamic_bsz, MiniBatches.of(role, n, seed))

    calls = {
        "compute_log_prob": CallPlan(shared.rollout.log_prob_use_dynamic_bsz, follows="update_actor"),
        "compute_ref_log_prob": CallPlan(shared.ref.log_prob_use_dynamic_bsz, follows="update_actor"),
        "compute_values": CallPlan(critic.use_dynamic_bsz, follows="update_critic"),
        "update_actor": update(shared.actor, shared.rollout.n),
        "update_critic": update(critic, critic.rollout_n),
    }
    sharing = (shared.model.use_prefix_sharing, critic.model.use_prefix_sharing, config.shares_prompts_by_default)
    together = any(sharing)
    return PartitionPlan(calls, cost if config.trainer.balance_batch else None, together)


def balance_metrics(batch: DataProto, plan: PartitionPlan, cost: RowCost, ranks: int, prefix: str) -> dict[str, float]:
    """Return how tokens and cost spread over ``ranks`` in the policy's update, before and after balancing.

    Tokens as ``{prefix}/{min,max,minmax_diff,balanced_min,balanced_max,mean}``. Cost as the sum over optimizer steps of
    the slowest rank's, over that of the mean: ``{prefix}/balanced_cost_max_over_mean`` and, with the rows dealt in
    their order, ``{prefix}/cost_max_over_mean``; 1 is best.
    """
    rows = row_lengths(batch, plan.groups_together)
    parts, after = plan.loads("update_actor", rows, ranks, cost)
    _, before = plan._replace(cost=None).loads("update_actor", rows, ranks, cost)
    return {
        **log_seqlen_unbalance(rows.lengths.tolist(), parts, prefix),
        # costs (steps, ranks): ranks wait for the slowest at every step
        f"{prefix}/cost_max_over_mean": float(before.max(axis=1).sum() / before.mean(axis=1).sum()),
        f"{prefix}/balanced_cost_max_over_mean": float(after.max(axis=1).sum() / after.mean(axis=1).sum()),
    }

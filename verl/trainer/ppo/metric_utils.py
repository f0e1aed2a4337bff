"""Metrics of a step and of a validation, under verl's names.

Reads batches column by column in their packed form (``data.ragged``), so the cost follows valid tokens and not padding.
Letters: B responses, R response width, P prompt width, Q prompts, N samples of a prompt, D bootstrap resamples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.reward_shaping import cut_at_limit
from verl.algorithms.valid_tokens import is_whole, valid_tokens
from verl.batch.ragged import Ragged, RowValues
from verl.protocol import DataProto
from verl.rewards.managers.scoring import without_failed_episodes
from verl.telemetry.metric import reduce_metrics
from verl.trainer.ppo.episodes import Decode, Episode, episode_metrics, episodes_of, trajectory_records
from verl.trainer.ppo.run_log import describe, dump_samples, ground_truths
from verl.trainer.ppo.trajectories import first_rows, trajectory_numbers, trajectory_sums

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]

# What a stage's time is divided by for timing_per_token_ms.
STAGES_OVER_RESPONSE_TOKENS = ("gen",)


STAGES_OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")


BOOTSTRAP_VALUES = 4_000_000  # numbers gathered at a time


EXACT_BITS_OF_FLOAT32, EXACT_BITS = 16, 46  # samples in a resample whose places and count fit into 24 and 53 bits


# -- a training batch -------------------------------------------------------------------------------------------------
def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Scores, advantages, lengths of one training batch.

    Args:
        batch: has ``token_level_scores``, ``token_level_rewards``, ``advantages``, ``returns``, ``response_mask``,
            ``responses``, ``attention_mask``, and ``values`` if ``use_critic``; each (B, R) or as the data flow says.
        use_critic: add ``critic/values/*`` and ``critic/vf_explained_var``.

    Returns:
        ``critic/{score,rewards,advantages,returns[,values]}/{mean,max,min}``, ``response_length/...``,
        ``prompt_length/...`` and, when the batch counts turns, ``num_turns/{min,max,mean}``. Scores and rewards are
        sums over a response; advantages, returns and values are over tokens where ``response_mask`` is 1. And how much
        there is to learn from, ``batch/...``, see `signal_metrics`; and of episodes, `episode_metrics`. Those that
        failed count in no other metric.
    """
    metrics = episode_metrics(episodes_of(batch))
    batch = without_failed_episodes(batch)
    if not len(batch):
        return metrics
    first = first_rows(batch)  # of each trajectory: its score is that of all its rows
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        sums = trajectory_sums(batch, batch.row_sums(column))
        metrics |= _spread(f"critic/{name}", sums if first is None else sums[first])
    mask = batch.ragged("response_mask")
    for name in ("advantages", "returns"):
        metrics |= _token_spread(f"critic/{name}", batch.ragged(name), mask)
    if use_critic:
        values, returns = (_sampled(batch.ragged(name), mask) for name in ("values", "returns"))
        metrics |= _spread("critic/values", values)
        explained = 0.0  # 1 for a perfect critic, 0 for a constant one
        if values.numel() > 1:
            v, r = values.double(), returns.double()
            explained = (1 - (r - v).var() / (r.var() + 1e-5)).item()
        metrics["critic/vf_explained_var"] = explained

    response, prompt = _lengths(batch)
    for name, (lengths, width) in (("response_length", response), ("prompt_length", prompt)):
        metrics |= _spread(name, lengths)
        metrics[f"{name}/clip_ratio"] = (lengths == width).double().mean().item()
    if "__num_turns__" in batch.non_tensor_batch:
        counts = torch.as_tensor(batch.non_tensor_batch["__num_turns__"].astype(np.float64))
        metrics |= _spread("num_turns", counts if first is None else counts[first])
    return metrics | signal_metrics(batch)


def signal_metrics(batch: DataProto) -> dict[str, float]:
    """Return metrics of the learning signal in a training batch; columns as in `compute_data_metrics`.

    Returns:
        ``batch/zero_advantage_ratio``: share of the responses with an advantage of 0 on every token;
        ``batch/token_ratio``: share of the response tokens that are in the loss; ``batch/truncated_ratio``: share of
        the responses truncated at a length limit. Where rows have a ``uid``, also ``batch/zero_std_ratio``, of the
        groups of two or more those whose scores are all equal, ``critic/groups_without_signal``, those of them whose
        advantages are all 0, ``batch/identical_responses``, the share of their responses that equal another of the
        group, and ``batch/solve_{all,none}``, the number of groups with all scores at 1 or more, and with all at 0 or
        less.
    """
    response = batch.ragged("responses").layout
    if not len(response):
        return {}
    mask, advantages = batch.ragged("response_mask"), batch.ragged("advantages")
    tokens = valid_tokens(mask)
    if isinstance(advantages, RowValues) and advantages.at is None:
        teaches = torch.where(advantages.numbers != 0, tokens.lengths, 0).double()
    else:
        teaches = mask.like((advantages.values != 0) & mask.values.bool()).row_sums()
    cut = cut_at_limit(response.lengths, response.width, batch.non_tensor_batch.get("finish_reason"))
    metrics = {
        "batch/zero_advantage_ratio": (teaches == 0).double().mean().item(),
        "batch/token_ratio": int(tokens.total) / max(1, response.total),
        "batch/truncated_ratio": cut.double().mean().item(),
    }
    if "uid" in batch.non_tensor_batch:
        _, group, sizes = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True, return_counts=True)
        scores = trajectory_sums(batch, batch.row_sums("token_level_scores")).cpu().numpy()
        low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
        np.minimum.at(low, group.reshape(-1), scores)
        np.maximum.at(high, group.reshape(-1), scores)
        metrics["batch/solve_all"] = float((low >= 1).sum())
        metrics["batch/solve_none"] = float((high <= 0).sum())
        if (several := sizes > 1).any():
            metrics["batch/zero_std_ratio"] = float((low == high)[several].mean())
            taught = np.bincount(group.reshape(-1), weights=teaches.cpu().numpy())
            metrics["critic/groups_without_signal"] = float((taught == 0)[several].mean())
            metrics["batch/identical_responses"] = identical_share(batch, group.reshape(-1))
    return metrics


def identical_share(batch: DataProto, group: np.ndarray) -> float:
    """Return the share of the responses that equal another of their group, token by token; of groups of two or more.

    Args:
        group: (B,) number of each row's group. The rows of one trajectory count as one response.
    """
    numbers = trajectory_numbers(batch)
    numbers = np.arange(len(batch)) if numbers is None else numbers
    responses = batch.ragged("responses")
    rows: dict[int, list[int]] = defaultdict(list)
    for row, number in enumerate(numbers.tolist()):
        rows[number].append(row)
    lengths = responses.layout.lengths.tolist()
    alike = {number: (group[own[0]], *(lengths[row] for row in own)) for number, own in rows.items()}
    several = Counter(alike.values())
    # only tokens of responses of equal lengths are looked at
    texts = {
        number: tuple(responses.row(row).cpu().numpy().tobytes() for row in own)
        for number, own in rows.items()
        if several[alike[number]] > 1
    }
    count = Counter((alike[number], text) for number, text in texts.items())
    compared = sum(n for n in Counter(key[0] for key in alike.values()).values() if n > 1)
    return sum(n for n in count.values() if n > 1) / max(1, compared)


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """``timing_s/*``, and ``timing_per_token_ms/*`` for stages whose cost follows tokens.

    ``gen`` is divided by the response tokens of the batch, the other stages by all its tokens.
    """
    (response, _), (prompt, _) = _lengths(batch)
    response_tokens = int(response.sum())
    all_tokens = response_tokens + int(prompt.sum())
    per_token = dict.fromkeys(STAGES_OVER_RESPONSE_TOKENS, response_tokens)
    per_token |= dict.fromkeys(STAGES_OVER_ALL_TOKENS, all_tokens)
    metrics = {f"timing_s/{name}": float(seconds) for name, seconds in timing_raw.items()}
    for name, tokens in per_token.items():
        if name in timing_raw and tokens > 0:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / tokens
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds, and ``perf/throughput`` in tokens per second and device.

    Reads ``meta_info["global_token_num"]``, the tokens of each row, and ``timing_raw["step"]``.
    """
    tokens = int(sum(batch.meta_info["global_token_num"]))
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
    }


def _compute_response_info(batch: DataProto) -> dict[str, Tensor]:
    """``response_mask`` (B, R), and float32 ``prompt_length`` and ``response_length`` (B,): verl's, for its recipes."""
    (response, width), (prompt, _) = _lengths(batch)
    mask = batch.column("attention_mask")[:, -int(width) :]
    return {"response_mask": mask, "prompt_length": prompt.float(), "response_length": response.float()}


def _sampled(column: Ragged, mask: Ragged) -> Tensor:
    """The values of a column on the tokens where ``mask`` is not 0."""
    return column.values if is_whole(mask) else column.values[mask.values.bool()]


def _token_spread(name: str, column: Ragged, mask: Ragged) -> dict[str, float]:
    """`_spread` over the tokens where ``mask`` is not 0."""
    if not isinstance(column, RowValues) or column.at is not None:
        return _spread(name, _sampled(column, mask))
    counts = valid_tokens(mask).lengths
    numbers, counts = column.numbers[counts > 0].double(), counts[counts > 0]
    metrics = _spread(name, numbers)
    return metrics and {**metrics, f"{name}/mean": ((numbers * counts).sum() / counts.sum()).item()}


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """mean, max and min; of no values there are none."""
    if values.numel() == 0:
        return {}
    values = values.detach().double()
    low, high = values.aminmax()
    return {f"{name}/mean": values.mean().item(), f"{name}/max": high.item(), f"{name}/min": low.item()}


def _lengths(batch: DataProto) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """(lengths (B,), width) of responses and of prompts, from the attention mask."""
    everything = batch.ragged("attention_mask").layout
    response = batch.ragged("responses").layout
    prompt_lengths = everything.lengths - response.lengths
    return (response.lengths, response.width), (prompt_lengths, everything.width - response.width)


# -- validation -------------------------------------------------------------------------------------------------------
def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each reduction over random subsets of ``data``, sampled with replacement.

    Args:
        data: one prompt's samples: numbers, or anything ``reduce_fns`` take a list of.
        subset_size: samples in a resample.
        reduce_fns: list -> number, e.g. ``np.max``.
        n_bootstrap: resamples.
        seed: the same resamples for every prompt with as many samples.

    Returns:
        (mean, std) for each of ``reduce_fns``.
    """
    resamples = _resamples(len(data), subset_size, n_bootstrap, seed)
    results = []
    for reduce in reduce_fns:
        if reduce in (np.max, np.min, np.mean) and not isinstance(data[0], Mapping):
            reduced = reduce(np.asarray(data, dtype=np.float64)[resamples], axis=1)
        else:
            reduced = np.array([reduce([data[i] for i in rows]) for rows in resamples], dtype=np.float64)
        results.append((float(reduced.mean()), float(reduced.std())))
    return results


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the answer given most often; of a tie, the answer given first wins."""
    counts: dict[Any, int] = defaultdict(int)
    first: dict[Any, Any] = {}
    for item in data:
        counts[item[vote_key]] += 1
        first.setdefault(item[vote_key], item[val_key])
    return first[max(counts, key=counts.__getitem__)]


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[Any],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> dict[str, dict[str, dict[str, float]]]:
    """Mean, best, worst and majority of k samples a prompt, averaged over the prompts of each data source.

    With N samples of a prompt: ``mean@N``; for N > 1 also ``std@N`` and, for k = 2, 4, 8, ... and N,
    ``{best,worst}@k/{mean,std}`` by bootstrap, and ``maj@k/{mean,std}`` when ``infos_dict`` has ``pred``.

    Args:
        data_sources: one for each sample.
        sample_uids: what samples of the same prompt share: its text or its uid.
        infos_dict: variable -> one value for each sample. A variable that is not a number for every sample of a data
            source gives no metrics there.
        seed: of the bootstrap.

    Returns:
        data source -> variable -> metric -> value.
    """
    found = prompt_metrics(data_sources, sample_uids, infos_dict, seed)
    return {source: {name: _means(metrics) for name, metrics in own.items()} for source, own in found.items()}


def prompt_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[Any],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """As `process_validation_metrics`, with the values (Q,) of the prompts that have a metric, not their mean."""
    rows_of: dict[str, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, (source, prompt) in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows_of[source][prompt].append(i)
    columns = {name: _numbers(values) for name, values in infos_dict.items()}
    preds = infos_dict.get("pred")

    result: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for source, prompts in rows_of.items():
        by_count: dict[int, list[list[int]]] = defaultdict(list)  # prompts with equally many samples go together
        for rows in prompts.values():
            by_count[len(rows)].append(rows)
        groups = [np.array(rows) for rows in by_count.values()]
        has_votes = preds is not None and any(preds[i] is not None for rows in prompts.values() for i in rows)
        votes = [_majority_shares(_vote_codes(preds, rows), seed) if has_votes else {} for rows in groups]
        result[source] = {
            name: _joined([_metrics_of_group(numbers[g], v, seed) for g, v in zip(groups, votes, strict=True)])
            for name, (numbers, is_number) in columns.items()
            if all(is_number[rows].all() for rows in groups)
        }
    return result


def _metrics_of_group(values: np.ndarray, votes: Mapping[int, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Metric -> (Q,) values, from (Q, N) values and the shares (Q, N) that samples have in majorities of k."""
    n = values.shape[1]
    metrics = {f"mean@{n}": values.mean(axis=1)}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = values.std(axis=1)
    for k in _subset_sizes(n):
        reductions: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
            "best": partial(_bootstrap_extreme, values, k, np.max, seed),
            "worst": partial(_bootstrap_extreme, values, k, np.min, seed),
        }
        for name, reduction in reductions.items():
            metrics[f"{name}@{k}/mean"], metrics[f"{name}@{k}/std"] = reduction()
        if k in votes:  # shares of a row sum to 1
            mean = (values * votes[k]).sum(axis=1)
            metrics[f"maj@{k}/mean"] = mean
            metrics[f"maj@{k}/std"] = np.sqrt(((values - mean[:, None]) ** 2 * votes[k]).sum(axis=1))
    return metrics


def _subset_sizes(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n."""
    return [2**i for i in range(1, (n - 1).bit_length())] + [n]


@lru_cache(maxsize=32)
def _resamples(n: int, k: int, n_bootstrap: int = 1000, seed: int = 42) -> np.ndarray:
    """Return (D, k) sample numbers, sampled with replacement; the same stream as repeated ``np.random.choice``."""
    resamples = np.random.RandomState(seed).randint(0, n, size=(n_bootstrap, k))
    resamples.flags.writeable = False
    return resamples


def _bootstrap_extreme(
    values: np.ndarray, k: int, extreme: Callable[..., np.ndarray], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and std over resamples of the largest or least of k, each (Q,)."""
    resamples = _resamples(values.shape[1], k, seed=seed)
    weights: np.ndarray = np.ones(len(resamples))
    if values.shape[1] <= 62:
        # The extreme depends on the set of samples only, and of few samples there are few sets.
        sets = np.bitwise_or.reduce(np.int64(1) << resamples, axis=1)
        _, first, weights = np.unique(sets, return_index=True, return_counts=True)
        resamples = resamples[first]
    means, stds = [], []
    for part in _parts(values, resamples.size):
        reduced = extreme(part[:, resamples], axis=2)
        mean = np.average(reduced, axis=1, weights=weights)
        means.append(mean)
        stds.append(np.sqrt(np.average((reduced - mean[:, None]) ** 2, axis=1, weights=weights)))
    return np.concatenate(means), np.concatenate(stds)


def _majority_shares(votes: np.ndarray, seed: int) -> dict[int, np.ndarray]:
    """k -> (Q, N): how often, over the resamples of k, a sample stands for the majority (`calc_maj_val`).

    Shares depend on the votes only, so all variables use the same. Prompts whose samples agree and differ alike have
    the same shares, and are looked at once.
    """
    n = votes.shape[1]
    if n == 1:
        return {}
    patterns, which = np.unique(votes, axis=0, return_inverse=True)
    winners = {k: _winners if k <= EXACT_BITS else _winners_by_counting for k in _subset_sizes(n)}
    shares = {}
    for k, winners_of in winners.items():
        resamples = _resamples(n, k, seed=seed)
        parts = [winners_of(part, resamples) for part in _parts(patterns, resamples.size)]
        samples = np.concatenate(parts) + n * np.arange(len(patterns))[:, None]
        counts = np.bincount(samples.reshape(-1), minlength=patterns.size).reshape(patterns.shape)
        shares[k] = (counts / len(resamples))[which.reshape(-1)]
    return shares


def _winners(votes: np.ndarray, resamples: np.ndarray) -> np.ndarray:
    """Return (Q, D): the first sample with the majority's answer; of a tie, the answer that comes first wins.

    The sample at place p = 0, 1, ... counts 1 + 2^-(p+1) for its answer. The whole part of an answer's sum is
    then its number of votes, and its fraction is the larger the earlier the answer comes: its first bit is that
    place.
    """
    n, k = votes.shape[1], resamples.shape[1]
    counts = np.zeros((len(resamples), n), dtype=np.float32 if k <= EXACT_BITS_OF_FLOAT32 else np.float64)
    np.add.at(counts, (np.arange(len(resamples))[:, None], resamples), 1 + 0.5 ** np.arange(1, k + 1))
    best = np.zeros((len(votes), len(resamples)), dtype=counts.dtype)
    for code in range(votes.max() + 1):
        np.maximum(best, (votes == code).astype(counts.dtype) @ counts.T, out=best)
    place = -np.frexp(best - np.floor(best))[1]
    return resamples[np.arange(len(resamples))[None, :], place]


def _winners_by_counting(votes: np.ndarray, resamples: np.ndarray) -> np.ndarray:
    """Return the same as `_winners` for resamples whose counts do not fit into the bits of a number."""
    sampled = votes[:, resamples]  # (Q, D, k)
    counts = np.zeros(sampled.shape, dtype=np.int32)
    for j in range(resamples.shape[1]):
        counts += sampled == sampled[..., j : j + 1]
    return resamples[np.arange(len(resamples))[None, :], counts.argmax(axis=2)]


def _parts(array: np.ndarray, values_per_row: int) -> list[np.ndarray]:
    """``array`` in runs of rows that gather at most ``BOOTSTRAP_VALUES`` numbers."""
    step = max(1, BOOTSTRAP_VALUES // values_per_row)
    return [array[i : i + step] for i in range(0, len(array), step)]


def _vote_codes(preds: Sequence[Any], rows: np.ndarray) -> np.ndarray:
    """(Q, N) integers, equal within a prompt where the answers are equal."""
    codes = np.empty(rows.shape, dtype=np.int32)
    for q, samples in enumerate(rows):
        known: dict[Any, int] = {}
        for j, i in enumerate(samples):
            pred = preds[i]
            key = pred if isinstance(pred, (str, int, float, bool, tuple, type(None))) else repr(pred)
            codes[q, j] = known.setdefault(key, len(known))
    return codes


def _numbers(values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """(B,) float64, zero where a value is no number, and (B,) whether it is one."""
    is_number = np.array([isinstance(value, (int, float, np.number, np.bool_)) for value in values], dtype=bool)
    numbers = np.zeros(len(values))
    numbers[is_number] = [float(value) for value, good in zip(values, is_number, strict=True) if good]
    return numbers, is_number


def _means(metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in metrics.items()}


def _joined(groups: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Each metric's values for the prompts that have it."""
    collected: dict[str, list[np.ndarray]] = defaultdict(list)
    for metrics in groups:
        for name, values in metrics.items():
            collected[name].append(values)
    return {name: np.concatenate(parts) for name, parts in collected.items()}


# -- Scoring the validation set: mean, best and majority of k by data source -----------------------------------------


CORE_NAMES = ("mean@", "maj@", "best@")


def validate(
    batches: Iterable[DataProto],
    score: Callable[[DataProto], tuple[Any, dict[str, list]]],
    decode: Callable[[DataProto], tuple[list[str], list[str]]],
    dump_to: Path | None = None,
    step: int = 0,
    source_key: str = "data_source",
    decode_ids: Decode | None = None,
    token_columns: Callable[[DataProto, int], dict[int, dict[str, list]]] | None = None,
    token_limit: int = 0,
) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    """Score every validation response.

    A trajectory of several rows is one sample with the sum of their rewards. Failed episodes have no score: they count
    in ``val-env/<tag>/error`` only.

    Args:
        batches: prompts with responses, those to one prompt under one ``uid``.
        score: batch -> (B, R) rewards and extra columns.
        decode: batch -> texts of prompts and responses.
        dump_to: folder of ``{step}.jsonl``, or None.
        source_key: column of the data source, by which metrics are grouped (``data.reward_fn_key``).
        decode_ids: ids to texts, for the turns of dumped trajectories.
        token_columns: batch, limit -> the columns of its rows' tokens (`TokenColumns`), for the dumped samples; None:
            they have none.
        token_limit: tokens of all batches that have them, at most.

    Returns:
        metrics under the names ``val-core/...`` and ``val-aux/...``, those of episodes under ``val-env/...`` and the
        like, and (input, output, score) of every sample.
    """
    inputs: list[str] = []
    outputs: list[str] = []
    sources, uids, gold = [], [], []
    columns: dict[str, list] = {"reward": []}
    described: dict[str, list] = {}
    episodes: list[Episode] = []
    trajectories = []
    tokens: dict[int, dict[str, list]] = {}
    for batch in batches:
        rewards, extra = score(batch)
        scores, before = rewards.sum(-1).tolist(), len(inputs)
        found = episodes_of(batch, scores)
        if dump_to is not None:
            records = trajectory_records(batch, found, decode_ids)
            trajectories += [([before + i for i in rows], record) for rows, record in records]
            for name, values in describe(batch, source_key).items():
                described.setdefault(name, []).extend(values)
            if token_columns is not None and token_limit > 0:
                of_rows = token_columns(batch, token_limit)
                token_limit -= sum(len(one["text"]) for one in of_rows.values())
                tokens |= {before + row: one for row, one in of_rows.items()}
        episodes += [replace(episode, rows=[before + i for i in episode.rows]) for episode in found]
        columns["reward"] += scores
        for name, values in extra.items():
            if name != "reward" and len(values) == len(batch):
                columns.setdefault(name, []).extend(values)
        texts = decode(batch)
        inputs += texts[0]
        outputs += texts[1]
        rows = batch.non_tensor_batch
        sources += rows.get(source_key, np.array(["unknown"] * len(batch), dtype=object)).tolist()
        uids += rows["uid"].tolist()
        gold += ground_truths(batch)
    if dump_to is not None:
        rewards = columns["reward"]
        dump_samples(dump_to, step, inputs, outputs, rewards, gold, {**described, **columns}, trajectories, tokens)
    columns = {name: values for name, values in columns.items() if len(values) == len(inputs)}
    kept = _one_row_each(columns["reward"], episodes)
    sources, uids = [sources[i] for i in kept], [uids[i] for i in kept]
    columns = {name: [values[i] for i in kept] for name, values in columns.items()}
    metrics = name_metrics(process_validation_metrics(sources, uids, columns)) | episode_metrics(episodes, "val-")
    if any(episode.has_turns for episode in episodes):
        counts = torch.tensor([float(episode.messages) for episode in episodes if not episode.failed])
        metrics |= _spread("val-aux/num_turns", counts)
    return metrics, [(inputs[i], outputs[i], columns["reward"][place]) for place, i in enumerate(kept)]


def _one_row_each(rewards: list[float], episodes: Sequence[Episode]) -> list[int]:
    """Return one row of each sample, which gets the reward of all its rows; none of failed episodes."""
    left_out = {i for episode in episodes for i in (episode.rows if episode.failed else episode.rows[1:])}
    for episode in episodes:
        if len(episode.rows) > 1:
            rewards[episode.rows[0]] = episode.reward
    return [i for i in range(len(rewards)) if i not in left_out]


def name_metrics(by_source: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Flatten source -> variable -> metric; the few numbers to look at go to ``val-core``, the rest to ``val-aux``.

    Core are mean, maj and best of the largest k, of ``acc`` where the reward function reports it, else of ``reward``.
    """
    metrics: dict[str, float] = {}
    for source, variables in by_source.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            largest = max((int(name.split("@")[1].split("/")[0]) for name in values), default=1)
            for name, value in values.items():
                is_core = variable == core and name.startswith(CORE_NAMES) and f"@{largest}" in name
                is_core = is_core and (name.startswith("mean@") or name.endswith("/mean"))
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{name}"] = value
    return metrics

"""Every field of ROLL's configuration classes at two releases, and what becomes of it here."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from verl.config.roll import pipelines
from verl.config.roll.rewards import REWARD
from verl.config.roll.strategies import STRATEGY
from verl.config.roll.table import TOP, Row
from verl.config.roll.workers import DATA, GENERATION, WORKER

_WORKERS = {**WORKER, **DATA, **GENERATION, **STRATEGY}
_TABLES: dict[str, tuple[dict[str, Row], str]] = {
    "worker_config.StrategyArguments": (_WORKERS, "strategy_args."),
    "worker_config.WorkerConfig": (_WORKERS, ""),
    "worker_config.RouterReplayConfig": (_WORKERS, "router_replay."),
    "worker_config.SequencePackingConfig": (_WORKERS, "sequence_packing_args."),
    "model_args.LoraArguments": (_WORKERS, "model_args."),
    "model_args.ModelArguments": (_WORKERS, "model_args."),
    "data_args.DataArguments": (_WORKERS, "data_args."),
    "generating_args.GeneratingArguments": (_WORKERS, "generating_args."),
    "training_args.TrainingArguments": (_WORKERS, "training_args."),
    "rlvr_config.RewardConfig": (REWARD, ""),
    "rlvr_config.RewardFilterConfig": (REWARD, "query_filter_config."),
    "rlvr_config.DatasetFilterConfig": (TOP, "dataset_filter."),
    "base_config.RolloutMockConfig": (TOP, "rollout_mock."),
    "base_config.RouterArguments": (TOP, "router_args."),
    "base_config.TransferBackendArguments": (TOP, "transfer_backend."),
    "base_config.TrainInferISWeightConfig": (TOP, "train_infer_correction.is_weight."),
    "base_config.TrainInferCorrectionConfig": (TOP, "train_infer_correction."),
    **{f"base_config.{name}": (TOP, "") for name in ("ScheduleConfig", "BaseConfig", "PPOConfig")},
    "rlvr_config.RLVRConfig": (TOP, ""),
}
"""Class of ROLL -> the table that has its fields, and what stands before a field's name there."""

_FILTERS = "base_config.TrainInferFilterConfig"
_PIPELINES = {
    "agentic_config": pipelines.AGENTIC,
    "sft_config": pipelines.SFT,
    "dpo_config": pipelines.DPO,
    "distill_config": pipelines.DISTILL,
}


class Field(NamedTuple):
    """A field of ROLL and what becomes of it."""

    section: str
    name: str
    type: str
    first: str
    """Default at v0.1.0; ``-``: not there."""
    latest: str
    """Default at 2026-08."""
    kind: str
    """``translated``, ``no effect`` or ``not built``."""
    text: str
    """To what, why, or what to do instead."""


@cache
def fields() -> list[Field]:
    """All fields, class by class.

    Raises:
        KeyError: no table has a field.
    """
    import yaml

    found = []
    classes = yaml.safe_load((Path(__file__).parent / "fields.yaml").read_text(encoding="utf-8"))
    for section, entries in classes.items():
        for name, (kind, first, latest) in entries.items():
            verdict, text = _verdict(section, name)
            found.append(Field(section, name, kind, first or "-", latest or "-", verdict, text))
    return found


def _verdict(section: str, name: str) -> tuple[str, str]:
    pipeline = _PIPELINES.get(section.partition(".")[0])
    if pipeline is not None and not (section == "agentic_config.AgenticConfig" and name in TOP):
        return "not built", f"{pipeline.name}; {pipeline.instead[0].lower()}{pipeline.instead[1:]}"
    if section == _FILTERS:
        if name.startswith("diff_"):
            return "not built", "a bound on the difference of probabilities; bound their ratio with `ratio_high`"
        return "translated", "`algorithm.rollout_correction.rollout_rs`, and its thresholds"
    table, before = _TABLES.get(section, (TOP, ""))
    key = f"{before}{name}"
    if key not in table and any(other.startswith(f"{key}.") for other in table):
        return "translated", "a section: its fields are in a list of their own"
    return table[key].kind, told(table[key])


def told(row: Row) -> str:
    """A row in words: its options, then its note."""
    options = [row.to] if isinstance(row.to, str) else list(row.to) if isinstance(row.to, tuple) else []
    text = "; ".join(filter(None, [", ".join(f"`{option}`" for option in options), row.note]))
    return f"{text}. ROLL's default `{row.default}` is kept" if row.default is not None else text

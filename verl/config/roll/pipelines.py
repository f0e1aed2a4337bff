"""Pipelines of ROLL that are not built here, and the keys by which a file is known to be for one."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Pipeline(NamedTuple):
    """A pipeline that is not built."""

    name: str
    keys: tuple[str, ...]
    instead: str


AGENTIC = Pipeline(
    "agentic training with environments",
    ("train_env_manager", "val_env_manager", "custom_envs", "custom_env", "env_manager_cls"),
    "Turns with an environment are an agent loop of yours (docs/async.md), given prompts by an RLVR file",
)
SFT = Pipeline(
    "supervised fine-tuning",
    ("sft_train",),
    "Fine-tune with another tool and name the model's folder with pretrain in an RLVR file",
)
DPO = Pipeline(
    "DPO",
    ("chosen_key", "rejected_key", "ipo", "beta", "label_smoothing"),
    "Train on preferences with another tool and name the model's folder with pretrain in an RLVR file, or give a "
    "reward model of them with reward_model.enable=true (docs/reward_model.md)",
)
DISTILL = Pipeline(
    "distillation from a teacher",
    ("student", "student_pretrain", "teacher_pretrain", "teacher", "student_train", "student_infer", "kd_objective"),
    "Distil with another tool and name the student's folder with pretrain in an RLVR file, or hold the policy near the "
    "teacher by use_kl_loss=true with the teacher as actor_rollout_ref.ref.model.path",
)
DIFFUSION = Pipeline("training of diffusion models", (), "Language models are trained here")
PIPELINES = (AGENTIC, SFT, DPO, DISTILL)


def unbuilt(tree: Mapping[str, Any]) -> str | None:
    """One sentence about the pipeline a file is for, if it is not built; None: it is for RLVR."""
    actor = tree.get("actor_train") if isinstance(tree.get("actor_train"), Mapping) else {}
    strategy = actor.get("strategy_args") if isinstance(actor.get("strategy_args"), Mapping) else {}
    if str(strategy.get("strategy_name")).startswith("diffusion"):
        return _sentence(DIFFUSION, [f"actor_train.strategy_args.strategy_name={strategy['strategy_name']}"])
    for pipeline in PIPELINES:
        if found := [key for key in pipeline.keys if tree.get(key) not in (None, {}, False)]:
            return _sentence(pipeline, found)
    data = actor.get("data_args") if isinstance(actor.get("data_args"), Mapping) else {}
    if tree.get("reward_normalization") and not data.get("file_name"):
        return _sentence(AGENTIC, ["reward_normalization"])
    for key in ("use_opd", "is_pure_opd", "opsd_mode"):
        if tree.get(key) is True:
            return _sentence(DISTILL, [key])
    return None


def _sentence(pipeline: Pipeline, keys: list[str]) -> str:
    return f"{', '.join(keys)}: this file is for {pipeline.name}, which is not built. {pipeline.instead}."

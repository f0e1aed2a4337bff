"""Batch arithmetic and devices: what ROLL spreads over its worker sections, and optimizer steps follow from.

One optimizer step of ROLL takes per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks
samples. Here a mini-batch counts prompts, each with all its responses.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.base import did_you_mean
from verl.config.roll.devices import parse_devices
from verl.config.roll.result import Note, Outcome, Refuse, Set
from verl.config.roll.table import ACTOR, REF, ROLLOUT
from verl.config.tree import at_key, section_at


class Roll:
    """A ROLL tree, and what follows from it.

    Args:
        tree: plain, interpolations filled in.
        overridden: options of ours that the command line sets beside it.
        knows: is this an option of ours?
    """

    def __init__(self, tree: Mapping[str, Any], overridden: set[str], knows: Any) -> None:
        self.tree, self.overridden, self.knows = dict(tree), overridden, knows
        self.at = ""
        """The key that is being translated."""
        self.is_agentic = any(name in tree for name in ("train_env_manager", "custom_envs", "val_env_manager"))
        self.mapped: dict[str, list[int] | None] = {}
        self.unreadable: list[Refuse] = []
        for role in ("actor_train", "actor_infer", "reference", "critic"):
            key = f"{role}.device_mapping"
            try:
                self.mapped[role] = parse_devices(self.get(key))
            except ValueError as error:
                self.mapped[role] = None
                self.unreadable.append(Refuse(key, self.get(key), str(error)))

    def get(self, key: str, default: Any = None) -> Any:
        value = at_key(self.tree, key)
        return default if value is None else value

    @property
    def group_size(self) -> int:
        return self.get("train_env_manager.group_size", 1)

    @property
    def responses(self) -> int:
        """Responses per prompt, or trajectories per group."""
        if self.is_agentic:
            return self.group_size
        of_worker = self.get("actor_infer.generating_args.num_return_sequences", 1)
        return self.get("num_return_sequences_in_group", of_worker)

    @property
    def samples(self) -> int:
        """Samples of one rollout."""
        batch = self.get("rollout_batch_size", 128)
        return batch if self.is_agentic else batch * self.responses

    @property
    def response_length(self) -> int | None:
        if (length := self.get("response_length")) is not None:
            return length
        whole = self.get("sequence_length")
        return None if whole is None else whole - self.get("prompt_length", 1024)

    def world_size(self, role: str) -> int:
        """Workers of a role: its devices, or on CPU what it says."""
        devices = self.mapped[role]
        return self.get(f"{role}.world_size", 1) if devices is None else len(devices)

    def dp_size(self, role: str) -> int:
        """Data-parallel ranks, as the guide counts them for the role's strategy."""
        settings = section_at(self.tree, f"{role}.strategy_args.strategy_config")
        shared = 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            shared *= settings.get(name) or 1
        shared *= self.get(f"{role}.model_args.ulysses_size", 1)
        return max(1, self.world_size(role) // shared)

    def samples_per_update(self, role: str) -> int:
        """Samples of one optimizer step over all ranks."""
        place = f"{role}.training_args"
        per_device = self.get(f"{place}.per_device_train_batch_size", 8)
        return per_device * self.get(f"{place}.gradient_accumulation_steps", 1) * self.dp_size(role)

    def updates_per_step(self, role: str) -> int:
        """Optimizer steps that follow one rollout."""
        epochs = self.get("ppo_epochs", 1) if role == "actor_train" else 1
        return max(1, self.samples // self.samples_per_update(role)) * epochs


def batches(roll: Roll) -> Iterator[Outcome]:
    """Options of the batch arithmetic, of every role that takes gradient steps."""
    yield from _updates(roll, "actor_train", ACTOR)
    yield Set(f"{ACTOR}.shuffle", True)
    yield Set(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", roll.get("actor_train.infer_batch_size", 16))
    if roll.get("reference") is not None:
        yield Set(f"{REF}.log_prob_micro_batch_size_per_gpu", roll.get("reference.infer_batch_size", 16))
    if roll.get("critic") is not None and roll.get("adv_estimator", "gae") == "gae":
        yield from _updates(roll, "critic", "critic")
        yield Set("critic.forward_micro_batch_size_per_gpu", roll.get("critic.infer_batch_size", 16))
    if roll.is_agentic:
        yield Set(f"{ROLLOUT}.n", roll.group_size)
    if (size := roll.get("actor_infer.infer_batch_size")) and roll.get(
        "actor_infer.strategy_args.strategy_name"
    ) == "hf_infer":
        yield Set(f"{ROLLOUT}.max_num_seqs", size)


def _updates(roll: Roll, role: str, place: str) -> Iterator[Outcome]:
    key = f"{role}.training_args.gradient_accumulation_steps"
    given = roll.get(key, 1)
    wanted, brought, siblings = roll.samples_per_update(role), roll.samples, roll.responses
    yield Set(f"{place}.ppo_micro_batch_size_per_gpu", roll.get(f"{role}.training_args.per_device_train_batch_size", 8))
    way_out = (f"{place}.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    if wanted > brought:
        why = f"an optimizer step takes {wanted} samples, a rollout brings {brought}"
        yield Refuse(key, given, why, way_out)
    elif wanted % siblings:
        why = f"an optimizer step takes {wanted} samples, which are no whole groups of {siblings}"
        yield Refuse(key, given, why, way_out)
    elif brought % wanted:
        why = (
            f"a rollout brings {brought} samples, no multiple of the {wanted} of an optimizer step: ROLL drops the rest"
        )
        yield Refuse(key, given, why, way_out)
    else:
        yield Set(f"{place}.ppo_mini_batch_size", wanted // siblings)


def devices(roll: Roll) -> Iterator[Outcome]:
    """Options of hardware: whose devices, and which roles share them."""
    mapped = roll.mapped
    yield from roll.unreadable
    own, sampling = mapped["actor_train"], mapped["actor_infer"]
    if own is None:
        yield Set("trainer.device", "cpu")
        yield Set("trainer.n_gpus_per_node", roll.world_size("actor_train"))
    else:
        yield from _nodes(roll, "actor_train", own, "trainer")
    yield Set(f"{ROLLOUT}.tensor_model_parallel_size", _tensor_parallel(roll))
    if sampling and own and not set(sampling) & set(own):
        yield Set("actor_rollout_ref.hybrid_engine", False)
        yield from _nodes(roll, "actor_infer", sampling, ROLLOUT)
    elif sampling and own and set(sampling) != set(own):
        value, why = roll.get("actor_infer.device_mapping"), "it shares some devices with actor_train: all, or none"
        yield Refuse("actor_infer.device_mapping", value, why, ("actor_rollout_ref.hybrid_engine",))
    for role in ("reference", "critic"):
        if mapped[role] and own and not set(mapped[role]) <= set(own):
            yield Refuse(f"{role}.device_mapping", roll.get(f"{role}.device_mapping"), "it shares the devices of "
                         "actor_train", ("trainer.n_gpus_per_node",))  # fmt: skip
        elif mapped[role] and own and set(mapped[role]) != set(own):
            yield Note(f"{role}.device_mapping: the role is spread over all devices of actor_train")


def _tensor_parallel(roll: Roll) -> int:
    settings = section_at(roll.tree, "actor_infer.strategy_args.strategy_config")
    chosen = settings.get("tensor_parallel_size") or settings.get("tp_size")
    return chosen or roll.get("actor_infer.num_gpus_per_worker", 1)


def _nodes(roll: Roll, role: str, ids: list[int], place: str) -> Iterator[Outcome]:
    key, per_node = f"{role}.device_mapping", roll.get("num_gpus_per_node", 8)
    value, way_out = roll.get(key), (f"{place}.n_gpus_per_node",)
    if sorted(ids) != list(range(min(ids), min(ids) + len(ids))):
        yield Refuse(key, value, "devices are taken in a row: choose others with CUDA_VISIBLE_DEVICES", way_out)
    elif place == "trainer" and min(ids) != 0:
        why = f"devices count from 0: start with CUDA_VISIBLE_DEVICES={','.join(map(str, sorted(ids)))}"
        yield Refuse(key, value, why, way_out)
    elif len(ids) > per_node and len(ids) % per_node:
        yield Refuse(key, value, f"{len(ids)} devices are no whole nodes of num_gpus_per_node={per_node}", way_out)
    else:
        yield Set(f"{place}.nnodes", max(1, len(ids) // per_node))
        if len(ids) > per_node and roll.get("generate_opt_level"):
            yield Set(f"{ROLLOUT}.server_host", "0.0.0.0")  # the driver asks the servers of other nodes
        yield Set(f"{place}.n_gpus_per_node", min(len(ids), per_node))


_RULES = ("MathRuleRewardWorker", "GeneralRuleRewardWorker", "CrossThinkQARuleRewardWorker",
          "MultipleChoiceBoxedRuleRewardWorker", "GeneralValRuleRewardWorker", "IfEvalRuleRewardWorker")  # fmt: skip


def rewards(roll: Roll) -> Iterator[Outcome]:
    """Reward workers: ROLL's rules are the built-in ones; any other class is the user's to bring as a function."""
    way_out = ("custom_reward_function.path", "reward_model.enable", "reward_model.reward_manager")
    for domain, section in section_at(roll.tree, "rewards").items():
        key = f"rewards.{domain}"
        name = str((section or {}).get("worker_cls", "")).rpartition(".")[2]
        if name in _RULES:
            yield Note(f"{key}.worker_cls={name}: rows are scored by the built-in rule of their data.reward_fn_key")
        else:
            hint = did_you_mean(name, _RULES).rstrip("?") if name else ""
            why = f"no reward of that name is built in{hint}; a function of yours scores: custom_reward_function.path"
            yield Refuse(f"{key}.worker_cls", name or None, why, way_out)
        if (filtering := (section or {}).get("query_filter_config")) and roll.get("is_use_additional_prompts"):
            yield from _query_filter(roll, f"{key}.query_filter_config", filtering)


def _query_filter(roll: Roll, key: str, value: Mapping) -> Iterator[Outcome]:
    """Which groups are trained on: ``mean_filter`` those whose mean score lies between two bounds, ``std_filter`` those
    whose scores differ by more than one."""
    limits, place = value.get("filter_args") or {}, "algorithm.filter_groups"
    low, high, least = (limits.get(name) for name in ("threshold_down", "threshold_up", "std_threshold"))
    if value.get("type") == "no_filter":
        return
    all_alike = (
        (value.get("type"), low, high) == ("mean_filter", 0, 1) or value.get("type") == "std_filter" and not least
    )
    if all_alike or roll.knows(f"{place}.low"):
        yield Set(f"{place}.enable", True)
        bounds = {} if all_alike else {"low": low, "high": high, "min_std": least}
        yield from (Set(f"{place}.{name}", bound) for name, bound in bounds.items() if bound is not None)
    else:
        why = "groups are dropped when all their scores are equal, by no other bound"
        yield Refuse(key, dict(value), why, (f"{place}.enable",))

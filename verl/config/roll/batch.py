"""Batch arithmetic and devices: what ROLL spreads over its worker sections, and optimizer steps follow from.

One optimizer step of ROLL takes per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks
samples. Here a mini-batch counts prompts, each with all its responses.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.roll.table import ACTOR, MODEL, REF, ROLLOUT, Note, Outcome, Refuse, Set, listed
from verl.config.tree import at_key, section_at

# -- ``device_mapping``: Python that ROLL evaluates, read here as what it is, a list of numbers ----------------------


_MOST = 1 << 20  # a range of more devices is a slip, and its list would fill the memory


def parse_devices(value: Any) -> list[int] | None:
    """Device ids of a ``device_mapping``: ``list(range(0,16))``, ``range(8)``, ``[0, 1] + [4]``, a list; None for null.

    Raises:
        ValueError: for anything else; nothing is evaluated.
    """
    if value is None or value == "null" or value == "None":
        return None
    if isinstance(value, list) and value:
        return [_number(item, value) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    try:
        found = _numbers(ast.parse(str(value).strip(), mode="eval").body, value)
    except (SyntaxError, RecursionError):
        raise _refusal(value) from None
    if not found:
        raise ValueError(f"{value!r} names no device")
    if len(found) != len(set(found)):
        raise ValueError(f"{value!r} names a device twice")
    return found


def _numbers(node: ast.expr, value: Any) -> list[int]:
    if isinstance(node, ast.List | ast.Tuple):
        return [_number(getattr(item, "value", None), value) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _numbers(node.left, value) + _numbers(node.right, value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in ("list", "sorted", "tuple") and len(node.args) == 1:
            return _numbers(node.args[0], value)
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            numbers = range(*(_number(getattr(item, "value", None), value) for item in node.args))
            if len(numbers) > _MOST:
                raise ValueError(f"{value!r} names {len(numbers)} devices")
            return list(numbers)
    raise _refusal(value)


def _number(item: Any, value: Any) -> int:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return item
    raise _refusal(value)


def _refusal(value: Any) -> ValueError:
    return ValueError(f"{value!r} is no list of device ids: write list(range(0,8)), [0,1,2,3] or null for CPU workers")


class Roll:
    """A ROLL tree, and what follows from it.

    Args:
        tree: plain, interpolations filled in.
        given: options of ours that the command line sets too, and their values as text.
    """

    def __init__(self, tree: Mapping[str, Any], given: Mapping[str, str]) -> None:
        self.tree, self.given = dict(tree), dict(given)
        self.is_agentic = any(name in tree for name in ("train_env_manager", "custom_envs", "val_env_manager"))
        self.mapped: dict[str, list[int] | None] = {}
        self.unreadable: list[Refuse] = []
        for role in ("actor_train", "actor_infer", "reference", "critic"):
            key = f"{role}.device_mapping"
            try:
                self.mapped[role] = parse_devices(self.get(key))
            except ValueError as error:
                self.mapped[role] = None
                self.unreadable.append(Refuse(key, self.get(key), str(error), (f"{key}='list(range(0,8))'",)))

    def get(self, key: str, default: Any = None) -> Any:
        value = at_key(self.tree, key)
        return default if value is None else value

    @property
    def over_samples(self) -> bool:
        """Whether more prompts are started than a batch needs."""
        return bool(self.get("is_use_additional_prompts") or self.get("use_additional_prompts"))

    @property
    def filters_groups(self) -> bool:
        """Whether groups are dropped by their scores, which ROLL does with additional prompts only."""
        sections = section_at(self.tree, "rewards").values()
        kinds = [at_key(section, "query_filter_config.type") for section in sections if section]
        return self.over_samples and any(kind not in (None, "no_filter") for kind in kinds)

    @property
    def puts_off(self) -> bool:
        """Whether the slowest of more prompts are put off to the next batch, since none are dropped."""
        return self.over_samples and not self.filters_groups

    @property
    def has_critic(self) -> bool:
        return bool(self.get("adv_estimator", "gae") == "gae")

    @property
    def has_reference(self) -> bool:
        return bool(self.get("use_kl_loss") or self.get("add_token_level_kl"))

    def is_megatron(self, role: str) -> bool:
        """Whether a role trains or scores on Megatron: the file says so, and the command line nothing else."""
        name = self.get(f"{role}.strategy_args.strategy_name")
        if name == "hf_infer" and role == "reference":  # scores with the engine of the actor
            return self.is_megatron("actor_train")
        place = at_key(listed("places"), f"{role}.role")
        chosen = self.given.get(f"{place}.strategy") or self.given.get(f"{ACTOR}.strategy")
        return listed("engines")["training"].get(name) == "megatron" and chosen in (None, "megatron")

    def places(self, role: str) -> Mapping[str, str]:
        """Kind -> the option or section of that kind that a worker section has here; ``listed("places")``."""
        found = dict(listed("places").get(role, {}))
        if "megatron" in found and self.is_megatron(role):
            found |= {"fsdp": found["megatron"], "dtype": f"{found['megatron']}.dtype"}
        return found

    @property
    def group_size(self) -> int:
        return int(self.get("train_env_manager.group_size", 1))

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
        shared = 1  # ranks that work on the same samples
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
        epochs = self.get("ppo_epochs", 1) if role == "actor_train" else 1  # ROLL's critic sees a rollout once
        return max(1, self.samples // self.samples_per_update(role)) * epochs


def batches(roll: Roll) -> Iterator[Outcome]:
    """Options of the batch arithmetic, of every role that takes gradient steps."""
    yield from _updates(roll, "actor_train", ACTOR)
    yield Set(f"{ACTOR}.shuffle", True)
    # 16 here and below is ROLL's default of infer_batch_size, 8 that of per_device_train_batch_size.
    yield Set(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", roll.get("actor_train.infer_batch_size", 16))
    if roll.get("reference") is not None:
        yield Set(f"{REF}.log_prob_micro_batch_size_per_gpu", roll.get("reference.infer_batch_size", 16))
    policy = roll.given.get(f"{MODEL}.path", roll.get("pretrain"))
    if policy and not roll.get("reward_pretrain") and not roll.get("critic.model_args.model_name_or_path"):
        yield Set("critic.model.path", policy)
    if roll.has_critic and roll.tree.get("critic") is None:
        micro = roll.get("actor_train.training_args.per_device_train_batch_size", 8)
        yield Set("critic.ppo_micro_batch_size_per_gpu", micro)
        yield Set("critic.forward_micro_batch_size_per_gpu", 16)
        yield Set("critic.optim.lr", 5e-5)
        yield Note("there is no critic section: it learns at ROLL's rate of 5e-5, in the mini-batches of the actor")
    elif roll.has_critic:
        yield from _updates(roll, "critic", "critic")
        yield Set("critic.forward_micro_batch_size_per_gpu", roll.get("critic.infer_batch_size", 16))
    if roll.is_agentic:
        yield Set(f"{ROLLOUT}.n", roll.group_size)
    size = roll.get("actor_infer.infer_batch_size")
    if size and roll.get("actor_infer.strategy_args.strategy_name") == "hf_infer":
        yield Set(f"{ROLLOUT}.max_num_seqs", size)


def _updates(roll: Roll, role: str, place: str) -> Iterator[Outcome]:
    key = f"{role}.training_args.gradient_accumulation_steps"
    given = roll.get(key, 1)
    taken, brought, group = roll.samples_per_update(role), roll.samples, roll.responses
    yield Set(f"{place}.ppo_micro_batch_size_per_gpu", roll.get(f"{role}.training_args.per_device_train_batch_size", 8))
    if taken > brought:
        why = f"an optimizer step takes {taken} samples, a rollout brings {brought}"
    elif taken % group:
        why = f"an optimizer step takes {taken} samples, which are no whole groups of {group}"
    elif brought % taken:
        why = (
            f"a rollout brings {brought} samples, no multiple of the {taken} of an optimizer step: ROLL drops the rest"
        )
    else:
        yield Set(f"{place}.ppo_mini_batch_size", taken // group)
        return
    # The largest mini-batch, up to the one asked for, of which a rollout is a multiple.
    prompts = max(1, brought // group)
    fitting = next(size for size in range(max(1, min(taken // group, prompts)), 0, -1) if prompts % size == 0)
    yield Refuse(key, given, why, (f"{place}.ppo_mini_batch_size={fitting}",))


def devices(roll: Roll) -> Iterator[Outcome]:
    """Options of hardware: whose devices, and which roles share them."""
    mapped = roll.mapped
    yield from roll.unreadable
    own, sampling = mapped["actor_train"], mapped["actor_infer"]
    if own is None:  # no devices: workers on the CPU
        yield Set("trainer.device", "cpu")
        yield Set("trainer.n_gpus_per_node", roll.world_size("actor_train"))
    else:
        yield from _nodes(roll, "actor_train", own, "trainer")
    settings = section_at(roll.tree, "actor_infer.strategy_args.strategy_config")
    shards = settings.get("tensor_parallel_size") or settings.get("tp_size")
    yield Set(f"{ROLLOUT}.tensor_model_parallel_size", shards or roll.get("actor_infer.num_gpus_per_worker", 1))
    if sampling and own and not set(sampling) & set(own):
        yield Set("actor_rollout_ref.hybrid_engine", False)
        yield from _nodes(roll, "actor_infer", sampling, ROLLOUT)
    elif sampling and own and set(sampling) != set(own):
        shared = f"actor_infer shares {len(set(sampling) & set(own))} of the {len(own)} devices of actor_train"
        yield Note(f"{shared}: here responses are sampled on all devices that train, and on no other")
    for role in ("reference", "critic"):
        others = mapped[role]
        if others and own and set(others) != set(own):
            yield Note(f"{role}.device_mapping: the role is spread over all devices of actor_train, and no other")


def _nodes(roll: Roll, role: str, ids: list[int], place: str) -> Iterator[Outcome]:
    """Nodes of equally many devices; which devices of a node they are is for CUDA_VISIBLE_DEVICES to say."""
    per_node = roll.get("num_gpus_per_node", 8)
    # Ids of all nodes are counted through: with 8 a node, 8 is the first of the second.
    used = len({number // per_node for number in ids})
    nodes = next(count for count in range(max(used, -(-len(ids) // per_node)), len(ids) + 1) if len(ids) % count == 0)
    count = len(ids) // nodes
    yield Set(f"{place}.nnodes", nodes)
    if nodes > 1 and roll.get("generate_opt_level"):
        yield Set(f"{ROLLOUT}.server_host", "0.0.0.0")  # the driver asks the servers of other nodes
    yield Set(f"{place}.n_gpus_per_node", count)
    of_a_node = [number % per_node for number in ids[:count]]
    if place == "trainer" and sorted(of_a_node) != list(range(count)):
        visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, of_a_node))}"
        yield Note(f"{role}.device_mapping: devices of a node count from 0 here; choose with {visible}")

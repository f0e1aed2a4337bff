"""Validators of on-policy distillation: teachers, and losses whose gradient would not be the one that was meant."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from verl.config.base import Problem, get_path
from verl.config.checks.base import IsGiven, contradictions, given_below, problem, unused, validator
from verl.config.ppo import ACTOR, ROLLOUT, TEACHER, PPOConfig

_LOSS = "distillation.distillation_loss"
_MODELS = "distillation.teacher_models"
_LOG_RATIO = ("kl", "k1")
"""Estimates with the gradient of KL(policy || teacher) as an advantage, and with none as a loss."""
_BY_BATCH = ("clip_cov", "kl_cov")
"""Policy losses that choose tokens of a whole mini-batch by its advantages."""

_CONTRADICTIONS = {
    f"{_LOSS}.topk_tail=false with {_LOSS}.loss_mode={mode} if distillation.enabled": (
        "without the other tokens the sum falls as probability leaves the teacher's top k. Set topk_tail=true, or use "
        "forward_kl_topk."
    )
    for mode in ("reverse_kl_topk", "jsd_topk")
}
contradictions(__name__, _CONTRADICTIONS)


@validator("error")
def teachers_are_named(config: PPOConfig) -> Iterator[Problem]:
    options = config.distillation
    problems: list[Problem] = []
    teachers = options.teachers(problems)
    if not options.enabled:
        return
    yield from problems
    if not teachers:
        text = (
            f"names no teacher: no entry of {_MODELS} has a model_path or server_urls. Set "
            f"{_MODELS}.teacher_model.model_path=FOLDER."
        )
        yield problem(config, "distillation.enabled", text, _MODELS)
    owners: dict[str | None, str] = {}
    for name, teacher in teachers.items():
        if other := owners.get(teacher.key):
            shown = "null" if teacher.key is None else teacher.key
            text = (
                f"{_MODELS}.{name}.key={shown} is that of {_MODELS}.{other}, too: a row has one teacher. Give each the "
                f"value that its rows have in the column distillation.teacher_key={options.teacher_key}."
            )
            yield Problem(_MODELS, text)
        owners[teacher.key] = name


@validator("error")
def servers_say_what_is_read(config: PPOConfig) -> Iterator[Problem]:
    options = config.distillation
    served = {name: one for name, one in options.teachers().items() if one.is_served} if options.enabled else {}
    for name, teacher in served.items():
        key = f"{_MODELS}.{name}.server_urls"
        for url in teacher.urls:
            if urlsplit(str(url)).scheme not in ("http", "https") or not urlsplit(str(url)).hostname:
                yield Problem(_MODELS, f"{key}={url} is no URL. Write http://HOST:PORT.")
        if options.distillation_loss.is_full:
            text = (
                f"{key} with {_LOSS}.loss_mode={options.distillation_loss.loss_mode}: whole distributions do not "
                "travel. Use a loss_mode of the likeliest tokens (..._topk), or give a model_path alone."
            )
            yield Problem(_MODELS, text, (f"{_LOSS}.loss_mode",))
        temperature = options.temperature or config.actor_rollout_ref.rollout.temperature
        if temperature != 1:
            which = "distillation.temperature" if options.temperature else f"{ROLLOUT}.temperature"
            text = f"{key} with {which}={temperature}: servers give log-probs of the logits as they are. Set "
            yield Problem(_MODELS, f"{text}distillation.temperature=1, or give a model_path alone.", (which,))


@validator("error")
def rollout_engines_of_teachers_fit(config: PPOConfig) -> Iterator[Problem]:
    options, policy = config.distillation, config.actor_rollout_ref.rollout
    sizes: dict[str, int] = {}
    shares = 0.0
    for name, teacher in options.in_rollout_engines.items():
        key = f"{_MODELS}.{name}.inference"
        problems: list[Problem] = []
        found = teacher.rollout(policy, key, problems)
        yield from problems
        sizes[name] = size = found.tensor_model_parallel_size
        shares += found.gpu_memory_utilization
        workers = sum(config.teacher_processes)
        if workers % size:
            text = f"{key}.tensor_model_parallel_size={size} does not divide the {workers} workers of distillation."
            yield Problem(_MODELS, f"{text}nnodes x n_gpus_per_node. Choose a divisor.", ("distillation.nnodes",))
        if found.temperature != 1 or (options.temperature or policy.temperature) != 1:
            text = f"{key} with another temperature than 1: rollout engines give log-probs of the logits as they are. "
            text += "Set distillation.temperature=1, or leave inference out."
            yield Problem(_MODELS, text, ("distillation.temperature",))
        if found.load_format.startswith("dummy"):
            yield Problem(_MODELS, f"{key}.load_format={found.load_format} would not read the teacher's weights.")
    if len(set(sizes.values())) > 1 or (sizes and options.uses_training_engine):
        text = (
            f"{_MODELS} differ in inference.tensor_model_parallel_size, or some have no inference: teachers divide the "
            "rows in the same way. Give all of them the same, or none an inference."
        )
        yield Problem(_MODELS, text)
    if len(sizes) > 1 and shares > 1:
        text = f"{_MODELS}: the gpu_memory_utilization of their inference make {shares:.2g} together, and all are on "
        yield Problem(_MODELS, f"{text}the same devices. Lower them to 1 at most.")


@validator("error")
def estimate_has_the_gradient_that_is_meant(config: PPOConfig) -> Iterator[Problem]:
    loss, key = config.distillation.distillation_loss, f"{_LOSS}.loss_mode"
    if not config.distillation.enabled:
        return
    if loss.loss_mode in _LOG_RATIO and not loss.use_policy_gradient:
        text = (
            f"with {_LOSS}.use_policy_gradient=false: its gradient is that of log pi, zero on average whatever the "
            "teacher is. Set use_policy_gradient=true, or use k1+, k3 or forward_kl_topk."
        )
        yield problem(config, key, text, f"{_LOSS}.use_policy_gradient")
    if loss.use_policy_gradient and loss.loss_mode not in _LOG_RATIO:
        what = "does not depend on the token that was sampled, so it is no advantage of it"
        if not loss.is_topk and not loss.is_full:
            what = "is no log-ratio, whose mean alone as an advantage has the gradient of KL(policy || teacher)"
        text = f"with {_LOSS}.use_policy_gradient=true: it {what}. Use loss_mode=k1, or set use_policy_gradient=false."
        yield problem(config, key, text, f"{_LOSS}.use_policy_gradient")
    if loss.use_policy_gradient and loss.policy_loss_mode in _BY_BATCH:
        text = "chooses tokens by the advantages of the task's rewards. Use vanilla, gspo, cispo or another."
        yield problem(config, f"{_LOSS}.policy_loss_mode", text)


@validator("error")
def full_divergence_has_one_model_to_compare_with(config: PPOConfig) -> Iterator[Problem]:
    options, key = config.distillation, f"{_LOSS}.loss_mode"
    if not options.enabled or not options.distillation_loss.is_full:
        return
    if len(options.teachers()) > 1:
        text = "compares with one teacher in the update, and there are several. Use forward_kl_topk, or name one."
        yield problem(config, key, text, _MODELS)
    if config.teacher_processes:
        text = (
            f"compares whole distributions in the update, which do not travel, and distillation.nnodes="
            f"{options.nnodes} gives the teacher devices of its own. Use forward_kl_topk, or set it to 0."
        )
        yield problem(config, key, text, "distillation.nnodes")
    if config.compares_distributions:
        text = f"and {ACTOR}.kl_loss_type=full both compare whole distributions in the update. Use low_var_kl there."
        yield problem(config, key, text, f"{ACTOR}.kl_loss_type")
    size = "ulysses_sequence_parallel_size"
    if options.teacher[size] != get_path(config, f"{ACTOR}.{size}"):
        text = (
            f"differs from {ACTOR}.{size}={get_path(config, f'{ACTOR}.{size}')} with {key}="
            f"{options.distillation_loss.loss_mode}: actor and teacher go through each micro-batch together. Set them "
            "equal, or use forward_kl_topk."
        )
        yield problem(config, f"{TEACHER}.{size}", text, f"{ACTOR}.{size}")


@validator("error")
def megatron_scores_sampled_tokens_only(config: PPOConfig) -> Iterator[Problem]:
    loss = config.distillation.distillation_loss
    if not config.distillation.enabled or not (loss.is_topk or loss.is_full):
        return
    for key in (ACTOR, TEACHER):
        if get_path(config, key).strategy == "megatron" and (key == ACTOR or config.distillation.uses_training_engine):
            text = (
                f"with {_LOSS}.loss_mode={loss.loss_mode}: this engine splits the vocabulary among ranks and scores "
                "the sampled tokens alone. Use fsdp2, or loss_mode=k3."
            )
            yield problem(config, f"{key}.strategy", text, f"{_LOSS}.loss_mode")


@validator("error")
def critic_has_rewards_to_learn_from(config: PPOConfig) -> Iterator[Problem]:
    if config.distillation.enabled and not config.distillation.distillation_loss.use_task_rewards:
        if config.uses_critic:
            text = (
                f"with algorithm.adv_estimator={config.algorithm.adv_estimator}: nothing would read the values of "
                "the critic. Use adv_estimator=grpo, or set critic.enable=false."
            )
            yield problem(config, f"{_LOSS}.use_task_rewards", text, "algorithm.adv_estimator")


# -- Settings without effect -----------------------------------------------------------------------------------------


@validator("warning")
def distillation_options_without_teacher(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.distillation.enabled:
        keys = [key for key in given_below("distillation", config, is_given) if key != "distillation.enabled"]
        yield from unused(config, keys, is_given, "distillation.enabled=false")


@validator("warning")
def distillation_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    options = config.distillation
    if not options.enabled:
        return
    loss = options.distillation_loss
    why = f"{_LOSS}.loss_mode={loss.loss_mode} does not read it"
    keys = [] if loss.is_topk else ["topk", "topk_tail"]
    keys += [] if loss.loss_mode.startswith("jsd") else ["jsd_beta"]
    keys += ["log_prob_min_clamp"] if loss.is_full else []
    yield from unused(config, [f"{_LOSS}.{name}" for name in keys], is_given, why)
    if loss.is_full:
        keys = [key for key in given_below(TEACHER, config, is_given) if key.startswith(f"{TEACHER}.log_prob_")]
        yield from unused(config, keys, is_given, f"{why}: the teacher runs in the micro-batches of the actor's update")
    if len(options.teachers()) < 2 and all(teacher.key is None for teacher in options.teachers().values()):
        yield from unused(config, ["distillation.teacher_key"], is_given, "there is one teacher, for all rows")
    if options.teachers() and not options.uses_training_engine:
        keys, where = list(given_below(TEACHER, config, is_given)), "on server_urls or in rollout engines"
        if not options.runs_teachers:
            where = "on server_urls"
            keys += ["distillation.nnodes", "distillation.n_gpus_per_node"]
        yield from unused(config, keys, is_given, f"all teachers are {where}")
    for name, teacher in options.teachers().items():
        where = f"teachers score in the training engine of {TEACHER}"
        ignored = ["num_replicas", "inference"]
        if name in options.in_rollout_engines:
            ignored = ["num_replicas"]
            notes: list[str] = []
            teacher.rollout(config.actor_rollout_ref.rollout, f"{_MODELS}.{name}.inference", None, notes)
            yield from (Problem(_MODELS, note) for note in notes)
        if teacher.is_served:
            where = f"the teacher runs on {_MODELS}.{name}.server_urls"
        else:
            default = type(teacher)()
            names = ("server", "server_model", "api_key_env", "max_concurrent", "timeout_s", "tries")
            ignored += [key for key in names if teacher[key] != default[key]]
        for key in ignored:
            if teacher[key]:
                yield Problem(_MODELS, f"{_MODELS}.{name}.{key} has no effect: {where}")

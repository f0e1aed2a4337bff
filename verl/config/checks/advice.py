"""Settings with which a run would work and which are probably not meant: risky, wasteful or useless.

Reported by ``verl doctor`` and before a start, not by ``load_ppo_config``. Silent about every recipe in ``examples/``.
"""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import ACTOR, ROLLOUT, models, problem, trained_roles, validator
from verl.config.ppo import PPOConfig

_HIGHEST_LR = 1e-2


@validator("advice")
def too_few_or_too_many_checkpoints(config: PPOConfig, total_steps: int | None) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.val_only:
        return
    if trainer.save_freq <= 0:
        text = (
            "writes no checkpoint: nothing of the run is left at its end, and nothing if it stops. Set it to a "
            "number of steps."
        )
        yield problem(config, "trainer.save_freq", text)
    elif trainer.save_freq == 1 and (total_steps or 0) > 50 and trainer.max_actor_ckpt_to_keep is None:
        text = (
            f"with trainer.max_actor_ckpt_to_keep=null keeps all of the {total_steps} checkpoints of the run. "
            "Keep some, or save less often."
        )
        yield problem(config, "trainer.save_freq", text, "trainer.max_actor_ckpt_to_keep")


@validator("advice")
def warmup_and_frequencies_within_total_steps(config: PPOConfig, total_steps: int | None) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        warmup = role.optim.lr_warmup_steps
        if total_steps is not None and warmup is not None and warmup >= total_steps > 0:
            text = (
                f"is not less than the {total_steps} steps of the run: the learning rate never reaches "
                f"{key}.optim.lr={role.optim.lr:g}. Lower it, or train longer."
            )
            yield problem(config, f"{key}.optim.lr_warmup_steps", text, "trainer.total_training_steps")
        elif role.optim.lr_warmup_steps_ratio == 1 and (warmup is None or warmup < 0):
            text = f"warms up during the whole run: the learning rate reaches {key}.optim.lr at its end only. Lower it."
            yield problem(config, f"{key}.optim.lr_warmup_steps_ratio", text)
        if key == "critic" and total_steps is not None and config.trainer.critic_warmup >= total_steps > 0:
            text = (
                f"is not less than the {total_steps} steps of the run: the policy is never trained. Lower it, or train "
                "longer."
            )
            yield problem(config, "trainer.critic_warmup", text)
    for key in ["trainer.save_freq", *(["trainer.test_freq"] if config.data.has_validation else [])]:
        if total_steps is not None and get_path(config, key) > total_steps:
            text = (
                f"is more than the {total_steps} steps of the run: only the last one counts. Lower it, or train longer."
            )
            yield problem(config, key, text, "trainer.total_training_steps")


@validator("advice")
def unusual_learning_rates_and_coefficients(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        if role.optim.lr > _HIGHEST_LR:
            text = (
                f"is more than {_HIGHEST_LR:g}, at which no language model has been trained. Common are 1e-6 to 1e-4."
            )
            yield problem(config, f"{key}.optim.lr", text)
        if role.optim.betas[0] > role.optim.betas[-1]:
            text = "gives the mean of gradients a longer memory than that of their squares. Common is [0.9,0.999]."
            yield problem(config, f"{key}.optim.betas", text)
    actor = config.actor_rollout_ref.actor
    if abs(actor.entropy_coeff) > 0.1:
        text = "is more than a policy loss of about 1 can balance: the policy would become noise. Common are 0 to 0.01."
        yield problem(config, f"{ACTOR}.entropy_coeff", text)
    if actor.use_kl_loss and actor.kl_loss_coef > 1:
        yield problem(config, f"{ACTOR}.kl_loss_coef", "holds the policy where it is. Common are 1e-4 to 0.1.")


@validator("advice")
def zero_loss_coefficients(config: PPOConfig) -> Iterator[Problem]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        text = (
            f"with {ACTOR}.use_kl_loss=true: the reference runs at every step, for a metric alone. Set one or the "
            "other."
        )
        yield problem(config, f"{ACTOR}.kl_loss_coef", text, f"{ACTOR}.use_kl_loss")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        text = (
            "with algorithm.use_kl_in_reward=true: the reference runs at every step, for a metric alone. Set one or "
            "the other."
        )
        yield problem(config, "algorithm.kl_ctrl.kl_coef", text, "algorithm.use_kl_in_reward")
    if actor.rl_loss_coef == 0 and actor.sft_loss_coef == 0:
        text = f"with {ACTOR}.sft_loss_coef=0: nothing but the entropy bonus is left of the loss. Set one of them."
        yield problem(config, f"{ACTOR}.rl_loss_coef", text, f"{ACTOR}.sft_loss_coef")


@validator("advice")
def low_token_budget(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        micro, rows = role.ppo_micro_batch_size_per_gpu, role.ppo_mini_batch_size * n // config.dp_size(role)
        if not role.use_dynamic_bsz and micro and rows > micro and rows % micro:
            text = (
                f"does not divide the {rows} samples of a rank's mini-batch: the last forward of each has "
                f"{rows % micro}. Choose a divisor of {rows}, or {key}.use_dynamic_bsz=true."
            )
            yield problem(config, f"{key}.ppo_micro_batch_size_per_gpu", text, f"{key}.ppo_mini_batch_size")
    shared, longest = config.actor_rollout_ref, config.actor_rollout_ref.rollout.longest_sequence
    if shared.actor.use_dynamic_bsz:
        rows = -(-shared.actor.ppo_mini_batch_size * shared.rollout.n // config.dp_size(shared.actor))
        sp = shared.actor.ulysses_sequence_parallel_size
        is_low = shared.actor.ppo_max_token_len_per_gpu * sp < 2 * longest
        if rows > 1 and is_low and config.trainer.device == "cuda":
            text = (
                f"holds one sample of {longest} tokens at a time, if they are long. Raise it as far as memory goes: "
                "twice to four times the longest is common."
            )
            yield problem(config, f"{ACTOR}.ppo_max_token_len_per_gpu", text)


@validator("advice")
def sequence_parallel_for_short_sequences(config: PPOConfig) -> Iterator[Problem]:
    longest = config.actor_rollout_ref.rollout.longest_sequence
    for key, section in models(config).items():
        size = section.ulysses_sequence_parallel_size
        if size > 1 and longest < 4096:
            text = (
                f"shares samples of at most {longest} tokens among {size} ranks, which exchange tokens in every layer. "
                "Of so few tokens a device holds many: set it to 1."
            )
            yield problem(config, f"{key}.ulysses_sequence_parallel_size", text)


@validator("advice")
def validation_files_in_training_files(config: PPOConfig) -> Iterator[Problem]:
    both = sorted(set(config.data.files["data.train_files"]) & set(config.data.files["data.val_files"]))
    validates = config.trainer.test_freq > 0 or config.trainer.val_before_train
    if both and validates:
        text = (
            f"data.val_files={both[0]} is in data.train_files too: validation would see what was trained on. Name "
            "other rows."
        )
        yield Problem("data.val_files", text, ("data.train_files",))


@validator("advice")
def high_gpu_memory_utilization(config: PPOConfig) -> Iterator[Problem]:
    rollout, is_shared = config.actor_rollout_ref.rollout, config.actor_rollout_ref.hybrid_engine
    key = f"{ROLLOUT}.gpu_memory_utilization"
    if config.trainer.device != "cuda":
        return
    if rollout.gpu_memory_utilization > 0.9 and is_shared:
        text = (
            f"leaves little of each GPU to the {config.algorithm.adv_estimator} update on the same devices. Common "
            f"are 0.4 to 0.8."
        )
        yield problem(config, key, text)
    if not rollout.free_cache_engine and is_shared and rollout.name != "hf":
        text = (
            f"with {key}={rollout.gpu_memory_utilization}: the engine holds that share of each GPU while the actor "
            f"trains. Set it to true."
        )
        yield problem(config, f"{ROLLOUT}.free_cache_engine", text, key)


@validator("advice")
def bf16_weights_with_small_learning_rate(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        place = f"{key}.model.fsdp_config" if key == "critic" else f"{key}.fsdp_config"
        if get_path(config, place).master_dtype == "bf16" and role.optim.lr < 1e-4:
            text = (
                f"with {key}.optim.lr={role.optim.lr:g}: bf16 has 8 bits, and steps so small are rounded away. Use "
                "fp32."
            )
            yield problem(config, f"{place}.model_dtype", text, f"{key}.optim.lr")


@validator("advice")
def fewer_samples_than_workers(config: PPOConfig) -> Iterator[Problem]:
    samples, workers = config.data.prompts_per_step * config.actor_rollout_ref.rollout.n, sum(config.rollout_processes)
    if samples < workers:
        text = (
            f"with {ROLLOUT}.n={config.actor_rollout_ref.rollout.n} gives {samples} samples a step to {workers} "
            f"workers: some have none. Raise it."
        )
        yield problem(config, "data.train_batch_size", text, f"{ROLLOUT}.n")

"""ROLL's keys of environments, and the options below ``env`` that hold them once environments are built."""

from verl.config.roll.table import Row

MANAGER: dict[str, Row] = {
    "env_groups": Row("n_groups"),
    "num_env_groups": Row("n_groups"),
    "group_size": Row("group_size", "of training also `rollout.n`"),
    "tags": Row("tags"),
    "n_groups": Row("groups_per_tag"),
    "num_groups_partition": Row("groups_per_tag"),
    "max_traj_per_env": Row("max_traj_per_env"),
    "format_penalty": Row("format_penalty"),
    "worker_cls": Row("manager_cls"),
    "max_env_num_per_worker": Row("max_env_num_per_worker"),
}
"""Keys of ``train_env_manager`` and ``val_env_manager`` -> options below ``env.train`` and ``env.val``."""

ENVIRONMENT: dict[str, Row] = {
    "env_type": Row("type"),
    "max_steps": Row("max_steps"),
    "max_steps_per_traj": Row("max_steps"),
    "max_actions_per_traj": Row("max_steps"),
    "max_tokens": Row("max_tokens_per_step"),
    "max_tokens_per_step": Row("max_tokens_per_step"),
    "env_instruction": Row("system_prompt"),
    "agent_system_template": Row("system_prompt"),
    "agent_template": Row("turn_template"),
    "env_config": Row("kwargs"),
    "env_manager_cls": Row("cls"),
    "use_thread_lock": Row(None, "an environment has a generator of its own"),
    "history_length": Row("history_length"),
}
"""Keys of an entry of ``custom_envs`` -> options below ``env.registry.<tag>``."""

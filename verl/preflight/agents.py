"""Agent loops, tools and simulated users of a run: whether those that rows and configuration name are there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.base import did_you_mean, get_path
from verl.config.conversations import TOOLS, USERS
from verl.config.ppo import PPOConfig
from verl.config.rollout import AGENT_LOOPS, needs_agent_loops

if TYPE_CHECKING:
    from verl.preflight.data import Preview
    from verl.tools.prompt_schemas import PromptSchemas


def check_agents(config: PPOConfig, found: Preview) -> None:
    """Check that the agent loops named by the rows and the configuration are registered."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.mode != "async":
        if text := needs_agent_loops(rollout.mode, found.rows.agents):
            found.error(text, "data.train_files", "actor_rollout_ref.rollout.mode")
        return
    if config.actor_rollout_ref.model.external_lib or os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        return  # a module of the user's registers what it likes
    known, section, path = set(AGENT_LOOPS), "actor_rollout_ref.rollout.agent", rollout.agent.agent_loop_config_path
    if path:
        file = Path(path).expanduser()
        if not file.is_file() or file.suffix not in (".yaml", ".yml"):
            return  # so does a Python file
        import yaml

        try:
            entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            key, reason = f"{section}.agent_loop_config_path", " ".join(str(error).split())
            found.error(f"{key}={path} is not YAML: {reason}.", key)
            return
        entries = entries if isinstance(entries, list) else [entries]
        known |= {entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
    key = f"{section}.default_agent_loop"
    named = [(rollout.agent.default_agent_loop, f"{key}={rollout.agent.default_agent_loop}", key)]
    named += [(name, f"agent_name={name!r} of {n} rows", "data.train_files") for name, n in found.rows.agents.items()]
    for name, setting, option in named:
        if name not in known:
            hint = did_you_mean(str(name), sorted(known)).rstrip("?")
            found.error(
                f"{setting} is not a known agent loop{hint}; known are {', '.join(sorted(known))}. Register yours in "
                f"the file of {section}.agent_loop_config_path.",
                option,
            )


def check_users(config: PPOConfig, found: Preview) -> None:
    """Check that the interactions named by the rows are in the file that lists them."""
    rollout = config.actor_rollout_ref.rollout
    path = rollout.multi_turn.interaction_config_path
    if rollout.mode != "async" or not path:
        if found.rows.agents.get("interaction_agent"):
            n = found.rows.agents["interaction_agent"]
            found.error(
                f"agent_name='interaction_agent' of {n} rows needs {USERS}, which is null: no simulated user could "
                "answer. Name a YAML file of interactions.",
                USERS,
            )
        return
    if not Path(path).expanduser().is_file():
        return  # which is said with the other files
    from verl.interactions.utils.interaction_registry import interaction_names

    try:
        known = interaction_names(path)
    except (ValueError, TypeError, ImportError, RuntimeError, AttributeError, FileNotFoundError) as error:
        found.error(f"{str(error).rstrip('.')}.", USERS)
        return
    for name, n in found.rows.users.items():
        if name not in known:
            found.error(
                f"extra_info.interaction_kwargs.name={name!r} of {n} rows is no interaction of {USERS}={path}"
                f"{did_you_mean(name, known).rstrip('?')}; those are {', '.join(known)}. Add it to that file.",
                "data.train_files",
                USERS,
            )


def shown_tools(config: PPOConfig, found: Preview) -> PromptSchemas | None:
    """Return the schemas that prompts show; None also where the tools cannot be loaded, which is reported."""
    if not any(get_path(config, key) for key in TOOLS):
        return None
    from verl.tools.prompt_schemas import prompt_schemas  # not at the top: tools bring much along

    try:
        return prompt_schemas(config.actor_rollout_ref.rollout)
    except (ValueError, TypeError, AttributeError, ImportError, OSError, RuntimeError) as error:
        found.error(f"The tools cannot be loaded: {str(error).rstrip('.')}.", *TOOLS)
        return None

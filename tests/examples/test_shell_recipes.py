"""Every recipe is a shell script that parses; ``tests/preflight/test_corpus.py`` checks what it runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.agents.test_learning_env import LAKE
from tests.support.commands import ROOT, calls_of, main_ppo_overrides
from verl.config.load import load_ppo_config

SCRIPTS = sorted(path for folder in ("scripts", "examples", "recipe", ".ci") for path in (ROOT / folder).rglob("*.sh"))
SCRIPTS.append(ROOT / ".ci" / "run")
RECIPES = sorted(path for folder in ("examples", "recipe") for path in (ROOT / folder).rglob("run_*.sh"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_script_parses(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("folder", sorted({recipe.parent for recipe in RECIPES}), ids=name_of)
def test_the_readme_of_the_recipes_lists_each_of_them(folder):
    readme = next(path for path in (folder / "README.md", folder.parent / "README.md") if path.exists())
    text = readme.read_text()
    assert all(recipe.name in text for recipe in folder.glob("run_*.sh"))


def dry_run(*arguments: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key not in ("RUN", "STEPS", "TASK", "MODEL", "DATA")}
    command = ["bash", "scripts/quickstart.sh", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("task", ["add1", "mul1", "max3", "even", "gsm8k", "digits"])
def test_quickstart_runs_a_recipe_for_each_task(task, tmp_path):
    shown = dry_run("--task", task, "--controller", "local", "--steps", "3", "trainer.seed=7")
    assert shown.returncode == 0, shown.stderr
    environment, _, command = shown.stdout.strip().partition(" bash ")
    recipe, *arguments = command.split()
    settings = dict(word.split("=", 1) for word in environment.split())
    assert settings["RUN"].startswith(f"runs/quickstart-{task}-")
    (overrides,) = main_ppo_overrides(calls_of(ROOT / recipe, tmp_path, *arguments, environment=settings))
    config = load_ppo_config(overrides)
    assert (config.trainer.controller, config.trainer.total_training_steps, config.trainer.seed) == ("local", 3, 7)
    assert config.trainer.test_freq == config.trainer.save_freq == 3, "the last step is validated and saved"
    assert config.data.train_files == f"data/{task}/train.parquet"
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == "fp32"


def test_quickstart_teaches_first_and_goes_on_from_what_that_wrote():
    first, second = dry_run("--task", "mul1", "--sft", "--steps", "3").stdout.splitlines()
    assert "examples/sft/run_arithmetic_smollm2_cpu.sh" in first and "-u STEPS" in first
    run = first.split("RUN=")[1].split()[0]
    assert f"MODEL={run}/huggingface" in second and "examples/grpo_trainer" in second
    assert dry_run("--task", "digits", "--sft").returncode == 2


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_quickstart_runs_with_the_engine_that_is_asked_for(engine, tmp_path):
    shown = dry_run("--task", "digits", "--rollout", engine, "actor_rollout_ref.rollout.n=4")
    environment, _, command = shown.stdout.strip().partition(" bash ")
    recipe, *arguments = command.split()
    settings = dict(word.split("=", 1) for word in environment.split())
    (overrides,) = main_ppo_overrides(calls_of(ROOT / recipe, tmp_path, *arguments, environment=settings))
    rollout = load_ppo_config(overrides).actor_rollout_ref.rollout
    assert (rollout.name, rollout.n) == (engine, 4)
    assert engine == "hf" or rollout.tensor_model_parallel_size == 1, "there is one worker"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--task", "sums"], "--task sums is unknown (known: add1 mul1 max3 even gsm8k digits)"),
        (["--controller", "slurm"], "--controller slurm is unknown (known: ray local)"),
        (["--rollout", "tgi"], "--rollout tgi is unknown (known: hf vllm sglang)"),
        (["--steps", "many"], "--steps many is no positive number"),
        (["--stepz", "3"], "unknown option --stepz"),
        (["trainer.seed"], "trainer.seed is neither an option nor key=value"),
        (["--task"], "--task needs a value"),
    ],
)
def test_quickstart_names_what_is_wrong(arguments, words):
    shown = dry_run(*arguments)
    assert shown.returncode == 2
    assert words in shown.stderr


@pytest.mark.parametrize("flags", [(), ("--estimator", "gigpo", "--blind")], ids=["plain", "blind"])
def test_quickstart_of_agents_runs_the_recipe(flags, tmp_path):
    command = ["bash", "scripts/quickstart_agent.sh", "--dry-run", *flags, "--steps", "3", "trainer.seed=7"]
    env = {key: value for key, value in os.environ.items() if key not in ("RUN", "STEPS", "MODEL")}
    shown = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    environment, _, call = shown.stdout.strip().partition(" bash ")
    recipe, *arguments = call.split()
    settings = dict(word.split("=", 1) for word in environment.split())
    (overrides,) = main_ppo_overrides(calls_of(ROOT / recipe, tmp_path, *arguments, environment=settings))
    config = load_ppo_config(overrides)
    assert (config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.seed) == (3, 3, 7)
    assert config.algorithm.adv_estimator == ("gigpo" if flags else "grpo")
    assert config.env.tag("FrozenLake").kwargs.get("show_map", True) == (not flags)


def test_quickstart_of_agents_trains_what_the_learning_test_trains(tmp_path):
    """The same options, and a model of the same size: one of 2.5M stays at one half with this learning rate."""
    assert 'verl.utils.tiny_model "$MODEL" --size tiny' in (ROOT / "scripts" / "quickstart_agent.sh").read_text()
    (overrides,) = main_ppo_overrides(calls_of(ROOT / "examples" / "agentic" / "run_frozen_lake_tiny_cpu.sh", tmp_path))
    published = dict(word.split("=", 1) for word in overrides)
    tested = {key.replace("__", "."): str(value) for key, value in LAKE.items()}
    shared = set(published) & set(tested) - {"trainer.logger", "trainer.save_freq"}
    assert len(shared) >= 14
    differing = {key for key in shared if yaml.safe_load(published[key]) != yaml.safe_load(tested[key])}
    assert not differing


def test_ci_calls_exactly_the_test_script():
    assert re.search(r"exec bash scripts/test\.sh$", (ROOT / ".ci" / "run").read_text().strip())

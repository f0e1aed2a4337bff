"""Imports go down only: the floors of CONTRIBUTING.md, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {  # the longest prefix decides
    "verl.trainer.main_": 7,
    "verl.trainer.sft_trainer": 7,  # and sft_trainer_ray
    "verl.trainer.fsdp_sft_trainer": 7,
    "verl.trainer.dpo_trainer": 7,
    "verl.trainer.rm_trainer": 7,
    "verl.doctor": 7,
    "verl.data_check": 7,
    "verl.model_merger": 7,
    "verl.api": 7,
    "verl.cluster": 7,
    "verl.selftest": 7,
    "verl.init": 7,
    "verl.cli": 7,
    "verl.experimental": 7,
    "verl.__main__": 7,
    "verl.trainer": 6,
    "verl.agents": 5,
    "verl.preflight": 5,
    "verl.rewards.managers": 5,
    "verl.envs": 4,
    "verl.interactions": 4,
    "verl.tools": 4,
    "verl.workers": 5,
    "verl.workers.engine": 3,
    "verl.workers.rollout": 3,
    "verl.algorithms": 2,
    "verl.checkpoint": 2,
    "verl.data": 2,
    "verl.models": 2,
    "verl.rewards": 2,
    "verl.protocol": 1,
    "verl.config": 1,
    "verl.single_controller": 1,
    "verl.utils.config": 1,
    "verl.view": 1,
    "verl.batch": 0,
    "verl.sandbox": 0,
    "verl.telemetry": 0,
    "verl.utils": 0,
    "verl.compat": 0,
    "verl.config.features": 0,
    "verl.version": 0,
}
ADDRESSES = ("verl", "verl.base_config", "verl.workers.config")
"""Public names of things that live elsewhere; nothing of ours imports them, but for ``from verl import DataProto``."""


def floor(module: str) -> int:
    return FLOORS[max((prefix for prefix in FLOORS if module.startswith(prefix)), key=len)]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_address(module: str) -> bool:
    return module == "verl" or any(module == name or module.startswith(f"{name}.") for name in ADDRESSES[1:])


MODULES = {name_of(path): path for path in sorted((ROOT / "verl").rglob("*.py")) if not is_address(name_of(path))}


def imported(path: Path) -> set[str]:
    """Modules of verl that a file imports, inside functions too; not for type checkers, nor to offer a public name."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if is_for_types or isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inner if name in MODULES} or {node.module}
    return {name for name in found if name.split(".")[0] == "verl"}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_from_above_its_floor(module):
    above = {name for name in imported(MODULES[module]) if not is_address(name) and floor(name) > floor(module)}
    assert not above


def test_training_and_sampling_engines_never_import_each_other():
    for one, other in (("engine", "rollout"), ("rollout", "engine")):
        for module, path in MODULES.items():
            if module.startswith(f"verl.workers.{one}"):
                assert not [name for name in imported(path) if name.startswith(f"verl.workers.{other}")], module

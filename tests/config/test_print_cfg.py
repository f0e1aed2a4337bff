"""scripts/print_cfg.py prints the annotated tree."""

import importlib.util
from pathlib import Path

import pytest

from verl.config.command_line import all_keys
from verl.config.ppo import PPOConfig


@pytest.fixture(scope="module")
def print_cfg():
    spec = importlib.util.spec_from_file_location("print_cfg", Path(__file__).parents[2] / "scripts" / "print_cfg.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_every_option_with_its_meaning(print_cfg, capsys):
    assert print_cfg.main([]) == 0
    text = capsys.readouterr().out
    for key in all_keys(PPOConfig):
        assert f"{key.rpartition('.')[2]}:" in text, key
    assert "# Dual-clip bound" in text and "${oc.select:actor_rollout_ref.rollout.n,1}" in text


def test_it_prints_one_section_with_changes(print_cfg, capsys):
    assert print_cfg.main(["trainer", "trainer.seed=9", "--key-value"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "trainer.seed: 9" in lines and all(line.startswith("trainer.") for line in lines)


def test_it_refuses_a_misspelt_key(print_cfg, capsys):
    assert print_cfg.main(["trainr"]) == 2
    assert "did you mean 'trainer'" in capsys.readouterr().err

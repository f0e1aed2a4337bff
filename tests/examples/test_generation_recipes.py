"""Recipes of generation and evaluation: the commands compose, and the README lists the scripts."""

import pytest

from tests.support.commands import ROOT, calls_of
from verl.config.generation import EvaluationConfig, GenerationConfig
from verl.config.load import load

FOLDER = ROOT / "examples" / "generation"
SCRIPTS = [*sorted(FOLDER.glob("*.sh")), *sorted((ROOT / "recipe").glob("*/generate_*.sh"))]
ROOTS = {"verl.trainer.main_generation": GenerationConfig, "verl.trainer.main_eval": EvaluationConfig}
ROOTS["recipe.r1.main_eval"] = EvaluationConfig


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_commands_compose_pass_the_checks_and_take_further_words(script, tmp_path):
    calls = calls_of(script, tmp_path, "trainer.seed=7")
    assert calls and script.name in (script.parent / "README.md").read_text()
    found = []
    for flag, module, *words in calls:
        found.append(load(words, config_name=ROOTS[module].config_name, root=ROOTS[module]))
        assert flag == "-m" and not found[-1].problems and not found[-1].warnings, found[-1]
    assert found[0].config.trainer.seed == 7

"""docs/algorithms.md names what is registered, with a paper and a test that exists."""

import re
from pathlib import Path

import pytest

from verl.algorithms.advantage import ADV_ESTIMATOR_REGISTRY
from verl.algorithms.aggregate import AGG_MODES
from verl.algorithms.kl import KL_PENALTIES
from verl.algorithms.policy_loss import POLICY_LOSS_REGISTRY
from verl.config.algorithm import AlgorithmConfig
from verl.config.base import leaves

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
TESTS = set(
    name
    for path in (ROOT / "tests" / "algorithms").glob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.M)
)


def rows(heading):
    """Cells of each line of the first table under ``heading``, its two head lines left out."""
    section = PAGE[PAGE.index(f"## {heading}") :]
    section = section[: section.index("\n## ", 3)]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def names(heading):
    """What stands in backticks in the first cells, keys of the config left out."""
    first = [re.findall(r"`([^`]+)`", cells[0]) for cells in rows(heading)]
    return {name for found in first for name in found if "." not in name and not name.startswith("clip_ratio")}


def built_in(registry):
    """Names of the package itself; other tests register some of their own."""
    return [name for name in registry if registry[name].__module__.startswith("verl.")]


@pytest.mark.parametrize(
    ("heading", "registry"),
    [
        ("Which advantage", ADV_ESTIMATOR_REGISTRY),
        ("Which policy loss", POLICY_LOSS_REGISTRY),
        ("From tokens to one number", AGG_MODES),
    ],
)
def test_every_registered_name_has_a_row_and_every_row_is_registered(heading, registry):
    assert names(heading) == set(built_in(registry))


def test_every_kl_estimator_has_a_row():
    described = names("Staying near the reference")
    assert {name for name in KL_PENALTIES if not name.endswith("+")} <= described
    assert described - set(KL_PENALTIES) == {"+"}


def test_every_option_of_shaping_has_a_row_with_tests_that_exist():
    table = rows("Shaping rewards")
    text = " ".join(cells[1] for cells in table)
    for key, _ in leaves(AlgorithmConfig(), "algorithm."):
        if key.startswith(("algorithm.reward_shaping.", "algorithm.advantage.", "algorithm.sample_mask.")):
            section, _, name = key.rpartition(".")
            listed = re.findall(re.escape(section) + r"\.\{([\w,]+)\}", text)
            assert key in text or any(name in names.split(",") for names in listed), key
    texts = [(ROOT / f"tests/trainer/test_{name}.py").read_text() for name in ("shaping", "more_shaping")]
    of_batches = re.findall(r"^def (test_\w+)", "\n".join(texts), flags=re.M)
    for cells in table:
        for name in re.findall(r"`(test_\w+)", cells[3]):
            assert any(known.startswith(name) for known in (*TESTS, *of_batches)), name


@pytest.mark.parametrize("heading", ["Which advantage", "Which policy loss"])
def test_every_row_names_a_paper_and_a_test_that_exists(heading):
    table = rows(heading)
    assert len(table) > 10
    for cells in table:
        assert len(cells) == 5, cells
        paper, test = cells[3], cells[4]
        assert re.search(r"\(https://(arxiv\.org/abs/\d{4}\.\d{5}|doi\.org/\S+)\)", paper), cells
        if test != "the same":
            prefix = test.strip("`").removesuffix("...")
            assert any(name.startswith(prefix) for name in TESTS), cells


def test_every_source_in_a_docstring_stands_on_the_page_too():
    for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        for name in built_in(registry):
            source = registry[name].__doc__.rpartition("Source:")[2]
            for number in re.findall(r"arXiv:(\d{4}\.\d{5})", source):
                assert number in PAGE, (name, number)

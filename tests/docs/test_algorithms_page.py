"""docs/algorithms.md says what the registries say, of every name a user can choose, and names tests that exist."""

import re
from pathlib import Path
from typing import get_args

import pytest

from scripts.algorithm_tables import PAGE, TABLES, filled, main, proof_of
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator
from verl.algorithms.aggregate import AGG_MODES
from verl.algorithms.correction import LEVELS
from verl.algorithms.kl import KL_PENALTIES
from verl.algorithms.losses import POLICY_LOSS_REGISTRY
from verl.algorithms.registry import CONTROLS, STEPS
from verl.algorithms.resample import RESAMPLE_METHODS
from verl.config.actor import LossAggMode
from verl.config.algorithm import AlgorithmConfig, KLKind
from verl.config.base import get_path, leaves
from verl.config.checks import find
from verl.config.checks.support import built_names, full_keys
from verl.config.ppo import PPOConfig

TEXT = PAGE.read_text(encoding="utf-8")
REGISTRIES = {
    "estimators": ADV_ESTIMATOR_REGISTRY,
    "losses": POLICY_LOSS_REGISTRY,
    "kl": KL_PENALTIES,
    "modes": AGG_MODES,
    "controls": CONTROLS,
}
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
ROWS = [
    pytest.param(about, id=f"{table}-{names[0]}-{about.setting or 'plain'}")
    for table, registry in REGISTRIES.items()
    for names, rows in registry.documented().items()
    for about in rows
]


def names_in(table: str) -> set[str]:
    """Names in the first cells of a table of the page."""
    section = TEXT[TEXT.index(f"<!-- table: {table} -->") : TEXT.index(f"<!-- end of table: {table} -->")]
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`([^`]+)`", cell.partition(" with ")[0])}


def test_the_tables_are_those_of_the_registries():
    assert filled(TEXT) == TEXT, "make docs"


def test_a_page_that_drifted_is_reported_and_written_again(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "algorithms.md"
    page.parent.mkdir()
    page.write_text(TEXT.replace("| `rloo` |", "| `rloo, of old` |"))
    monkeypatch.setattr("scripts.algorithm_tables.PAGE", page)
    monkeypatch.setattr("scripts.algorithm_tables.ROOT", tmp_path)
    monkeypatch.setitem(TABLES, "estimators", lambda: "nothing")
    assert main(["--check"]) == 1 and "not what the registries say" in capsys.readouterr().out
    monkeypatch.undo()
    assert "`rloo, of old`" not in filled(page.read_text())


@pytest.mark.parametrize(
    ("table", "offered"),
    [
        ("estimators", {name.value for name in AdvantageEstimator} | set(built_names("algorithm.adv_estimator"))),
        ("losses", set(built_names(LOSS_MODE))),
        ("modes", set(get_args(LossAggMode))),
        ("kl", set(get_args(KLKind))),
    ],
)
def test_every_name_the_config_offers_has_a_row_and_every_row_is_offered(table, offered):
    assert names_in(table) == offered
    documented = {name for names in REGISTRIES[table].documented() for name in names}
    ours = {name for name in REGISTRIES[table] if _is_ours(REGISTRIES[table][name])}
    assert documented == offered == ours


def _is_ours(entry) -> bool:
    """Not registered by another test."""
    return getattr(entry, "__module__", "").startswith("verl.")


def test_values_that_are_no_names_of_a_registry_stand_on_the_page_too():
    for value in (*LEVELS, *RESAMPLE_METHODS, "fixed", "adaptive", "truncate", "mask", "batch", "group", "running"):
        assert re.search(rf"`(\w+=)?{value}`", TEXT), value


def test_every_option_of_the_algorithm_is_read_by_a_row_or_named_in_the_text():
    read = {key for registry in REGISTRIES.values() for rows in registry.documented().values() for about in rows
            for key in full_keys(about.options)}  # fmt: skip
    for key, _ in leaves(AlgorithmConfig(), "algorithm."):
        section, _, name = key.rpartition(".")
        assert key in read or key in TEXT or f"`{section.rpartition('.')[2]}.{name}" in TEXT or f"`{name}" in TEXT, key


def test_every_step_between_scores_and_update_is_a_control():
    assert set(STEPS) <= set(CONTROLS)


@pytest.mark.parametrize("about", ROWS)
def test_a_row_names_a_source_options_that_exist_and_a_test_that_exists(about):
    assert re.fullmatch(r"arXiv:\d{4}\.\d{5}|\[[^\]]+\]\(https?://\S+\)", about.source)
    assert about.equation and about.use
    config = PPOConfig()
    for key in full_keys(about.options):
        get_path(config, key)
    path, name = proof_of(about)
    assert re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE), about.test


@pytest.mark.parametrize(
    ("key", "table"), [("algorithm.adv_estimator", "estimators"), (LOSS_MODE, "losses")], ids=["estimators", "losses"]
)
def test_what_a_notice_says_a_name_does_not_read_is_what_its_row_leaves_out(key, table):
    whiten = "algorithm.advantage.whiten"  # has a notice of its own
    reads = {
        name: {option for about in rows for option in full_keys(about.options)} - {whiten}
        for names, rows in REGISTRIES[table].documented().items()
        for name in names
    }
    every = set().union(*reads.values())
    for name, read in reads.items():
        warnings = find(PPOConfig().with_values({key: name}), "warning", is_given=lambda option: True)
        (sentence,) = [found.text for found in warnings if found.text.endswith(f"{key}={name} does not read it")]
        assert set(re.findall(r"([\w.]+)=", sentence.partition(" no effect: ")[0])) == every - read, name


def test_every_source_in_a_docstring_stands_on_the_page_too():
    for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        for names in registry.documented():
            source = registry[names[0]].__doc__.rpartition("Source:")[2]
            for number in re.findall(r"arXiv:(\d{4}\.\d{5})", source):
                assert number in TEXT, (names, number)


def test_the_command_is_found_where_the_page_says():
    assert "scripts/algorithm_tables.py" in (Path(PAGE).parents[1] / "Makefile").read_text()

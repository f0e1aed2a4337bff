"""Bad configurations are caught with their key named; about good ones the doctor has nothing to say."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.commands import ROOT, calls_of
from verl.config.command_line import parse
from verl.preflight.checks import examine
from verl.utils.import_utils import load_extern_type

from .conftest import BASE, ELSEWHERE, examined, make_model, make_rows

HERE = Path(__file__).parent


def _lines(name):
    return [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]


BAD, GOOD = _lines("bad.txt"), _lines("good.txt")
RECIPES = sorted(path for folder in ("examples", "recipe") for path in (ROOT / folder).rglob("run_*.sh"))


@pytest.mark.parametrize("line", BAD)
def test_a_bad_configuration_is_caught_with_its_key_named(line, there):
    level, _, rest = line.partition(" ")
    words, _, key = rest.rpartition(" -> ")
    report = examined(*words.split())
    found = report.errors if level == "error" else report.warnings
    assert key in {name for finding in found for name in finding.all_keys}, report.to_text()
    assert (report.exit_code() == 2) == (level == "error"), report.to_text()


@pytest.mark.parametrize("line", ["", *GOOD])
def test_nothing_is_said_about_a_good_configuration(line, there):
    report = examined(*line.split())
    assert not report.findings, report.to_text()


@pytest.mark.parametrize("line", [BAD[0], BAD[64], GOOD[20]])
def test_the_shared_base_is_no_shortcut(line, there):
    words = line.removeprefix("error ").partition(" -> ")[0].split()
    assert examine([*BASE, *words], machine=ELSEWHERE).to_dict() == examined(*words).to_dict()


def test_the_corpus_is_as_large_as_it_is_said_to_be():
    assert len(BAD) >= 150 and len(set(BAD)) == len(BAD)
    assert len(GOOD) + len(RECIPES) >= 100 and len(set(GOOD)) == len(GOOD)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_said_about_a_shell_recipe(recipe, there, tmp_path, monkeypatch):
    """With a model and data of ours in place of those that would have to be downloaded or made."""
    monkeypatch.chdir(ROOT)
    for name, number in (("train", 17_917), ("test", 128)):  # as many as the mathematics of DAPO
        has_own = (recipe.parent / "prepare.py").exists()
        rows = load_extern_type(str(recipe.parent / "prepare.py"), "rows") if has_own else make_rows
        pq.write_table(pa.Table.from_pylist(rows(number)), tmp_path / f"{name}.parquet")
    make_model(tmp_path / "policy", tokens=260, num_attention_heads=8, max_position_embeddings=32768)
    make_model(tmp_path / "judge", architecture="Qwen2ForSequenceClassification", tokens=260)
    places = {"MODEL": tmp_path / "policy", "JUDGE": tmp_path / "judge", "RUN": tmp_path / "run"}
    places |= {"DATA": tmp_path, "TEST": tmp_path}
    calls = calls_of(recipe, tmp_path, environment={name: str(place) for name, place in places.items()})
    jobs = ("main_ppo", "main_agentic")
    module, arguments = next((call[1], call[2:]) for call in calls if call[0] == "-m" and call[1].endswith(jobs))
    flags, words = parse(arguments)
    start = {"config_name": "agentic_trainer"} if module.endswith("main_agentic") else {}
    if module.startswith("recipe"):
        (yaml,) = (recipe.parent / "config").glob("*.yaml")
        start = {"config_path": str(yaml.parent), "config_name": yaml.stem}
    report = examine(words, **start, machine=ELSEWHERE)
    assert not report.findings, report.to_text()

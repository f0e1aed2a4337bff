"""Bad configurations are caught with their key named; about good ones the doctor has nothing to say."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.commands import ROOT, calls_of, training_call
from tests.support.composing import load_over
from verl.preflight.checks import examine, examine_loaded
from verl.preflight.data import Limits
from verl.utils.import_utils import load_extern_type

from .conftest import BASE, ELSEWHERE, examined, make_model, make_rows

HERE = Path(__file__).parent


def _lines(name):
    return [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]


BAD, GOOD = _lines("bad.txt"), _lines("good.txt")
RECIPES = sorted(path for folder in ("examples", "recipe") for path in (ROOT / folder).rglob("run_*.sh"))
OTHERS = ("sft", "dpo_trainer", "rm_trainer")  # other programs: tests/examples/test_sft_recipes.py
RECIPES = [path for path in RECIPES if path.parent.name not in OTHERS]


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


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with a model, a judge and rows of ours, in place of those that would have to be downloaded or made."""
    folder = tmp_path_factory.mktemp("published")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 32768}
    make_model(folder / "policy", tokens=260, **sizes)
    experts = {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 32}
    make_model(folder / "experts", tokens=260, architecture="Qwen3MoeForCausalLM", **sizes, **experts)
    make_model(folder / "judge", architecture="Qwen2ForSequenceClassification", tokens=260)
    write_rows(folder, make_rows)
    return folder


def write_rows(folder, rows):
    for name, number in (("train", 17_917), ("test", 128)):  # as many as the mathematics of DAPO
        pq.write_table(pa.Table.from_pylist(rows(number)), folder / f"{name}.parquet")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_said_about_a_shell_recipe(recipe, there, published, tmp_path, monkeypatch):
    """Its options compose and pass every check, and it hands its own arguments on, last."""
    monkeypatch.chdir(ROOT)
    model = "experts" if "_a3b" in recipe.stem else "policy"
    places = {"MODEL": published / model, "JUDGE": published / "judge", "RUN": tmp_path / "run"}
    places |= {"DATA": published, "TEST": published, "TEACHER": published / "policy"}
    if (recipe.parent / "prepare.py").exists():
        write_rows(tmp_path, load_extern_type(str(recipe.parent / "prepare.py"), "rows"))
        places |= {"DATA": tmp_path, "TEST": tmp_path}
    environment = {name: str(place) for name, place in places.items()}
    start, words = training_call(calls_of(recipe, tmp_path, "trainer.seed=7", environment=environment))
    report = examine_loaded(load_over((), words, start), ELSEWHERE, Limits(tokens=50, rows=50))
    assert not report.findings, report.to_text()
    assert report.config.trainer.seed == 7
    assert report.config.trainer.device == ("cpu" if recipe.stem.endswith("_cpu") else "cuda")


def test_a_recipe_is_examined_as_its_command_is(there, published, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    environment = {name: str(published) for name in ("DATA", "TEST")} | {"MODEL": str(published / "policy")}
    recipe = ROOT / "recipe" / "spin" / "run_gsm8k_qwen2_5_3b.sh"
    start, words = training_call(calls_of(recipe, tmp_path, environment=environment))
    whole = examine(words, start.config_path, start.config_name, machine=ELSEWHERE, root=start.root)
    assert examine_loaded(load_over((), words, start), ELSEWHERE).to_dict() == whole.to_dict()

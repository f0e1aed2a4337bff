"""Tables of old names and of features that are not built: whole rows, targets that exist, sentences with a way out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.config.command_line import locate
from verl.config.features import TABLE, Feature, expand, feature_of_module, features
from verl.config.legacy import CONVERSIONS, MOVED, OLD_TABLE, REMOVED, SECTIONS
from verl.config.ppo import PPOConfig

ROOT = Path(__file__).parents[2]
SECTION = r"actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer"


def options_in(text: str) -> set[str]:
    """Dotted options that a sentence names."""
    return set(re.findall(rf"(?<![\w./])((?:{SECTION})(?:\.\w+)+)", text))


def test_braces_stand_for_each_of_their_choices():
    assert expand("a.b") == ["a.b"]
    assert expand("{a, b}.x.{c,d}") == ["a.x.c", "a.x.d", "b.x.c", "b.x.d"]


def test_every_row_of_a_feature_is_whole():
    rows = yaml.safe_load(TABLE.read_text())
    assert len(rows) == len(features()) == len({row["name"] for row in rows})
    for row in rows:
        assert row.keys() <= set(Feature._fields) and {"name", "instead"} <= row.keys(), row
        assert row.keys() & {"keys", "modules", "backends", "configs"}, f"nothing leads to {row['name']}"
        for name in row.keys() - {"name", "instead", "is_free"}:
            assert isinstance(row[name], list) and row[name], (row["name"], name)
        assert row.get("is_free", True) is True


@pytest.mark.parametrize("feature", features(), ids=lambda feature: feature.name)
def test_a_feature_says_in_whole_sentences_what_to_do(feature):
    begins_with_a_name = re.match(r"[\w.]*[._/]\w+", feature.instead)
    assert feature.instead[0].isupper() or begins_with_a_name, feature.instead
    assert feature.instead.endswith(".") and len(feature.instead.split()) >= 3
    assert not feature.name.endswith(".")
    for option in options_in(feature.instead):
        assert locate(PPOConfig, option).kind != "unknown", option
    for name in (*feature.keys, *feature.switches):
        assert re.fullmatch(r"\.?\w+(\.\w+)*", name), name
    for name in feature.modules:
        assert re.fullmatch(r"(verl|recipe)(\.[\w-]+)+", name), name


def test_the_merger_of_megatron_checkpoints_is_told_by_its_feature():
    assert feature_of_module("verl.model_merger.megatron_model_merger").name.startswith("Megatron's own classes")


def test_every_row_of_an_old_name_is_whole():
    lines = [line for line in OLD_TABLE.read_text().splitlines() if not line.startswith(("#", "old\t"))]
    old = [line.split("\t")[0] for line in lines]
    assert len(old) == len(set(old)), "a name stands twice"
    assert set(CONVERSIONS) == {line.split("\t")[2] if line.count("\t") > 1 else "" for line in lines
                                if "\t[" not in line and "\tsection" not in line}  # fmt: skip
    for line in lines:
        name, new, *rest = line.split("\t")
        assert re.fullmatch(r"\w+(\.\w+)*", name) and bool(new) != (len(rest) == 2), line
        assert line == line.strip(), line
    for new in SECTIONS.values():
        assert locate(PPOConfig, new).kind in ("section", "free")
    for entry in MOVED:
        assert entry.new and all(locate(PPOConfig, new).kind != "unknown" for new in entry.new)


@pytest.mark.parametrize("entry", REMOVED, ids=lambda entry: entry.old)
def test_an_option_that_is_gone_has_a_reason_or_a_way_out(entry):
    assert len(entry.why.split()) >= 2 and not entry.why.endswith("."), "legacy.py ends the sentence"
    for option in options_in(entry.why):
        assert locate(PPOConfig, option).kind != "unknown", option


def test_a_run_of_today_reads_no_table_of_features():
    """Its YAML costs milliseconds at every start."""
    code = """
import sys
from verl.config.load import load
from verl.config import features, legacy
loaded = load(["data.train_files=a", "data.val_files=a", "actor_rollout_ref.model.path=m", "trainer.seed=3"])
assert loaded.config.trainer.seed == 3
print(features.features.cache_info().currsize, legacy.release_keys.cache_info().currsize)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["0", "0"], done.stdout + done.stderr

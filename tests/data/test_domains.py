"""Rows of ROLL's shape are divided into domains and read in the standard columns."""

import json
import logging

import pytest

from verl.data.files import in_domains, open_table
from verl.data.table import DataError
from verl.rewards.scorers import default_compute_score

DOMAINS = {"math": ["aime", "MATH-*"], "code": ["KodCode"]}


@pytest.fixture
def read(tmp_path):
    def call(*rows, domains=DOMAINS, key="tag"):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return in_domains(open_table(str(path)), domains, key)

    return call


def row(tag, **more):
    said = json.dumps([{"role": "user", "content": "What is 2 + 2?"}])
    own = {"id": "7", "source": "a book", "difficulty": "0.25", "messages": said, "ground_truth": "4", "tag": tag}
    return own | more


def test_a_row_gets_the_standard_columns(read):
    (found,) = read(row("aime"))
    assert found["tag"] == "math/aime" and found["difficulty"] == 0.25
    assert found["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert found["extra_info"] == {"id": "7", "source": "a book", "question": "What is 2 + 2?"}


def test_its_own_domain_goes_before_its_tag_and_names_before_patterns(read):
    rows = [row("aime", domain="code"), row("aime", domain="nobody's"), row("MATH-500", domain=None)]
    assert read(*rows).column("tag") == ["code/aime", "math/aime", "math/MATH-500"]
    assert read(row("KodCode"), domains={"rest": ["*"], **DOMAINS}).column("tag") == ["code/KodCode"]


def test_rows_of_no_domain_are_left_out_and_counted(read, caplog):
    with caplog.at_level(logging.WARNING):
        table = read(row("poems"), row("aime"), row("poems"))
    assert table.column("tag") == ["math/aime"] and table.where(0).endswith("row 1")
    assert "2 of 3 rows belong to no domain" in caplog.text and "2 of 'poems'" in caplog.text
    with pytest.raises(DataError, match="'\\*' takes all"):
        read(row("poems"))


def test_columns_of_our_own_shape_stay(read):
    own = {"data_source": "aime", "prompt": "p", "reward_model": {"style": "rule", "ground_truth": "9"},
           "extra_info": {"index": 3}}  # fmt: skip
    (found,) = read(own)
    assert found["tag"] == "math/aime" and found["reward_model"]["ground_truth"] == "9"
    assert found["extra_info"] == {"index": 3}


@pytest.mark.parametrize(
    ("cases", "more", "right", "wrong"),
    [
        ([{"assert_code": "from solution import f\n\ndef test_a():\n    assert f(1) == 2\n"}], {}, "x + 1", "x"),
        ([{"assert_code": "assert f(1) == 2"}], {}, "x + 1", "x"),
        ([{"stdin": "1", "expected_stdout": "2"}], {"test_case_function": "f"}, "x + 1", "x"),
    ],
)
def test_test_cases_are_the_goal_of_a_program(read, cases, more, right, wrong):
    (found,) = read(row("KodCode", ground_truth="", test_cases=json.dumps(cases), **more))
    rules = {"code/*": {"name": "code"}}
    for body, score in ((right, 1.0), (wrong, 0.0)):
        answer = f"```python\ndef f(x):\n    return {body}\n```"
        result = default_compute_score(found["tag"], answer, found["reward_model"]["ground_truth"], score_as=rules)
        assert result["score"] == score


def test_a_goal_of_another_type_is_text(read):
    assert read(row("aime", ground_truth=4))[0]["reward_model"]["ground_truth"] == "4"
    assert read(row("aime", ground_truth=None))[0]["reward_model"]["ground_truth"] == ""

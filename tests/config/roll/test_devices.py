"""``device_mapping`` is read, never evaluated."""

import pytest

from verl.config.roll.batch import parse_devices


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("list(range(0,16))", list(range(16))),
        (" list(range(0, 8, 2)) ", [0, 2, 4, 6]),
        ("range(3)", [0, 1, 2]),
        ("[0, 1] + list(range(4,6))", [0, 1, 4, 5]),
        ([2, 3], [2, 3]),
        (5, [5]),
        (None, None),
        ("null", None),
    ],
)
def test_lists_of_numbers_are_understood(text, ids):
    assert parse_devices(text) == ids


@pytest.mark.parametrize(
    "text",
    ["__import__('os').getcwd()", "list(range(0,n))", "[0,'1']", "0:8", "list(map(int, '01'))", "range(0,10**12)",
     "range(2000000000)", "[1,1]", "-1", "[True]", "(" * 500],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="device"):
        parse_devices(text)

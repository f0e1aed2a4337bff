import asyncio

import pytest

from verl.utils.import_utils import import_external_libs, is_package_available, load_class_from_fqn
from verl.utils.py_functional import (
    append_to_dict,
    convert_to_regular_types,
    excerpt,
    gather_awaitables,
    nearest_name,
    union_two_dict,
)


def test_values_are_appended_by_key():
    data = {"a": [1]}
    append_to_dict(data, {"a": 2, "b": 3})
    assert data == {"a": [1, 2], "b": [3]}


def test_union_refuses_two_values_for_one_key():
    assert union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a' is 1 in one dict and 2 in the other"):
        union_two_dict({"a": 1}, {"a": 2})


def test_nests_of_mappings_and_sequences_become_plain():
    from omegaconf import OmegaConf

    tree = OmegaConf.create({"a": {"b": [1, {"c": "x"}]}, "d": None})
    plain = convert_to_regular_types(tree)
    assert plain == {"a": {"b": [1, {"c": "x"}]}, "d": None} and type(plain["a"]["b"][1]) is dict


def test_nearest_name_suggests_typos_and_parts_and_nothing_else():
    assert nearest_name("niave", ["naive", "batch"]) == " Did you mean 'naive'?"
    assert nearest_name("gsm8k", ["digits", "openai/gsm8k"]) == " Did you mean 'openai/gsm8k'?"
    assert nearest_name("zzz", ["naive"]) == ""


def test_excerpt_keeps_both_ends():
    assert excerpt("short") == "'short'"
    text = excerpt("a" * 500 + "z" * 500, limit=40)
    assert text.startswith("'aaa") and text.endswith("zzz'") and len(text) < 100


def test_awaitables_return_results_and_errors_in_order():
    async def work(value):
        await asyncio.sleep(0.001)
        if value < 0:
            raise ValueError(value)
        return value

    first, nothing, error = gather_awaitables([work(1), None, work(-1)], 8)
    assert first == 1 and nothing is None and isinstance(error, ValueError)


def test_external_libs_are_imported_or_named(tmp_path, monkeypatch):
    (tmp_path / "side_effect_lib.py").write_text("import builtins\nbuiltins.side_effect = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_external_libs(None)
    import_external_libs(["side_effect_lib"])
    assert __builtins__["side_effect"] == 1
    with pytest.raises(ModuleNotFoundError, match="external_lib='no_such_lib_here' cannot be imported"):
        import_external_libs("no_such_lib_here")
    assert is_package_available("json") and not is_package_available("no_such_lib_here.deeper")


def test_classes_load_by_dotted_name():
    import collections

    assert load_class_from_fqn("collections.OrderedDict") is collections.OrderedDict
    with pytest.raises(ValueError, match="'OrderedDict' is not a dotted name"):
        load_class_from_fqn("OrderedDict")
    with pytest.raises(AttributeError, match="module collections has no .*'OrderedDic'.*Did you mean 'OrderedDict'"):
        load_class_from_fqn("collections.OrderedDic")

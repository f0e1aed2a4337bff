from enum import Enum

import pytest

from verl.algorithms.registry import About, Registry
from verl.config.checks.support import full_keys


class Colour(str, Enum):
    RED = "red"


@pytest.fixture
def registry():
    registry = Registry("paint.colour", "@register_colour(name)")
    registry.register("red", "rot")(1)
    registry.register("green")(2)
    return registry


def test_an_entry_is_found_under_each_of_its_names_and_by_enum(registry):
    assert registry.get("red") == registry["rot"] == registry.get(Colour.RED) == 1
    assert "red" in registry and Colour.RED in registry and "blue" not in registry
    assert list(registry) == list(registry.keys()) == ["red", "rot", "green"] and len(registry) == 3


def test_a_registry_has_the_methods_of_a_dict(registry):
    assert registry.get("blue") is None and registry.get("blue", 7) == 7
    assert dict(registry.items()) == {"red": 1, "rot": 1, "green": 2} and sorted(registry.values()) == [1, 1, 2]
    registry["red"] = 3
    registry.update({"blue": 4})
    assert registry.get("red") == registry.pop("red") == 3 and "red" not in registry and registry["blue"] == 4
    assert registry.setdefault("green", 9) == 2 and registry.pop("red", None) is None
    with pytest.raises(KeyError):
        registry["xyzzy"]


def test_a_users_function_takes_over_a_name_that_verl_has_come_to_use(monkeypatch, caplog):
    from verl.algorithms.losses import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss

    monkeypatch.setattr(POLICY_LOSS_REGISTRY, "_entries", dict(POLICY_LOSS_REGISTRY._entries))
    monkeypatch.setattr(POLICY_LOSS_REGISTRY, "_about", dict(POLICY_LOSS_REGISTRY._about))

    @register_policy_loss("cispo")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
        return (log_prob * advantages).mean()

    assert get_policy_loss_fn("cispo") is mine and "not verl's own" in caplog.text
    with pytest.raises(ValueError, match="already taken"):
        register_policy_loss("cispo")(lambda log_prob: log_prob)


def test_register_is_a_decorator_that_leaves_the_function_alone(registry):
    @registry.register("double")
    def double(x):
        return 2 * x

    assert double(3) == 6 and registry.get("double") is double


def test_a_taken_name_is_refused_unless_it_is_the_same_thing(registry):
    registry.register("red")(1)
    with pytest.raises(ValueError, match=r"paint\.colour: the name 'red' is already taken by 1"):
        registry.register("red")(3)
    assert registry.get("red") == 1


def test_an_unknown_name_is_answered_with_the_nearest_the_known_and_the_way_out(registry):
    with pytest.raises(ValueError) as error:
        registry["gren"]
    message = str(error.value)
    for part in ("paint.colour=gren", "did you mean 'green'?", "Known: red, rot, green", "@register_colour(name)"):
        assert part in message
    with pytest.raises(ValueError, match="is not known. Known"):
        registry["xyzzy"]


def test_what_is_said_of_a_thing_is_kept_for_all_its_names_together():
    registry = Registry("paint.colour", "@register_colour(name)")
    plain = About("r", "warm rooms", "arXiv:1234.56789", "test_x.py::test_y", options="paint.{hue,depth} actor.brush")
    registry.register("red", "rot", about=[plain, About("r", "barns", "arXiv:1234.56789", "t", setting="hue=1")])(1)
    registry.register("green")(2)
    assert list(registry.documented()) == [("red", "rot")] and registry.about("rot")[0] is plain
    assert registry.about("green") == registry.about("blue") == ()
    assert full_keys(plain.options) == ("paint.hue", "paint.depth", "actor_rollout_ref.actor.brush")


def test_users_register_without_saying_anything():
    assert Registry("k", "w").register("mine")(len) is len

"""What `register` records and what the dispatch modes do, on a group that is only a size and a mesh."""

import pickle

import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    Mesh,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    resolve_mode,
    update_dispatch_mode,
)

FROM_VERL = """RANK_ZERO ONE_TO_ALL ALL_TO_ALL DP_COMPUTE DP_COMPUTE_PROTO DP_COMPUTE_PROTO_WITH_FUNC DP_COMPUTE_METRIC
    MEGATRON_COMPUTE MEGATRON_PP_AS_DP MEGATRON_PP_ONLY MEGATRON_COMPUTE_PROTO MEGATRON_PP_AS_DP_PROTO
    DIRECT_ROLLOUT_METHOD"""


class Group:
    """Four ranks; on the mesh "actor" two by two, ranks 1 and 2 answering."""

    world_size = 4

    def mesh(self, name):
        return Mesh((0, 0, 1, 1), (1, 2)) if name in ("actor", "*") else Mesh.over_world(4)


def rows(count):
    return DataProto.from_dict({"x": torch.arange(count)})


@pytest.mark.parametrize("name", FROM_VERL.split())
def test_every_mode_of_verl_has_its_two_functions(name):
    mode = get_predefined_dispatch_fn(Dispatch[name])
    assert callable(mode["dispatch_fn"]) and callable(mode["collect_fn"])


def test_execute_modes_name_the_method_that_runs_them():
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}


def test_a_registered_method_is_the_method_and_carries_its_registration():
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, mesh="actor", reads=["x"])
    def method(self):
        return "ran"

    registration = getattr(method, MAGIC_ATTR)
    assert method(None) == "ran"
    assert (registration["dispatch_mode"], registration["execute_mode"]) == (Dispatch.DP_COMPUTE_PROTO, Execute.ALL)
    assert (registration["blocking"], registration["mesh"], registration["reads"]) == (False, "actor", ("x",))


def test_rows_go_to_the_ranks_of_their_part_and_come_back_from_those_that_answer():
    mode = resolve_mode(Dispatch.DP_COMPUTE_PROTO, "actor")
    assert mode.parts(Group()) == 2
    (parts, names), _ = mode.dispatch_fn(Group(), rows(4), "same")
    assert [part.column("x").tolist() for part in parts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert parts[0] is parts[1] and names == ["same"] * 4
    joined = mode.collect_fn(Group(), [None, rows(2), rows(3), None])
    assert joined.column("x").tolist() == [0, 1, 0, 1, 2]


def test_without_a_mesh_every_rank_has_its_own_part():
    (parts,), _ = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)["dispatch_fn"](Group(), rows(4))
    assert [part.column("x").tolist() for part in parts] == [[0], [1], [2], [3]]


def test_mesh_functions_can_be_given_as_the_mode():
    mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")
    assert resolve_mode(mode, None) is mode and mode.parts(Group()) == 2


def test_a_batch_without_rows_goes_to_every_rank():
    metadata = DataProto(meta_info={"step": 3})
    (parts,), _ = resolve_mode(Dispatch.DP_COMPUTE_PROTO, None).dispatch_fn(Group(), metadata)
    assert parts == [metadata] * 4


def test_lists_of_the_wrong_length_say_how_long_they_must_be():
    mode = resolve_mode(Dispatch.DP_COMPUTE, "actor")
    (values,), _ = mode.dispatch_fn(Group(), ["a", "b"])
    assert values == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match="list of 3.*lists of 2"):
        mode.dispatch_fn(Group(), [1, 2, 3])


def test_a_direct_rollout_method_is_not_for_groups():
    with pytest.raises(NotImplementedError, match="on the worker itself"):
        resolve_mode(Dispatch.DIRECT_ROLLOUT_METHOD, None).dispatch_fn(Group())


def test_a_mode_can_be_added_replaced_and_sent():
    register_dispatch_mode("reversed", lambda group, x: (([x] * 4)[::-1], {}), lambda group, outputs: outputs[::-1])
    assert resolve_mode(Dispatch.REVERSED, None).collect_fn(None, [1, 2]) == [2, 1]
    update_dispatch_mode(Dispatch.REVERSED, lambda group: ((), {}), lambda group, outputs: outputs)
    assert resolve_mode(Dispatch.REVERSED, None).collect_fn(None, [1, 2]) == [1, 2]
    assert pickle.loads(pickle.dumps(Dispatch.REVERSED)) is Dispatch.REVERSED
    assert Dispatch.REVERSED in Dispatch and "REVERSED" in Dispatch and len(list(Dispatch)) == len(Dispatch)
    with pytest.raises(ValueError, match="already registered"):
        Dispatch.register("reversed")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(dispatch_mode="ALL"), "neither a Dispatch member.*ONE_TO_ALL"),
        (dict(dispatch_mode={"dispatch_fn": print}), "needs dispatch_fn and collect_fn"),
        (dict(execute_mode="ALL_RANKS"), "use one of"),
        (dict(reads="input_ids"), r"\('input_ids',\)"),
    ],
)
def test_a_wrong_registration_is_refused_where_it_is_written(wrong, message):
    with pytest.raises(ValueError, match=message):
        register(**wrong)


@pytest.mark.parametrize(
    "positions, message",
    [
        ([(0, True), None], r"ranks \[1\] registered no position"),
        ([(0, True), (0, True)], "exactly one collecting rank"),
        ([(0, True), (1, False)], "exactly one collecting rank"),
        ([(0, True), (2, True)], "0, 1, ..."),
    ],
)
def test_a_mesh_with_gaps_is_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        Mesh.from_positions("actor", positions)


def test_auto_padding_of_verl_does_not_make_uneven_parts(monkeypatch):
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    (parts,), _ = resolve_mode(Dispatch.DP_COMPUTE_PROTO, None).dispatch_fn(Group(), rows(8))
    assert [len(part) for part in parts] == [2, 2, 2, 2]

"""What a call on a group does, the same on both controllers."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.single_controller.roles import Counter, MeshWorker, Splitter
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost
from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.decorator import Dispatch, register


def rows(count, **more):
    tensors = {"x": torch.arange(count).float()[:, None], **more}
    return DataProto.from_dict(
        tensors, {"name": np.array([f"row {i}" for i in range(count)], dtype=object)}, {"step": 7}
    )


def flat(data, name="x"):
    return data.column(name).flatten().tolist()


def test_every_rank_knows_its_place(start):
    places = start(Counter).place()
    assert [place["rank"] for place in places] == [0, 1]
    assert [(p["RANK"], p["WORLD_SIZE"], p["LOCAL_WORLD_SIZE"]) for p in places] == [("0", "2", "2"), ("1", "2", "2")]
    assert len({place["pid"] for place in places} | {os.getpid()}) == 3
    assert len({place["MASTER_PORT"] for place in places}) == 1


def test_a_single_local_rank_lives_in_the_driver(local_controller):
    classes = local_controller.ClassWithInitArgs(Counter, begin=5)
    group = local_controller.WorkerGroup(local_controller.ResourcePool([1]), classes)
    assert group.place()[0]["pid"] == os.getpid() and group.add(1) == [6]


def test_workers_keep_their_state_and_constructor_arguments(start_local):
    group = start_local(Counter, begin=10)
    assert group.add(1) == [11, 11] and group.add(number=2) == [13, 13]


def test_modes_without_rows(start):
    group = start(Counter)
    assert group.echo(1, two=2) == [((1,), {"two": 2})] * 2
    assert group.echo([1, 2], two=["a", "b"]) == [((1,), {"two": "a"}), ((2,), {"two": "b"})]
    assert group.first("hello") == "hello from 0" and group.zero("hello") == "hello to 0"
    assert group.own([1, 2]) == [10, 21]


def test_calls_by_name(start):
    group = start(Counter)
    group.reset()
    assert group.execute_all_sync("add", 3) == [3, 3] and group.execute_all_sync("add", [1, 2]) == [4, 5]
    assert group.execute_rank_zero_sync("add", 1) == 5
    assert group.wait(group.execute_all_async("add", 0)) == [5, 5]
    assert group.wait([group.execute_rank_zero_async("add", 0)]) == [5]


def test_async_methods_are_waited_for(start):
    assert start(Counter).later(0.01) == [0, 1]


def test_a_call_that_does_not_block_gives_futures(start):
    group = start(Counter)
    futures = group.slow_rank(0.1)
    assert len(futures) == 2 and group.wait(futures) == [0, 1]


def planned(lengths, mini=None, name="shared"):
    """A batch of rows of these lengths that says how a call is to be cut."""
    width = max(lengths)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    data = rows(len(lengths), attention_mask=mask, input_ids=mask, responses=mask[:, 1:], response_mask=mask[:, 1:])
    data.partition_plan = PartitionPlan({name: CallPlan(True, mini)}, RowCost(10))
    return data


def test_a_batch_is_cut_as_it_says_and_its_rows_come_back_in_order(start):
    data = planned([2, 9, 2, 2, 3, 2])
    for ranks in (2, 3):  # the same batch for groups of other sizes
        group = start(Splitter, ranks)
        assert flat(group.shared(data)) == [0, 2, 4, 6, 8, 10]
        shares = [share for share, _, _ in group.last_share()]
        assert shares[0] == [1] and sorted(row for share in shares for row in share) == [0, 1, 2, 3, 4, 5]
    assert flat(data) == [0, 1, 2, 3, 4, 5] and data.partition_plan is not None
    assert flat(start(Splitter).tag(data.select(["x"])), "rank") == [0, 0, 0, 1, 1, 1]  # a verb the plan does not know


def test_ranks_without_a_row_in_a_step_get_one_that_trains_nothing(start):
    data = planned([4, 3, 2], MiniBatches(2))
    group = start(Splitter, 3)
    group.shared(data)
    by_rank = group.last_share()
    assert [steps for _, steps, _ in by_rank] == [[[0], [2]], [[1], [2]], [[2], [2]]]
    assert [masked for _, _, masked in by_rank] == [[3, 1], [2, 0], [0]]


def test_what_is_worked_on_twice_comes_back_as_it_is(start_local):
    group = start_local(Splitter)
    result = group.shared(planned([2] * 8, MiniBatches(4, epochs=2, shuffle=True, seed=1)))
    by_rank = group.last_share()
    assert len(result) == sum(len(share) for share, _, _ in by_rank) > 8
    assert all(len(steps) == 4 for _, steps, _ in by_rank)


def test_threads_of_the_driver_may_call_the_same_group(start_local):
    group = start_local(Splitter)

    def work(i):
        data = DataProto.from_dict({"x": torch.full((4, 10_000), float(i))})
        return all(flat(group.big(data), "y")[0] == i for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_functions_of_a_module_can_be_sent(start):
    group = start(Splitter)
    assert group.execute_func_rank_zero(os.path.join, "a", "b") == "a/b"
    tagged = group.execute_with_func_generator(Splitter.tag, rows(4))
    assert flat(tagged, "rank") == [0, 0, 1, 1]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_rows_are_split_joined_in_order_and_padding_never_seen(start, count):
    tagged = start(Splitter).tag(rows(count))
    assert flat(tagged) == [2.0 * i for i in range(count)]
    assert tagged.non_tensor_batch["name"].tolist() == [f"row {i}" for i in range(count)]
    assert sorted(set(flat(tagged, "rank"))) == list(range(min(count, 2)))


def test_only_declared_columns_travel(start):
    group = start(Splitter)
    before = group.traffic.sent["Splitter", "seen"], group.traffic.nbytes
    seen = group.seen(rows(2, big=torch.zeros(2, 1000))).non_tensor_batch["seen"]
    sent, received = group.traffic.sent["Splitter", "seen"], group.traffic.received["Splitter", "seen"]
    assert 2 * 8 < sent - before[0] < 2 * 4000 and received and group.traffic.nbytes > before[1]
    assert seen.tolist() == [["x", "name", "step"]] * 2


def test_batches_of_other_nodes_go_through_the_object_store_as_they_are(controller, start, monkeypatch):
    if controller.name == "local":
        pytest.skip("all of its ranks share memory with the driver")
    group = start(Splitter)
    before = group.traffic.nbytes
    near = group.tag(rows(4))
    near_bytes, before = group.traffic.nbytes - before, group.traffic.nbytes
    monkeypatch.setattr(group._hosts, "_endpoints", {})
    far = group.tag(rows(4))
    assert flat(near, "rank") == flat(far, "rank") and flat(near) == flat(far) == [0.0, 2.0, 4.0, 6.0]
    assert abs(group.traffic.nbytes - before - near_bytes) < 200  # arguments are packed together where memory is shared
    assert group.metrics_only(rows(3)).meta_info["metrics"]["rows"] == [2]
    assert flat(group.promised(rows(3)).get()) == [1.0, 2.0, 3.0]


def test_padding_rows_have_no_mask(start):
    mask = torch.ones(3, 4, dtype=torch.long)
    masks = start(Splitter).masks(rows(3, response_mask=mask, loss_mask=mask))
    assert masks == [{"response_mask": [4, 4], "loss_mask": [4, 4]}, {"response_mask": [4, 0], "loss_mask": [4, 0]}]


def test_a_result_without_rows_keeps_its_metadata(start):
    assert start(Splitter).metrics_only(rows(3)).meta_info["metrics"]["rows"] == [2]


def test_several_batches_of_a_call_are_split_alike(start):
    result = start(Splitter).both(rows(3), 10, right=rows(3))
    assert flat(result) == [0.0, 11.0, 22.0]


def test_one_local_rank_splits_and_promises_like_many(start_local):
    group = start_local(Splitter, 1)
    assert flat(group.tag(rows(3))) == [0.0, 2.0, 4.0]
    assert flat(group.promised(rows(3)).chunk(3)[2].get()) == [3.0]
    assert group.seen(rows(1, big=torch.zeros(1, 9))).non_tensor_batch["seen"].tolist() == [["x", "name", "step"]]


def test_other_processes_cannot_change_what_the_driver_sent(start):
    data = rows(4, wide=torch.zeros(4, 20_000))
    spoilt = start(Splitter).spoil(data)
    assert flat(spoilt) == [100.0, 101.0, 102.0, 103.0]
    assert flat(data) == [0.0, 1.0, 2.0, 3.0]
    assert data.non_tensor_batch["name"][0] == "row 0" and "spoilt" not in data.meta_info


def test_a_worker_may_keep_what_it_was_sent(start):
    group = start(Splitter)
    group.keep(rows(2, wide=torch.zeros(2, 20_000)))
    group.keep(DataProto.from_dict({"x": torch.full((2, 20_000), 1.5)}))
    for _ in range(3):
        group.big(DataProto.from_dict({"x": torch.full((2, 20_000), 9.0)}))
    assert group.kept_sum() == [30_000.0, 30_000.0]


def test_results_stay_what_they_were_when_more_results_come(start):
    group = start(Splitter)
    results = [group.big(DataProto.from_dict({"x": torch.full((2, 20_000), float(i))})) for i in range(4)]
    assert [flat(result, "y")[0] for result in results] == [0.0, 1.0, 2.0, 3.0]
    assert [flat(result, "y")[-1] for result in results] == [0.0, 1.0, 2.0, 3.0]


def test_a_promised_batch_can_be_waited_for_cut_and_passed_on(start):
    group = start(Splitter)
    future = group.promised(rows(3))
    assert isinstance(future, DataProtoFuture)
    assert flat(future.get()) == [1.0, 2.0, 3.0] and flat(future.get()) == [1.0, 2.0, 3.0]
    assert [flat(part.get()) for part in future.chunk(3)] == [[1.0], [2.0], [3.0]]
    assert flat(group.promised(group.promised(rows(3))).get()) == [2.0, 3.0, 4.0]


def test_a_mesh_decides_who_gets_and_who_answers(start_local):
    group = start_local(MeshWorker, 4)
    assert group.mesh("actor").dp_ranks == (0, 1, 2, 3)  # not registered yet: the whole world
    group.init_model()
    assert (group.mesh("actor").dp_ranks, group.mesh("actor").sources) == ((0, 0, 1, 1), (1, 3))
    tagged = group.tag(rows(5))
    assert flat(tagged) == [0.0, 1.0, 2.0, 3.0, 4.0] and flat(tagged, "rank") == [1, 1, 1, 3, 3]
    assert group.rows_seen() == [3, 3, 3, 3]
    assert group.own(["a", "b"]) == [(1, "a"), (3, "b")]
    assert flat(group.tag_as_megatron(rows(2)), "rank") == [1, 3]
    group.register_again()
    with pytest.raises(ValueError, match=r"\['actor', 'critic'\]"):
        group.tag_as_megatron(rows(2))


@pytest.mark.parametrize("world_size", [1, 2])
def test_colocated_roles_share_processes_and_nothing_else(controller, world_size):
    new = controller.ClassWithInitArgs
    classes = controller.create_colocated_worker_cls({"actor": new(Counter, begin=1), "critic": new(Counter, begin=2)})
    both = controller.WorkerGroup(resource_pool=controller.ResourcePool([world_size]), ray_cls_with_init=classes)
    roles = both.spawn(prefix_set={"actor", "critic"})
    actor, critic = roles["actor"], roles["critic"]
    assert actor.add(10) == [11] * world_size and critic.add(10) == [12] * world_size
    assert [p["pid"] for p in actor.place()] == [p["pid"] for p in critic.place()]
    assert actor.siblings() == [(["actor", "critic"], [11, 12])] * world_size
    assert both.critic_add(1) == [13] * world_size
    both.fuse({"critic"})
    assert both.critic.add(1) == [14] * world_size
    with pytest.raises(ValueError, match="'reward'.*holds.*actor"):
        both.spawn({"reward"})
    with pytest.raises(ValueError, match="spawn"):
        both.execute_all_sync("add", 1)
    both.stop()


def test_a_group_needs_a_pool_with_processes(controller):
    classes = controller.ClassWithInitArgs(Counter)
    with pytest.raises(ValueError, match="no processes"):
        controller.WorkerGroup(controller.ResourcePool([]), classes)
    with pytest.raises(ValueError, match="at least 1"):
        controller.ResourcePool([2, 0])
    with pytest.raises(ValueError, match="resource_pool and cls_with_init"):
        controller.WorkerGroup(controller.ResourcePool([1]))


def test_a_method_may_not_take_a_name_of_the_group(local_controller):
    class Stopper(Counter):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def stop(self):
            return "stopped"

    classes = local_controller.ClassWithInitArgs(Stopper)
    with pytest.raises(ValueError, match="Stopper.stop: a group has a stop of its own"):
        local_controller.WorkerGroup(local_controller.ResourcePool([1]), classes)

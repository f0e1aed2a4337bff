import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from verl.checkpoint.rank_files import open_file
from verl.checkpoint.shards import Joined, fill, flat_piece, join, join_optimizer, share_like
from verl.utils.fsdp_utils import create_device_mesh

SHAPES = {"even": (8, 2), "uneven": (7, 3), "fewer rows than ranks": (3, 5), "vector": (5,), "one": (1,)}


def wholes():
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=draw) for name, shape in SHAPES.items()}


def laid_out(ranks, fsdp_size):
    mesh = create_device_mesh(ranks, fsdp_size, "cpu")
    return mesh, [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]


def _save(folder, ranks, fsdp_size):
    mesh, placements = laid_out(ranks, fsdp_size)
    state = {name: distribute_tensor(whole, mesh, placements) for name, whole in wholes().items()}
    state["step"] = torch.tensor(3.0)
    torch.save(state, folder / f"{mesh.get_rank()}.pt")


@pytest.mark.parametrize(("ranks", "fsdp_size"), [(2, -1), (4, -1), (4, 2)])
def test_slices_of_all_ranks_make_the_whole_in_a_process_without_a_group(tmp_path, capfd, ranks, fsdp_size):
    run_ranks(ranks, _save, tmp_path, ranks, fsdp_size)
    joined = Joined([open_file(tmp_path / f"{rank}.pt", mmap=True) for rank in range(ranks)])
    assert list(joined) == [*SHAPES, "step"] and joined["step"] == 3
    for name, whole in wholes().items():
        assert type(joined[name]) is torch.Tensor and torch.equal(joined[name], whole), name
    assert "DeviceMesh" not in capfd.readouterr().err


def _share(ranks, fsdp_size):
    mesh, placements = laid_out(ranks, fsdp_size)
    for name, whole in wholes().items():
        expected = distribute_tensor(whole, mesh, placements)
        found = share_like(expected, whole)
        assert isinstance(found, DTensor) and found.placements == expected.placements and found.shape == expected.shape
        assert torch.equal(found.to_local(), expected.to_local()), name
        assert torch.equal(found.full_tensor(), whole), name
        own = distribute_tensor(torch.zeros_like(whole), mesh, placements)
        fill(own, whole)
        assert torch.equal(own.full_tensor(), whole), name


def test_a_rank_takes_its_own_slice_of_a_whole_tensor():
    run_ranks(4, _share, 4, -1)
    run_ranks(4, _share, 4, 2)


def test_flat_ranges_make_the_whole_however_they_are_cut():
    whole = torch.arange(12.0).view(3, 4)
    row = whole.flatten()
    for cuts in ([0, 6, 12], [0, 1, 1, 12], [0, 5, 7, 9, 12]):
        pieces = [
            flat_piece(row[begin:end], begin, whole.shape) for begin, end in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        assert torch.equal(join(pieces), whole)
        assert torch.equal(join([None, *reversed(pieces), *pieces]), whole)  # replicas, a rank without a part


def test_an_optimizer_is_joined_by_parameter_name():
    row = torch.arange(6.0)
    ranks = [
        {
            "state": {"w": {"exp_avg": flat_piece(row[begin:end], begin, (2, 3)), "step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.1, "params": ["w"]}],
        }
        for begin, end in ((0, 2), (2, 6))
    ]
    joined = join_optimizer(ranks)
    assert torch.equal(joined["state"]["w"]["exp_avg"], row.view(2, 3)) and joined["state"]["w"]["step"] == 4
    assert joined["param_groups"] == [{"lr": 0.1, "params": ["w"]}]


def test_parameters_that_shared_a_step_count_their_own_when_joined():
    step = torch.tensor(4.0)
    ranks = [{"state": {name: {"step": step} for name in "ab"}, "param_groups": []}] * 2
    joined = join_optimizer(ranks)
    steps = [joined["state"][name]["step"] for name in "ab"]
    steps[0] += 1
    assert (steps[1], step) == (4, 4)


def test_what_does_not_fit_together_is_said():
    row = torch.arange(6.0)
    with pytest.raises(ValueError, match="hold 4 of the 6 numbers of w"):
        join([flat_piece(row[:4], 0, (6,))], "w")
    with pytest.raises(ValueError, match="shape of w differs between the ranks' files"):
        join([torch.zeros(2), torch.zeros(3)], "w")
    with pytest.raises(ValueError, match=r"w has shape \(3,\) in the checkpoint and \(2,\) in this model"):
        fill(torch.zeros(2), torch.zeros(3), "w")

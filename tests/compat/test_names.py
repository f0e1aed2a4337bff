"""What the names that recipes import do, other than being there (``tests/test_public_surface.py``)."""

import time
from dataclasses import FrozenInstanceError, dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.support import FILES
from tests.support.ranks import run_ranks
from verl.base_config import BaseConfig
from verl.single_controller.base import ResourcePool
from verl.single_controller.base.decorator import Dispatch
from verl.single_controller.local import LocalWorkerGroup
from verl.utils import fsdp_utils, ulysses
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.debug import performance
from verl.utils.profiler import DistProfiler
from verl.utils.py_functional import append_to_dict, timeout_limit
from verl.utils.tokenizer import hf_tokenizer


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FILES))


# -- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class Mine(BaseConfig):
    """A section of a project's."""

    _mutable_fields = {"steps"}
    rate: float = 0.5
    steps: int = 1
    names: list = field(default_factory=list)

    def __post_init__(self):
        self.half = self.rate / 2

    @property
    def double(self):
        return self.rate * 2


def test_a_section_class_of_a_projects_derives_attributes_and_is_read_like_a_dict():
    config = Mine(rate=1.0)
    assert config.half == config["half"] == 0.5 and config["double"] == config.get("double") == 2.0
    assert config.get("nothing", 7) == 7 and "rate" in config and list(config) == ["rate", "steps", "names"]
    config.steps = 5
    assert config["steps"] == 5
    for name in ("rate", "half"):
        with pytest.raises(FrozenInstanceError):
            setattr(config, name, 2.0)
    with pytest.raises(KeyError):
        config["nothing"]


def test_a_section_of_hydras_tree_becomes_its_dataclass_lists_and_all():
    from omegaconf import OmegaConf

    from verl.utils.config import omega_conf_to_dataclass, typed_section
    from verl.workers.config import FSDPOptimizerConfig

    tree = OmegaConf.create({"lr": "1e-3", "betas": [0.8, "${lr}"]})
    assert omega_conf_to_dataclass(tree, FSDPOptimizerConfig).betas == [0.8, 1e-3]
    tree.my_own = 1
    assert typed_section(tree, FSDPOptimizerConfig).lr == 1e-3  # a script's own keys stay with the script
    tree.lr = "fast"
    with pytest.raises(ValueError, match="lr=fast must be a number"):
        typed_section(tree, FSDPOptimizerConfig)


def test_dispatch_modes_can_be_looked_up_and_taken_out():
    assert Dispatch.from_name("one_to_all") is Dispatch.ONE_TO_ALL and Dispatch.from_name("nothing") is None
    mine = Dispatch.register("MY_OWN")
    assert Dispatch.remove("my_own") is mine and "MY_OWN" not in Dispatch
    assert Dispatch.register("MY_OWN").value not in {member.value for member in Dispatch if member.name != "MY_OWN"}
    Dispatch.remove("MY_OWN")


# -- workers ----------------------------------------------------------------------------------------------------------


def test_a_fused_class_holds_its_roles_and_has_methods_of_its_own():
    from my_fused import Hybrid, class_dict

    from verl.single_controller.base import ClassWithInitArgs

    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Hybrid))
    try:
        group.fuse(class_dict.keys())
        assert group.both(1.0) == [-9.0, -8.0]  # + rank, - 10
        assert group.actor.add(1.0) == [1.0, 2.0] and group.critic.subtract(1.0) == [-9.0, -9.0]
        assert group.spell(2.0) == [2.0, 3.0]
    finally:
        group.stop()


@pytest.mark.ray
def test_a_fused_class_runs_in_actors_of_ray():
    import my_fused
    import ray

    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import RayController

    controller = RayController()
    controller.start({}, {"PYTHONPATH": str(FILES)})
    try:
        wrapped = RayClassWithInitArgs(cls=ray.remote(my_fused.Hybrid))
        wrapped.fused_worker_used = True
        group = RayWorkerGroup(RayResourcePool([2], use_gpu=False, max_colocate_count=1), wrapped)
        group.fuse(my_fused.class_dict.keys())
        assert group.both(1.0) == [-9.0, -8.0] and group.actor.add(1.0) == [1.0, 2.0]
    finally:
        controller.stop()


# -- small functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_signals", [False, True])
def test_a_limit_of_time_raises_and_lets_results_and_errors_through(use_signals):
    @timeout_limit(seconds=0.2, use_signals=use_signals)
    def work(seconds, fails=False):
        time.sleep(seconds)
        return 1 / (not fails)

    assert work(0) == 1.0
    with pytest.raises(ZeroDivisionError):
        work(0, fails=True)
    with pytest.raises(TimeoutError, match="work took longer than 0.2 s"):
        work(2)


def test_a_prefix_is_put_before_keys_that_lack_it():
    data = {"actor/x": [1]}
    append_to_dict(data, {"x": 2, "actor/x": 3, "y": 4}, prefix="actor/")
    assert data == {"actor/x": [1, 2, 3], "actor/y": [4]}


def _share_sequence():
    group, rank = dist.group.WORLD, dist.get_rank()
    ulysses.set_ulysses_sequence_parallel_group(group)
    ids, positions = torch.arange(5)[None], torch.arange(5)[None]
    mine, whole, pad = ulysses.ulysses_pad_and_slice_inputs(ids, positions, sp_size=2)
    x = mine.float().requires_grad_()
    gathered = ulysses.gather_outputs_and_unpad(x, gather_dim=1, unpad_dim=1, padding_size=pad)
    (gathered * torch.arange(1.0, 6.0)).sum().backward()
    times = performance.reduce_timing({"gen": 1.0 + rank})
    spread = performance.topk_reduce_ratio_min_max(1.0 + rank, k=50)
    mesh = fsdp_utils.create_device_mesh(2, -1)
    with fsdp_utils.get_init_weight_context_manager(mesh=mesh)():
        layer = nn.Linear(2, 2)
    is_meta = layer.weight.is_meta
    fsdp_utils.init_fn(layer)
    strategy = fsdp_utils.get_sharding_strategy(mesh).name
    results = (mine.tolist(), whole.tolist(), pad, gathered.tolist(), x.grad.tolist(), times, spread)
    return (*results, is_meta, layer.weight.is_meta, strategy)


def test_two_ranks_share_a_sequence_times_and_the_reading_of_weights():
    first, second = run_ranks(2, _share_sequence)
    assert first[0] == [[0, 1, 2]] and second[0] == [[3, 4, 0]] and first[1] == [[0, 1, 2, 3, 4, 0]] and first[2] == 1
    assert first[3] == second[3] == [[0, 1, 2, 3, 4]]
    assert first[4] == [[2, 4, 6]] and second[4] == [[8, 10, 0]]  # times the two ranks that will be averaged over
    assert first[5] == second[5] == {"gen": 1.5} and first[6] == (0.5, 1.0, 2.0)
    assert (first[7], second[7]) == (False, True) and not first[8] and not second[8] and first[9] == "FULL_SHARD"


def test_without_a_group_sequences_are_whole():
    ulysses.set_ulysses_sequence_parallel_group(None)
    x = torch.zeros(1, 3)
    assert ulysses.gather_outputs_and_unpad(x, 0) is x and ulysses.get_ulysses_sequence_parallel_world_size() == 1
    assert performance.reduce_timing({"a": 1.0}) == {"a": 1.0}
    assert performance.topk_reduce_ratio_min_max(1.0) == (-1.0, -1.0, -1.0)


def test_a_wrap_policy_takes_the_layers_of_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    policy = fsdp_utils.get_fsdp_wrap_policy(model, {"transformer_layer_cls_to_wrap": ["Linear"]})
    assert policy._lambda_fn(model[0]) and not policy._lambda_fn(model[1])
    assert fsdp_utils.get_fsdp_wrap_policy(model, {"disable": True}) is None


def test_a_profiler_follows_its_ranks_and_marks_functions():
    chosen = DistProfiler(1, SimpleNamespace(all_ranks=False, ranks=[1]))
    assert chosen.check_enable() and not DistProfiler(0, SimpleNamespace(all_ranks=False, ranks=[1])).check_enable()
    chosen.start()
    chosen.stop()

    @DistProfiler.annotate(color="red")
    def double(x):
        return 2 * x

    assert double(2) == 4 and double.__name__ == "double" and not DistProfiler(0).check_enable()


def test_a_program_is_run_against_its_tests_with_verls_codes():
    from verl.utils.reward_score.prime_code.testing_util import run_test

    tests = {"inputs": ["1\n", "2\n", "x\n"], "outputs": ["2", "5", "0"]}
    codes, details = run_test(tests, "print(int(input()) * 2)", timeout=5)
    assert codes == [True, False, -2] and details["error_message"] == "wrong"
    assert run_test(tests) == ([], {})


def test_positions_for_a_data_set_are_those_the_model_makes(tmp_path):
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    from verl.models.transformers.qwen2_vl import get_rope_index

    tokens = {"<|image_pad|>": 5, "<|video_pad|>": 6, "<|vision_start|>": 7}
    tokenizer = SimpleNamespace(convert_tokens_to_ids=tokens.__getitem__)
    processor = SimpleNamespace(tokenizer=tokenizer, image_processor=SimpleNamespace(merge_size=2))
    ids = torch.tensor([0, 0, 1, 7, *[5] * 6, 2, 3, 7, *[6] * 4, 4])
    mask = (torch.arange(len(ids)) >= 2).long()
    images, videos = torch.tensor([[1, 4, 6]]), torch.tensor([[2, 2, 4]])
    made = get_rope_index(processor, ids, images, videos, attention_mask=mask)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2VLConfig(
        text_config={**small, "vocab_size": 16, "num_key_value_heads": 1},
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 1, "spatial_merge_size": 2},
        image_token_id=5, video_token_id=6, vision_start_token_id=7,
    )  # fmt: skip
    from verl.models.multimodal import vision_positions

    model = Qwen2VLForConditionalGeneration(config)
    inputs = {"image_grid_thw": images, "video_grid_thw": videos}
    expected, _ = vision_positions(model, ids[None], inputs, mask[None])
    assert made[:, 2:].tolist() == expected[:, 0, 2:].tolist() and made[:, :2].eq(1).all()
    assert get_rope_index(processor, torch.arange(3)).tolist() == [[0, 1, 2]] * 3


def test_the_generation_config_of_a_folder_or_of_its_model(task, tmp_path):
    from verl.utils.model import get_generation_config

    assert get_generation_config(task["actor_rollout_ref.model.path"]).eos_token_id is not None
    assert get_generation_config(str(tmp_path / "nothing")) is None


def test_a_worker_that_holds_its_model_saves_and_loads_it(task, tmp_path):
    from transformers import AutoModelForCausalLM

    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    def held(lr):
        model = AutoModelForCausalLM.from_pretrained(task["actor_rollout_ref.model.path"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        contents = SimpleNamespace(save_contents=["model", "optimizer", "extra", "hf_model"], load_contents=None)
        return model, optimizer, FSDPCheckpointManager(model, optimizer, schedule, checkpoint_config=contents)

    model, optimizer, manager = held(lr=0.1)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    manager.save_checkpoint(local_path=tmp_path / "global_step_1" / "actor", global_step=1, max_ckpt_to_keep=1)
    again, other, reader = held(lr=0.5)
    reader.load_checkpoint(local_path=tmp_path / "global_step_1" / "actor")
    for name, tensor in model.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert moments and all(a.equal(b["exp_avg"]) for a, b in zip(moments, other.state.values(), strict=True))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_1" / "actor" / "huggingface")
    assert exported.lm_head.weight.equal(model.lm_head.weight)


# -- data sets --------------------------------------------------------------------------------------------------------


class WantsKey(RLHFDataset):
    def _build_messages(self, example, key):
        return [{"role": "user", "content": f"From {key}: {example.pop(key)[0]['content']}"}]


class AsksBase(RLHFDataset):
    def __getitem__(self, item):
        row = dict(self.dataframe[item])
        assert super()._build_messages(row) == super()._build_messages(row, key="prompt")
        return {"messages": self._build_messages(row, key=self.prompt_key)}


def test_messages_are_built_with_and_without_the_name_of_their_column(task):
    tokenizer = hf_tokenizer(task["actor_rollout_ref.model.path"])
    config = {"max_prompt_length": 64, "return_raw_chat": True}
    rows = WantsKey(task["data.val_files"], tokenizer, config)
    assert rows[0]["raw_prompt"][0]["content"].startswith("From prompt: Say something")
    rows = AsksBase(task["data.val_files"], tokenizer, config)
    assert rows[0]["messages"][0]["content"].startswith("Say something")
    rows.resume_dataset_state()
    assert len(rows) == 8

"""The names user code imports, and what importing verl costs."""

import csv
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from verl import compat
from verl.config.features import features

with open(Path(__file__).parent / "public_names.tsv", encoding="utf-8") as table:
    NAMES = {row["name"]: row for row in csv.DictReader(table, delimiter="\t")}
"""What recipes and examples of verl import: name -> its parameters and methods, "-" where none are known."""

NOT_BUILT = {  # name, or the module it is in -> the words that say which feature it belongs to
    "verl.experimental.agent_loop.tool_agent_loop.AgentData": "state machine",
    "verl.experimental.agent_loop.tool_agent_loop.AgentState": "state machine",
    "verl.models.mcore": "Megatron",
    "verl.models.transformers.monkey_patch": "patches of transformers models",
    "verl.third_party": "copies of engine internals",
    "verl.utils.megatron_utils": "Megatron",
    "verl.utils.vllm": "rollout engines",
    "verl.utils.vllm_utils": "rollout engines",
    "verl.workers.actor": "DataParallelPPOActor",
    "verl.workers.rollout.async_server": "schedulers and callbacks",
    "verl.workers.rollout.schemas": "schedulers and callbacks",
    "verl.workers.rollout.vllm_rollout": "rollout engines",
    "verl.workers.sharding_manager": "sharding managers",
}
OTHER_PARAMETERS = {
    "verl.experimental.agent_loop.agent_loop.AsyncLLMServerManager": "made by the trainer only, for each row",
}
OTHER_METHODS = {
    "rollout_mode trainer_mode": "workers switch within generate_sequences",
    "start_profile stop_profile dump_memory_snapshot": "for DistProfilerExtension",
    "load_pretrained_model": "init_model does it",
    "wake_up sleep get_zeromq_address chat_completion generate": "of servers inside of workers, which a client asks",
    "log_generations_to_vemlp_wandb": "a logger that is not built says so",
}


def feature_of(name: str) -> str | None:
    return next((words for prefix, words in NOT_BUILT.items() if f"{name}.".startswith(f"{prefix}.")), None)


HERE = [name for name in NAMES if feature_of(name) is None]


def found(name: str):
    """The module or the object at a dotted address, as an import statement finds it."""
    module, _, last = name.rpartition(".")
    namespace: dict = {}
    exec(f"from {module} import {last}", namespace)
    return namespace[last]


@pytest.mark.parametrize("name", HERE)
def test_a_name_that_recipes_import_is_here_and_takes_their_arguments(name):
    thing, row = found(name), NAMES[name]
    absent = [method for method in row["methods"].split() if not hasattr(thing, method)]
    assert not set(absent) - {method for methods in OTHER_METHODS for method in methods.split()}
    if row["parameters"] == "-" or name in OTHER_PARAMETERS:
        return
    parameters = inspect.signature(thing).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    expected = row["parameters"].split()
    named = [parameter for parameter in expected if not parameter.startswith("*")]
    assert [parameter for parameter in parameters if parameter in named] == named
    assert takes_all or all(p.default is not p.empty for name, p in parameters.items() if name not in named)


@pytest.mark.parametrize("name", [name for name in NAMES if feature_of(name)])
def test_a_name_whose_feature_is_not_built_says_so_on_import(name):
    with pytest.raises(ImportError) as error:
        found(name)
    text = str(error.value)
    assert "that is not built" in text and feature_of(name) in text and "No module named" not in text
    assert isinstance(error.value, NotImplementedError) and len(text.split(". ")) > 1  # and says what to do instead


@pytest.mark.parametrize(
    "statement", ["import verl.third_party", "from verl import third_party", "from verl.utils import megatron"]
)
def test_every_form_of_import_says_the_feature(statement):
    with pytest.raises(ImportError, match="asks for .*: that is not built"):
        exec(statement)


def test_a_name_of_a_module_that_is_here_says_its_feature_too():
    with pytest.raises(ImportError, match="TorchtitanEngineConfig asks for .*TorchTitan.*that is not built"):
        exec("from verl.workers.config import TorchtitanEngineConfig")
    with pytest.raises(ImportError, match="training of reward models"):
        exec("from verl.utils.dataset import RMDataset")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from verl.workers.config import nonsense")
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl.nonsense'"):
        exec("import verl.nonsense")


def test_megatrons_names_of_sections_are_sections_on_megatron():
    from verl.workers.config import ActorConfig, McoreActorConfig, McoreCriticConfig, McoreRewardModelConfig

    for section in (McoreActorConfig, McoreCriticConfig, McoreRewardModelConfig):
        assert section().strategy == "megatron"
    assert isinstance(McoreActorConfig(), ActorConfig)


def test_a_module_run_from_the_command_line_says_its_feature():
    result = subprocess.run([sys.executable, "-m", "verl.utils.npu"], capture_output=True, text=True)
    assert result.returncode and "Ascend NPUs" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("address", compat.ADDRESSES)
def test_an_address_shows_the_names_of_the_module_it_stands_for(address):
    if "ray" in address:
        pytest.importorskip("ray")
    module, source = importlib.import_module(address), importlib.import_module(compat.ADDRESSES[address])
    names = [name for name in getattr(module, "__all__", dir(module)) if hasattr(source, name)]
    assert names
    for name in names:
        ours = getattr(source, name)  # a module is an address of its own
        assert inspect.ismodule(ours) or getattr(module, name) is ours
    assert importlib.import_module(address) is module


def test_no_file_of_ours_is_hidden_by_the_table():
    root = Path(compat.__file__).parents[1]
    for name in {*compat.ADDRESSES, *(module for feature in features() for module in feature.modules)}:
        place = root.joinpath(*name.split("."))
        assert not place.with_suffix(".py").exists() and not (place / "__init__.py").exists(), name


# -- names other than those of the table ------------------------------------------------------------------------------

SURFACE = {
    "verl": "DataProto Trainer __version__ make_config",
    "verl.agent_loop": "AgentLoopBase AgentLoopMetrics AgentLoopOutput register",
    "verl.protocol": "DataProto DataProtoItem DataProtoFuture pad_dataproto_to_divisor unpad_dataproto collate_fn "
    "union_tensor_dict union_numpy_dict list_of_dict_to_dict_of_list fold_batch_dim unfold_batch_dim DataProtoConfig",
    "verl.base_config": "BaseConfig",
    "verl.single_controller.base.decorator": "register Dispatch Execute register_dispatch_mode "
    "get_predefined_dispatch_fn get_predefined_execute_fn make_nd_compute_dataproto_dispatch_fn",
    "verl.single_controller.ray.base": "create_colocated_worker_cls create_colocated_worker_raw_cls RayResourcePool "
    "merge_resource_pool",
    "verl.trainer.config": "AlgoConfig KLControlConfig CheckpointConfig",
    "verl.trainer.main_ppo": "main run_ppo TaskRunner get_ppo_ray_runtime_env",
    "verl.trainer.ppo.core_algos": "compute_gae_advantage_return compute_grpo_outcome_advantage compute_policy_loss "
    "compute_value_loss get_kl_controller register_adv_est get_adv_estimator_fn register_policy_loss "
    "get_policy_loss_fn AdaptiveKLController FixedKLController ADV_ESTIMATOR_REGISTRY POLICY_LOSS_REGISTRY",
    "verl.trainer.ppo.ray_trainer": "DataProto agg_loss _timer core_algos compute_reward reduce_metrics "
    "compute_throughout_metrics need_critic",
    "verl.trainer.ppo.reward": "extract_reward",
    "verl.trainer.ppo.utils": "need_critic",
    "verl.utils.checkpoint.checkpoint_manager": "get_checkpoint_tracker_filename should_save_ckpt_esi",
    "verl.utils.device": "auto_set_device",
    "verl.utils.fs": "local_mkdir_safe exists",
    "verl.utils.torch_functional": "masked_whiten logprobs_from_logits entropy_from_logits postprocess_data "
    "pad_sequence_to_length get_cosine_schedule_with_warmup",
    "verl.utils.ulysses": "get_ulysses_sequence_parallel_group set_ulysses_sequence_parallel_group "
    "get_ulysses_sequence_parallel_rank get_ulysses_sequence_parallel_world_size slice_input_tensor ulysses_pad",
    "verl.workers.config": "FSDPCriticConfig FSDPEngineConfig FSDPOptimizerConfig PolicyLossConfig",
    "verl.workers.megatron_workers": "ActorRolloutRefWorker AsyncActorRolloutRefWorker CriticWorker RewardModelWorker",
    "verl.workers.reward_manager": "BatchRewardManager",
    "verl.workers.rollout.replica": "TokenOutput",
    "verl.experimental.dataset.sampler": "AbstractSampler AbstractCurriculumSampler",
}


@pytest.mark.parametrize("module", SURFACE)
def test_public_names_stand_at_their_address(module):
    loaded = importlib.import_module(module)
    missing = [name for name in SURFACE[module].split() if not hasattr(loaded, name)]
    assert not missing, f"{module} lacks {missing}"


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_verl_imports_nothing_heavy():
    assert not modules_after("import verl") & {"torch", "ray", "transformers", "tensordict", "hydra", "numpy"}


def test_the_config_is_read_without_torch_or_ray():
    loaded = modules_after("import verl.trainer.main_ppo")
    assert not loaded & {"torch", "ray", "transformers", "tensordict", "hydra"}


def test_the_local_controller_never_imports_ray():
    assert "ray" not in modules_after("from verl.single_controller import get_controller; get_controller('local')")

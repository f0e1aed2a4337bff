"""The first lines of a run."""

import torch
from safetensors.torch import save_file

from tests.support.runs import make_task, overrides
from verl.config.load import load_ppo_config
from verl.trainer.ppo.job import PPOJob, run_plan, stored_parameters
from verl.utils.tiny_model import make_digit_judge


def test_the_first_lines_say_what_will_happen(tmp_path):
    task = make_task(tmp_path / "task")
    judge = make_digit_judge(tmp_path / "judge")
    config = load_ppo_config(
        overrides(
            task,
            algorithm__adv_estimator="gae",
            critic__ppo_micro_batch_size_per_gpu=8,
            critic__model__path=judge,
            reward_model__enable=True,
            reward_model__model__path=judge,
            reward_model__micro_batch_size_per_gpu=8,
            data__return_raw_chat=True,
            trainer__total_training_steps=8,
            trainer__test_freq=4,
            trainer__default_local_dir=tmp_path / "run",
        )
    )
    number = stored_parameters(str(tmp_path / "task" / "model"))
    model = f"{tmp_path}/task/model, {number / 1e3:.1f}K parameters"
    in_judge = f"{stored_parameters(judge) / 1e3:.2f}K"
    assert run_plan(PPOJob(config).build_trainer()).splitlines() == [
        f"model    {model}",
        f"critic   {judge}, {in_judge} parameters, value head from there",
        f"rewards  {judge}, {in_judge} parameters",
        "data     64 prompts to train on, 8 to validate",
        "step     4 prompts x 4 responses of up to 12 tokens; gae; 1 optimizer step",
        "run      8 steps (0.5 epochs); validation every 4 steps, no checkpoint",
        "on       cpu, 1 rank, local, controller local",
        f"results  {tmp_path}/run",
    ]
    on_megatron = config.with_values({"actor_rollout_ref.actor.strategy": "megatron"})
    lines = run_plan(PPOJob(on_megatron).build_trainer()).splitlines()
    assert lines[-2].startswith("megatron tp 1 x pp 1 x cp 1 x dp 1; as in our tests")


def test_parameters_are_counted_from_the_files_of_a_model(tmp_path):
    weights = {"a": torch.zeros(3, 4), "b": torch.zeros(5)}
    save_file(weights, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"c": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    assert stored_parameters(str(tmp_path)) == 19
    assert stored_parameters("some/hub-id") is None

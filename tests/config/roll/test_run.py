"""A ROLL file trains, on a CPU and without Ray, through the command a user types."""

import json
import textwrap

from tests.support.runs import make_task
from verl.cli import main

FILE = """
exp_name: tiny
seed: 7
logging_dir: {folder}/logs
output_dir: {folder}/output
track_with: stdout
max_steps: 2
save_steps: 2
logging_steps: 1
eval_steps: 1
resume_from_checkpoint: false
rollout_batch_size: 4
val_batch_size: 8
prompt_length: 64
response_length: 8
num_return_sequences_in_group: 4
generate_opt_level: 0
ppo_epochs: 1
max_grad_norm: 1.0
adv_estimator: reinforce
reward_norm: group
reward_clip: 5
whiten_advantages: true
advantage_clip: 2.0
use_kl_loss: true
kl_loss_coef: 0.001
entropy_loss_coef: 0.0
dual_clip_loss: true
loss_agg_mode: seq-mean-token-mean
pretrain: {model}
validation:
  data_args: {{file_name: {val}}}
  generating_args: {{max_new_tokens: 8, temperature: 0.6, num_return_sequences: 1}}
actor_train:
  model_args: {{dtype: fp32, disable_gradient_checkpointing: false}}
  training_args:
    learning_rate: 1.0e-3
    weight_decay: 0
    per_device_train_batch_size: 4
    gradient_accumulation_steps: 2
    warmup_steps: 2
    dataloader_num_workers: 0
  data_args: {{template: native, file_name: {train}, prompt: prompt}}
  strategy_args: {{strategy_name: fsdp2_train, strategy_config: {{}}}}
  device_mapping: null
  infer_batch_size: 8
actor_infer:
  model_args: {{dtype: fp32}}
  generating_args: {{max_new_tokens: 8, temperature: 0.99, top_p: 1, top_k: -1}}
  strategy_args: {{strategy_name: hf_infer, strategy_config: null}}
  device_mapping: null
reference:
  model_args: {{dtype: fp32}}
  strategy_args: {{strategy_name: hf_infer, strategy_config: null}}
  device_mapping: null
  infer_batch_size: 8
rewards:
  digits: {{worker_cls: my_package.DigitsRewardWorker}}
"""


def test_a_roll_file_trains_to_the_end(tmp_path, capsys):
    task = make_task(tmp_path / "task")
    places = {
        "folder": tmp_path,
        "model": task["actor_rollout_ref.model.path"],
        "train": task["data.train_files"],
        "val": task["data.val_files"],
    }
    file = tmp_path / "rlvr.yaml"
    file.write_text(textwrap.dedent(FILE).format(**places))
    assert main(["roll", str(file)]) == 2
    assert "rewards.digits.worker_cls" in capsys.readouterr().err, "the reward is the user's to bring"
    words = [f"custom_reward_function.path={task['custom_reward_function.path']}", "trainer.controller=local"]
    assert main(["roll", str(file), *words]) == 0
    assert (tmp_path / "output" / "global_step_2" / "actor").is_dir()
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    steps = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row["data"])
    assert sorted(steps) == [0, 1, 2]
    assert any(name.startswith("val-") for name in steps[2])
    assert steps[1]["actor/lr"] == 0.0 or steps[1]["actor/lr"] < 1e-3
    assert "actor/kl_loss" in steps[2] and "actor/pg_loss" in steps[2]

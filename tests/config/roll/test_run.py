"""A ROLL file trains, on a CPU and without Ray, through the command a user types."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.config.roll.shapes import rule
from tests.support.runs import make_task
from verl.cli import main
from verl.utils.tiny_model import make_tiny_model

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
    # resume_from_checkpoint: the newest of the output folder, or a step's folder
    longer, output = file.read_text().replace("max_steps: 2", "max_steps: 3"), tmp_path / "output"
    for value, folder in (("true", "output"), (f"{output}/global_step_2", "elsewhere")):
        changed = longer.replace("resume_from_checkpoint: false", f"resume_from_checkpoint: {value}")
        file.write_text(changed.replace("/output", f"/{folder}", 1))
        capsys.readouterr()
        assert main(["roll", str(file), *words]) == 0
        said = capsys.readouterr()
        assert f"resumed from {output / 'global_step_2'}: 2 of 3 steps are done" in said.out + said.err


HERE = Path(__file__).parent


def messages(text):
    return json.dumps([{"role": "user", "content": text}])


def rows_of(tag, count, **more):
    """Rows as ROLL's data files have them; all values are texts."""
    return [
        {"id": str(i), "source": "a book", "difficulty": "0.5", "prompt": f"{tag} {i}", "instruction": f"{tag} {i}",
         "messages": messages(f"{tag} {i}"), "ground_truth": "4", "case_type": "", "test_case_function": "",
         "test_cases": "", "tag": tag, **more}
        for i in range(count)
    ]  # fmt: skip


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("guide", ["guide-zh", "guide-en"])
def test_the_guides_own_file_trains_on_rolls_rows(tmp_path, guide):
    """Devices, engines and sizes are changed, on the command line; everything else is the guide's."""
    data = write_rows(tmp_path / "train.json", rows_of("gsm8k", 8))
    model = make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=0)
    small = ["rollout_batch_size=2", "num_return_sequences_in_group=2", "prompt_length=64", "response_length=8",
             "actor_train.training_args.gradient_accumulation_steps=4", "trainer.total_training_steps=2"]  # fmt: skip
    places = [f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={tmp_path}/model",
              f"trainer.default_local_dir={tmp_path}/output", f"trainer.log_dir={tmp_path}/logs",
              f"trainer.tracker_kwargs.tensorboard.log_dir={tmp_path}/tb"]  # fmt: skip
    devices = ["actor_train.device_mapping=null", "actor_infer.device_mapping=null", "trainer.controller=local",
               "actor_rollout_ref.rollout.name=hf"]  # fmt: skip
    in_place_of_megatron = "actor_rollout_ref.actor.strategy=fsdp2"
    file = str(HERE / f"{guide}.yaml")
    assert model is not None and main(["roll", file, *small, *places, *devices, in_place_of_megatron]) == 0
    assert (tmp_path / "output" / "global_step_2" / "actor").is_dir()


def test_each_reward_worker_gets_its_rows(tmp_path, capsys):
    tests = json.dumps([{"assert_code": "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n"}])
    instruction = json.dumps({"func_name": "validate_lowercase", "N": None})
    rows = [
        *rows_of("aime", 4),
        *rows_of("KodCode", 4, ground_truth="", case_type="pytest", test_cases=tests),
        *rows_of("ifeval", 4, ground_truth=instruction),
        *rows_of("odd", 4, domain="crossthinkqa", ground_truth="A"),
    ]
    data = write_rows(tmp_path / "train.jsonl", rows)
    make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=0)
    text = textwrap.dedent(FILE).format(folder=tmp_path, model=tmp_path / "model", train=data, val=data)
    tree = yaml.safe_load(text)
    tree["rewards"] = {
        "math_rule": rule("MathRuleRewardWorker", ["deepmath_103k"]),
        "code_sandbox": rule("CodeSandboxRewardWorker", ["KodCode"], use_local=True),
        "ifeval": rule("GeneralRuleRewardWorker", ["ifeval"], reward_type="soft"),
        "crossthinkqa": rule("CrossThinkQARuleRewardWorker", ["crossthinkqa"]),
    }
    shares = {"math_rule": 0.25, "code_sandbox": 0.25, "ifeval": 0.25, "crossthinkqa": 0.25}
    tree["actor_train"]["data_args"] |= {"prompt": None, "messages": "messages", "domain_interleave_probs": shares}
    tree |= {"reward_pretrain": "unused", "max_len_mask": True, "difficulty_loss_weight": True}
    file = tmp_path / "domains.yaml"
    file.write_text(yaml.safe_dump(tree))
    words = ["trainer.controller=local", "reward_model.sandbox.workers=1", f"trainer.rollout_data_dir={tmp_path}/dump"]
    assert main(["roll", str(file), *words]) == 0, capsys.readouterr().err
    metrics = [json.loads(line)["data"] for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    groups = {name.split("/", 2)[1] for row in metrics for name in row if name.startswith("val-")}
    assert {"math_rule", "code_sandbox", "ifeval", "crossthinkqa"} <= groups, sorted(groups)

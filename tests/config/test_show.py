"""``verl config``: sections, one option in full, and what differs between two files."""

import json
from pathlib import Path

import pytest

from verl.config.base import leaves
from verl.config.describe import keys_page, main, papers, read_source, unit, words_of_script
from verl.config.ppo import PPOConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import TrainerConfig

ROOT = Path(__file__).parents[2]

SCRIPT = """
#!/usr/bin/env bash
LR=${LR:-3e-6}
MODEL="models/a b"
options=(
    algorithm.adv_estimator=grpo   # a comment
    actor_rollout_ref.model.path="$MODEL"
)
python3 -m verl.trainer.main_ppo "${options[@]}" \\
    actor_rollout_ref.actor.optim.lr=$LR trainer.experiment_name=$(date) "$@"
"""


def test_the_beginning_of_a_name_shows_all_that_begin_so(capsys):
    assert main(["trainer.max_"]) == 0
    text = capsys.readouterr().out
    assert "trainer.max_actor_ckpt_to_keep: null" in text and "trainer.max_critic_ckpt_to_keep" in text


def test_explain_tells_all_about_an_option(capsys):
    assert main(["--explain", "algorithm.lam", "algorithm.lam=0.9"]) == 0
    text = capsys.readouterr().out
    for words in ("Bias against variance", "float >= 0 <= 1", "default      1.0", "value        0.9",
                  "Schulman et al. 2016 (arXiv:1506.02438)", "verl/trainer/ppo/ray_trainer.py:"):  # fmt: skip
        assert words in text, words


def test_explain_of_an_old_name_says_the_new_one(capsys):
    assert main(["--explain", "trainer.val_generations_to_log_to_wandb"]) == 2
    assert "now called trainer.log_val_generations" in capsys.readouterr().err


def test_units_and_papers_come_from_the_docstrings():
    assert unit(RolloutConfig, "update_weights_bucket_megabytes") == "MiB"
    assert unit(TrainerConfig, "worker_timeout") == "seconds"
    assert unit(TrainerConfig, "save_freq") == "training steps"
    assert unit(TrainerConfig, "device") == ""
    assert papers(RolloutConfig, "use_fire_sampling") == ["FIRE sampling, Chen et al. 2024 (arXiv:2410.21236)"]


def test_the_page_of_all_options_is_up_to_date():
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    assert page == keys_page(PPOConfig), "run: python -m verl config --markdown > docs/keys.md"
    assert all(f"| `{key.rpartition('.')[2]}` |" in page for key, _ in leaves(PPOConfig()))


def test_a_script_is_read_without_running_it():
    words, notes = words_of_script(SCRIPT)
    assert words == [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=models/a b",
        "actor_rollout_ref.actor.optim.lr=3e-6",
    ]
    assert len(notes) == 1 and "trainer.experiment_name=$(date)" in notes[0]


def test_the_recipes_can_be_compared():
    first = {path.parent: path for path in sorted((ROOT / "examples").rglob("run_*.sh"), reverse=True)}
    for folder, recipe in first.items():
        if folder.name in ("split_placement", "sft", "dpo_trainer", "rm_trainer"):  # modules of their own
            continue
        source = read_source(str(recipe))
        assert source.values["actor_rollout_ref.rollout.name"] in ("hf", "vllm", "sglang"), recipe
        assert source.values["trainer.total_training_steps"] or source.values["trainer.total_epochs"] > 0


def test_arrays_and_sums_of_a_script_are_followed():
    text = "LONG=${LONG:-96}\noptions=(\n  a.b=$((LONG + 32))  # (both)\n  a.c=$((2 * $LONG))\n  a.d=$((x/2))\n)\n"
    words, notes = words_of_script(text + 'python -m verl.trainer.main_ppo "${options[@]}" a.e=1')
    assert words == ["a.b=128", "a.c=192", "a.e=1"] and len(notes) == 1 and "a.d=" in notes[0]


def test_diff_shows_what_differs_in_the_composed_tree(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {name: hf}, actor: {ppo_mini_batch_size: 8}}\n"
    )
    (tmp_path / "b.sh").write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=hf trainer.seed=9 \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=16\n"
    )
    assert main(["--diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.sh")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "actor_rollout_ref.actor.ppo_mini_batch_size: 8 -> 16",
        "trainer.seed: 1 -> 9",
        "critic.ppo_mini_batch_size: 8 -> 16",
    ]
    assert main(["--diff", str(tmp_path / "a.yaml"), str(tmp_path / "a.yaml")]) == 0


def test_a_checkpoint_can_be_compared_with_a_file(tmp_path, capsys):
    for step, seed in ((2, 3), (10, 4)):
        folder = tmp_path / "run" / f"global_step_{step}"
        folder.mkdir(parents=True)
        values = PPOConfig().with_values({"trainer.seed": seed, "actor_rollout_ref.rollout.name": "hf"}).to_dict()
        (folder / "config.json").write_text(json.dumps(values))
    assert main(["--diff", str(tmp_path / "run" / "global_step_2"), str(tmp_path / "run")]) == 1
    assert capsys.readouterr().out == "trainer.seed: 3 -> 4\n"


@pytest.mark.parametrize("name", ["nowhere.yaml", "empty.sh"])
def test_what_cannot_be_read_is_named(tmp_path, name, capsys):
    (tmp_path / "empty.sh").write_text("echo hello\n")
    assert main(["--diff", str(tmp_path / name), str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err

"""What the doctor prints, its exit codes, and what it costs."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.preflight.checks import examine_loaded
from verl.preflight.command import doctor as main
from verl.preflight.command import run_or_examine
from verl.preflight.estimates import memory_plan
from verl.preflight.machine import containment_here
from verl.trainer.main_ppo import run_ppo

from .conftest import BASE, ELSEWHERE, examined, loaded_with, make_rows


def numbers(*words):
    return {number.name: number.value for number in examined(*words).derivation}


def test_the_derivation_goes_from_prompts_to_optimizer_steps(there):
    found = numbers("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2")
    assert (found["prompts"], found["samples"], found["workers"], found["actor dp"]) == (8, 32, 2, 2)
    assert (found["actor mini"], found["actor updates"], found["actor rows"], found["actor micro"]) == (2, 4, 8, 2)
    assert (found["old log-probs"], found["epoch"], found["run"], found["updates"]) == (4, 8, 20, 80)


def test_every_number_names_keys_that_exist(there):
    report = examined("algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=2", "critic.model.path=model")
    keys = {key for number in report.derivation for key in number.keys}
    assert not examined(*(f"+{key}=1" for key in sorted(keys) if "=" in key)).errors
    from verl.config.base import get_path
    from verl.config.ppo import PPOConfig

    for key in keys:
        get_path(PPOConfig(), key)
    assert len(keys) > 10


def test_sequence_parallel_ranks_count_as_one(there):
    shared = [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.model.use_remove_padding=true",
    ]
    found = numbers(*shared, "trainer.n_gpus_per_node=4")
    assert (found["workers"], found["actor dp"], found["actor rows"]) == (4, 2, 16)


def test_the_estimate_counts_weights_gradients_and_moments(there):
    phases = {phase.phase: phase.parts for phase in examined("trainer.n_gpus_per_node=1").memory}
    numbers = 90_944  # of the shapes in the header of model.safetensors
    update = phases["update actor"]
    # one CPU process trains with the plain engine, which keeps a copy in bf16
    assert update["actor weights"] == (4 + 2) * numbers and update["actor gradients"] == 4 * numbers
    assert update["actor optimizer"] == 2 * 4 * numbers
    assert "cache" in phases["rollout"] and "actor optimizer" in phases["checkpoint"]


def test_ranks_that_share_a_model_share_its_optimizer(there):
    one, two = (
        next(row for row in examined(f"trainer.n_gpus_per_node={n}").memory if row.phase == "update actor")
        for n in (1, 2)
    )
    assert one.parts["actor optimizer"] == 2 * two.parts["actor optimizer"]


def test_nodes_that_hold_replicas_hold_more(there):
    loaded = loaded_with("trainer.device=cuda", "trainer.nnodes=2", "trainer.n_gpus_per_node=2")
    large, small, unknown = (
        next(row for row in memory_plan(loaded.config, size) if row.phase == "update actor").parts["actor optimizer"]
        for size in (1 << 40, 1 << 10, None)
    )
    assert large == 2 * small == 2 * unknown
    for size, where in ((1 << 40, "within nodes of 2 ranks, replicated on 2"), (1 << 10, "over all ranks")):
        report = examine_loaded(loaded, ELSEWHERE._replace(gpu_bytes=size))
        notes = " ".join(" ".join(report.memory_notes).split())
        assert f"actor: fsdp_config.fsdp_size=-1: sharded {where}. Weights, gradients and" in notes


def test_copies_that_a_gpu_has_room_for_are_counted_and_explained(there):
    loaded = loaded_with("trainer.device=cuda", "trainer.n_gpus_per_node=2")
    for size, is_on in ((1 << 40, "true"), (1 << 20, "false")):
        report = examine_loaded(loaded, ELSEWHERE._replace(gpu_bytes=size))
        notes = " ".join(" ".join(report.memory_notes).split())
        assert f"actor: fsdp_config: gather_once=null means {is_on} and reduce_once=null means {is_on}. A" in notes
        update = next(row for row in report.memory if row.phase == "update actor")
        assert ("sums of gradients" in update.parts) == (is_on == "true")


def test_sums_of_gradients_take_the_format_they_are_reduced_in(there):
    sums = []
    for dtype in ("fp32", "bf16"):
        report = examined(
            "trainer.n_gpus_per_node=2", f"actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype={dtype}"
        )
        sums += [row.parts["sums of gradients"] for row in report.memory if row.phase == "update actor"]
    assert sums[0] == 2 * sums[1] > 0


def test_both_ends_of_the_link_hold_two_buckets(there):
    apart = ["actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    phases = {phase.phase: phase.parts for phase in examined(*apart, "trainer.device=cuda").memory}
    # of a small model both together are no more than it
    numbers = 90_944
    assert phases["send weights"]["link buckets"] == phases["rollout apart"]["link buckets"] == 2 * numbers
    assert "cache" in phases["rollout apart"] and "rollout weights" not in phases["send weights"]


def test_a_model_too_large_for_the_gpu_is_an_error(there, capsys):
    words = [*BASE, "trainer.device=cuda"]
    assert main([*words, "--gpu-mem", "80GB"]) == 0
    assert main([*words, "--gpu-mem=100MB"]) == 2
    assert "actor_rollout_ref.model.path=model needs about" in capsys.readouterr().out


def test_the_json_form_says_the_same(there, capsys):
    assert main([*BASE, "trainer.save_freq=-1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["can_run"] and not found["errors"]
    assert found["warnings"][0]["keys"][0] == "trainer.save_freq"
    assert {row["phase"] for row in found["memory"]} >= {"start", "rollout", "log-probs", "update actor"}


@pytest.mark.parametrize(
    "words, code",
    [([], 0), (["trainer.save_freq=-1"], 0), (["trainer.save_freq=-1", "--strict"], 1), (["trainer.sede=1"], 2),
     (["--gpu-mem", "much"], 2), (["--no-such-flag"], 2), (["--gpus", "four"], 2)],
)  # fmt: skip
def test_exit_codes(words, code, there, capsys):
    assert main([*BASE, *words]) == code


def test_the_preview_shows_prompts_lengths_and_rewards(there):
    shown = "\n".join(examined().preview)
    assert shown.count("prompt  ") == 3 and "<|im_start|>assistant" in shown
    assert "tokens of 72 prompts" in shown and "reward  digits: 1 for known-good" in shown


def test_an_unread_option_is_reported_with_the_nearest_that_is_read(there, monkeypatch):
    from verl.config import unused_options

    key = "trainer.project_name"
    readers = unused_options.readers
    monkeypatch.setattr(unused_options, "readers", lambda name: [] if name == key else readers(name))
    (found,) = examined(f"{key}=mine").errors
    assert found.keys[0] == key and "is read by nothing" in found.text
    assert "the nearest option that is read is trainer.experiment_name" in found.text
    (found,) = examined(f"{key}=mine", "trainer.unread_keys=warn").warnings
    assert found.keys[0] == key and not examined(f"{key}=mine", "trainer.unread_keys=off").findings


def test_the_users_function_is_called_and_its_scores_shown(there):
    shown = "\n".join(examined("custom_reward_function.path=reward.py").preview)
    assert "reward  digits: 1 for known-good answers, written as 'answer'; 0 for known-bad answers" in shown


def test_the_doctor_says_what_contains_generated_programs(there, monkeypatch, capsys):
    here = "verl.preflight.machine"
    monkeypatch.setattr(f"{here}.landlock_version", lambda: 7)
    monkeypatch.setattr(f"{here}.containment", lambda: ())
    main([*BASE])
    said = " ".join(capsys.readouterr().out.split())
    assert "are contained on this machine: it cannot signal" in said and "Landlock 7" in said
    monkeypatch.setattr(f"{here}.containment", lambda: ("files",))
    said = containment_here(is_allowed=False).text
    assert "are not contained on this machine" in said and "read or write files" in said and "They are refused" in said


def test_a_dry_run_of_the_main_job_is_the_doctor(there, capsys):
    with pytest.raises(SystemExit) as end:
        run_or_examine(run_ppo, [*BASE, "trainer.dry_run=true", "trainer.save_freq=-1"])
    assert end.value.code == 0
    assert "trainer.save_freq=-1 writes no checkpoint" in capsys.readouterr().out


def test_a_dry_run_may_be_asked_for_in_yaml(there, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {dry_run: true}\n")
    with pytest.raises(SystemExit) as end:
        run_or_examine(run_ppo, [*BASE, f"--config-path={tmp_path}", "--config-name=mine"])
    assert end.value.code == 0
    assert "what one training step does" in capsys.readouterr().out


def test_torch_is_not_imported(there):
    code = (
        "import sys\nfrom verl.preflight.command import "
        "doctor\ndoctor(sys.argv[1:])\nprint(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *BASE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_row_the_scorer_cannot_judge_is_an_error_of_the_data(there):
    rows = make_rows(64)
    rows[0]["reward_model"] = None
    pq.write_table(pa.Table.from_pylist(rows), "data/no_goal.parquet")
    (found,) = examined("data.train_files=data/no_goal.parquet").errors
    assert "no_goal.parquet, row 0: reward_model has no ground_truth" in found.text
    assert found.keys[0] == "data.train_files"

"""Every option does what it says, from the command line to the numbers and files of a real run."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job, write_prompts
from verl.trainer.ppo.job import run_plan

GAE = {
    "algorithm__adv_estimator": "gae",
    "critic__strategy": "local",
    "critic__ppo_micro_batch_size_per_gpu": 8,
    "critic__optim__lr": "1e-3",
    "critic__model__fsdp_config__mixed_precision__param_dtype": "fp32",
}
REFERENCE = {
    "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref__ref__fsdp_config__mixed_precision__param_dtype": "fp32",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def run(task, tmp_path, monkeypatch):
    """``run(**settings)``: a run of two steps; returns the trainer and each step's metrics."""
    count = 0

    def do(**settings):
        nonlocal count
        count += 1
        log = tmp_path / f"{count}.jsonl"
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        given = {"trainer__logger": "[file]", "trainer__total_training_steps": 2, "trainer__resume_mode": "disable"}
        given["trainer__default_local_dir"] = str(tmp_path / "checkpoints")
        trainer = run_job(overrides(task, **{**given, **settings}))
        steps: dict[int, dict] = {}
        for row in read_metrics(log) if log.exists() else ():
            steps.setdefault(row["step"], {}).update(row.get("data", {}))
        return trainer, steps

    return do


def numbers(steps):
    """What a seed decides: everything but clocks and memory."""
    return [
        {k: v for k, v in step.items() if not k.startswith(("timing", "perf/", "rollout/engine/"))}
        for step in steps.values()
    ]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def series(steps, name):
    return [steps[step][name] for step in sorted(steps)]


# -- validation -------------------------------------------------------------------------------------------------------


def test_val_only_validates_once_and_trains_nothing(run):
    trainer, steps = run(trainer__val_only=True)
    assert list(steps) == [0] and trainer.global_steps == 0 and trainer.actor_wg.world_size == 1
    assert steps[0].keys() == {"val-core/digits/reward/mean@1"}


@pytest.mark.parametrize(("freq", "before", "when"), [(2, False, [2, 4, 5]), (-1, True, [0]), (3, True, [0, 3, 5])])
def test_validation_comes_when_it_was_asked_for(run, freq, before, when):
    settings = {"trainer__test_freq": freq, "trainer__val_before_train": before}
    trainer, steps = run(trainer__total_training_steps=5, trainer__log_freq=4, **settings)
    assert [step for step, _ in trainer.validations] == when
    assert [step for step in steps if any(name.startswith("val-core") for name in steps[step])] == when


SAMPLED = {
    "actor_rollout_ref__rollout__val_kwargs__do_sample": True,
    "actor_rollout_ref__rollout__val_kwargs__temperature": 1.0,
    "actor_rollout_ref__rollout__val_kwargs__n": 3,
}


def dumped_validation(run, tmp_path, **settings):
    folder = tmp_path / "val"
    run(trainer__val_only=True, trainer__validation_data_dir=str(folder), **settings)
    return rows(folder / "0.jsonl")


def test_validation_samples_as_its_own_section_says(run, tmp_path):
    greedy = dumped_validation(run, tmp_path)
    sampled = dumped_validation(run, tmp_path, **SAMPLED)
    nearly_greedy = dumped_validation(run, tmp_path, **{**SAMPLED, "actor_rollout_ref__rollout__val_kwargs__top_k": 1})
    narrow = dumped_validation(run, tmp_path, **{**SAMPLED, "actor_rollout_ref__rollout__val_kwargs__top_p": 1e-6})
    cold = {**SAMPLED, "actor_rollout_ref__rollout__val_kwargs__temperature": 1e-4}
    assert len(greedy) == 8 and len(sampled) == 24
    assert len({row["output"] for row in sampled}) > 12
    for other in (nearly_greedy, narrow, dumped_validation(run, tmp_path, **cold)):
        assert [row["output"] for row in other] == [row["output"] for row in greedy for _ in range(3)]


def test_how_validation_is_cut_changes_no_sample(run, tmp_path):
    whole = dumped_validation(run, tmp_path, **SAMPLED)
    assert dumped_validation(run, tmp_path, data__val_batch_size=3, **SAMPLED) == whole


def test_validation_shuffle_changes_the_order_of_the_prompts_only(run, tmp_path):
    inputs = [[row["input"] for row in dumped_validation(run, tmp_path, data__validation_shuffle=s)] for s in (0, 1)]
    assert inputs[0] != inputs[1] and sorted(inputs[0]) == sorted(inputs[1])


def test_prompts_that_do_not_spread_over_the_ranks_are_all_validated_once(run, tmp_path):
    settings = {
        "data__val_files": str(write_prompts(tmp_path / "three.parquet", 3)),
        "trainer__n_gpus_per_node": 2,
        "actor_rollout_ref__actor__strategy": "fsdp2",
    }
    assert len({row["input"] for row in dumped_validation(run, tmp_path, **settings)}) == 3


@pytest.mark.parametrize(("nothing", "is_asked"), [("null", True), ("[]", False), ("''", True)])
def test_without_validation_files_a_run_trains_without_validation(run, tmp_path, nothing, is_asked):
    trainer, steps = run(
        data__val_files=nothing,
        trainer__test_freq=1 if is_asked else -1,
        trainer__val_before_train=is_asked,
        trainer__validation_data_dir=str(tmp_path / "val"),
        trainer__total_training_steps=2,
    )
    assert trainer.global_steps == 2 and trainer.validations == [] and not (tmp_path / "val").exists()
    assert not [name for step in steps.values() for name in step if name.startswith("val-")]
    assert "no validation" in run_plan(trainer) and "none to validate" in run_plan(trainer)


DICT_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 10, "acc": solution_str > "M", "pred": solution_str[:1], "why": "it is"}
"""


def test_dumps_hold_input_output_truth_score_step_and_what_the_reward_function_adds(run, tmp_path):
    (tmp_path / "reward.py").write_text(DICT_REWARD)
    trainer, steps = run(
        custom_reward_function__path=str(tmp_path / "reward.py"),
        trainer__rollout_data_dir=str(tmp_path / "train"),
        trainer__validation_data_dir=str(tmp_path / "val"),
        trainer__test_freq=2,
        trainer__rollout_data_tokens=60,
        actor_rollout_ref__rollout__calculate_log_probs=True,
        **SAMPLED,
    )
    fields = {"input", "output", "gts", "score", "step", "acc", "pred", "why", "reward"}
    fields |= {"uid", "data_source", "prompt_length", "response_length", "finish_reason"}
    train, val = rows(tmp_path / "train" / "2.jsonl"), rows(tmp_path / "val" / "2.jsonl")
    assert len(train) == 16 and len(val) == 24
    assert all(fields <= row.keys() for row in train + val)
    assert all(math.isclose(row["score"], len(row["output"]) / 10, rel_tol=1e-6) and row["step"] == 2 for row in train)
    assert len({row["uid"] for row in train}) == 4 and len({row["uid"] for row in val}) == 8
    for kind, names in ((train, {"log_probs", "advantages"}), (val, set())):
        told = [row for row in kind if "tokens" in row]
        assert 0 < sum(row["response_length"] for row in told) <= 60 and len(told) < len(kind)
        for row in told:
            assert row["tokens"].keys() == {"text", "rollout_log_probs", "mask"} | names
            assert {len(values) for values in row["tokens"].values()} == {row["response_length"]}
            assert max(row["tokens"]["rollout_log_probs"]) <= 0
    assert {row["data_source"] for row in train + val} == {"digits"}
    assert all((row["finish_reason"] == "length") <= (row["response_length"] == 12) for row in train + val)
    groups = [[row for row in train if row["uid"] == uid] for uid in {row["uid"] for row in train}]
    for group in groups:  # grpo: above the group's mean is a positive advantage, and the other way round
        mean = sum(row["score"] for row in group) / 4
        assert all((row["advantage"] > 0) == (row["score"] > mean + 1e-6) for row in group)
    lengths = [row["response_length"] for row in train]
    assert steps[2]["response_length/mean"] == pytest.approx(sum(lengths) / 16)
    assert steps[2]["critic/score/mean"] == pytest.approx(sum(row["score"] for row in train) / 16)
    core = {name for name in steps[2] if name.startswith("val-core")}
    assert core == {f"val-core/digits/acc/{kind}" for kind in ("mean@3", "best@3/mean", "maj@3/mean")}
    assert {"val-aux/digits/reward/mean@3", "val-aux/digits/acc/worst@2/std"} <= steps[2].keys()


def test_validation_is_grouped_by_reward_fn_key(run, tmp_path):
    import pyarrow.parquet as pq

    files = {}
    for name, count in (("train", 8), ("val", 4)):
        table = pq.read_table(write_prompts(tmp_path / f"{name}.parquet", count))
        names = ["family" if column == "data_source" else column for column in table.column_names]
        pq.write_table(table.rename_columns(names), tmp_path / f"{name}.parquet")
        files[f"data__{name}_files"] = str(tmp_path / f"{name}.parquet")
    _, steps = run(trainer__val_only=True, data__reward_fn_key="family", **files)
    assert steps[0].keys() == {"val-core/digits/reward/mean@1"}


def test_log_val_generations_shows_the_same_prompts_each_time(run, tmp_path, monkeypatch):
    run(trainer__test_freq=1, trainer__log_val_generations=3)
    shown = [row["generations"] for row in read_metrics(tmp_path / "1.jsonl") if "generations" in row]
    assert [len(samples) for samples in shown] == [3, 3]
    assert [sample[0] for sample in shown[0]] == [sample[0] for sample in shown[1]]


def test_a_reward_that_names_a_column_of_the_trainer_is_refused(run, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(**kwargs):\n    return {'score': 1.0, 'uid': 3}\n")
    with pytest.raises(ValueError, match="'uid'"):
        run(custom_reward_function__path=str(tmp_path / "reward.py"))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def kept(folder, role):
    return sorted(int(path.parent.name.split("_")[-1]) for path in folder.glob(f"global_step_*/{role}"))


def test_only_the_newest_checkpoints_are_kept_over_restarts_too(run, tmp_path):
    settings = {
        **GAE,
        "trainer__save_freq": 1,
        "trainer__max_actor_ckpt_to_keep": 1,
        "trainer__max_critic_ckpt_to_keep": 2,
        "trainer__resume_mode": "auto",
    }
    folder = tmp_path / "checkpoints"
    run(**settings, trainer__total_training_steps=3)
    assert kept(folder, "actor") == [3] and kept(folder, "critic") == [2, 3]
    trainer, steps = run(**settings, trainer__total_training_steps=5)
    assert list(steps) == [4, 5]
    assert kept(folder, "actor") == [5] and kept(folder, "critic") == [4, 5]
    assert sorted(path.name for path in folder.glob("global_step_*")) == ["global_step_4", "global_step_5"]


def test_checkpoints_of_another_run_are_not_deleted(run, tmp_path):
    run(trainer__save_freq=1)
    run(trainer__save_freq=2, trainer__total_training_steps=4, trainer__max_actor_ckpt_to_keep=1)
    assert kept(tmp_path / "checkpoints", "actor") == [1, 4]


@pytest.mark.parametrize("moment", ["save_driver_state", "mark_complete"])
def test_a_run_killed_while_saving_resumes_from_the_checkpoint_before(run, monkeypatch, moment):
    from verl.checkpoint import run_state as checkpoint

    settings = {"trainer__save_freq": 1, "trainer__max_actor_ckpt_to_keep": 1, "trainer__resume_mode": "auto"}
    real = getattr(checkpoint, moment)

    def die_at_the_second_step(where, *args):
        if "global_step_2" in str(where) or args == (2,):
            raise KeyboardInterrupt
        return real(where, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, moment, die_at_the_second_step)
        run(**settings)
    trainer, steps = run(**settings)
    assert list(steps) == [2]


def test_save_freq_saves_every_nth_step_and_the_last(run, tmp_path):
    run(trainer__save_freq=2, trainer__total_training_steps=3)
    assert kept(tmp_path / "checkpoints", "actor") == [2, 3]


def test_nothing_is_saved_unless_asked_for(run, tmp_path):
    run()
    assert not list((tmp_path / "checkpoints").glob("global_step_*"))


def test_a_complete_run_says_so_and_exits(run, capsys):
    run(trainer__save_freq=2)
    trainer, steps = run(trainer__save_freq=2, trainer__resume_mode="auto", trainer__val_before_train=True)
    assert steps == {} and trainer.global_steps == 2
    assert "nothing is left to train: 2 steps are done, this run asks for 2" in capsys.readouterr().out


def test_a_checkpoint_deleted_after_loading_is_missed_by_name(run, tmp_path):
    run(trainer__save_freq=1, trainer__total_training_steps=1)
    settings = {"trainer__resume_mode": "auto", "trainer__del_local_ckpt_after_load": True}
    _, steps = run(**settings)
    assert list(steps) == [2] and not list((tmp_path / "checkpoints").glob("global_step_*"))
    with pytest.raises(FileNotFoundError, match="names step 1.*resume_mode=disable"):
        run(**settings)


def test_disable_ignores_what_is_there(run):
    run(trainer__save_freq=1)
    _, steps = run(trainer__resume_mode="disable")
    assert list(steps) == [1, 2]


def test_resume_path_needs_an_existing_step_folder(run, tmp_path):
    settings = {"trainer__resume_mode": "resume_path"}
    with pytest.raises(ValueError, match="global_step_"):
        run(**settings)
    with pytest.raises(ValueError, match="global_step_"):
        run(**settings, trainer__resume_from_path=str(tmp_path))
    with pytest.raises(ValueError, match="global_step_7"):
        run(**settings, trainer__resume_from_path=str(tmp_path / "global_step_7"))


def test_a_missing_loader_state_is_said_and_the_data_starts_over(run, tmp_path, capsys):
    run(trainer__save_freq=1, trainer__total_training_steps=1, trainer__rollout_data_dir=str(tmp_path / "dump"))
    for name in ("data.pt", "manifest.json"):  # as another program leaves it
        (tmp_path / "checkpoints" / "global_step_1" / name).unlink()
    (tmp_path / "checkpoints" / "global_step_1" / "actor" / "manifest.json").unlink()
    run(trainer__resume_mode="auto", trainer__rollout_data_dir=str(tmp_path / "dump"))
    assert "data.pt is missing" in capsys.readouterr().out
    prompts = [sorted(row["input"] for row in rows(tmp_path / "dump" / f"{step}.jsonl")) for step in (1, 2)]
    assert prompts[0] == prompts[1]


def test_the_hugging_face_copy_gives_the_logits_of_the_policy(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer, _ = run(trainer__save_freq=2, actor_rollout_ref__actor__checkpoint__save_contents="[hf_model,extra,model]")
    folder = tmp_path / "checkpoints" / "global_step_2" / "actor"
    assert not list(folder.glob("optim*"))
    copy = AutoModelForCausalLM.from_pretrained(folder / "huggingface", dtype=torch.float32)
    saved = torch.load(next(folder.glob("model_world_size_1_rank_0.pt")), weights_only=True)
    ids = AutoTokenizer.from_pretrained(folder / "huggingface")("some text", return_tensors="pt").input_ids
    before = copy(ids).logits
    copy.load_state_dict(saved, strict=False)
    assert torch.equal(copy(ids).logits, before) and len(saved) > 10


def test_contents_without_the_model_cannot_be_resumed_from(run):
    contents = {"actor_rollout_ref__actor__checkpoint__save_contents": "[optimizer]"}
    run(trainer__save_freq=2, **contents)
    with pytest.raises(ValueError, match="load_contents.*initial weights"):
        run(trainer__resume_mode="auto", trainer__total_training_steps=4, **contents)


def test_the_hugging_face_copy_alone_can_be_resumed_from_and_is_said(run, capsys):
    contents = {"actor_rollout_ref__actor__checkpoint__save_contents": "[hf_model]"}
    run(trainer__save_freq=2, **contents)
    further = {"trainer__resume_mode": "auto", "trainer__total_training_steps": 3, **contents}
    _, steps = run(**further)
    _, whole = run(trainer__total_training_steps=3)
    # no optimizer step has been taken since, so the responses are those of the weights that were saved
    assert list(steps) == [3] and steps[3]["critic/score/mean"] == whole[3]["critic/score/mean"]
    said = capsys.readouterr().out
    assert "actor: weights of huggingface/" in said and "actor: optimizer, extra not loaded, initialized again" in said
    with pytest.raises(ValueError, match="hf_model holds the adapter merged into the model"):
        run(**further, actor_rollout_ref__model__lora_rank=4, trainer__resume_allow_changes=True)


def test_a_resumed_run_says_what_was_not_loaded(run, capsys):
    contents = {"actor_rollout_ref__actor__checkpoint__load_contents": "[model]"}
    run(trainer__save_freq=1, trainer__total_training_steps=1)
    _, steps = run(trainer__resume_mode="auto", **contents)
    assert list(steps) == [2]
    assert "actor: optimizer, extra not loaded" in capsys.readouterr().out


# -- algorithms -------------------------------------------------------------------------------------------------------


def test_a_critic_may_be_trained_with_any_estimator(run):
    _, steps = run(**{**GAE, "algorithm__adv_estimator": "grpo", "critic__enable": True})
    assert {"critic/vf_loss", "critic/values/mean", "critic/vf_explained_var"} <= steps[2].keys()


def test_gae_without_a_critic_is_refused(run):
    with pytest.raises(ValueError, match="GAE needs values"):
        run(**GAE, critic__enable=False)


def test_during_the_warm_up_only_the_critic_learns(run):
    _, steps = run(**GAE, trainer__critic_warmup=1)
    assert "actor/grad_norm" not in steps[1] and "actor/grad_norm" in steps[2]
    assert all("critic/grad_norm" in steps[step] for step in (1, 2))


def test_policy_filtration_updates_on_rows_sampled_by_score(run, monkeypatch, tmp_path):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    seen = {}

    def resampled(self, batch, original=RayPPOTrainer.resampled):
        filtered = original(self, batch)
        for name in ("before", "after"):
            rows = {"before": batch, "after": filtered}[name]
            seen.setdefault(name, []).append(rows.column("token_level_scores").sum(-1).tolist())
        assert filtered.meta_info["global_token_num"] == filtered.column("attention_mask").sum(-1).tolist()
        assert len(batch.meta_info["global_token_num"]) == len(batch) == len(filtered) == 16
        return filtered

    monkeypatch.setattr(RayPPOTrainer, "resampled", resampled)
    settings = {**GAE, "algorithm__use_pf_ppo": True, "algorithm__pf_ppo__reweight_method": "max_min"}
    _, steps = run(**settings, actor_rollout_ref__actor__ppo_mini_batch_size=2)
    before, after = seen["before"][0], seen["after"][0]
    assert set(after) == {min(before), max(before)} and len(set(before)) > 2
    assert steps[1]["actor/grad_norm"] > 0 and steps[1]["critic/grad_norm"] > 0
    assert steps[1]["critic/score/mean"] == pytest.approx(sum(before) / 16)
    assert steps[1]["pf_ppo/score/mean"] == pytest.approx(sum(after) / 16)
    assert 0 < steps[1]["pf_ppo/unique_share"] < 1
    assert numbers(run(**settings, actor_rollout_ref__actor__ppo_mini_batch_size=2)[1]) == numbers(steps)


@pytest.mark.parametrize("estimator", ["remax", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimators_without_critic_run(run, estimator):
    _, steps = run(algorithm__adv_estimator=estimator)
    assert steps[2]["actor/grad_norm"] > 0 and "critic/vf_loss" not in steps[2]
    assert ("timing_s/gen_max" in steps[2]) == (estimator == "remax")


def test_gae_runs_with_one_response_a_prompt(run):
    four = {f"{role}__ppo_micro_batch_size_per_gpu": 4 for role in ("actor_rollout_ref__actor", "critic")}
    _, steps = run(**{**GAE, **four}, actor_rollout_ref__rollout__n=1)
    assert steps[2]["actor/grad_norm"] > 0


def test_kl_in_reward_charges_its_coefficient_which_an_adaptive_controller_moves(run):
    on = {**REFERENCE, "algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__kl_coef": 0.5}
    _, fixed = run(**on, trainer__total_training_steps=3)
    assert series(fixed, "actor/reward_kl_penalty_coeff") == [0.5] * 3
    assert abs(fixed[1]["actor/reward_kl_penalty"]) < 1e-6  # the reference is the policy the run began with
    assert fixed[3]["critic/rewards/mean"] != fixed[3]["critic/score/mean"]
    adaptive = {"algorithm__kl_ctrl__type": "adaptive", "algorithm__kl_ctrl__horizon": 160}
    _, moved = run(**on, **adaptive, trainer__total_training_steps=3)
    assert series(moved, "actor/reward_kl_penalty_coeff") == pytest.approx([0.5, 0.49, 0.4802])


def test_a_resumed_controller_goes_on_and_a_new_kind_begins_at_its_coefficient(run):
    on = {**REFERENCE, "algorithm__use_kl_in_reward": True, "trainer__save_freq": 1, "trainer__resume_mode": "auto"}
    on |= {"algorithm__kl_ctrl__horizon": 160}
    run(**on, algorithm__kl_ctrl__kl_coef=0.5, trainer__total_training_steps=1)
    adaptive = {**on, "algorithm__kl_ctrl__type": "adaptive", "algorithm__kl_ctrl__kl_coef": 0.2}
    adaptive["trainer__resume_allow_changes"] = True
    _, steps = run(**adaptive)
    assert steps[2]["actor/reward_kl_penalty_coeff"] == 0.2
    _, steps = run(**adaptive, trainer__total_training_steps=3)
    assert steps[3]["actor/reward_kl_penalty_coeff"] == pytest.approx(0.196)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+", "full"])
def test_the_kl_loss_of_each_kind_is_measured_and_weighed(run, kind):
    _, steps = run(
        **REFERENCE,
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__kl_loss_type=kind,
        actor_rollout_ref__actor__kl_loss_coef=0.25,
    )
    assert series(steps, "actor/kl_coef") == [0.25, 0.25]
    assert abs(steps[1]["actor/kl_loss"]) < 1e-6 < abs(steps[2]["actor/kl_loss"])
    assert ("timing_s/ref" in steps[1]) == (kind != "full")  # which is made in the update


def test_another_reference_model_is_another_reference(run, tmp_path):
    from verl.utils.tiny_model import make_tiny_model

    other = make_tiny_model(tmp_path / "other", family="qwen2", size="tiny", seed=9) and str(tmp_path / "other")
    _, steps = run(
        **REFERENCE,
        actor_rollout_ref__actor__use_kl_loss=True,
        **{"+actor_rollout_ref__ref__model__path": other},
    )
    assert steps[1]["actor/kl_loss"] > 1e-3


def test_each_of_these_settings_changes_what_is_learned(run):
    # four updates: a later one tells what earlier ones changed, and Adam's first knows no betas
    base = {"actor_rollout_ref__actor__ppo_mini_batch_size": 1, "trainer__total_training_steps": 1}
    base["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = 4
    names = {
        "entropy_coeff": 0.1,
        "loss_agg_mode": "seq-mean-token-sum",
        "ppo_epochs": 2,
        "shuffle": True,
        "grad_clip": 0.01,
        "clip_ratio": 0.001,
        "optim__weight_decay": 10,
        "optim__betas": "[0.5,0.9]",
        "optim__eps": 1,
    }
    variants = [{}, *({f"actor_rollout_ref__actor__{name}": value} for name, value in names.items())]
    variants += [{"actor_rollout_ref__rollout__temperature": 0.7}, {"data__seed": 5}, {"data__shuffle": False}]
    variants += [{"actor_rollout_ref__rollout__top_k": 3}, {"actor_rollout_ref__rollout__top_p": 0.5}]
    variants += [{"algorithm__norm_adv_by_std_in_grpo": False}, {"trainer__seed": 4}]
    variants += [{"actor_rollout_ref__rollout__dtype": "bfloat16"}]
    precision = "actor_rollout_ref__actor__fsdp_config__"
    variants += [{f"{precision}mixed_precision__param_dtype": "bf16"}, {f"{precision}model_dtype": "bf16"}]
    results = [run(**{**base, **variant})[1][1] for variant in variants]
    grads = [(step["actor/grad_norm"], step["actor/entropy"]) for step in results]
    assert len(set(grads)) == len(grads), list(zip(variants, grads, strict=True))
    assert numbers({1: results[0]}) == numbers({1: run(**base)[1][1]})


def test_entropy_is_aggregated_as_the_loss_is_over_the_whole_window(run):
    settings = {"trainer__total_training_steps": 1, "data__max_response_length": 100, "data__train_batch_size": 1}
    settings["actor_rollout_ref__actor__ppo_mini_batch_size"] = 1
    settings["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = 4
    settings["trainer__seed"] = 5
    found = {}
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        _, steps = run(**settings, actor_rollout_ref__actor__loss_agg_mode=mode)
        found[mode] = steps[1]["actor/entropy"]
    assert steps[1]["response_length/max"] < 100  # so that the window is more than the longest response
    assert found["token-mean"] == pytest.approx(found["seq-mean-token-mean"], rel=0.05)
    sums = found["token-mean"] * steps[1]["response_length/mean"]
    assert found["seq-mean-token-sum"] == pytest.approx(sums, rel=1e-4)
    assert found["seq-mean-token-sum-norm"] == pytest.approx(4 * sums / 100, rel=1e-4)


def test_each_of_these_settings_changes_what_the_critic_learns(run):
    base = {**GAE, "critic__ppo_mini_batch_size": 2, "critic__optim__lr": "1e-2"}
    names = {
        "cliprange_value": 1e-4,
        "loss_agg_mode": "seq-mean-token-sum",
        "ppo_epochs": 2,
        "shuffle": True,
        "grad_clip": 0.01,
        "optim__weight_decay": 10,
    }
    variants = [{}, *({f"critic__{name}": value} for name, value in names.items())]
    variants += [{"algorithm__gamma": 0.9}, {"algorithm__lam": 0.9}]
    results = [run(**base, **variant)[1][2]["critic/vf_loss"] for variant in variants]
    assert len(set(results)) == len(results), list(zip(variants, results, strict=True))


DYNAMIC = {
    **{f"actor_rollout_ref__{role}__log_prob_max_token_len_per_gpu": 200 for role in ("rollout", "ref")},
    "actor_rollout_ref__actor__use_dynamic_bsz": True,
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 200,
    "critic__ppo_max_token_len_per_gpu": 200,
    "critic__forward_max_token_len_per_gpu": 200,
}
SMALL = {
    **{f"actor_rollout_ref__{role}__log_prob_micro_batch_size_per_gpu": 2 for role in ("rollout", "ref")},
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4,
    "critic__ppo_micro_batch_size_per_gpu": 2,
    "critic__forward_micro_batch_size_per_gpu": 1,
}


@pytest.mark.parametrize("cut", [DYNAMIC, SMALL], ids=["by tokens", "by rows"])
def test_how_batches_are_cut_into_forwards_changes_no_number(run, cut):
    base = {**GAE, **REFERENCE, "algorithm__use_kl_in_reward": True}
    plain, other = numbers(run(**base)[1]), numbers(run(**{**base, **cut})[1])
    for one, two in zip(plain, other, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4)


def test_how_two_ranks_share_the_work_changes_no_number(run):
    base, fsdp = {"trainer__n_gpus_per_node": 2, "actor_rollout_ref__actor__strategy": "fsdp2"}, "fsdp_config__"
    plain = numbers(run(**base)[1])
    for name, value in {
        "trainer__balance_batch": False,
        f"actor_rollout_ref__actor__{fsdp}fsdp_size": 1,
        f"actor_rollout_ref__actor__{fsdp}reshard_after_forward": False,
        f"actor_rollout_ref__actor__{fsdp}wrap_policy__min_num_params": 1000,
    }.items():
        other = numbers(run(**base, **{name: value})[1])
        assert ("global_seqlen/balanced_max" in other[0]) == (name != "trainer__balance_batch")
        for one, two in zip(plain, other, strict=True):
            # groups that are torn apart share less
            shared = two.keys() - {"actor/prefix_tokens_saved"}
            one, two = ({key: number for key, number in part.items() if key in shared} for part in (one, two))
            assert two == pytest.approx(one, rel=1e-3, abs=1e-4), name


# -- learning rate, length, seeds -------------------------------------------------------------------------------------


def test_the_rate_warms_up_and_falls_along_the_run(run):
    optim = "actor_rollout_ref__actor__optim__"
    _, steps = run(trainer__total_training_steps=4, **{f"{optim}lr_warmup_steps": 2})
    assert series(steps, "actor/lr") == pytest.approx([0, 5e-4, 1e-3, 1e-3])
    _, steps = run(trainer__total_training_steps=4, **{f"{optim}lr_warmup_steps_ratio": 0.25, f"{optim}lr": 2e-3})
    assert series(steps, "actor/lr") == pytest.approx([0, 2e-3, 2e-3, 2e-3])
    cosine = {f"{optim}warmup_style": "cosine", f"{optim}min_lr_ratio": 0.5}
    _, steps = run(trainer__total_training_steps=4, **cosine)
    wave = [0.5 + 0.25 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert series(steps, "actor/lr") == pytest.approx([1e-3 * share for share in wave])
    _, longer = run(trainer__total_training_steps=4, **cosine, **{f"{optim}total_training_steps": 100})
    assert series(longer, "actor/lr")[-1] > 0.99e-3
    wsd = {f"{optim}lr_scheduler_type": "wsd", f"{optim}lr_wsd_decay_steps": 2, f"{optim}lr_wsd_decay_style": "linear"}
    _, steps = run(trainer__total_training_steps=4, **wsd)
    assert series(steps, "actor/lr") == pytest.approx([1e-3, 1e-3, 1e-3, 5e-4])


def test_a_chat_template_of_ones_own_writes_the_prompts_and_is_saved(run, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }} Answer: ")
    run(
        actor_rollout_ref__model__custom_chat_template=str(template),
        trainer__rollout_data_dir=str(tmp_path / "dump"),
        trainer__total_training_steps=1,
        trainer__save_freq=1,
    )
    prompts = [row["input"] for row in rows(tmp_path / "dump" / "1.jsonl")]
    assert all(text.startswith("Say something") and text.endswith(". Answer: ") for text in prompts)
    saved = tmp_path / "checkpoints" / "global_step_1" / "actor" / "huggingface" / "chat_template.jinja"
    assert saved.read_text() == template.read_text()


def test_epochs_count_full_batches_and_steps_go_before_epochs(run, tmp_path):
    ten = str(write_prompts(tmp_path / "ten.parquet", 10))
    base = {"data__train_files": ten, "trainer__total_epochs": 2}
    _, steps = run(**base, trainer__total_training_steps=None)
    assert list(steps) == [1, 2, 3, 4] and series(steps, "training/epoch") == [0, 0, 1, 1]
    assert list(run(**base, trainer__total_training_steps=5)[1]) == [1, 2, 3, 4, 5]


def test_the_seed_decides_everything(run):
    first, second, other = (numbers(run(**GAE, trainer__seed=seed)[1]) for seed in (3, 3, 4))
    assert first == second != other


def test_log_freq_thins_the_lines(run):
    assert list(run(trainer__total_training_steps=5, trainer__log_freq=2)[1]) == [2, 4, 5]


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_the_sampler_and_the_trainer_agree_on_probabilities(run):
    _, steps = run(actor_rollout_ref__rollout__calculate_log_probs=True)
    assert steps[2]["training/rollout_probs_diff_max"] < 1e-5
    assert {f"training/rollout_probs_diff_{kind}" for kind in ("max", "mean", "std")} <= steps[2].keys()


def test_responses_run_to_the_end_without_eos_and_never_past_the_window(run):
    _, steps = run(actor_rollout_ref__rollout__ignore_eos=True, actor_rollout_ref__rollout__response_length=7)
    assert steps[2]["response_length/min"] == steps[2]["response_length/max"] == 7
    assert steps[2]["response_length/clip_ratio"] == 1


def test_how_the_engine_is_run_changes_no_number(run):
    plain = numbers(run()[1])
    for name, value in {
        "free_cache_engine": False,
        "update_weights_bucket_megabytes": 1,
        "load_format": "safetensors",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.01,
    }.items():
        other = numbers(run(**{f"actor_rollout_ref__rollout__{name}": value})[1])
        assert [step.keys() for step in other] == [step.keys() for step in plain], name
        for one, two in zip(plain, other, strict=True):
            assert two == pytest.approx(one, rel=1e-3, abs=1e-4), name


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_long_prompts_are_cut_where_it_says(run, tmp_path, side):
    run(
        trainer__total_training_steps=1,
        data__truncation=side,
        data__max_prompt_length=20,
        trainer__rollout_data_dir=str(tmp_path / "dump"),
    )
    text = rows(tmp_path / "dump" / "1.jsonl")[0]["input"]
    assert ("user" in text) == (side != "left") and ("assistant" in text) == (side != "right")


def test_long_prompts_stop_the_run_or_are_left_out(run, tmp_path):
    with pytest.raises(ValueError, match="exceed data.max_prompt_length=48"):
        run(data__max_prompt_length=48)
    settings = {"data__max_prompt_length": 48, "data__filter_overlong_prompts": True}
    trainer, _ = run(**settings, data__filter_overlong_prompts_workers=2)
    assert 0 < len(trainer.train_dataset) < 64


def test_gen_batch_size_is_what_a_step_generates(run, tmp_path):
    run(data__gen_batch_size=8, trainer__rollout_data_dir=str(tmp_path / "dump"))
    assert len(rows(tmp_path / "dump" / "1.jsonl")) == 32


CUSTOM = '''
import torch
from verl.data.rl_dataset import RLHFDataset

class Mine(RLHFDataset):
    """Adds a tensor column that no worker knows."""
    def __getitem__(self, item):
        return {**super().__getitem__(item), "difficulty": torch.tensor([item, 1])}
    def on_batch_end(self, batch):
        self.seen = batch.batch["difficulty"]
'''


def test_tensor_columns_of_a_users_dataset_reach_the_end_of_the_step(run, tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM)
    trainer, _ = run(data__custom_cls__path=str(tmp_path / "mine.py"), data__custom_cls__name="Mine", **SAMPLED)
    assert trainer.train_dataset.seen.shape == (16, 2) and trainer.train_dataset.seen[:, 1].eq(1).all()


# -- failures and limits ----------------------------------------------------------------------------------------------


def test_a_gradient_that_stays_infinite_ends_the_run_at_the_tolerance(run, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(**kwargs):\n    return 1e30 * len(kwargs['solution_str'])\n")
    settings = {
        "custom_reward_function__path": str(tmp_path / "reward.py"),
        "algorithm__norm_adv_by_std_in_grpo": False,
        "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum",
        "trainer__total_training_steps": 6,
        "trainer__rollout_data_dir": str(tmp_path / "dump"),
    }
    with pytest.raises(FloatingPointError, match="actor.*2 steps in a row.*nonfinite_tolerance=2"):
        run(**settings, trainer__nonfinite_tolerance=2)


def test_a_worker_that_takes_too_long_is_named(run):
    from verl.single_controller.errors import WorkerTimeout

    with pytest.raises(WorkerTimeout, match="rank"):
        run(
            trainer__worker_timeout=0.001,
            trainer__n_gpus_per_node=2,
            actor_rollout_ref__actor__strategy="fsdp2",
        )


def test_reward_errors_are_counted_if_asked_for(run, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, **kwargs):\n    return float(solution_str)\n")
    path = {"custom_reward_function__path": str(tmp_path / "reward.py")}
    _, steps = run(**path, reward_model__on_error="zero_and_count")
    assert steps[1]["reward/errors"] > 0 and steps[1]["critic/score/mean"] == 0


LIBRARY = """
from verl.algorithms.advantages import register_adv_est
from verl.telemetry.tracking import Backend, register_backend

@register_adv_est("mine_of_options")
def estimate(token_level_rewards, response_mask, config=None, **kwargs):
    return 5 * response_mask.float(), 5 * response_mask.float()

@register_backend("list_of_options")
class ListBackend(Backend):
    lines = []
    def log(self, data, step):
        self.lines.append((step, data))
"""


def test_an_external_library_brings_names_of_its_own(run, tmp_path, monkeypatch):
    import sys

    from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
    from verl.telemetry import tracking

    (tmp_path / "library_of_options.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "library_of_options", raising=False)
    monkeypatch.setattr(ADV_ESTIMATOR_REGISTRY, "_entries", dict(ADV_ESTIMATOR_REGISTRY._entries))
    monkeypatch.setattr(tracking, "_BACKENDS", dict(tracking._BACKENDS))
    run(
        actor_rollout_ref__model__external_lib="library_of_options",
        algorithm__adv_estimator="mine_of_options",
        trainer__logger="[list_of_options]",
    )
    import library_of_options

    assert [step for step, _ in library_of_options.ListBackend.lines] == [1, 2]
    assert library_of_options.ListBackend.lines[0][1]["critic/advantages/mean"] == 5


def test_a_logger_whose_package_is_missing_is_refused_before_models_load(run, monkeypatch):
    import sys

    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    monkeypatch.setattr(RayPPOTrainer, "init_workers", lambda self: pytest.fail("models were loaded"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="trainer.logger=wandb needs the package"):
        run(trainer__logger="[wandb]")


def test_the_tokenizer_may_lie_elsewhere(run, task, tmp_path):
    import shutil

    bare, tokenizer = tmp_path / "bare", tmp_path / "tokenizer"
    for folder in (bare, tokenizer):
        shutil.copytree(task["actor_rollout_ref.model.path"], folder)
    for file in bare.glob("*token*"):
        file.unlink()
    for file in tokenizer.glob("*.safetensors"):
        file.unlink()
    _, plain = run()
    _, steps = run(actor_rollout_ref__model__path=str(bare), data__tokenizer=str(tokenizer), trainer__save_freq=2)
    assert numbers(steps) == numbers(plain)
    assert list((tmp_path / "checkpoints" / "global_step_2" / "actor" / "huggingface").glob("tokenizer*"))


def test_arguments_of_the_chat_template_reach_it(run, task, tmp_path):
    import shutil

    shutil.copytree(task["actor_rollout_ref.model.path"], tmp_path / "model")
    for file in (tmp_path / "model").glob("chat_template*"):
        file.unlink()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }} be {{ mood }}")
    dump = {"trainer__rollout_data_dir": str(tmp_path / "dump"), "trainer__total_training_steps": 1}
    run(
        **{"+data__apply_chat_template_kwargs__mood": "brief"},
        actor_rollout_ref__model__path=str(tmp_path / "model"),
        **dump,
    )
    assert all(row["input"].endswith("be brief") for row in rows(tmp_path / "dump" / "1.jsonl"))


@pytest.mark.ray
def test_ray_starts_as_ray_init_says(run, tmp_path, monkeypatch):
    import ray

    ray.shutdown()  # one that is running already, from another test, would be joined as it is
    seen = {}
    shutdown = ray.shutdown
    monkeypatch.setattr(ray, "shutdown", lambda: (seen.update(ray.cluster_resources()), shutdown()))
    monkeypatch.setenv("COLOUR", "")
    run(
        trainer__controller="ray",
        trainer__total_training_steps=1,
        ray_init__num_cpus=3,
        ray_init__object_store_memory_mb=100,
        ray_init__timeline_json_file=str(tmp_path / "timeline.json"),
        **{"+ray_init__env__COLOUR": "red"},
    )
    assert seen["CPU"] == 3 and seen["object_store_memory"] == 100 << 20
    assert json.loads((tmp_path / "timeline.json").read_text())


def test_variables_of_ray_init_env_reach_the_workers(run, tmp_path, monkeypatch):
    monkeypatch.setenv("BONUS", "")
    (tmp_path / "reward.py").write_text(
        "import os\ndef compute_score(**kwargs):\n    return float(os.environ['BONUS'])\n"
    )
    _, steps = run(**{"+ray_init__env__BONUS": "'7'"}, custom_reward_function__path=str(tmp_path / "reward.py"))
    assert steps[1]["critic/score/mean"] == 7


def test_tracker_kwargs_reach_their_logger(run, tmp_path):
    _, steps = run(**{"+trainer__tracker_kwargs__file__path": str(tmp_path / "elsewhere.jsonl")})
    assert steps == {} and len(read_metrics(tmp_path / "elsewhere.jsonl")) == 2


def test_metrics_have_the_names_users_know(run):
    _, steps = run(
        **GAE,
        **REFERENCE,
        algorithm__use_kl_in_reward=True,
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__rollout__calculate_log_probs=True,
        trainer__test_freq=2,
        trainer__save_freq=2,
    )
    spread = [f"{name}/{kind}" for name in SPREAD for kind in ("mean", "max", "min")]
    missing = [name for name in (*NAMES.split(), *spread) if name not in steps[2]]
    assert not missing
    assert steps[2]["timing_s/generate_sequences"] <= steps[2]["timing_s/gen"]
    parts = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
    assert sum(steps[2][f"timing_s/{part}"] for part in parts) <= steps[2]["timing_s/step"]


SPREAD = [f"critic/{name}" for name in ("score", "rewards", "advantages", "returns", "values")]
SPREAD += ["response_length", "prompt_length"]
NAMES = """
actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/kl_loss actor/kl_coef
actor/grad_norm actor/lr actor/reward_kl_penalty actor/reward_kl_penalty_coeff
critic/vf_loss critic/vf_clipfrac critic/vpred_mean critic/grad_norm critic/lr critic/vf_explained_var
response_length/clip_ratio prompt_length/clip_ratio
global_seqlen/min global_seqlen/max global_seqlen/minmax_diff global_seqlen/balanced_min global_seqlen/balanced_max
global_seqlen/mean
perf/cpu_memory_used_gb perf/total_num_tokens perf/time_per_step perf/throughput
timing_s/step timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv
timing_s/update_critic timing_s/update_actor timing_s/testing timing_s/save_checkpoint timing_s/generate_sequences
timing_s/reshard
timing_per_token_ms/gen timing_per_token_ms/ref timing_per_token_ms/values timing_per_token_ms/adv
timing_per_token_ms/update_critic timing_per_token_ms/update_actor
training/global_step training/epoch
training/rollout_probs_diff_max training/rollout_probs_diff_mean training/rollout_probs_diff_std
val-core/digits/reward/mean@1
"""


def test_mfu_is_logged_where_the_peak_of_the_device_is_known(run, monkeypatch):
    from verl.workers import model_worker

    assert not [name for name in run(**GAE)[1][2] if "mfu" in name]
    monkeypatch.setattr(model_worker, "get_device_flops", lambda **_: 1e-3)  # TFLOPS
    _, steps = run(**GAE)
    assert 0 < steps[2]["perf/mfu/actor"] < 100 and 0 < steps[2]["perf/mfu/critic"] < 100


def test_parts_and_weights_of_the_loss_change_what_is_learned(run, task, tmp_path):
    actor, table = "actor_rollout_ref__actor__", pq.read_table(task["data.train_files"]).to_pylist()
    hard = [row | {"extra_info": {**row["extra_info"], "difficulty": i % 2}} for i, row in enumerate(table)]
    pq.write_table(pa.Table.from_pylist(hard), tmp_path / "hard.parquet")
    norms = {}
    for name, value in {"rl_loss_coef": 1, "sft_loss_coef": 0.5, "length_loss_weight": True}.items():
        norms[name] = series(run(**{f"{actor}{name}": value})[1], "actor/grad_norm")
    difficult = {f"{actor}difficulty_loss_weight": True, "data__train_files": str(tmp_path / "hard.parquet")}
    norms["difficulty_loss_weight"] = series(run(**difficult)[1], "actor/grad_norm")
    assert len({norm[0] for norm in norms.values()}) == 4


def test_a_difficulty_that_is_not_in_the_data_is_missed_by_name(run):
    with pytest.raises(ValueError, match="difficulty_loss_weight=true: row 0 .* has difficulty=None.* Add a column"):
        run(actor_rollout_ref__actor__difficulty_loss_weight=True)


# -- functions of ones own -------------------------------------------------------------------------------------------

MINE = """
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage

def grpo(token_level_rewards, response_mask, index, **kwargs):
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index)

def gpg(old, new, adv, mask, mode, config):
    zero = new.new_zeros(())
    return agg_loss(-adv * new, mask, mode), zero, agg_loss((old - new).detach(), mask, mode), zero

def lone(token_level_rewards, response_mask):
    return token_level_rewards
"""


def test_functions_of_a_file_train_as_the_registered_ones_do(run, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    loss = "actor_rollout_ref__actor__policy_loss__loss_mode"
    _, named = run(**{"algorithm__adv_estimator": "grpo", loss: "gpg"})
    _, from_file = run(**{"algorithm__adv_estimator": f"{mine}:grpo", loss: f"{mine}:gpg"})
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max"):
        assert series(from_file, name) == pytest.approx(series(named, name), abs=1e-6)


def test_an_estimator_that_returns_no_pair_is_named(run, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ValueError, match=r"mine.py:lone returned .* must return advantages and returns"):
        run(algorithm__adv_estimator=f"{tmp_path}/mine.py:lone")

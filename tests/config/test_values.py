"""Values follow hydra's grammar, become the declared type, and say so when they cannot."""

import pytest

from tests.support.composing import load_over
from verl.config.base import ConfigError
from verl.config.load import load

from .helpers import RUNNABLE, problems, typed


def _at(config, key):
    for name in key.split("."):
        config = config[name]
    return config


LR, WORDS = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.model.override_config"


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        (f"{LR}=1e-6", LR, 1e-6),
        (f"{LR}='1e-6'", LR, 1e-6),
        (f'{LR}="2e-5"', LR, 2e-5),
        (f"{LR}=1", LR, 1.0),
        ("trainer.total_epochs=3.0", "trainer.total_epochs", 3),
        ("trainer.total_epochs='3'", "trainer.total_epochs", 3),
        ("trainer.save_freq=-1", "trainer.save_freq", -1),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", None),
        ("trainer.val_before_train=False", "trainer.val_before_train", False),
        ("trainer.val_before_train=off", "trainer.val_before_train", False),
        ("actor_rollout_ref.actor.skip_old_log_probs=auto", "actor_rollout_ref.actor.skip_old_log_probs", None),
        ("actor_rollout_ref.model.use_liger='Auto'", "actor_rollout_ref.model.use_liger", None),
        ("critic.enable=auto", "critic.enable", None),
        ("trainer.val_before_train='true'", "trainer.val_before_train", True),
        ("trainer.experiment_name=123", "trainer.experiment_name", "123"),
        ("trainer.experiment_name='my run, 2nd'", "trainer.experiment_name", "my run, 2nd"),
        ("trainer.experiment_name='a=b'", "trainer.experiment_name", "a=b"),
        ("trainer.experiment_name=", "trainer.experiment_name", ""),
        ("trainer.experiment_name=qwen2.5-0.5b_x", "trainer.experiment_name", "qwen2.5-0.5b_x"),
        ("trainer.logger=console", "trainer.logger", "console"),
        ("trainer.logger=['console','tensorboard']", "trainer.logger", ["console", "tensorboard"]),
        ("trainer.logger=[console, file]", "trainer.logger", ["console", "file"]),
        ("data.train_files=['/a b/x.parquet','y.parquet']", "data.train_files", ["/a b/x.parquet", "y.parquet"]),
        ("data.train_files=hdfs://host/x.parquet", "data.train_files", "hdfs://host/x.parquet"),
        ("data.custom_cls={path: x.py, name: D}", "data.custom_cls.name", "D"),
        ("+data.custom_cls={path: x.py, name: D}", "data.custom_cls.path", "x.py"),
        (f"+{WORDS}.attention_dropout=0.0", f"{WORDS}.attention_dropout", 0.0),
        (f"{WORDS}.rope.factor=2", f"{WORDS}.rope", {"factor": 2}),
        (f"+{WORDS}={{a: [1, {{b: c}}]}}", f"{WORDS}.a", [1, {"b": "c"}]),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=4", "reward_model.reward_kwargs",
         {"overlong_buffer_cfg": {"len": 4}}),
        ("+trainer.total_epochs=7", "trainer.total_epochs", 7),
        ("++trainer.total_epochs=7", "trainer.total_epochs", 7),
        ("+trainer.logger=[console]", "trainer.logger", ["console"]),
        ("trainer.default_local_dir='runs/${trainer.experiment_name}'", "trainer.default_local_dir", "runs/gsm8k"),
        ("trainer.max_actor_ckpt_to_keep=${trainer.nnodes}", "trainer.max_actor_ckpt_to_keep", 1),
        ("trainer.project_name=${oc.env:VERL_TEST_NAME}", "trainer.project_name", "from env"),
        ("~actor_rollout_ref.rollout.engine_kwargs.sglang", "actor_rollout_ref.rollout.engine_kwargs",
         {"vllm": {"swap_space": None, "disable_mm_preprocessor_cache": False}}),
        ("+actor_rollout_ref.ref.model.path=/m", "actor_rollout_ref.ref.model.path", "/m"),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
         "actor_rollout_ref.actor.fsdp_config.compute_dtype", "fp32"),
        ("actor_rollout_ref.actor.policy_loss._target_=my.Loss", "actor_rollout_ref.actor.policy_loss.loss_mode",
         "vanilla"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "critic.ppo_epochs", 2),
        ("data.max_prompt_length=128", "actor_rollout_ref.rollout.prompt_length", 128),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model]",
         "actor_rollout_ref.actor.checkpoint.load_contents", ["model"]),
        ("trainer.controller_nsight_options.cuda-memory-usage=\"true\"",
         "trainer.controller_nsight_options.cuda-memory-usage", "true"),
    ],
)  # fmt: skip
def test_a_word_of_the_command_line_gives_a_typed_value(word, key, value, monkeypatch):
    monkeypatch.setenv("VERL_TEST_NAME", "from env")
    loaded = load_over(RUNNABLE, [word])
    assert not loaded.problems
    head, _, last = key.rpartition(".")
    holder = _at(loaded.config, head)
    found = holder[last] if last in holder else getattr(holder, last)
    assert found == value and type(found) is type(value) or (found == value and isinstance(value, dict))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("trainer.total_epochs=1.5", "trainer.total_epochs=1.5 must be a whole number."),
        ("trainer.total_epochs=true", "trainer.total_epochs=true must be a whole number."),
        ("trainer.total_epochs=0", "trainer.total_epochs=0 must be greater than 0."),
        ("trainer.seed=three", "trainer.seed=three must be a whole number."),
        (
            "actor_rollout_ref.model.use_liger=maybe",
            "actor_rollout_ref.model.use_liger=maybe must be true, false or auto (null: the automatic choice).",
        ),
        ("trainer.val_only=auto", "trainer.val_only=auto must be true or false."),
        ("trainer.val_only=maybe", "trainer.val_only=maybe must be true or false."),
        (f"{LR}=fast", f"{LR}=fast must be a number."),
        (f"{LR}=nan", f"{LR}=nan must be a finite number."),
        (f"{LR}=-1", f"{LR}=-1 must be greater than 0."),
        ("algorithm.gamma=1.01", "algorithm.gamma=1.01 must be at most 1."),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "clip_ratio_c=1 must be greater than 1."),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1]", "betas=[0.9, 1] must be less than 1."),
        ("trainer.resume_mode=atuo",
         "trainer.resume_mode=atuo must be one of auto, disable, resume_path; did you mean 'auto'."),
        ("data.custom_cls.path={a: 1}", "data.custom_cls.path={'a': 1} must be text, not a mapping"),
        ("trainer=3", "trainer=3 must be a section with the options npu_profile"),
        ("data.custom_cls=x", "data.custom_cls=x must be a section"),
        (f"{WORDS}=3", f"{WORDS}=3 must be a mapping"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[modle]", "must be one of model, optimizer, extra"),
        ("trainer.project_name=${trainer.nmae}", "trainer.project_name=${trainer.nmae} cannot be resolved"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused_with_key_value_and_rule(word, sentence):
    assert sentence in problems(word)


@pytest.mark.parametrize(
    "words",
    [
        [f"{LR}=1e-5", "trainer.total_training_steps=null", f"{WORDS}={{a: 1, b: [2]}}", f"+{WORDS}.c='x'"],
        ["data.train_files=[a,b]", "trainer.project_name=${data.shuffle}"],
        ["actor_rollout_ref.actor.grad_clip=none", "actor_rollout_ref.actor.optim.warmup_style=cosine"],
    ],
)
def test_words_over_a_shared_base_come_to_what_the_whole_command_line_comes_to(words):
    """What most tests of this folder rely on to be quick."""
    whole, over = load([*RUNNABLE, *words]), load_over(RUNNABLE, words)
    assert over == whole


def test_an_option_that_only_follows_a_wrong_one_is_not_blamed():
    found = load([*RUNNABLE, "actor_rollout_ref.actor.use_dynamic_bsz=often"]).problems
    assert [problem.key for problem in found] == ["actor_rollout_ref.actor.use_dynamic_bsz"]


def test_problems_of_every_kind_come_together():
    text = problems("trainer.seed=x", "algorithm.adv_estimator=grp0", "data.train_batch_size=3", "trainer.device=npu")
    assert "trainer.seed=x" in text and "grp0" in text and "trainer.device" in text
    assert "ppo_mini_batch_size=4 is larger than data.train_batch_size=3" in text


def test_the_rollout_engine_must_be_named():
    with pytest.raises(ConfigError, match="actor_rollout_ref.rollout.name must be given"):
        typed("actor_rollout_ref.rollout.name=???")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("trainer.logger=[console", r"trainer.logger=\[console does not follow hydra's grammar"),
        ("trainer.experiment_name=a=b", "put the value in quotes"),
        ("trainer.seed=1,2", "One command runs one configuration"),
        ("actor@actor_rollout_ref.actor=nope", "nope"),
        ("trainer.logger={a: 1}", "trainer.logger"),
    ],
)
def test_what_hydra_refuses_is_a_config_error_with_its_reason(word, sentence):
    with pytest.raises(ConfigError, match=sentence):
        typed(word)


def test_an_option_cannot_be_deleted():
    with pytest.raises(ConfigError, match="Leave it out for its default"):
        typed("~trainer.experiment_name")


def test_clip_ratio_reaches_both_sides_unless_a_side_is_given():
    actor = typed("actor_rollout_ref.actor.clip_ratio=0.3").actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.3)
    words = ("actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio_high=0.28")
    actor = typed(*words).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.28)


def test_a_micro_batch_size_over_all_ranks_becomes_one_per_rank():
    words = [word for word in RUNNABLE if "micro" not in word]
    words += [
        "actor_rollout_ref.actor.ppo_micro_batch_size=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size=8",
        "critic.ppo_micro_batch_size=2",
    ]
    loaded = load(words)
    assert not loaded.problems
    shared, critic = loaded.config.actor_rollout_ref, loaded.config.critic
    assert (shared.actor.ppo_micro_batch_size, shared.actor.ppo_micro_batch_size_per_gpu) == (None, 2)
    assert shared.rollout.log_prob_micro_batch_size_per_gpu == 4
    assert (critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu) == (1, 1)
    assert critic.forward_micro_batch_size is None


def test_a_micro_batch_size_over_all_ranks_must_spread_evenly():
    words = [word for word in RUNNABLE if "actor.ppo_micro" not in word]
    text = "\n".join(
        problem.text for problem in load([*words, "actor_rollout_ref.actor.ppo_micro_batch_size=3"]).problems
    )
    assert "ppo_micro_batch_size=3 does not spread evenly over 2" in text

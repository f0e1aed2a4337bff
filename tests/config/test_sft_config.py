"""Options of supervised fine-tuning: those of verl's releases, and what contradicts."""

from pathlib import Path

import pytest

from verl.config.base import ConfigError
from verl.config.load import load
from verl.config.sft import SFTConfig
from verl.trainer.sft import job

RUNNABLE = ("model.path=/m", "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.logger=[console]")


def loaded(*words):
    return load([*RUNNABLE, *words], config_name="sft_trainer", root=SFTConfig)


def layouts():
    found = {}
    for line in Path(__file__).with_name("sft_keys.txt").read_text().splitlines():
        if line.startswith("### "):
            found[line[4:]] = lines = []
        elif not line.startswith("#"):
            lines.append(line.split(": ", 1))
    return found


@pytest.mark.parametrize("layout", layouts())
def test_every_option_of_a_release_composes_with_its_default(layout):
    words = [f"{key}={value}" for key, value in layouts()[layout] if key != "trainer.device"]
    tree = load([*words, "trainer.device=cpu"], config_name="sft_trainer", root=SFTConfig)
    assert tree.problems == []
    config = tree.config
    assert config.model.path.startswith("~/models/") and config.data.train_batch_size == 256
    assert config.data.format == ("auto" if "engine" in layout else "prompt_response")


def test_nothing_is_said_of_options_that_nobody_gave():
    assert not any("old names" in text for text in loaded().warnings)


def test_names_of_the_older_layout_act():
    tree = loaded(
        *("model.partial_pretrain=/m", "model.strategy=fsdp1", "model.fsdp_config.model_dtype=bf16"),
        *("model.fsdp_config.wrap_policy.min_num_params=7", "ulysses_sequence_parallel_size=2"),
        *("use_remove_padding=true", "optim.warmup_steps_ratio=0.3", "optim.lr_scheduler=wsd"),
        *("data.multiturn.enable=true", "data.multiturn.messages_key=chat", "data.chat_template=t.jinja"),
        *("trainer.checkpoint.save_contents=[model]", "data.micro_batch_size=6"),
    )
    assert tree.problems == []
    config = tree.config
    assert (config.model.path, config.engine.strategy, config.engine.model_dtype) == ("/m", "fsdp1", "bf16")
    assert config.engine.wrap_policy.min_num_params == 7 and config.engine.ulysses_sequence_parallel_size == 2
    assert config.model.use_remove_padding and config.model.custom_chat_template == "t.jinja"
    assert (config.optim.lr_warmup_steps_ratio, config.optim.warmup_style) == (0.3, "wsd")
    assert (config.data.format, config.data.messages_key) == ("messages", "chat")
    assert config.checkpoint.save_contents == config.checkpoint.load_contents == ["model"]
    # two ranks share a sequence, so that the global size is one rank's
    assert (config.data.micro_batch_size_per_gpu, config.data.use_dynamic_bsz) == (6, False)


def test_the_worker_gets_these_sections_as_its_own():
    config = loaded("engine.dtype=float32", "optim.clip_grad=0.5", "optim.lr=1e-3", "model.lora.rank=4").config
    actor = config.actor_rollout_ref.actor
    assert actor.fsdp_config.compute_dtype == "fp32" and actor.grad_clip == 0.5 and actor.optim.lr == 1e-3
    assert config.actor_rollout_ref.model.lora_rank == 4 and actor.update_split.max_tokens == 8192


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["data.trunctaion=left"], "did you mean 'data.truncation'"),
        (["engine.strategy=local"], "engine.strategy=local runs in one process"),
        (["engine.ulysses_sequence_parallel_size=3"], "engine.ulysses_sequence_parallel_size=3 does not divide"),
        (["engine.strategy=megatron"], "engine.strategy=megatron"),
        (["model.mtp.enable=true"], "multi-token prediction: that is not built"),
        (["trainer.profile_interval=[2,1]"], "must be the first and the last step to profile"),
        (["trainer.profile_interval=[1,2]", "profiler.tool=nsys"], "nothing here starts the ranks under nsys"),
        (["data.max_length=4096", "data.max_token_len_per_gpu=1024"], "fits no micro-batch"),
        (["trainer.nnodes=2"], "Start it with torchrun on every node"),
        (["trainer.val_only=true"], "name files to measure"),
        (["optim.override_optimizer_config={amsgrad: true}"], "set optim.betas"),
        (["actor_rollout_ref.model.path=/m"], "actor_rollout_ref.model.path is not an option"),
    ],
)
def test_what_cannot_run_is_refused_under_the_names_of_this_program(words, text):
    try:
        problems = [problem.text for problem in loaded(*words).problems]
    except ConfigError as error:
        problems = [str(error)]
    assert any(text in problem for problem in problems), problems


def test_what_has_no_effect_is_said():
    said = " ".join(loaded("trainer.test_freq=5", "ray_init.num_cpus=2", "engine.deepspeed.zero_stage=3").warnings)
    for key in ("trainer.test_freq", "ray_init.num_cpus", "engine.deepspeed.zero_stage"):
        assert key in said


def test_a_rank_of_torchrun_has_the_ranks_that_there_are(monkeypatch):
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    served = []
    monkeypatch.setattr(job, "_serve", lambda words, root: served.extend(words) or 0)
    with pytest.raises(SystemExit):
        job.main(["model.path=a"])
    assert served == ["model.path=a", "trainer.nnodes=2", "trainer.n_gpus_per_node=2"]

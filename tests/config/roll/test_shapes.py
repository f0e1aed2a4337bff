"""Files of the shapes that ROLL's examples have start, after no more than the words that their refusal asks for."""

import pytest
import yaml

from tests.config.roll.shapes import SHAPES, shape
from tests.support.composing import load_over
from verl.config.load import load
from verl.config.roll.command import main, translate_file
from verl.config.tree import put_key

ELSEWHERE = ("does not exist", "my_reward.py")
FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2"


@pytest.fixture
def write(tmp_path):
    def call(tree):
        path = tmp_path / "file.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return str(path)

    return call


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_starts_with_the_words_its_refusal_asks_for(write, name):
    changes, expected = SHAPES[name]
    path = write(shape(changes))
    found = translate_file(path)
    assert found.added == expected, found.refusals
    for word in found.added:
        assert any(word in refusal for refusal in found.refusals)
    found = translate_file(path, found.added)
    assert found.refusals == []
    problems = [one.text for one in load_over((), found.words).problems]
    assert [text for text in problems if not any(part in text for part in ELSEWHERE)] == []


def test_domains_become_sources_shares_and_rules(write):
    path = write(shape({}))
    config = load(translate_file(path, SHAPES["five domains"][1]).words).config
    assert config.data.domains["math_rule"] == ["deepmath_103k", "aime", "*"], "tags listed by no worker are its own"
    assert config.data.domains["code_sandbox"] == ["KodCode"] and config.data.reward_fn_key == "tag"
    assert config.data.mixture == {"crossthinkqa/*": 0.1, "ifeval/*": 0.1, "math_rule/*": 0.4, "code_sandbox/*": 0.3,
                                   "llm_judge/*": 0.1}  # fmt: skip
    assert config.reward_model.by_source == {
        "crossthinkqa/*": "builtin:multiple_choice",
        "ifeval/*": {"function": "builtin:ifeval", "continuous": True},
        "math_rule/*": "builtin:math",
        "code_sandbox/*": "builtin:code",
        "llm_judge/*": "builtin",
    }
    judge = config.reward_model.judge
    assert (judge.model, judge.data_sources, judge.temperature) == ("judge/7B", ["llm_judge/*"], 0.8)
    assert config.algorithm.sample_mask.drop_truncated and config.algorithm.sample_mask.difficulty == [0.1, 0.95]


def test_a_domain_may_be_left_out_and_the_last_takes_the_rest(write):
    changes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    path = write(shape({"actor_train.strategy_args.strategy_config": changes}))
    found = translate_file(path, ["rewards.llm_judge=null", "actor_train.strategy_args.strategy_name=fsdp2_train"])
    assert found.refusals == [], "Megatron's settings with fsdp2_train are reported, not refused"
    assert any("fsdp2 shards the model" in note for note in found.notes)
    shares = load_over((), found.words).config.data.mixture
    assert shares["ifeval/*"] == 0.2 and sum(shares.values()) == pytest.approx(1)
    assert any("ifeval gets 0.2" in note for note in found.notes)


def test_megatrons_settings_are_one_sentence_with_fsdp2(write):
    changes, _ = SHAPES["mixture of experts"]
    found = translate_file(write(shape(changes)), [FSDP2])
    assert found.refusals == []
    (note,) = (text for text in found.notes if "Megatron" in text)
    assert "moe_grouped_gemm" in note and "virtual_pipeline_model_parallel_size" in note
    actor = load_over((), found.words).config.actor_rollout_ref.actor
    assert (actor.strategy, actor.ulysses_sequence_parallel_size) == ("fsdp2", 4)
    # 1 per device x 32 accumulated x 32 devices / (2 x 4) ranks that share a sample, over 8 responses
    assert actor.ppo_mini_batch_size == 16


def test_devices_that_overlap_or_lie_apart_are_said(write):
    notes = translate_file(write(shape({}))).notes
    assert any("shares 12 of the 16 devices" in text for text in notes)
    changes, _ = SHAPES["devices apart, of two nodes"]
    words = translate_file(write(shape(changes))).words
    assert {"trainer.nnodes=2", "trainer.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=false"} <= {*words}
    assert "actor_rollout_ref.rollout.n_gpus_per_node=2" in words


def test_a_line_that_settles_all_refusals_ends_the_message(write, capsys):
    path = write(shape({}))
    assert main([path, "trainer.seed=3"], run=None) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"To go on: verl roll {path} trainer.seed=3 {' '.join(SHAPES['five domains'][1])}"


def test_a_secret_goes_to_the_environment_and_not_to_the_command_line(write, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that what main sets is undone
    monkeypatch.delenv("WANDB_API_KEY")
    changes, _ = SHAPES["lora and a key of wandb"]
    ran = []
    assert main([write(shape(changes))], run=ran.append) == 0
    assert not any("secret" in word for word in ran[0]) and "secret" not in "".join(capsys.readouterr())
    import os

    assert os.environ["WANDB_API_KEY"] == "secret"


@pytest.mark.parametrize(
    ("tree", "pipeline"),
    [
        ({"sft_train": {"strategy_args": {"strategy_name": "megatron_train"}}}, "supervised fine-tuning"),
        ({"chosen_key": "chosen", "beta": 0.1, "actor_train": {"world_size": 1}}, "DPO"),
        ({"student_pretrain": "m", "teacher": {"device_mapping": "[0]"}}, "distillation"),
        ({"actor_train": {"strategy_args": {"strategy_name": "diffusion_deepspeed_train"}}}, "diffusion"),
    ],
)  # fmt: skip
def test_a_file_of_another_pipeline_is_refused_in_one_sentence(write, capsys, tree, pipeline):
    assert main([write({"pretrain": "m", **tree})], run=None) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(error) == 1 and pipeline in error[0] and "not built" in error[0]


def test_null_asks_for_nothing_whatever_the_key(write):
    tree = shape(SHAPES["deepspeed"][0] | {"max_stepz": None, "rewards.math_rule.format_pattern": None,
                                           "actor_train.strategy_args.other": None})  # fmt: skip
    assert translate_file(write(tree)).refusals == []


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("rollout_batch_size", "x", "is a whole number from 1 on"),
        ("num_gpus_per_node", 0, "is a whole number from 1 on"),
        ("actor_train.training_args", "x", "is a section"),
        ("rewards.math_rule", "MathRule", "is a section"),
        ("actor_train.device_mapping", [], "names no device"),
    ],
)
def test_a_value_of_another_shape_is_named(write, key, value, rule):
    tree = shape(SHAPES["deepspeed"][0])
    put_key(tree, key, value)
    assert any(text.startswith(f"{key}=") and rule in text for text in translate_file(write(tree)).refusals)

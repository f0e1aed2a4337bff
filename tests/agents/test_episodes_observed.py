"""Runs of episodes: metrics, dumps and traces say the same of them, and the command shows them."""

import json

import pytest

from tests.support.runs import DEFAULTS, make_task, overrides, read_metrics, run_job
from verl.telemetry.trajectories import find_files, read
from verl.utils.tiny_model import make_tiny_model
from verl.view.trajectory_command import main as show

ROLLOUT, LAKE = "actor_rollout_ref.rollout", "env.registry.FrozenLake"

# earlier turns of the policy are shown to it in other words: each turn is a training row
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ 'earlier: ' if message['role'] == 'assistant' and not loop.last }}{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def lake(tmp_path, monkeypatch):
    """Train for a step on a small lake; returns the trainer, and the metrics of the step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=1)

    def run(**settings):
        left_out = ("trainer.total_epochs", "data.train_batch_size", f"{ROLLOUT}.n")
        options = {key: value for key, value in DEFAULTS.items() if key not in left_out}
        options |= {
            "actor_rollout_ref.model.path": tmp_path / "model",
            "trainer.default_local_dir": tmp_path / "run",
            "trainer.total_training_steps": 1,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "trainer.logger": "[file]",
            "trainer.test_freq": 1,
            "trainer.rollout_data_dir": tmp_path / "samples",
            "trainer.validation_data_dir": tmp_path / "validation",
            "env.train.tags": "[FrozenLake]",
            "env.train.n_groups": 2,
            "env.train.group_size": 4,
            "env.val.n_groups": 3,
            f"{LAKE}.kwargs.size": 2,
            f"{LAKE}.max_steps": 3,
            f"{LAKE}.max_tokens_per_step": 6,
            "data.max_prompt_length": 300,
            "data.max_response_length": 300,
            f"{ROLLOUT}.trace.backend": "file",
            f"{ROLLOUT}.trace.token2text": True,
            f"{ROLLOUT}.calculate_log_probs": True,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        trainer = run_job([f"{key}={value}" for key, value in options.items()])
        return trainer, read_metrics(tmp_path / "metrics.jsonl")[-1]["data"]

    return run


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_metrics_dumps_and_traces_say_the_same_of_episodes(lake, tmp_path, capsys):
    trainer, metrics = lake()
    dumped, traced = lines(tmp_path / "samples/1.jsonl"), lines(tmp_path / "run/rollout_trace/1.jsonl")
    assert len(dumped) == len(traced) == 8
    for name, value in {
        "success": mean(row["info"]["success"] for row in dumped),
        "reward": mean(row["score"] for row in dumped),
        "turns": mean(sum(turn["generated"] for turn in row["turns"]) for row in dumped),
        "valid_action": mean(row["info"]["valid_action"] for row in dumped),
        "truncated": mean(row["status"] != "completed" for row in dumped),
        "error": 0,
    }.items():
        assert metrics[f"env/FrozenLake/{name}"] == pytest.approx(value), name
    assert metrics["agent_loop/slowest_s"] == max(row["seconds"] for row in dumped)
    assert [row["seconds"] for row in dumped if row.get("slowest")] == [metrics["agent_loop/slowest_s"]]
    assert metrics["num_turns/mean"] == mean(row["num_turns"] for row in dumped)
    assert {"val-env/FrozenLake/success", "val-aux/num_turns/mean"} <= metrics.keys()
    assert len(lines(tmp_path / "validation/1.jsonl")) == 3
    for row in traced:
        mask, ids = row["response_mask"], row["response_ids"]
        generated = [turn for turn in row["turns"] if turn["generated"]]
        assert sum(last - first for first, last in (turn["span"] for turn in generated)) == sum(mask)
        for turn in generated:
            assert all(mask[slice(*turn["span"])])
            assert turn["text"] == trainer.tokenizer.decode(ids[slice(*turn["span"])])
        assert row["score"] == pytest.approx(sum(turn["reward"] for turn in generated))
        assert len(row["response_logprobs"]) == len(ids)
    assert [row["turns"] for row in dumped] == [row["turns"] for row in traced]
    assert show([str(tmp_path / "validation"), "--diff", "1", "1", "--best", "1"]) == 0
    assert "You walk on a frozen lake" in capsys.readouterr().out


def test_a_trajectory_of_several_rows_is_one_line_and_counts_once(lake, tmp_path):
    (tmp_path / "template.jinja").write_text(REWRITING)
    _, metrics = lake(
        actor_rollout_ref__rollout__multi_turn__use_inference_chat_template=True,
        actor_rollout_ref__model__custom_chat_template=tmp_path / "template.jinja",
    )
    dumped, traced = lines(tmp_path / "samples/1.jsonl"), lines(tmp_path / "run/rollout_trace/1.jsonl")
    assert len(dumped) == len(traced) == 8 and len(lines(tmp_path / "validation/1.jsonl")) == 3
    assert metrics["env/FrozenLake/turns"] == mean(row.get("num_rows", 1) for row in dumped)
    assert max(row["num_rows"] for row in dumped) == 3
    for row, record in zip(dumped, traced, strict=True):
        roles = [turn["role"] for turn in row["turns"]]
        assert roles == ["assistant", "user"] * (row["num_rows"] - 1) + ["assistant"]
        assert all(turn["span"] is None for turn in row["turns"] if not turn["generated"])
        own = [turn for turn in row["turns"] if turn["generated"]]
        assert [turn["span"][1] for turn in own] == [len(part["response_ids"]) for part in record["rows"]]
        assert row["response_length"] == sum(len(part["response_ids"]) for part in record["rows"])
    assert all(t.turns[0].log_prob < 0 for t in read(find_files([tmp_path / "run"]), []))


LOOP = """
from verl.agents import AgentLoopBase, AgentLoopOutput, register


@register("counts")
class Counts(AgentLoopBase):
    async def run(self, sampling_params, **row):
        if row["extra_info"]["index"] % 8 == 3:
            raise KeyError("lost")
        prompt = list(row["raw_prompt_ids"])
        short = {**sampling_params, "max_tokens": 4}
        first = await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=short)
        ids = first.token_ids + self.tokenizer.encode("!")
        second = await self.server_manager.generate("x", prompt_ids=prompt + ids, sampling_params=short)
        mask = [1] * len(first.token_ids) + [0] + [1] * len(second.token_ids)
        fields = {"success": len(first.token_ids) == 4, "looks": 2, "note": "kept as a column only"}
        return AgentLoopOutput(prompt, ids + second.token_ids, mask, num_turns=4, extra_fields=fields)
"""


def test_numbers_of_a_users_loop_reach_metrics_and_dumps_and_failed_rows_count_in_error_only(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    (tmp_path / "loop.py").write_text(LOOP)
    words = overrides(
        make_task(tmp_path / "task"),
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__agent__agent_loop_config_path=str(tmp_path / "loop.py"),
        actor_rollout_ref__rollout__agent__default_agent_loop="counts",
        actor_rollout_ref__rollout__val_kwargs__n=2,
        trainer__total_training_steps=1,
        trainer__test_freq=1,
        trainer__logger="[file]",
        trainer__rollout_data_dir=tmp_path / "samples",
        trainer__validation_data_dir=tmp_path / "validation",
        data__shuffle=False,
        env__on_error="drop",
        env__max_error_share=0.5,
    )
    run_job(words)
    metrics = read_metrics(tmp_path / "metrics.jsonl")[-1]["data"]
    rows, held_out = lines(tmp_path / "samples/1.jsonl"), lines(tmp_path / "validation/1.jsonl")
    done = [row for row in rows if "error" not in row]
    assert len(rows) == 16 and len(done) == 12 and len(held_out) == 16
    assert metrics["agent/counts/error"] == 0.25 and metrics["val-agent/counts/error"] == 0.125
    assert metrics["agent/counts/looks"] == 2 and metrics["agent/counts/turns"] == 2
    assert metrics["agent/counts/success"] == mean(row["info"]["success"] for row in done)
    assert metrics["agent/counts/reward"] == pytest.approx(mean(row["score"] for row in done))
    assert metrics["critic/score/mean"] == pytest.approx(metrics["agent/counts/reward"])
    assert metrics["response_length/min"] > 1, "the one masked token of a failed row is no response"
    solved = [row["score"] for row in held_out if "error" not in row]
    assert len(solved) == 14 and metrics["val-agent/counts/reward"] == pytest.approx(mean(solved))
    assert metrics["val-core/digits/reward/mean@2"] == pytest.approx(mean(solved))
    assert all("note" not in row["info"] and row["info"]["looks"] == 2 for row in done)
    assert [[turn["generated"] for turn in row["turns"]] for row in done] == [[True, False, True]] * 12

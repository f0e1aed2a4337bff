"""Runs that train an agent outside: the policy's tokens, rewards and failures, on the whole way."""

import threading
from pathlib import Path

import pytest

from tests.agents.conftest import ROLLOUT
from tests.trainer.test_learning import TINY, rewards_of
from tests.workers.rollout.conftest import COMMON
from verl.utils.tiny_model import make_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "agentic" / "openai_agent"
AGENT = f"{ROLLOUT}__agent__openai_agent__"
SETTINGS = {
    f"{ROLLOUT}__calculate_log_probs": True,
    "data__max_response_length": 60,
}

OTHERS = '''
import importlib.util, json, urllib.request

def ask(base_url, messages):
    body = json.dumps({"messages": messages, "max_tokens": 5}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

def rewrites(base_url, api_key, row):
    """Begins anew twice: three rows, of which the second has two turns."""
    ask(base_url, row["messages"])
    messages = [{"role": "user", "content": "Sum up."}]
    first = ask(base_url, messages)
    ask(base_url, [*messages, first, {"role": "user", "content": "more"}])
    ask(base_url, [{"role": "user", "content": "End."}])
    return 0.75

def fails_at_times(base_url, api_key, row):
    ask(base_url, row["messages"])
    if row["extra_info"]["index"] % 4 == 0:
        raise KeyError("no such thing")
    return 0.5
'''


@pytest.mark.parametrize(("file", "runs_in"), [("agent.py", "thread"), ("agent_urllib.py", "process")])
def test_what_the_agent_was_answered_is_what_the_actor_scores(run, file, runs_in, tmp_path):
    if file == "agent.py":
        pytest.importorskip("openai")
    before = set(threading.enumerate())
    settings = {f"{AGENT}function": f"{EXAMPLES / file}:solve", f"{AGENT}runs_in": runs_in}
    trainer, steps = run(**SETTINGS, **settings)
    assert trainer.metrics["training/rollout_probs_diff_max"] < 1e-6
    assert trainer.metrics["num_turns/mean"] == 4 and trainer.metrics["critic/rewards/max"] > 0
    assert all(row["output"].count("user\nDigits only!") == 1 for rows in steps for row in rows)
    assert [[row["output"] for row in rows] for rows in steps] == [
        [row["output"] for row in rows] for rows in run(**SETTINGS, **settings)[1]
    ]
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert "agent" not in left


def test_a_rewritten_history_trains_several_rows_of_a_trajectory(run, tmp_path):
    (tmp_path / "others.py").write_text(OTHERS)
    trainer, steps = run(**SETTINGS, **{f"{AGENT}function": f"{tmp_path / 'others.py'}:rewrites"})
    assert trainer.metrics["training/rollout_probs_diff_max"] < 1e-6
    for row in steps[0]:
        assert row["num_rows"] == 3 and [turn["row"] for turn in row["turns"] if turn.get("generated")] == [0, 1, 1, 2]
        assert row["score"] == 0.75 and row["status"] == "completed"


def test_an_agent_that_fails_takes_its_own_episode_only(run, tmp_path):
    (tmp_path / "others.py").write_text(OTHERS)
    settings = {f"{AGENT}function": f"{tmp_path / 'others.py'}:fails_at_times", "env__max_error_share": 0.9}
    trainer, steps = run(**SETTINGS, **settings, trainer__total_training_steps=1)
    assert "critic/rewards/mean" in trainer.metrics
    failed = [row for row in steps[0] if row["status"] == "error"]
    assert len(failed) == 4 and all("KeyError: 'no such thing'" in row["error"] for row in failed)
    assert [row["score"] for row in steps[0] if row["status"] != "error"] == [0.5] * 12
    with pytest.raises(RuntimeError, match="openai_agent.*KeyError: 'no such thing'"):
        run(**SETTINGS, **settings, env__on_error="stop")


@pytest.mark.vllm
def test_what_vllm_answered_is_what_the_actor_scores(run, tmp_path):
    model = make_tiny_model(tmp_path / "heads_of_32", **COMMON["tied"])
    settings = {
        f"{AGENT}function": f"{EXAMPLES / 'agent_urllib.py'}:solve",
        f"{ROLLOUT}__name": "vllm",
        "actor_rollout_ref__model__path": model,
        "trainer__total_training_steps": 1,
    }
    trainer, steps = run(**SETTINGS, **settings)
    assert trainer.metrics["training/rollout_probs_diff_max"] < 1e-4
    assert all(row["num_turns"] == 4 and row["status"] == "completed" for rows in steps for row in rows)


@pytest.mark.learning
def test_an_agent_outside_learns(tmp_path, monkeypatch):
    settings = {**TINY, **SETTINGS, f"{AGENT}function": f"{EXAMPLES / 'agent_urllib.py'}:solve"}
    del settings[f"{ROLLOUT}__calculate_log_probs"]
    rewards = rewards_of(tmp_path, monkeypatch, **settings)
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.6, rewards


def test_an_agent_that_was_put_off_goes_on_with_the_answers_it_had(run, tmp_path):
    """It runs again from its start, and is given again what it was answered; the rest comes from newer weights."""
    settings = {
        f"{AGENT}function": f"{EXAMPLES / 'agent_urllib.py'}:solve",
        f"{ROLLOUT}__partial_rollout": True,
        f"{ROLLOUT}__over_sample_rate": 1.0,
        f"{ROLLOUT}__max_running_requests": 8,
        "trainer__total_training_steps": 4,
    }
    trainer, steps = run(**SETTINGS, **settings)
    assert all(row["num_turns"] == 4 and row["status"] == "completed" for rows in steps for row in rows)
    assert trainer.metrics["rollout/prompts_put_off"] > 0 and trainer.metrics["rollout/tokens_discarded"] == 0

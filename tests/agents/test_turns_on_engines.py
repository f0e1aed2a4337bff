"""Several turns on real engines: the actor scores every generated token as the engine did, at every turn."""

import json

import pytest

from tests.agents.conftest import ROLLOUT
from tests.agents.test_turns_of_runs import LOOP
from tests.support.runs import main_ppo, make_task, overrides, read_metrics
from tests.workers.rollout.conftest import COMMON
from verl.utils.tiny_model import make_tiny_model


@pytest.mark.parametrize(
    "name", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_every_turn_is_scored_as_it_was_generated(name, tmp_path):
    task = make_task(tmp_path / "task")
    task["actor_rollout_ref.model.path"] = make_tiny_model(tmp_path / "model", **COMMON["tied"])
    (tmp_path / "loop.py").write_text(LOOP)
    done = main_ppo(
        overrides(
            task,
            **{
                f"{ROLLOUT}__name": name,
                f"{ROLLOUT}__mode": "async",
                f"{ROLLOUT}__agent__agent_loop_config_path": tmp_path / "loop.py",
                f"{ROLLOUT}__agent__default_agent_loop": "asks_again",
                f"{ROLLOUT}__multi_turn__max_tokens_per_turn": 4,
                f"{ROLLOUT}__calculate_log_probs": True,
                "data__return_raw_chat": True,
                "data__max_prompt_length": 96,
                "data__max_response_length": 128,
                "trainer__logger": "[file]",
                "trainer__total_training_steps": 2,
                "trainer__save_freq": -1,
                "trainer__rollout_data_dir": tmp_path / "samples",
            },
        ),
        VERL_FILE_LOGGER_PATH=str(tmp_path / "metrics.jsonl"),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(steps) == 2 and all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    for path in (tmp_path / "samples").iterdir():
        for row in map(json.loads, path.read_text().splitlines()):
            assert len([turn for turn in row["turns"] if turn["generated"]]) == 3

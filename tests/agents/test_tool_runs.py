"""Runs of the main job in which a policy calls tools."""

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.agents.conftest import ROLLOUT

TOOLS = '''
import os
import time

from verl.tools import function_tool


@function_tool
def look_up(key: str, *, table: dict) -> str:
    """Return the value of a key."""
    if key in "abcdefgh":
        os._exit(1)
    return f"value of {key}"


@function_tool
def hang() -> str:
    """Never return."""
    time.sleep(1000)
'''

# whatever the policy says is a call: its letters choose which
FORMAT = """
from verl.agents.tool_parser import ToolCall, ToolParser


class AnyTurn(ToolParser):
    def parse(self, token_ids, text, tools=()):
        name = ("look_up", "hang", "nothing", "look_up")[len(text) % 4]
        return "", [ToolCall(name, {"key": text[:1]} if name == "look_up" else {}, raw=text)]
"""


def test_a_run_calls_tools_counts_their_failures_and_is_the_same_with_two_processes_of_agent_loops(run, tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "format.py").write_text(FORMAT)
    path = tmp_path / "task" / "train.parquet"
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row["extra_info"]["tools_kwargs"] = {"look_up": {"execute_kwargs": {"table": {"a": "1"}}}}
    pq.write_table(pa.Table.from_pylist(rows), path)
    settings = {
        f"{ROLLOUT}__multi_turn__enable": True,
        f"{ROLLOUT}__multi_turn__function_tool_path": str(tmp_path / "tools.py"),
        f"{ROLLOUT}__multi_turn__format": f"{tmp_path / 'format.py'}:AnyTurn",
        f"{ROLLOUT}__multi_turn__tool_timeout": 0.5,
        f"{ROLLOUT}__multi_turn__max_assistant_turns": 3,
        f"{ROLLOUT}__multi_turn__tool_num_workers": 2,
        f"{ROLLOUT}__calculate_log_probs": True,
        "data__max_response_length": 256,
        "data__max_prompt_length": 512,
        "data__train_batch_size": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
        "trainer__total_training_steps": 1,
        "trainer__val_before_train": False,
    }
    trainer, (rows,) = run(**settings)
    calls = [call for row in rows for call in row.get("tool_calls") or ()]
    outcomes = {call["outcome"] for call in calls}
    assert {"ok", "timeout", "unknown_tool"} <= outcomes, calls
    assert trainer.metrics["training/rollout_probs_diff_max"] < 1e-5, "tool answers move no log-prob"
    outputs = "".join(row["output"] for row in rows)
    assert "Error: there is no tool 'nothing'; tools are: look_up, hang" in outputs and "value of" in outputs
    two, (others,) = run(**settings, **{f"{ROLLOUT}__agent__num_workers": 2})
    names = ("input", "output", "score", "num_turns")
    assert [[row[name] for name in names] for row in others] == [[row[name] for name in names] for row in rows]
    assert two.metrics["actor/entropy"] == trainer.metrics["actor/entropy"]
    assert {name for name in two.timing if name.startswith("agent_loop/")} == {
        name for name in trainer.timing if name.startswith("agent_loop/")
    }
    assert not any(psutil.pid_exists(pid) for group in two.buffer.agent_loops.workers.groups for pid in group.pids)
    # wherever they are: the tools of a process that has ended are no children of this one
    here = [p.info for p in psutil.process_iter(["cwd", "cmdline"]) if p.info["cwd"] == str(tmp_path)]
    assert not [one for one in here if "verl.tools.worker" in " ".join(one["cmdline"])]

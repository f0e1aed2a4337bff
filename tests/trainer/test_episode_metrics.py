"""Episodes of a batch, by hand: metrics in closed form, and the lines of dumps and traces."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from tests.config.helpers import typed
from verl.protocol import DataProto
from verl.telemetry.rollout_trace import open_trace
from verl.telemetry.trajectories import parse
from verl.trainer.ppo.episodes import episode_metrics, episodes_of
from verl.trainer.ppo.health import HealthMonitor
from verl.trainer.ppo.metric_utils import compute_data_metrics, validate
from verl.trainer.ppo.run_log import TokenColumns, dump_batch, sample_records, sample_table, texts
from verl.view.trajectory_command import main as show


class Letters:
    """Tokenizer of letters: id 1 is a, 2 is b, ...; 27 is the end marker, which is special."""

    def batch_decode(self, rows, skip_special_tokens=False):
        return [
            "".join("abcdefghijklmnopqrstuvwxyz!"[i - 1] for i in row if i < 27 or not skip_special_tokens)
            for row in rows
        ]


def objects(*values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def single_turns(**columns):
    """Two prompts of two responses, as mode=sync makes them."""
    ids = torch.tensor([[1, 2, 27, 0], [3, 4, 5, 6], [7, 27, 0, 0], [8, 9, 27, 0]])
    attention = torch.cat([torch.ones(4, 2, dtype=torch.long), (ids > 0).long()], dim=1)
    scores = torch.zeros(4, 4)
    for row, last in enumerate([2, 3, 1, 2]):
        scores[row, last] = row / 2
    tensors = {
        "prompts": torch.tensor([[1, 1]] * 2 + [[2, 2]] * 2),
        "responses": ids,
        "attention_mask": attention,
        "response_mask": attention[:, 2:],
        **{name: scores for name in ("token_level_scores", "token_level_rewards", "advantages", "returns")},
    }
    names = {"uid": objects("p0", "p0", "p1", "p1"), "data_source": objects(*["s"] * 4)}
    return DataProto.from_dict(tensors=tensors, non_tensors={**names, **columns})


def episodes(**columns):
    """Three episodes of an environment and one that failed: abc, then what it read (dd), then ee, and so on."""
    ids = torch.tensor(
        [[1, 2, 27, 4, 4, 5, 27], [1, 27, 4, 6, 27, 0, 0], [3, 3, 3, 27, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]]
    )
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0], [0] * 7])
    is_token = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 4 + [0] * 3, [1] + [0] * 6])
    scores = torch.zeros(4, 7)
    scores[0, 2], scores[0, 6], scores[1, 1], scores[1, 4], scores[2, 3] = -0.1, 1.0, -0.1, -0.1, 0.5
    scores[3, 0] = 99.0  # whatever stands there counts nowhere
    tensors = {
        "prompts": torch.tensor([[1, 1]] * 2 + [[2, 2]] * 2),
        "responses": ids,
        "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), is_token], dim=1),
        "response_mask": mask,
        "rollout_log_probs": -torch.arange(28.0).reshape(4, 7) / 10,
        **{name: scores for name in ("token_level_scores", "token_level_rewards", "advantages", "returns")},
    }
    hello, moved = {"role": "user", "content": "hello"}, {"role": "user", "content": "moved"}
    said = {"role": "assistant", "content": "ab"}
    names = {
        "uid": objects("p0", "p0", "p1", "p1"),
        "data_source": objects(*["lake"] * 4),
        "env_tag": objects("Lake", "Lake", "Lake", "Lake"),
        "__num_turns__": np.array([4, 4, 2, 2], dtype=np.int32),
        "turn_rewards": objects([-0.1, 1.0], [-0.1, -0.1], [0.5], None),
        "turn_spans": objects([(0, 3), (5, 7)], [(0, 2), (3, 5)], [(0, 4)], None),
        "turn_state_ids": objects(["s0", "s1"], [np.array([0, 0]), (0, 1)], None, None),
        "turn_seconds": objects([0.5, 0.25], [1.0, 2.0], [0.5], None),
        "episode_status": objects("completed", "max_assistant_turns", "completed", "error"),
        "episode_info": objects(
            {"success": True, "valid_action": True, "distance": 0},
            {"success": False, "valid_action": False, "distance": np.float32(3)},
            {"success": True, "note": "text is no number"},
            None,
        ),
        "episode_error": objects(None, None, None, "EnvironmentFailure: step took longer than env.step_timeout=1"),
        "messages": objects([hello, said, moved, said], [hello, said, moved, said], None, None),
        "rollout_seconds": objects(0.75, 3.0, 0.5, 60.0),
        **columns,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=names)


def test_metrics_of_an_environment_in_closed_form():
    metrics = episode_metrics(episodes_of(episodes()))
    expected = {
        "env/Lake/success": 2 / 3,
        "env/Lake/reward": (0.9 - 0.2 + 0.5) / 3,
        "env/Lake/turns": 5 / 3,
        "env/Lake/valid_action": 1 / 2,
        "env/Lake/truncated": 1 / 3,
        "env/Lake/error": 1 / 4,
        "env/Lake/distance": 1.5,
        "agent/status/completed": 1 / 2,
        "agent/status/max_assistant_turns": 1 / 4,
        "agent/status/error": 1 / 4,
        "agent/status/max_tokens": 0,
        "agent_loop/slowest_s": 60.0,
        "agent_loop/slowest_turns": 1,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert set(metrics) - set(expected) == {
        f"agent/status/{name}"
        for name in ("truncated", "max_user_turns", "max_tool_calls", "max_tokens_per_turn", "episode_timeout")
    }


def test_tags_are_apart_and_an_agent_loop_stands_for_a_tag_that_is_missing():
    tags, names = objects("Lake", "Lake", None, None), objects(None, None, "my_agent", "my_agent")
    metrics = episode_metrics(episodes_of(episodes(env_tag=tags, agent_name=names)))
    assert metrics["env/Lake/turns"] == 2 and metrics["env/Lake/error"] == 0
    assert metrics["agent/my_agent/reward"] == 0.5 and metrics["agent/my_agent/error"] == 0.5


def test_tools_are_counted_by_name_and_outcome_and_what_is_no_tool_is_one_name():
    def call(name, outcome="ok", seconds=0.5):
        return {"name": name, "outcome": outcome, "seconds": seconds}

    calls = objects(
        [call("search"), call("search", "timeout", 5.0), call("evil/../\n")],
        [call("search", "error", 0.5), call("x" * 300, "unknown_tool")],
        None,
        [call("search")],
    )
    metrics = episode_metrics(episodes_of(episodes(tool_calls=calls)))
    expected = {
        "tool/search/calls": 1,
        "tool/search/error": 1 / 3,
        "tool/search/timeout": 1 / 3,
        "tool/search/seconds": 2,
        "tool/unknown/calls": 2 / 3,
        "tool/unknown/unknown_tool": 1 / 2,
        "tool/unknown/error": 1 / 2,
        "tool/unknown/timeout": 0,
        "tool/unknown/seconds": 0.5,
    }
    assert {name: value for name, value in metrics.items() if name.startswith("tool/")} == pytest.approx(expected)


def test_the_reward_that_an_environment_reports_is_its_own():
    """The score may have penalties and what a reward function gives."""
    info = objects({"reward": 1.0}, {"reward": 0.0}, {"reward": 0.5}, {"reward": 99.0})
    assert episode_metrics(episodes_of(episodes(episode_info=info)))["env/Lake/reward"] == 0.5


def test_rows_of_one_trajectory_are_one_episode():
    names = {"trajectory_id": objects("t0", "t0", "t1", "t2"), "turn_seconds": objects(*[[1.0, 2.0, 3.0, 4.0]] * 4)}
    found = episodes_of(episodes(**names))
    assert [(episode.rows, episode.turns) for episode in found] == [([0, 1], 4), ([2], 1), ([3], 1)]
    assert found[0].reward == pytest.approx(0.9 - 0.2)
    assert episode_metrics(found)["env/Lake/turns"] == 2.5


def test_a_batch_of_single_turns_has_no_metrics_of_episodes():
    for columns in (
        {},
        {"__num_turns__": np.full(4, 2, dtype=np.int32), "messages": objects(*[[{"role": "user"}]] * 4)},
    ):
        batch = single_turns(**columns)
        assert episodes_of(batch) == []
        names = compute_data_metrics(batch, use_critic=False)
        assert not [name for name in names if name.startswith(("env/", "agent", "tool/"))]


def test_metrics_of_a_step_have_those_of_episodes():
    metrics = compute_data_metrics(episodes(), use_critic=False)
    assert metrics["env/Lake/success"] == pytest.approx(2 / 3) and metrics["num_turns/max"] == 4


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_dumps_of_single_turns_are_as_they_were(tmp_path):
    """The text of the file, byte by byte."""
    path = dump_batch(tmp_path, 3, single_turns(), Letters())
    first = (
        '{"input": "aa", "output": "ab", "gts": null, "score": 0.0, "step": 3, "uid": "p0", "data_source": "s", '
        '"prompt_length": 2, "response_length": 3, "finish_reason": "stop", "reward": 0.0, "advantage": 0.0}'
    )
    assert path.read_text().splitlines()[0] == first and len(path.read_text().splitlines()) == 4


def test_a_table_of_samples_has_the_best_and_the_worst_with_the_parts_of_their_reward():
    batch = single_turns(acc=np.array([0.0, 1.0, 0.0, 1.0]), note=objects(*"abcd"))
    batch.meta_info["reward_extra_keys"] = ["acc", "note"]
    table = sample_table(7, batch, Letters(), width=60, count=1)
    assert table.split("\n") == [
        "samples of step 7, by score",
        "       score  advantage    acc  tokens",
        "best   1.500      0.500  1.000       3",
        "   prompt    bb",
        "   response  hi",
        "worst  0.000      0.000  0.000       3",
        "   prompt    aa",
        "   response  ab",
    ]
    assert "99.0" not in sample_table(7, episodes(), Letters(), width=60), "a failed episode has no score"
    one = sample_table(7, single_turns().select_idxs([1]), Letters(), width=60)
    assert one.count("best") == 1 and "worst" not in one


def test_a_response_in_the_table_is_one_line_of_text_and_no_code_of_the_terminal():
    class Hostile(Letters):
        def batch_decode(self, rows, **kwargs):
            return ["\x1b[2J\n" * 50 for _ in rows]

    table = sample_table(7, single_turns(), Hostile(), width=60)
    assert "\x1b" not in table and all(len(line) <= 60 for line in table.split("\n"))


def test_a_dumped_trajectory_has_its_turns(tmp_path):
    rows = read(dump_batch(tmp_path, 3, episodes(), Letters()))
    assert rows[0]["turns"] == [
        {
            "role": "assistant",
            "generated": True,
            "span": [0, 3],
            "text": "ab!",
            "reward": -0.1,
            "seconds": 0.5,
            "state": "s0",
        },
        {"role": "user", "generated": False, "span": [3, 5], "text": "moved"},
        {
            "role": "assistant",
            "generated": True,
            "span": [5, 7],
            "text": "e!",
            "reward": 1.0,
            "seconds": 0.25,
            "state": "s1",
        },
    ]
    assert rows[0]["status"] == "completed" and rows[0]["env_tag"] == "Lake" and rows[0]["num_turns"] == 4
    assert rows[0]["info"] == {"success": True, "valid_action": True, "distance": 0} and rows[0]["seconds"] == 0.75
    assert [turn["state"] for turn in rows[1]["turns"] if turn["generated"]] == [[0, 0], [0, 1]]
    assert [turn["text"] for turn in rows[2]["turns"]] == ["ccc!"] and "state" not in rows[2]["turns"][0]
    assert rows[3]["status"] == "error" and rows[3]["turns"] == [] and "env.step_timeout" in rows[3]["error"]
    assert [row.get("slowest") for row in rows] == [None, None, None, True]
    assert [row["score"] for row in rows[:3]] == pytest.approx([0.9, -0.2, 0.5])
    assert rows[3]["score"] is None and rows[3]["reward"] is None


def test_what_was_read_is_decoded_where_there_are_no_messages_that_fit(tmp_path):
    others = objects("a data column of that name", [{"role": "user", "content": "x"}], None, None)
    rows = read(dump_batch(tmp_path, 3, episodes(messages=others), Letters()))
    reads = [turn for row in rows[:2] for turn in row["turns"] if not turn["generated"]]
    assert [(turn["role"], turn["text"]) for turn in reads] == [("observation", "dd"), ("observation", "d")]


def test_turns_of_a_loop_that_names_none_are_the_runs_of_ones(tmp_path):
    batch = episodes()
    for name in ("turn_spans", "turn_rewards", "turn_state_ids", "episode_status", "episode_info", "messages"):
        batch.non_tensor_batch.pop(name)
    rows = read(dump_batch(tmp_path, 3, batch, Letters()))
    assert [turn["span"] for turn in rows[0]["turns"]] == [[0, 3], [3, 5], [5, 7]]
    assert "turns" not in rows[2]  # two messages: a single turn


def test_the_rows_of_a_trajectory_are_one_line(tmp_path):
    said = [{"role": "assistant", "content": "-"}, {"role": "tool", "content": "found"}]
    messages = [{"role": "user", "content": "find"}, *said, *said, *said, said[0]]
    names = {
        "trajectory_id": objects("t0", "t0", "t1", "t2"),
        "turn_seconds": objects([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], None, None),
        "messages": objects(messages, messages, None, None),
    }
    batch = episodes(**names)
    first, *others = read(dump_batch(tmp_path, 3, batch, Letters()))
    assert len(others) == 2 and first["num_rows"] == 2 and first["score"] == pytest.approx(0.7)
    assert first["response_length"] == 12
    turns = first["turns"]
    assert [turn["role"] for turn in turns] == ["assistant", "tool"] * 3 + ["assistant"]
    assert [turn["reward"] for turn in turns if turn["generated"]] == [-0.1, 1.0, -0.1, -0.1]
    assert [turn["seconds"] for turn in turns if turn["generated"]] == [1, 2, 3, 4]
    assert [(turn["row"], turn["span"]) for turn in turns if turn["generated"]][2:] == [(1, [0, 2]), (1, [3, 5])]
    record = sample_records(batch, 3, 1.0)[0]
    assert [row["response_ids"] for row in record["rows"]] == [[1, 2, 27, 4, 4, 5, 27], [1, 27, 4, 6, 27]]
    assert "response_ids" not in record and len(record["rows"][1]["response_mask"]) == 5


@pytest.mark.parametrize(("limit", "rows"), [(0, []), (2, []), (3, [0]), (7, [0, 1]), (11, [0, 1]), (12, [0, 1, 2, 3])])
def test_tokens_are_those_of_whole_groups_as_many_as_a_limit_allows(limit, rows):
    columns = TokenColumns(lambda rows: Letters().batch_decode(rows) or [""])
    found = columns(single_turns(), limit)
    assert columns(single_turns(), limit) == found  # of tokens that are known already
    assert list(found) == rows and sum(len(own["text"]) for own in found.values()) <= limit


def test_dumped_tokens_stand_with_what_is_known_of_each(tmp_path):
    batch = single_turns()
    batch.batch["old_log_probs"] = -torch.arange(16.0).reshape(4, 4) / 7
    tokens = TokenColumns(Letters().batch_decode)(batch, 7)
    rows = read(dump_batch(tmp_path, 3, batch, Letters(), tokens=tokens))
    assert rows[0]["tokens"] == {
        "text": Letters().batch_decode([[1], [2], [27]]),
        "log_probs": [0.0, -0.1429, -0.2857],
        "advantages": [0.0, 0.0, 0.0],
        "mask": [1, 1, 1],
    }
    assert "tokens" in rows[1] and "tokens" not in rows[2]
    assert parse(json.dumps(rows[0]), tmp_path / "3.jsonl", 1).tokens == [rows[0]["tokens"]]


def test_tokens_of_a_trajectory_of_several_rows_are_kept_by_row(tmp_path):
    batch = episodes(trajectory_id=objects("t0", "t0", "t1", "t2"))
    rows = read(dump_batch(tmp_path, 3, batch, Letters(), tokens=TokenColumns(Letters().batch_decode)(batch, 100)))
    assert [len(row["tokens"]["text"]) for row in rows[0]["rows"]] == [7, 5]
    found = parse(json.dumps(rows[0]), tmp_path / "3.jsonl", 1)
    assert [sum(own["mask"]) for own in found.tokens] == [sum(row["tokens"]["mask"]) for row in rows[0]["rows"]]
    assert [turn.row for turn in found.turns if turn.generated][-1] == 1


def test_a_value_of_the_reward_function_is_not_lost_to_a_key_of_the_trajectory(tmp_path):
    batch = episodes(status=objects("mine", "mine", "mine", "mine"))
    batch.meta_info["reward_extra_keys"] = ["status"]
    row = read(dump_batch(tmp_path, 3, batch, Letters()))[0]
    assert row["status"] == "completed" and row["reward/status"] == "mine"


def test_a_trace_has_the_turns_with_masks_and_log_probs(tmp_path):
    batch = episodes()
    trace = open_trace("file", "p", "e", tmp_path)
    trace.log(3, sample_records(batch, 3, 1.0, decode=Letters().batch_decode))
    row = read(tmp_path / "3.jsonl")[0]
    assert row["response_mask"] == [1, 1, 1, 0, 0, 1, 1] and row["prompt_ids"] == [1, 1]
    assert row["response_logprobs"] == pytest.approx([-i / 10 for i in range(7)])
    assert [turn["text"] for turn in row["turns"]] == ["ab!", "moved", "e!"] and row["status"] == "completed"
    without_text = sample_records(batch, 3, 1.0)[0]
    assert "text" not in without_text["turns"][0] and without_text["turns"][0]["reward"] == -0.1
    assert "turns" not in sample_records(single_turns(), 3, 1.0)[0]
    assert "response_mask" not in sample_records(single_turns(), 3, 1.0)[0]


def run_validation(batch, folder=None):
    def score(rows):
        return rows.column("token_level_scores"), {"acc": [1.0] * len(rows)}

    tokenizer = Letters()
    return validate([batch], score, partial(texts, tokenizer=tokenizer), folder, 7, decode_ids=tokenizer.batch_decode)


def test_validation_counts_trajectories_and_leaves_failed_ones_out(tmp_path):
    metrics, samples = run_validation(episodes(), tmp_path)
    assert metrics["val-env/Lake/success"] == pytest.approx(2 / 3) and metrics["val-env/Lake/error"] == 0.25
    assert metrics["val-aux/num_turns/max"] == 4 and len(samples) == 3
    assert metrics["val-aux/lake/reward/mean@2"] == pytest.approx((0.9 - 0.2) / 2)
    assert metrics["val-aux/lake/reward/mean@1"] == pytest.approx(0.5)
    assert [row["status"] for row in read(tmp_path / "7.jsonl")][3] == "error"
    together, samples = run_validation(episodes(trajectory_id=objects("t0", "t0", "t1", None)))
    assert together["val-aux/lake/reward/mean@1"] == pytest.approx((0.7 + 0.5) / 2) and len(samples) == 2


def test_validation_of_single_turns_has_no_metrics_of_episodes():
    metrics, samples = run_validation(single_turns())
    assert set(metrics) >= {"val-core/s/acc/mean@2"} and len(samples) == 4
    assert all(name.startswith(("val-core/s/", "val-aux/s/")) for name in metrics)


def test_the_command_shows_what_a_run_dumps(tmp_path, capsys):
    dump_batch(tmp_path, 3, episodes(), Letters())
    assert show([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "completed 50%" in shown and "max_assistant_turns" in shown and "error 25%" in shown
    assert show([str(tmp_path), "--index", "0"]) == 0
    shown = capsys.readouterr().out
    assert "turn 2  assistant  reward 1.000  0.25 s  2 tokens" in shown and "   moved" in shown


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("max_assistant_turns", ["multi_turn.max_assistant_turns", "env.registry.<tag>.max_steps"]),
        ("max_tokens", ["data.max_response_length", "(now "]),
        ("max_tokens_per_turn", ["multi_turn.max_tokens_per_turn", "max_tokens_per_step"]),
        ("episode_timeout", ["env.episode_timeout"]),
        ("truncated", ["a limit of the environment", "env.registry.<tag>.kwargs"]),
        ("error", ["failed and taught nothing", "env.on_error (now retry)", "env.max_error_share (now 0.25)"]),
    ],
)
def test_a_run_whose_episodes_mostly_end_by_one_limit_is_told_which(status, words):
    def sentences(share):
        watch = HealthMonitor(typed())
        return [text for _ in range(7) for text in watch.note({f"agent/status/{status}": share})]

    [sentence] = sentences(0.75)
    assert sentence.startswith("in 5 of the last 5 steps most episodes (75%)")
    assert not [word for word in words if word not in sentence]
    assert not sentences(0.5)

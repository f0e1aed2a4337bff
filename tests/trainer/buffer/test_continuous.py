"""Continuous generation: engines that never wait for the trainer, tokens of several versions, a bound on their age."""

import json
from collections import Counter
from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.support.runs import make_task, overrides, read_metrics
from tests.trainer.buffer.test_disjoint import APART, ROLLOUT, RUN, run
from verl.experimental.fully_async_policy import fully_async_main
from verl.trainer.buffer.continuous import ContinuousScheduler, OpenGroup
from verl.trainer.main_ppo import main

CONTINUOUS = {
    **APART,
    f"{ROLLOUT}__mode": "async",
    f"{ROLLOUT}__partial_rollout": True,
    f"{ROLLOUT}__max_staleness": 2,
    f"{ROLLOUT}__max_running_requests": 2,
    "trainer__test_freq": -1,
    "trainer__total_training_steps": 6,
    "trainer__save_freq": 1,
    "data__max_response_length": 24,
}


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_no_group_is_trained_on_after_its_last_step_and_engines_always_have_work(data, staleness, batch_size):
    config = SimpleNamespace(staleness=staleness, max_postponements=None, partial_rollout=True)
    scheduler = ContinuousScheduler(config, None, batch_size, 0)
    scheduler.total_steps = 8
    trained = []
    for step in range(1, 9):
        for number in range(scheduler.num_prompts_of(step)):
            uid = f"{step}-{number}"
            scheduler.open[uid] = OpenGroup(uid, None, "", step, [], None)
        assert len(scheduler.open) == batch_size * min(1 + staleness, 8 - step + 1)
        waiting = data.draw(st.permutations(list(scheduler.open.values())))
        while scheduler.lacking(step, batch_size) or sum(group.finished >= 0 for group in waiting) < batch_size:
            next(group for group in waiting if group.finished < 0).finished = 0
        complete = sorted((group for group in waiting if group.finished >= 0), key=lambda group: group.step)
        for group in complete[:batch_size]:
            assert step - group.step <= staleness
            trained.append(scheduler.open.pop(group.uid).uid)
    assert not scheduler.open and len(set(trained)) == 8 * batch_size


def prompts_of(folder, steps):
    rows = [json.loads(line) for step in steps for line in (folder / f"{step}.jsonl").read_text().splitlines()]
    return Counter(row["input"] for row in rows)


def run_as_verl_does(folder, monkeypatch):
    """The metrics by step of the same options under the names of verl's own program, below another configuration."""
    given = {name: value for name, value in CONTINUOUS.items() if name.endswith(("requests", "n_gpus_per_node"))}
    given |= {name: value for name, value in {**RUN, **CONTINUOUS}.items() if not name.startswith("actor_rollout_ref")}
    given |= {name: value for name, value in RUN.items() if name.endswith("ppo_mini_batch_size")}
    given |= {"async_training__staleness_threshold": 2, "async_training__partial_rollout": True}
    given |= {"trainer__rollout_data_dir": folder / "resumed", "trainer__default_local_dir": folder / "run"}
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "resumed.jsonl"))
    main(overrides(make_task(folder / "task", rows=12), **given), fully_async_main.RECIPE)
    return {row["step"]: row["data"] for row in read_metrics(folder / "resumed.jsonl")}


def test_tokens_of_several_versions_are_trained_on_and_a_resumed_run_keeps_them(tmp_path, monkeypatch):
    whole = run(tmp_path, "whole", monkeypatch, **CONTINUOUS, trainer__default_local_dir=tmp_path / "run")
    assert all(row["rollout/staleness/max"] <= 2 for row in whole.values())
    assert max(row["rollout/staleness/max"] for row in whole.values()) > 0
    assert max(row["rollout/interrupted_share"] for row in whole.values()) > 0
    assert all(row["rollout/samples_restarted"] == 0 for row in whole.values())
    assert whole[1]["rollout/groups_open"] == 8 and whole[6]["rollout/groups_open"] == 0
    # each token's log-prob is that of the weights that drew it: the first batch, of one version, shows the actor's own
    assert whole[1]["training/rollout_probs_diff_max"] < 1e-5
    counts = prompts_of(tmp_path / "whole", range(1, 7))
    assert len(counts) == 12 and len(set(counts.values())) == 1  # each prompt once in each of two epochs

    state = json.loads((tmp_path / "run" / "global_step_3" / "rollout.json").read_text())
    saved = {name: turns["turns"][0] for name, turns in state["journals"].items()}
    assert len(state["started"]) == 8 and any(turn["finish_reason"] is None for turn in saved.values())
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = run_as_verl_does(tmp_path, monkeypatch)
    assert sorted(resumed) == [4, 5, 6] and resumed[4]["rollout/stale_token_share"] > 0
    again = prompts_of(tmp_path / "whole", range(1, 4)) + prompts_of(tmp_path / "resumed", range(4, 7))
    assert again == counts

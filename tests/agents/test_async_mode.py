"""rollout.mode=async in a run: what it generates, measures, lets users bring, and leaves behind."""

import json
import sys
import textwrap
import threading

import pytest

from tests.agents.conftest import ACTOR, ROLLOUT, outputs
from tests.support.learning import check_learned
from tests.trainer.test_learning import TINY, rewards_of
from verl.agents import AgentLoopOutput
from verl.agents.manager import AgentLoopIdle, assemble_outputs, spread
from verl.agents.outputs import EpisodeError
from verl.protocol import DataProto
from verl.single_controller.errors import WorkerDied

RANKS = {
    "local_one_rank": {},
    "local_two_ranks": {"trainer__n_gpus_per_node": 2, f"{ACTOR}__strategy": "fsdp2"},
    "ray_two_ranks": {
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
        f"{ACTOR}__strategy": "fsdp2",
        f"{ROLLOUT}__agent__num_workers": 2,
    },
}


def samples(steps):
    """Responses and their scores; two ranks dump their rows in another order than one."""
    return [sorted((row["input"], row["output"], row["score"]) for row in rows) for rows in steps]


@pytest.mark.parametrize(
    "ranks", ["local_one_rank", "local_two_ranks", pytest.param("ray_two_ranks", marks=pytest.mark.ray)]
)
def test_sampled_responses_log_probs_and_scores_are_those_of_mode_sync(ranks, run):
    settings = {f"{ROLLOUT}__calculate_log_probs": True, "trainer__test_freq": 1, f"{ROLLOUT}__max_running_requests": 7}
    sync, expected = run("sync", **settings)
    trainer, found = run("async", **settings, **RANKS[ranks])
    assert samples(found) == samples(expected) and len(found[0]) == 16
    assert trainer.validations == sync.validations and trainer.metrics["training/rollout_probs_diff_max"] < 1e-6
    spread = [trainer.timing[f"agent_loop/generate_sequences/{kind}"] for kind in ("min", "mean", "max")]
    assert 0 < spread[0] <= spread[1] <= spread[2] <= trainer.timing["generate_sequences"] < trainer.timing["gen"]
    assert trainer.timing["reshard"] > 0


DEADLY = """
import os
import signal
from pathlib import Path

from verl.agents import SingleTurnAgentLoop, register


@register("deadly")
class Deadly(SingleTurnAgentLoop):
    async def run(self, sampling_params, **row):
        folder = Path(__file__).parent
        with open(folder / "begun", "a") as begun:
            print(os.getpid(), row["uid"], self.server_manager._seed, file=begun)
        done = await super().run(sampling_params, **row)
        for number in range(int((folder / "deaths").read_text()) if row["extra_info"]["index"] % 2 else 0):
            try:
                (folder / f"death{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return done
"""


def test_a_process_that_dies_is_started_again_alone_and_then_the_run_ends_with_its_name(run, tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text(DEADLY)
    settings = {f"{ROLLOUT}__agent__agent_loop_config_path": str(path), f"{ROLLOUT}__agent__num_workers": 2}
    settings |= {f"{ROLLOUT}__agent__default_agent_loop": "deadly", "trainer__total_training_steps": 1}
    (tmp_path / "deaths").write_text("0")
    expected = outputs(run(**settings)[1])
    before = [line.split(" ", 1) for line in (tmp_path / "begun").read_text().splitlines()]
    (tmp_path / "begun").unlink()
    (tmp_path / "deaths").write_text("1")
    assert outputs(run(**settings)[1]) == expected and (tmp_path / "death0").exists()
    begun = [line.split(" ", 1) for line in (tmp_path / "begun").read_text().splitlines()]
    # what began twice, with the same seed, was in the process that died, and then in the one in its place
    places = {row: [pid for pid, other in begun if other == row] for _, row in begun}
    twice = {tuple(pids) for pids in places.values() if len(pids) > 1}
    assert len(twice) == 1 and len({pid for pid, _ in begun}) == 3
    assert {row for _, row in begun} == {row for _, row in before} and len(before) == len(places)
    (tmp_path / "deaths").write_text("9")
    with pytest.raises(WorkerDied, match=r"Rank 0 of 1 died while running agent_loop_[01]\..*SIGKILL"):
        run(**settings)


def test_a_run_leaves_no_thread_and_no_file_behind(run, tmp_path):
    before = set(threading.enumerate())
    run(trainer__total_training_steps=1)
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith("verl-") and name != "verl-forker"]
    assert not (tmp_path / "run" / "rollout_servers.json").exists()


def test_mode_sync_imports_no_http():
    code = """
        import sys
        from verl.trainer.ppo.job import PPOJob
        import verl.workers.roles, verl.workers.rollout.hf.rollout, verl.workers.fsdp_workers
        assert not {"aiohttp", "verl.agents.manager", "verl.agents.conversation"} & set(sys.modules), "imported"
    """
    import subprocess

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- agent loops of the user's -----------------------------------------------------------------------------------------

LOOP = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("two_halves")
class TwoHalves(AgentLoopBase):
    """Generates four tokens, adds a word of its own, and generates four more; rewards itself."""

    async def run(self, sampling_params, **row):
        assert row["data_source"] == "digits" and row["raw_prompt_ids"]
        prompt = list(row["raw_prompt_ids"])
        word = self.tokenizer.encode(self.options.get("word", "!"))
        sampling_params |= {"max_tokens": 4, "ignore_eos": True}
        first = await self.server_manager.generate("talk", prompt_ids=prompt, sampling_params=sampling_params)
        context = prompt + first.token_ids + word
        second = await self.server_manager.generate("talk", prompt_ids=context, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=first.token_ids + word + second.token_ids,
            response_mask=[1] * 4 + [0] * len(word) + [1] * 4,
            response_logprobs=first.log_probs + [0.0] * len(word) + second.log_probs,
            reward_score=0.25,
            num_turns=4,
            metrics={"tool_calls": 0.5},
        )
'''


@pytest.fixture
def loop_file(tmp_path):
    path = tmp_path / "my_loop.py"
    path.write_text(LOOP)
    return path


def test_a_python_file_brings_a_loop_that_masks_rewards_and_talks_twice(run, loop_file):
    settings = {
        f"{ROLLOUT}__agent__agent_loop_config_path": str(loop_file),
        f"{ROLLOUT}__agent__default_agent_loop": "two_halves",
        f"{ROLLOUT}__calculate_log_probs": True,
    }
    trainer, steps = run(**settings)
    assert {len(row["output"]) for rows in steps for row in rows} <= set(range(1, 10))
    assert all("!" in row["output"] and row["score"] == 0.25 for rows in steps for row in rows)
    assert trainer.metrics["num_turns/mean"] == 4 and trainer.timing["agent_loop/tool_calls/max"] == 0.5
    assert trainer.metrics["response_length/mean"] == 9
    assert trainer.metrics["training/rollout_probs_diff_max"] < 1e-6, "a later turn's log-probs are the model's too"
    assert outputs(run(**settings)[1]) == outputs(steps)


def test_a_yaml_file_names_loops_with_options(run, loop_file, tmp_path):
    entries = [{"name": "polite", "_target_": "TwoHalves", "path": str(loop_file), "word": "?"}]
    (tmp_path / "loops.yaml").write_text(json.dumps(entries))
    settings = {
        f"{ROLLOUT}__agent__agent_loop_config_path": str(tmp_path / "loops.yaml"),
        f"{ROLLOUT}__agent__default_agent_loop": "polite",
        f"{ROLLOUT}__calculate_log_probs": True,
    }
    _, (rows, *_) = run(trainer__total_training_steps=1, **settings)
    assert all("?" in row["output"] for row in rows)


def test_a_loop_that_raises_names_itself_the_row_and_the_cause(run, loop_file):
    loop_file.write_text(LOOP.replace("prompt = list(", "prompt = 1 / 0 or list("))
    options = {
        f"{ROLLOUT}__agent__agent_loop_config_path": str(loop_file),
        f"{ROLLOUT}__agent__default_agent_loop": "two_halves",
    }
    with pytest.raises(RuntimeError, match="agent loop 'two_halves' failed on row 0: ZeroDivisionError"):
        run(**options, env__on_error="stop")
    with pytest.raises(EpisodeError, match="16 of 16 episodes failed(?s:.*)16 times: agent loop 'two_halves': ZeroDiv"):
        run(**options)


def test_a_row_whose_loop_fails_leaves_its_group_and_the_run_goes_on(run, loop_file):
    """Some responses fail: their reward is no zero, and the others of their groups count."""
    fails = "if self.server_manager._seed % 5 == 0: raise KeyError('lost')\n        prompt = list("
    loop_file.write_text(
        LOOP.replace("prompt = list(", fails).replace("reward_score=0.25", "reward_score=first.token_ids[0] % 7 / 7")
    )
    trainer, steps = run(
        **{
            f"{ROLLOUT}__agent__agent_loop_config_path": str(loop_file),
            f"{ROLLOUT}__agent__default_agent_loop": "two_halves",
            f"{ROLLOUT}__calculate_log_probs": True,
            "env__on_error": "drop",
            "env__max_error_share": 0.9,
        }
    )
    assert trainer.global_steps == 2
    rows = [row for rows in steps for row in rows]
    failed = [row for row in rows if row["output"] == ""]
    assert failed and all(row["status"] == "error" and "KeyError: 'lost'" in row["error"] for row in failed)
    assert all(row["score"] is None and row["advantage"] is None for row in failed)
    others = [row for row in rows if row["output"] != ""]
    assert all(row["score"] is not None for row in others) and any(row["advantage"] for row in others)


def loops(loop_file, name="two_halves"):
    return {
        f"{ROLLOUT}__agent__agent_loop_config_path": str(loop_file),
        f"{ROLLOUT}__agent__default_agent_loop": name,
        f"{ROLLOUT}__calculate_log_probs": True,
    }


def test_a_loop_that_waits_for_nothing_fails_and_its_place_is_named(run, loop_file):
    waits = "import asyncio; await asyncio.Event().wait()\n        prompt = list("
    loop_file.write_text(LOOP.replace("prompt = list(", waits))
    with pytest.raises(EpisodeError, match=r"asked for no tokens in .* s .*idle_timeout=1.*/my_loop.py:11 in run"):
        run(**loops(loop_file), env__idle_timeout=1)
    with pytest.raises(EpisodeError, match="not done after env.episode_timeout=1 s"):
        run(**loops(loop_file), env__episode_timeout=1)


def test_a_loop_that_blocks_all_others_ends_the_run_with_its_place(run, loop_file):
    # the first episode only: the end of the run waits for every episode that still runs
    blocks = "import time; RAN.append(1) or len(RAN) > 1 or time.sleep(4)\n        prompt = list("
    loop_file.write_text("RAN = []\n" + LOOP.replace("prompt = list(", blocks))
    with pytest.raises(AgentLoopIdle, match="(?s)blocked the event loop of all of them.*my_loop.py.*time.sleep"):
        run(**loops(loop_file), env__idle_timeout=1)


def test_a_loop_that_rewards_itself_needs_no_scorer(run, loop_file):
    options = {**loops(loop_file), "custom_reward_function__path": "null", "data__reward_fn_key": "ability"}
    trainer, _ = run(**options)
    assert trainer.metrics["critic/score/mean"] == 0.25
    with pytest.raises(ValueError, match="no built-in scorer for ability='test'"):
        run(**{**options, f"{ROLLOUT}__agent__default_agent_loop": "single_turn_agent"})


def test_an_unknown_loop_is_refused_before_the_first_step(run):
    with pytest.raises(ValueError, match="default_agent_loop=single_turn_agnt is not a known .*'single_turn_agent'"):
        run(**{f"{ROLLOUT}__agent__default_agent_loop": "single_turn_agnt"})


SERVER = """
from aiohttp import web
from verl.workers.rollout.server.server import RolloutServer


class Mine(RolloutServer):
    def application(self):
        application = super().application()
        application.add_routes([web.get("/mine", self.mine)])
        print("a server of mine", flush=True)
        return application

    async def mine(self, request):
        return web.json_response({})


class NoServer:
    pass
"""


def test_a_server_of_the_users_is_used_and_another_class_refused(run, tmp_path, capfd):
    (tmp_path / "server.py").write_text(SERVER)
    settings = {f"{ROLLOUT}__agent__custom_async_server__path": str(tmp_path / "server.py")}
    run(trainer__total_training_steps=1, **settings, **{f"{ROLLOUT}__agent__custom_async_server__name": "Mine"})
    assert "a server of mine" in capfd.readouterr().out
    with pytest.raises(Exception, match="NoServer.* is no subclass of .*RolloutServer"):
        run(**settings, **{f"{ROLLOUT}__agent__custom_async_server__name": "NoServer"})


# -- outputs to columns ------------------------------------------------------------------------------------------------


def an_output(**changes):
    return AgentLoopOutput(**{"prompt_ids": [5], "response_ids": [6, 7], "response_mask": [1, 0], **changes})


def test_outputs_become_the_columns_of_a_rollout():
    columns = {"prompt_length": 3, "response_length": 4, "pad_token_id": 0}
    prompts = DataProto(non_tensor_batch={})
    rows = [an_output(reward_score=0.5), an_output(response_ids=[8], response_mask=[1], reward_score=-1.0)]
    batch = assemble_outputs(prompts, rows, **columns)
    assert batch.column("responses").tolist() == [[6, 7, 0, 0], [8, 0, 0, 0]]
    assert batch.column("response_mask").tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert batch.column("attention_mask").tolist() == [[0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert batch.column("rm_scores").tolist() == [[0.5, 0, 0, 0], [-1.0, 0, 0, 0]]
    assert batch.non_tensor_batch["__num_turns__"].tolist() == [2, 2]


def test_a_loops_reward_stands_on_the_last_token_the_policy_sampled_or_on_the_last_if_it_sampled_none():
    rows = [
        an_output(response_ids=[6, 7, 8, 9], response_mask=[1, 0, 1, 0], reward_score=0.5),
        an_output(response_mask=[0, 0], reward_score=2.0),
        an_output(response_ids=[], response_mask=[], reward_score=-1.0),
    ]
    batch = assemble_outputs(DataProto(), rows, prompt_length=3, response_length=4, pad_token_id=0)
    assert batch.column("rm_scores").tolist() == [[0, 0, 0.5, 0], [0, 2.0, 0, 0], [-1.0, 0, 0, 0]]
    assert batch.column("response_mask").sum(-1).tolist() == [2, 0, 0]
    assert batch.ragged("responses").layout.lengths.tolist() == [4, 2, 1]


def test_what_only_some_rows_have_is_refused():
    columns = {"prompt_length": 3, "response_length": 4, "pad_token_id": 0}
    for name, value in (("reward_score", 1.0), ("response_logprobs", [0.0, 0.0])):
        with pytest.raises(ValueError, match=f"{name} is given in row 1 and missing in row 0"):
            assemble_outputs(DataProto(non_tensor_batch={}), [an_output(), an_output(**{name: value})], **columns)
    with pytest.raises(ValueError, match="response_mask has 1 entries, response_ids 2"):
        an_output(response_mask=[1])


def test_seconds_are_reported_as_their_spread():
    rows = [an_output(metrics={"tool_calls": 1.0}), an_output(metrics={"tool_calls": 3.0}), an_output()]
    assert spread(rows) == {
        "agent_loop/tool_calls/min": 0.0,
        "agent_loop/tool_calls/max": 3.0,
        "agent_loop/tool_calls/mean": pytest.approx(4 / 3),
    }


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.learning
def test_grpo_learns_with_servers(tmp_path, monkeypatch):
    check_learned("servers", rewards_of(tmp_path, monkeypatch, **TINY, **{f"{ROLLOUT}__mode": "async"}))

"""Cost of the sandbox of reward functions, and the time that asynchronous rewards hide.

``python -m benchmarks.rewards [--save]``. Scoring 1024 responses of 300 characters with a function that does nothing
and with the built-in GSM8K rule: called in the driver, in a sandbox of one process, of two. Milliseconds a sample, the
least of several batches, and what a sandbox adds. Then how long a sandbox takes to start and to get over a crash.
The driver's CPU time for the rewards of 1024 responses of GSM8K. Last, GRPO steps of a tiny model, 8 prompts x 4
responses of up to 192 tokens, whose reward waits for a judge that takes 0.3 s or checks for 10 ms: when the batch is
whole, in turn or during the log-probs of policy and reference; and as each response ends, in steps that compute no
log-probs before the update, and in steps that do.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import report, spread, work_words
from verl.rewards.scorers import default_compute_score
from verl.sandbox.pool import Pool, SandboxedFunction, Source
from verl.sandbox.supervisor import Limits

SAMPLES = 1024
LENGTH = 300
PROMPTS, N, RESPONSE, STEPS = 8, 4, 192, 6
LIMITS = Limits(memory_mb=8192, output_mb=4, processes=64)
TRIVIAL = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "crash":
        os._exit(1)
    return 1.0
"""
JUDGE = """
import time

def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    time.sleep(0.3)
    return [len(text) / 100 for text in solution_strs]
"""
ONE_JUDGE = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.3)
    return len(solution_str) / 100
"""
CHECK = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.01)
    return len(solution_str) / 100
"""


WORK = f"{SAMPLES:,} responses of {LENGTH} characters"


def calls(text: str = "") -> list[tuple[tuple, dict]]:
    texts = [text or f"Step {i}. " + "and so on " * (LENGTH // 10 - 1) + f"#### {i}" for i in range(SAMPLES)]
    return [
        ((), {"data_source": "openai/gsm8k", "solution_str": text, "ground_truth": str(i), "extra_info": {"index": i}})
        for i, text in enumerate(texts)
    ]


def milliseconds(score: Callable[[], object], repeat: int = 9) -> float:
    """The least a sample takes."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        score()
        times.append(time.perf_counter() - start)
    return min(times[1:]) * 1000 / SAMPLES


def overhead(name: str, function: Callable, source: Source) -> list[dict]:
    arguments = calls()
    in_driver = milliseconds(lambda: [function(**kwargs) for _, kwargs in arguments])
    found: list[dict] = [{"what": f"{name}, in the driver", "work": WORK, "ms_a_sample": in_driver}]
    for workers in (1, 2):
        pool = Pool(source, LIMITS, workers=workers)
        sandboxed = SandboxedFunction(pool)
        cost = milliseconds(lambda function=sandboxed: function.rows(arguments))
        pool.close()
        label = f"{name}, sandbox of {workers}"
        found.append({"what": label, "work": WORK, "ms_a_sample": cost, "added_ms_a_sample": cost - in_driver})
    return found


def starting(source: Source) -> list[dict]:
    starts, restarts = [], []
    for _ in range(5):
        start = time.perf_counter()
        pool = Pool(source, LIMITS)
        function = SandboxedFunction(pool)
        starts.append((time.perf_counter() - start) * 1000)
        [(_, crash)], [(_, good)] = calls("crash")[:1], calls("good")[:1]
        function.rows([((), good)])
        start = time.perf_counter()
        function.rows([((), crash)])
        function.rows([((), good)])
        restarts.append((time.perf_counter() - start) * 1000)
        pool.close()
    return [
        {"what": "start of a sandbox", "work": "1 process", "wall_ms": spread(starts)},
        {"what": "a crash, tried twice, and the next sample", "work": "1 process", "wall_ms": spread(restarts)},
    ]


def steps(folder: Path, reward: str, place: str, code: str, keys: dict[str, object]) -> dict:
    """Wall seconds of steps after the first, and how long each waited for its rewards."""
    from tests.support.runs import make_task, overrides, run_job
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    task = make_task(folder / "task")
    (folder / "reward.py").write_text(code)
    seconds: list[float] = []
    waited: list[float] = []
    finish = RayPPOTrainer.finish_step

    def timed(trainer, step, batch):
        seconds.append(trainer.timing["step"])
        waited.append(trainer.timing["reward"])
        finish(trainer, step, batch)

    RayPPOTrainer.finish_step = timed
    options = {
        "custom_reward_function__path": folder / "reward.py",
        "reward_model__self_test": "off",
        "trainer__total_training_steps": STEPS,
        "trainer__default_local_dir": folder / "checkpoints",
        "trainer__resume_mode": "disable",
        "data__train_batch_size": PROMPTS,
        "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref__rollout__n": N,
        "data__max_response_length": RESPONSE,
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__actor__skip_old_log_probs": False,
        "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    }
    try:
        run_job(overrides(task, **{**options, **keys}))
    finally:
        RayPPOTrainer.finish_step = finish
    work = f"tiny model, {PROMPTS} prompts x {N} responses of at most {RESPONSE} tokens, {STEPS - 1} steps"
    row = {"what": f"steps with {reward}, {place}", "reward": reward, "place": place, "work": work}
    return {**row, "wall_s": spread(seconds[1:]), "waited_for_rewards_s": spread(waited[1:])}


IN_TURN, LAST = "when the batch is whole", "as responses end, log-probs meanwhile"
PLACES: dict[str, dict[str, object]] = {
    IN_TURN: {"reward_model__sandbox__while_generating": False},
    "as responses end, no log-probs to compute": {
        "actor_rollout_ref__actor__skip_old_log_probs": True,
        "actor_rollout_ref__actor__use_kl_loss": False,
    },
    LAST: {},
}
PLACES_OF_A_BATCH: dict[str, dict[str, object]] = {
    IN_TURN: {},
    "when the batch is whole, log-probs meanwhile": {"reward_model__launch_reward_fn_async": True},
}


def hidden(folder: Path) -> list[dict]:
    """Steps with slow rewards: after the rollout, and in the places where they can be hidden."""
    rows = []
    for name, code, keys, places in (
        ("a judge of 0.3 s, with lists", JUDGE, {"reward_model__reward_manager": "batch"}, PLACES_OF_A_BATCH),
        ("a judge of 0.3 s, `async def`", ONE_JUDGE, {}, PLACES),
        ("a check of 10 ms, two processes", CHECK, {"reward_model__sandbox__workers": 2}, PLACES),
    ):
        waits = []
        for number, (place, more) in enumerate(places.items()):
            sub = folder / f"{len(rows)}-{number}"
            sub.mkdir(parents=True)
            rows.append(steps(sub, name, place, code, {**keys, **more}))
            waits.append(rows[-1]["waited_for_rewards_s"]["median"])
            rows[-1]["hidden_share"] = 1 - waits[-1] / waits[0]
    return rows


def driver(folder: Path) -> list[dict]:
    """CPU ms of the driver for the rewards of 1024 responses of GSM8K, from the batch to token-level rewards."""
    import numpy as np
    import torch

    from verl.protocol import DataProto
    from verl.rewards.managers.built_in import NaiveRewardManager
    from verl.utils.tiny_model import make_tiny_model
    from verl.utils.tokenizer import hf_tokenizer

    make_tiny_model(folder / "model", family="qwen2", size="2.5M")
    tokenizer = hf_tokenizer(str(folder / "model"))
    texts = [f"so the sum is {'and then ' * (i % 20)} so #### {i % 10}" for i in range(SAMPLES)]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width, prompt = max(map(len, tokens)), 8
    ids, mask = torch.zeros(SAMPLES, width, dtype=torch.long), torch.zeros(SAMPLES, prompt + width, dtype=torch.long)
    for row, one in enumerate(tokens):
        ids[row, : len(one)] = torch.tensor(one)
        mask[row, : prompt + len(one)] = 1
    prompts = torch.full((SAMPLES, prompt), 20)
    rows = {
        "data_source": ["openai/gsm8k"] * SAMPLES,
        "reward_model": [{"style": "rule", "ground_truth": str(i % 10)} for i in range(SAMPLES)],
        "extra_info": [{"index": i} for i in range(SAMPLES)],
    }
    batch = DataProto.from_dict(
        {"prompts": prompts, "responses": ids, "attention_mask": mask, "input_ids": torch.cat([prompts, ids], 1)},
        {name: np.array(values, dtype=object) for name, values in rows.items()},
    )
    counts = {"rows": SAMPLES, "tokens": sum(map(len, tokens))}
    pool = Pool(Source("pkg://verl.rewards.scorers", "default_compute_score"), LIMITS, workers=2, grows=True)
    found = []
    for name, function in (("in the driver", None), ("in a sandbox", SandboxedFunction(pool))):
        manager = NaiveRewardManager(tokenizer, 0, compute_score=function)
        costs = []
        for _ in range(15):
            start = time.process_time()
            manager(batch)
            costs.append((time.process_time() - start) * 1000)
        row = {"what": f"rewards of a batch, GSM8K, {name}", "work": work_words(counts), **counts}
        found.append({**row, "driver_cpu_ms": spread(costs)})
    pool.close()
    return found


def main() -> None:
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trivial.py").write_text(TRIVIAL)
        trivial = Source(str(folder / "trivial.py"), "compute_score")
        rows += overhead("nothing", lambda **kwargs: 1.0, trivial)
        built_in = Source("pkg://verl.rewards.scorers", "default_compute_score")
        rows += overhead("GSM8K", default_compute_score, built_in)
        rows += starting(trivial)
        rows += driver(folder)
        rows += hidden(folder)
    report("rewards", rows)


if __name__ == "__main__":
    sys.exit(main())

"""Cost and gain of a rollout on devices of its own: seconds of a transfer, steps a second, and what is learned.

``python -m benchmarks.disjoint [--transfers] [--schedules] [--learning] [--save]``, all three by default. Wall seconds:
run it on an idle machine.

- Transfers: bf16 weights of a random model through a `WeightLink` between two processes, next to a plain copy of as
  many bytes in the same run.
- Schedules: GRPO of a tiny model, 8 prompts x 8 responses a step, of forced lengths, log-normal around 40 and cut at
  256. Devices of their own are stood for by waits, since here both sides share cores: `DECODE_S` a step of the engine,
  however many rows it has, and `UPDATE_S` an update.
- Learning: the digits task of the tests with three seeds, zero, one and two steps behind.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.measure import report
from benchmarks.step import LEARNING
from tests.support.ranks import run_ranks
from tests.support.runs import make_task, overrides
from tests.trainer.test_learning import LEARNING as DIGITS
from tests.trainer.test_learning import TINY
from verl.config.load import load_ppo_config
from verl.config.rollout import RolloutConfig
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.ray_trainer import OneStepOffTrainer, RayPPOTrainer
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.link import WeightLink, find_store, open_store

WARM_UP = 3
ROLLOUT = "actor_rollout_ref__rollout"
SERVED = {f"{ROLLOUT}__mode": "async", f"{ROLLOUT}__calculate_log_probs": True}
APART = {**SERVED, "actor_rollout_ref__hybrid_engine": False, f"{ROLLOUT}__n_gpus_per_node": 1}
AHEAD = {**APART, f"{ROLLOUT}__max_staleness": 1}
WAYS = {
    "apart": APART,
    "one step ahead": AHEAD,
    **{
        f"all the time, max_staleness={k}": {
            **AHEAD,
            f"{ROLLOUT}__partial_rollout": True,
            f"{ROLLOUT}__max_staleness": k,
        }
        for k in (1, 2, 4)
    },
}
UPDATE_S, DECODE_S = 1.5, 0.01
LONGEST, MEDIAN, PROMPTS, N, STEPS = 256, 40, 8, 8, 16
SCHEDULE = f"tiny model, {PROMPTS} prompts x {N} responses a step, log-normal lengths around {MEDIAN}, at most "
SCHEDULE += f"{LONGEST}; {1000 * DECODE_S:.0f} ms a step of the engine, {UPDATE_S} s an update"
SCHEDULE += f"; {STEPS} steps, the first {WARM_UP} left out"
DIGITS_STEPS = TINY["trainer__total_training_steps"]
SERVER = """
import time
from verl.workers.rollout.server.server import RolloutServer


class Slow(RolloutServer):
    def __init__(self, engine, *args, **options):
        super().__init__(engine, *args, **options)
        step = engine.step

        def slow():
            time.sleep(DECODE_S)
            return step()

        engine.step = slow
"""
LOOP = """
import random
from verl.agents import AgentLoopBase, AgentLoopOutput, register


@register("forced")
class Forced(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = list(row["raw_prompt_ids"])
        draw = random.Random(self.server_manager._seed)
        tokens = max(1, min(LONGEST, int(MEDIAN * draw.lognormvariate(0, 0.9))))
        sampling_params |= {"max_tokens": tokens, "ignore_eos": True}
        answer = await self.server_manager.generate("one", prompt_ids=prompt, sampling_params=sampling_params)
        ids = answer.token_ids
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids), num_turns=2,
                               response_logprobs=answer.log_probs)
"""
SIZES = {
    "2.5M": {"size": "2.5M"},
    "86M": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "head_dim": 64},
}


def transfers(folder: str, bucket_bytes: int, times: int = 5) -> list[float]:
    """Wall seconds of each transfer into an hf rollout, receipts included; on rank 0, and those of a plain copy."""
    rank = dist.get_rank()
    store = open_store("127.0.0.1", 60.0) if rank == 0 else None
    ports: list[Any] = [store and store.port, None]
    dist.broadcast_object_list(ports, 0)
    link = WeightLink(store or find_store("127.0.0.1", ports[0], 60.0), rank, 2, "cpu", 60.0)
    if rank == 0:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    else:
        rollout = HFRollout(folder, RolloutConfig(dtype="bfloat16", prompt_length=8, response_length=8))
        rollout.wake()
    seconds = []
    for version in range(times):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            link.send(weights.items(), version, bucket_bytes, torch.bfloat16)
        else:
            link.receive(rollout)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        start = time.perf_counter()
        copies = [tensor.clone() for tensor in weights.values()]
        return [*seconds, time.perf_counter() - start, sum(copy.nbytes for copy in copies)]
    return []


class TimedTrainer(RayPPOTrainer):
    """Notes when every step ended and what it said of its sampling."""

    ends: list[float]
    update_s = UPDATE_S

    def improve(self, batch: Any) -> None:
        super().improve(batch)
        time.sleep(self.update_s)

    def finish_step(self, step: int, batch: Any) -> None:
        super().finish_step(step, batch)
        vars(self).setdefault("ends", []).append(time.perf_counter())
        vars(self).setdefault("said", []).append({**self.metrics})


def steps(task: dict[str, str], **settings: Any) -> dict[str, Any]:
    """Steps a second of a job, its first steps left out, and the share of generation that training hid."""
    is_ahead = f"{ROLLOUT}__max_staleness" in settings
    base = OneStepOffTrainer if is_ahead else RayPPOTrainer

    class Job(PPOJob):
        trainer_cls = type("Timed", (TimedTrainer, base), {})

    trainer = Job(load_ppo_config(overrides(task, **{**LEARNING, **settings}))).run()
    last = -4 if is_ahead else None  # the engines run dry in the last steps
    said, ends = trainer.said[WARM_UP:last], trainer.ends[WARM_UP:last]
    seconds = ends[-1] - ends[0]
    row = {"steps_a_second": (len(said) - 1) / seconds}
    row["tokens_a_second"] = sum(step["perf/total_num_tokens"] for step in said[1:]) / seconds
    return row | {name.split("/", 1)[1]: _mean(said, name) for name in SAID if _mean(said, name) is not None}


def learned(task: dict[str, str], folder: Path, seed: int, **settings: Any) -> float:
    """The mean reward of the last three steps of a run."""
    base = OneStepOffTrainer if f"{ROLLOUT}__max_staleness" in settings else RayPPOTrainer

    class Job(PPOJob):
        trainer_cls = type("Timed", (TimedTrainer, base), {"update_s": 0.0})

    options = {**DIGITS, **TINY, **settings, "trainer__seed": seed, "trainer__default_local_dir": folder}
    del options["size"]
    trainer = Job(load_ppo_config(overrides(task, **options))).run()
    return sum(step["critic/score/mean"] for step in trainer.said[-3:]) / 3


def _mean(said: list[dict[str, float]], name: str) -> float | None:
    numbers = [metrics[name] for metrics in said if name in metrics]
    return sum(numbers) / len(numbers) if numbers else None


SAID = (
    "timing_s/gen",
    "timing_s/generate_sequences",
    "timing_s/sync_weights",
    "perf/rollout_overlap",
    "perf/trainer_idle_share",
    "rollout/bubble_share",
    "rollout/staleness/mean",
    "rollout/interrupted_share",
)


def main() -> None:
    rows = []
    parts = {part for part in ("transfers", "schedules", "learning") if f"--{part}" in sys.argv}
    parts = parts or {"transfers", "schedules", "learning"}
    with tempfile.TemporaryDirectory() as place:
        for name, options in SIZES.items() if "transfers" in parts else ():
            folder = make_tiny_model(Path(place) / name, family="qwen2", **options)
            for bucket_mib in (16, 512):
                *seconds, copy, nbytes = run_ranks(2, transfers, folder, bucket_mib << 20)[0]
                row = {"what": f"transfer, {name} parameters", "bucket_mib": bucket_mib, "mib": nbytes / 2**20}
                row["work"] = f"bf16 weights of {nbytes / 2**20:.0f} MiB in buckets of {bucket_mib} MiB"
                best = min(seconds[1:])
                rows.append(
                    {**row, "seconds": best, "gib_a_second": nbytes / best / 2**30, "ratio_to_copy": best / copy}
                )
        for way, settings in WAYS.items() if "schedules" in parts else ():
            task = make_task(Path(place) / "task")
            (Path(place) / "forced.py").write_text(LOOP.replace("LONGEST", str(LONGEST)).replace("MEDIAN", str(MEDIAN)))
            (Path(place) / "slow.py").write_text(SERVER.replace("DECODE_S", str(DECODE_S)))
            size = {"data__train_batch_size": PROMPTS, "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS}
            size |= {"data__max_response_length": LONGEST, "trainer__total_training_steps": STEPS}
            size |= {f"{ROLLOUT}__n": N}
            size |= {f"{ROLLOUT}__agent__agent_loop_config_path": Path(place) / "forced.py"}
            size |= {f"{ROLLOUT}__agent__default_agent_loop": "forced"}
            size |= {f"{ROLLOUT}__agent__custom_async_server__path": Path(place) / "slow.py"}
            size |= {f"{ROLLOUT}__agent__custom_async_server__name": "Slow"}
            folder = {"trainer__default_local_dir": Path(place) / f"schedule{len(rows)}"}
            rows.append({"what": f"GRPO, {PROMPTS * N} responses a step, {way}", "work": SCHEDULE})
            rows[-1] |= steps(task, **size, **folder, **settings)
        behind = {"0": APART, "1": AHEAD, "2": WAYS["all the time, max_staleness=2"]}
        for k, settings in behind.items() if "learning" in parts else ():
            task = make_task(Path(place) / "tiny", size="tiny")
            correction = {"algorithm__rollout_correction__rollout_is": "token"} if k == "2" else {}
            folders = [Path(place) / f"learning{k}_{seed}" for seed in range(3)]
            scores = [learned(task, folder, seed, **settings, **correction) for seed, folder in enumerate(folders)]
            name = f"digits, {k} steps behind, reward of three seeds"
            rows.append({"what": name, "work": f"{DIGITS_STEPS} steps", "scores": scores})
    report("disjoint", rows)


if __name__ == "__main__":
    main()

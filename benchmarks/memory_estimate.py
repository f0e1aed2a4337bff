"""Memory estimated by the doctor, against the memory that the process takes: peak resident memory by phase.

``python -m benchmarks.memory_estimate [--model "llama 50M"] [--save]``: two GRPO steps of random models, one CPU
process each, with the kernel's own peak (``VmHWM``), set back at the start of each phase. ``ratio`` is estimate over
measurement of the whole process; ``model_ratio`` leaves out on both sides what the doctor counts as the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import report

MODELS: dict[str, dict[str, Any]] = {
    "qwen2, 151936 tokens": {
        "family": "qwen2", "vocab_size": 151936, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "head_dim": 32,
    },
    "llama 50M": {
        "family": "llama", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10,
        "num_attention_heads": 8, "head_dim": 64,
    },
    "llama 135M": {
        "family": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    },
}  # fmt: skip
FSDP2, LOCAL = "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.strategy=local"
FP32 = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32"
RUNS = {
    "qwen2, 151936 tokens": ((FSDP2,), (LOCAL,), (FSDP2, FP32)),
    "llama 50M": ((FSDP2,), (FSDP2, FP32)),
    "llama 135M": ((FSDP2,),),
}
PHASES = {
    "start": "start", "rollout_generate": "rollout", "log_prob": "log-probs", "update_actor": "update actor",
    "save": "checkpoint",
}  # fmt: skip
"""Phase of the ledger -> phase of the doctor."""


def words(folder: Path, model: Path, *more: str) -> list[str]:
    """The command line: 16 samples of up to 96 tokens a step."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        "data.max_response_length=48",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.controller=local",
        "trainer.logger=file",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.save_freq=2",
        "trainer.progress_bar=false",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/run-{model.name}",
        *more,
    ]


def peak_bytes() -> int:
    """Most resident memory of this process since the last ``forget_peak``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(arguments: list[str]) -> None:
    """Run the job in this process and print phase -> peak bytes."""
    import verl.trainer.ppo.job  # noqa: F401 - what a process has before any model
    from verl.config.load import load_ppo_config
    from verl.telemetry.memory import MemoryLedger
    from verl.trainer.main_ppo import run_ppo

    peaks: dict[str, int] = {}

    @contextmanager
    def phase(self: MemoryLedger, name: str) -> Iterator[None]:
        forget_peak()
        yield
        peaks[name] = max(peaks.get(name, 0), peak_bytes())

    MemoryLedger.phase = phase
    before = peak_bytes()
    run_ppo(load_ppo_config(arguments))
    print("PEAKS", json.dumps({"process": before, **peaks}))


def compare(folder: Path, name: str, run: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row a phase."""
    from verl.preflight.checks import examine

    arguments = words(folder, folder / name.replace(" ", "-").replace(",", ""), *run)
    estimated = {row.phase: row for row in examine(arguments).memory}
    command = [sys.executable, "-m", "benchmarks.memory_estimate", "--measure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEAKS ")]
    if not lines:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    peaks = json.loads(lines[0].removeprefix("PEAKS "))
    print(name, run, {phase: peak >> 20 for phase, peak in peaks.items()}, file=sys.stderr)
    rows = []
    for phase, ours in PHASES.items():
        if phase in peaks:
            row, process = estimated[ours], estimated[ours].parts["process"]
            model = max(1, peaks[phase] - process)
            rows.append(
                {
                    "model": name,
                    "run": " ".join(word.rpartition("fsdp_config.")[2].rpartition("actor.")[2] for word in run),
                    "phase": ours,
                    "estimate_MiB": row.total >> 20,
                    "measured_MiB": peaks[phase] >> 20,
                    "ratio": round(row.total / peaks[phase], 3),
                    "model_ratio": round((row.total - process) / model, 3),
                    "parts_MiB": {part: size >> 20 for part, size in row.parts.items() if size >> 20},
                }
            )
    return rows


def main() -> None:
    from tests.support.commands import ROOT
    from verl.utils.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as place:
        folder, rows = Path(place), []
        script = ROOT / "examples" / "data_preprocess" / "arithmetic.py"
        command = [sys.executable, script, "--task", "digits", "--local_dir", folder]
        subprocess.run(command, check=True, capture_output=True)
        for name, shape in MODELS.items():
            if "--model" in sys.argv and name != sys.argv[sys.argv.index("--model") + 1]:
                continue
            make_tiny_model(folder / name.replace(" ", "-").replace(",", ""), **shape)
            for run in RUNS[name]:
                rows += compare(folder, name, run)
        report("memory_estimate", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    else:
        main()

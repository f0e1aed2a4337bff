"""Write the weights of a Hugging Face folder as a distributed checkpoint of megatron-core.

    python scripts/converter_hf_to_mcore.py --hf_model_path Qwen/Qwen2.5-7B-Instruct --output_path models/qwen-mcore
    torchrun --nproc_per_node 8 scripts/converter_hf_to_mcore.py --pp_size 2 --ep_size 4 --hf_model_path ...

A run reads the folder with

    actor_rollout_ref.actor.megatron.use_dist_checkpointing=true \\
    actor_rollout_ref.actor.megatron.dist_checkpointing_path=models/qwen-mcore

on any tensor, pipeline and expert parallel sizes; model.path stays the Hugging Face folder, which has configuration and
tokenizer. Without these options a run reads the Hugging Face folder itself, and nothing needs to be converted. A model
that one GPU does not hold is converted by several, which share it as the sizes say. Precision is that of the folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.utils.process import plain_ending


def convert(hf_model_path: str, output_path: str, pp_size: int = 1, ep_size: int = 1, trusts: bool = False) -> Path:
    """Write the folder's weights to ``output_path``; all ranks call it together. Returns the folder that was written.

    Raises:
        ValueError: ``output_path`` holds something, or the model is not admitted (docs/megatron.md).
    """
    import torch

    from verl.config.megatron import MegatronConfig
    from verl.models.heads import stored_shapes
    from verl.models.loader import ModelSpec, load_config
    from verl.models.megatron.parallel import import_megatron, start_groups, use_virtual_pipeline
    from verl.utils.device import get_device_name
    from verl.utils.distributed import barrier, ensure_process_group, get_world_size

    import_megatron()
    from verl.models.megatron import bridge, checkpoint

    folder = Path(output_path).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"--output_path={output_path} holds files: name a folder that is empty, or is not there.")
    ensure_process_group(get_device_name())
    config = MegatronConfig(pipeline_model_parallel_size=pp_size, expert_model_parallel_size=ep_size)
    spec = ModelSpec(hf_model_path, trust_remote_code=trusts)
    model_config = load_config(spec)
    start_groups(config.mesh(get_world_size()), config.seed)
    use_virtual_pipeline(1)
    stored = stored_shapes(spec.folder)
    head: bridge.Head = "value" if "score.weight" in stored else "lm"
    dtype = model_config.dtype or torch.float32
    model = bridge.build(model_config, dtype, head, hf_model_path, head_bias="score.bias" in stored)
    bridge.load_hf(model, spec.folder)
    barrier()
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder, model)
    return folder


def differences(hf_model_path: str, folder: Path, trusts: bool = False) -> list[str]:
    """Names of the weights that ``folder`` does not hold bit for bit as the Hugging Face folder does."""
    import torch

    from verl.checkpoint.hf_folder import Weights
    from verl.models.loader import ModelSpec, load_config
    from verl.models.megatron.stored import StoredWeights

    spec = ModelSpec(hf_model_path, trust_remote_code=trusts)
    theirs = Weights(Path(spec.folder))
    ours = StoredWeights(folder, load_config(spec), "value" if "score.weight" in theirs.names() else "lm")
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. All ranks call it together."""
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf_model_path", required=True, help="folder, or name on the hub, of a causal language model")
    parser.add_argument("--output_path", required=True, help="folder to write")
    parser.add_argument("--pp_size", type=int, default=1, help="ranks that share the layers")
    parser.add_argument("--ep_size", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--test", action="store_true", help="read the folder again and compare every weight")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code")
    parser.add_argument("--use_cpu_initialization", action="store_true", help="no effect: each rank reads its own part")
    options = parser.parse_args(arguments)
    folder = convert(
        options.hf_model_path, options.output_path, options.pp_size, options.ep_size, options.trust_remote_code
    )
    if dist.get_rank():
        return 0
    if options.use_cpu_initialization:
        print("--use_cpu_initialization has no effect: each rank reads its own part", file=sys.stderr)
    print(f"{folder}: a distributed checkpoint of {options.hf_model_path}")
    if options.test and (odd := differences(options.hf_model_path, folder, options.trust_remote_code)):
        print(f"{len(odd)} weights differ, first {odd[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with plain_ending():
        sys.exit(main())

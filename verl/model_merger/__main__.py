"""Merge the files that the ranks of a run saved into a Hugging Face folder, or compare them with one.

python -m verl.model_merger merge --backend fsdp --local_dir runs/x/global_step_100/actor --target_dir merged
python -m verl.model_merger test  --backend fsdp --local_dir runs/x/global_step_100/actor --test_hf_dir other
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.ending import plain_ending

if TYPE_CHECKING:
    from verl.model_merger.merged import Source

BACKENDS = ("fsdp", "deepspeed", "local")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ELSEWHERE = ("tie_word_embedding", "use_cpu_initialization")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(arguments)
    if options.backend not in BACKENDS:
        raise ValueError(
            f"--backend={options.backend} is not read here: use one of {', '.join(BACKENDS)}. Checkpoints of Megatron "
            f"are merged by the program that wrote them"
        )
    for name in _ELSEWHERE:
        if getattr(options, name):
            print(f"--{name.replace('_', '-')} has no effect: the checkpoint's config.json decides", file=sys.stderr)
    from verl.model_merger.merged import Source  # torch and transformers, which --help should not wait for

    source = Source.find(
        options.local_dir,
        options.hf_model_path,
        trust_remote_code=options.trust_remote_code,
        is_value_model=options.is_value_model,
    )
    return _merge(source, options) if options.operation == "merge" else _test(source, options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m verl.model_merger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="operation", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--backend", default="fsdp", help=f"{', '.join(BACKENDS)}: their files are read alike")
    both.add_argument("--local_dir", required=True, help="folder of a role's checkpoint, .../global_step_N/actor")
    both.add_argument("--hf_model_path", help="config and tokenizer, if the checkpoint has no huggingface/")
    both.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    both.add_argument("--is-value-model", action="store_true", help="a critic whose config does not say so")
    both.add_argument("--tie-word-embedding", action="store_true", help="no effect: config.json decides")
    both.add_argument("--use_cpu_initialization", action="store_true", help="no effect: no device is used")
    merge = commands.add_parser("merge", parents=[both], help="write a Hugging Face folder")
    merge.add_argument("--target_dir", default="tmp", help="folder to write")
    merge.add_argument("--dtype", choices=_DTYPES, help="of the weights; default: what the model came in")
    merge.add_argument("--hf_upload_path", help="repository on the hub to bring it to")
    merge.add_argument("--private", action="store_true", help="a new repository is private")
    test = commands.add_parser("test", parents=[both], help="compare with a Hugging Face folder")
    test.add_argument("--test_hf_dir", required=True, help="folder to compare with")
    return top


def _merge(source: Source, options: argparse.Namespace) -> int:
    import torch

    from verl.model_merger.merge import merge, upload

    dtype = getattr(torch, _DTYPES[options.dtype]) if options.dtype else None
    written = merge(source, options.target_dir, dtype)
    target = Path(options.target_dir).absolute()
    print(f"{target}: {len(written)} tensors written and read back")
    if options.hf_upload_path:
        print(f"uploaded to {upload(target, options.hf_upload_path, options.private)}")
    return 0


def _test(source: Source, options: argparse.Namespace) -> int:
    from verl.model_merger.merge import compare

    differences = compare(source, options.test_hf_dir)
    for line in differences[:20]:
        print(line, file=sys.stderr)
    if differences:
        print(f"{source.local_dir} differs from {options.test_hf_dir} in {len(differences)} tensors", file=sys.stderr)
        return 1
    print(f"{source.local_dir} and {options.test_hf_dir} hold the same model")
    return 0


if __name__ == "__main__":
    with plain_ending():
        sys.exit(main())

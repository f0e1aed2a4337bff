"""Merge the files that the ranks of a run saved into a Hugging Face folder, or compare them with one.

verl merge RUN                                    the newest step's actor of a run's folder, to RUN/merged_step_N
verl merge RUN --role critic --step 100 --target_dir DIR
verl merge test RUN --test_hf_dir DIR             compare instead of writing

RUN is a run's folder (trainer.default_local_dir), one of its steps, or a role's folder in that, as --local_dir is.
`python -m verl.model_merger merge|test` takes the same words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint.manifest import TRACKER
from verl.utils.process import plain_ending

if TYPE_CHECKING:
    from verl.model_merger.merge import Source

BACKENDS = ("fsdp", "deepspeed", "local", "megatron")
ROLES = ("actor", "critic")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# options of other releases: accepted without effect, so that their command lines go on
_ELSEWHERE = ("tie_word_embedding", "use_cpu_initialization")


def main(arguments: Sequence[str] | None = None, operation: str | None = None) -> int:
    """Run one command; returns the exit code.

    Args:
        arguments: the words; None: those of this process.
        operation: ``merge`` or ``test``. None: the first of the words.
    """
    options = parser(operation).parse_args(arguments)
    options.operation = operation or options.operation
    if options.backend not in BACKENDS:
        raise ValueError(f"--backend={options.backend} is not read here: use one of {', '.join(BACKENDS)}")
    for name in _ELSEWHERE:
        if getattr(options, name):
            print(f"--{name.replace('_', '-')} has no effect: the checkpoint's config.json decides", file=sys.stderr)
    if options.run is None:
        local_dir, target = options.local_dir, "tmp"
    else:
        local_dir, target = find_checkpoint(options.run, options.role, options.step)
        print(f"merging {local_dir}" if options.operation == "merge" else f"reading {local_dir}")
    if local_dir is None:
        raise ValueError("no checkpoint is named: give the folder of a run, or --local_dir=.../global_step_N/actor")
    from verl.model_merger.merge import Source  # torch and transformers, which --help should not wait for

    source = Source.find(
        local_dir,
        options.hf_model_path,
        trust_remote_code=options.trust_remote_code,
        # with RUN the role is known; of --local_dir the config must say it, or this option
        is_value_model=options.is_value_model or options.run is not None and options.role == "critic",
    )
    if options.operation == "merge":
        options.target_dir = options.target_dir or target
        return _merge(source, options)
    return _test(source, options)


def find_checkpoint(run: str, role: str = "actor", step: int | None = None) -> tuple[str, str]:
    """The folder of ``role`` in the newest complete step below ``run``, and where its model goes by default.

    Args:
        run: folder of a run, of a step, or of a role.
        step: take this one.

    Raises:
        ValueError: nothing is there to merge.
    """
    folder = Path(run).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{run} is no folder: give the folder of a run, the one named by trainer.default_local_dir")
    if folder.name in ROLES and folder.parent.name.startswith("global_step_"):
        folder, role = folder.parent, folder.name
    if folder.name.startswith("global_step_"):
        root, steps = folder.parent, {_step_of(folder): folder}
    else:
        root, steps = folder, {_step_of(found): found for found in folder.glob("global_step_*")}
    # without global_step_N.partial and the like, copies that were cut off, of which `_step_of` gives -1
    steps = {number: found for number, found in sorted(steps.items()) if number >= 0 and (found / role).is_dir()}
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"--step={step}: {run} has no global_step_{step}/{role}. Steps with one: {there}")
    if not steps:
        way_out = "Set trainer.save_freq, or name another folder" if role == "actor" else "Use --role actor"
        if exported := exported_model(run):
            way_out = f"Its model lies in {exported} already"
        raise ValueError(f"{run} has no checkpoint of the {role}: no global_step_N/{role} is in it. {way_out}")
    tracker = root / TRACKER
    newest = tracker.read_text().strip() if tracker.exists() else ""
    complete = int(newest) if newest.isdigit() and folder == root else max(steps)  # a newer one is still being written
    # no step up to the tracker's may be left, where folders were deleted: then the newest there is
    chosen = step if step is not None else max((number for number in steps if number <= complete), default=max(steps))
    name = f"merged_step_{chosen}" if role == "actor" else f"merged_{role}_step_{chosen}"
    return str(steps[chosen] / role), str(root / name)


def is_checkpoint(path: str) -> bool:
    """Whether a folder is that of a run, of a step or of a role's checkpoint, and not a model's."""
    folder = Path(path).expanduser()
    # config.json of a step has the options of its run
    if not folder.is_dir() or (folder / "config.json").exists() and not folder.name.startswith("global_step_"):
        return False
    names = [folder.name, folder.parent.name, *(found.name for found in folder.glob("global_step_*"))]
    return any(name.startswith("global_step_") for name in names)


def exported_model(path: str) -> str | None:
    """The folder of the model that a run on examples has written at its end; None where there is none."""
    folder = Path(path).expanduser()
    exported = folder / "huggingface"
    is_run = not (folder / "config.json").exists() and not folder.parent.name.startswith("global_step_")
    return str(exported) if is_run and (exported / "config.json").exists() else None


def merged_folder(path: str) -> str:
    """Return the Hugging Face folder of the newest checkpoint below ``path``; what ``verl merge`` left, or made now.

    Raises:
        ValueError: nothing is there to merge.
    """
    local_dir, target = find_checkpoint(path)
    files = [file.stat().st_mtime for file in Path(local_dir).iterdir() if file.is_file()]
    made = Path(target, "config.json")
    if not made.exists() or made.stat().st_mtime < max(files, default=0):
        from verl.model_merger.merge import Source, merge

        print(f"merging {local_dir} to {target}", flush=True)
        merge(Source.find(local_dir), target)
    return target


def _step_of(folder: Path) -> int:
    match = re.fullmatch(r"global_step_(\d+)", folder.name)
    return int(match[1]) if match else -1


def parser(operation: str | None = None) -> argparse.ArgumentParser:
    """The parser of ``verl merge`` or ``verl merge test``; for None that of ``python -m verl.model_merger``."""
    prog = {None: "python -m verl.model_merger", "merge": "verl merge"}.get(operation, f"verl merge {operation}")
    top = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if operation is not None:
        _add_options(top, operation)
        return top
    commands = top.add_subparsers(dest="operation", required=True)
    _add_options(commands.add_parser("merge", help="write a Hugging Face folder"), "merge")
    _add_options(commands.add_parser("test", help="compare with a Hugging Face folder"), "test")
    return top


def _add_options(one: argparse.ArgumentParser, operation: str) -> None:
    place = one.add_mutually_exclusive_group()
    place.add_argument("run", nargs="?", metavar="RUN", help="folder of a run: its newest complete step is taken")
    place.add_argument("--local_dir", help="folder of a role's checkpoint, .../global_step_N/actor")
    one.add_argument("--role", choices=ROLES, default="actor", help="with RUN: the policy, or the value model")
    one.add_argument("--step", type=int, help="with RUN: this step instead of the newest")
    one.add_argument("--backend", default="fsdp", help=f"{', '.join(BACKENDS)}: the files themselves say it")
    one.add_argument("--hf_model_path", help="config and tokenizer, if the checkpoint has no huggingface/")
    one.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    one.add_argument("--is-value-model", action="store_true", help="a critic whose config does not say so")
    one.add_argument("--tie-word-embedding", action="store_true", help="no effect: config.json decides")
    one.add_argument("--use_cpu_initialization", action="store_true", help="no effect: no device is used")
    if operation == "test":
        one.add_argument("--test_hf_dir", required=True, help="folder to compare with")
        return
    one.add_argument("--target_dir", help="folder to write; default: RUN/merged_step_N, with --local_dir: tmp")
    one.add_argument("--dtype", choices=_DTYPES, help="of the weights; default: what the model came in")
    one.add_argument("--hf_upload_path", help="repository on the hub to bring it to")
    one.add_argument("--private", action="store_true", help="a new repository is private")


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

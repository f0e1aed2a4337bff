"""The first second of a command: words on the screen before anything heavy is imported; a driver without models."""

import os
import subprocess
import sys

import pytest

from verl.single_controller.processes import torchrun_size
from verl.utils.tiny_model import make_tiny_model

HEAVY = {"torch", "transformers", "ray", "numpy", "pyarrow", "hydra", "omegaconf"}
"""Packages whose imports take longer than a user waits for a sign of life."""


def python(code, *words):
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize(
    "words",
    [
        *("doctor trainer.device=cpu", "doctor sft trainer.device=cpu", "check rows.parquet", "env", "env --json"),
        *("ppo trainer.device=cpu", "ppo --check trainer.device=cpu", "ppo trainer.dry_run=true"),
        *("sft --check trainer.device=cpu", "dpo trainer.device=cpu", "agentic --check trainer.device=cpu"),
        *("generate model rows.parquet", "eval responses.parquet", "chat model", "selftest", "selftest --json"),
    ],
)
def test_a_command_speaks_before_it_imports_anything_heavy(words):
    code = (
        "import os, sys\nimport verl.telemetry.run_record as record\n"
        "def first(line):\n"
        f"    print(line, sorted({HEAVY} & set(sys.modules)), flush=True)\n    os._exit(0)\n"
        "record.say_early = first\nfrom verl.cli import main\nmain(sys.argv[1:])\n"
    )
    (line,) = python(code, *words.split())
    assert line.startswith("verl ") and line.endswith(" []")


@pytest.mark.parametrize("words", ["doctor --help", "check --help", "env --help", "generate --help", "sft --help"])
def test_help_is_all_that_is_printed_where_help_is_asked_for(words):
    done = subprocess.run([sys.executable, "-m", "verl", *words.split()], capture_output=True, text=True, check=True)
    assert "usage: " in done.stdout and not done.stderr


@pytest.mark.parametrize(
    "variables", [{}, {"WG_BACKEND": "local"}], ids=["of torchrun", "of a run that starts a command"]
)
def test_help_is_printed_by_a_rank_too(variables):
    of_torchrun = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    command = [sys.executable, "-m", "verl", "sft", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **of_torchrun, **variables})
    assert done.returncode == 0 and "usage: " in done.stdout and not done.stderr


def test_ranks_of_a_run_are_not_those_of_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "4")
    for name in ("WG_BACKEND", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_size() == (1, 4)
    monkeypatch.setenv("WG_BACKEND", "ray")
    assert torchrun_size() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # torchrun, started by a rank
    assert torchrun_size() == (1, 4)


def test_a_driver_on_ray_imports_neither_models_nor_the_compiler(tmp_path):
    folder = make_tiny_model(tmp_path)
    code = (
        "import sys\nfrom verl.single_controller import get_controller\nfrom verl.utils import hf_processor\n"
        "import verl.trainer.ppo.job, verl.trainer.sft.trainer, verl.trainer.preference.trainer\n"
        "from verl.workers import disjoint, reward_model, roles, teacher\n"
        "from verl.utils.tokenizer import hf_tokenizer\nget_controller('ray')\n"
        "assert hf_tokenizer(sys.argv[1]).apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "assert hf_processor(sys.argv[1]) is None and {'torch', 'ray'} <= set(sys.modules)\n"
        "unused = {'torch._dynamo', 'torch.distributed.tensor', 'sympy', 'transformers.models.auto.modeling_auto'}\n"
        "print(sorted(unused & set(sys.modules)))\n"
    )
    assert python(code, os.fspath(folder))[-1] == "[]"

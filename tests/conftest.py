"""What holds for every test: one thread, no network, a GPU only where there is one."""

import gc
import importlib.util
import os
import signal
import zlib
from functools import cache
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; tests interrupt what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest  # noqa: E402

HERE = Path(__file__).parent
NUMERIC = {
    HERE / "workers" / "engine" / f"test_{name}.py"
    for name in (
        *("engine", "full_kl", "invariance", "optim", "packed_images", "parity"),
        *("sequence_parallel", "shared_prompts"),
    )
}
"""Tests whose numbers depend on the kernels that a CPU gets; learning tests are the others."""


TIERS = ("ranks", "ray", "learning", "vllm", "sglang", "numerics")
"""Markers of whose tests scripts/test.sh collects the files alone: importing all of them takes half a minute."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="collect the K-th of N parts of the files, as scripts/test.sh does")
    parser.addoption("--mentions", metavar="MARKER", help="collect the files that name a marker: the others have none")


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def mentions(path: Path, marker: str) -> bool:
    """Whether a file of tests, or a conftest.py between it and this one, names ``marker``."""
    if marker == "numerics" and (path in NUMERIC or path == HERE / "trainer" / "test_learning.py"):
        return True
    folders = [folder for folder in path.parents if HERE in folder.parents]
    return any(marker in text_of(place) for place in (path, *(folder / "conftest.py" for folder in folders)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py":
        return None
    if marker := config.getoption("mentions"):
        return not mentions(collection_path, marker) or None
    if not (part := config.getoption("part")):
        return None
    number, count = map(int, part.split("/"))
    return zlib.crc32(collection_path.relative_to(HERE).as_posix().encode()) % count != number - 1 or None


def pytest_collection_finish() -> None:
    gc.freeze()  # tests and modules stay: garbage collection need not look through a million objects each time


def pytest_configure(config: pytest.Config) -> None:
    # Other tests see no GPU: they fork ranks after a backward pass, which torch forbids with one.
    expression = config.getoption("markexpr") or ""
    on_gpu = "gpu" in expression and "not gpu" not in expression
    if not on_gpu and os.environ.get("VERL_TEST_DEVICE", "cpu") == "cpu":  # tests/gpu/test_rollout_engines.py sets it
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def has_cuda() -> bool:
    import verl  # noqa: F401 - only reached when a GPU test was collected; makes the next question harmless
    import torch  # isort: skip

    return torch.cuda.is_available()


def is_numeric(item: pytest.Item) -> bool:
    """Whether a test is repeated with the kernels of another CPU."""
    if item.name.startswith("test_a_method_reaches_a_reward"):  # some for all: they differ in their losses, not kernels
        return item.callspec.params["method"] in ("ppo", "grpo", "gspo", "dapo")
    # all others learn through the kernels that these run with other instruction sets
    learns = item.get_closest_marker("learning") is not None and item.path == HERE / "trainer" / "test_learning.py"
    return item.path in NUMERIC or learns


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_gpu = None
    missing = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is None]
    for item in items:
        if hasattr(getattr(item, "module", None), "run_ranks"):
            item.add_marker(pytest.mark.ranks)
        if is_numeric(item):
            item.add_marker(pytest.mark.numerics)
        for name in TIERS:
            if item.get_closest_marker(name) and not mentions(item.path, name):
                raise pytest.UsageError(f"{item.path} has tests of {name} and does not name it: --mentions misses them")
        for name in missing:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"needs {name}: bash scripts/install_engines.sh {name}"))
        if item.get_closest_marker("gpu"):
            if skip_gpu is None:
                skip_gpu = not has_cuda()
            if skip_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and pytest -m gpu"))

"""Nothing is assumed installed: what the code imports is named, and what is named is pinned for every Python."""

import ast
import re
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTION = {"hydra": "hydra-core", "omegaconf": "hydra-core", "yaml": "hydra-core", "jinja2": "transformers"}
DISTRIBUTION |= {"tokenizers": "transformers", "huggingface_hub": "transformers", "tqdm": "transformers"}
DISTRIBUTION |= {"math_verify": "math-verify", "latex2sympy2_extended": "latex2sympy2-extended"}
DISTRIBUTION |= {"cloudpickle": "ray", "PIL": "pillow"}
# Imported only where the user brought them: by an option that names them, or on a machine that has them.
OPTIONAL = {"flash_attn", "vllm", "sglang", "modelscope", "torch_npu", "nvtx", "mlflow", "weave"}
OPTIONAL |= {"deepspeed", "megatron", "mbridge", "liger_kernel", "torchao", "reasoning_gym", "langdetect"}
OPTIONAL |= {"gymnasium", "textarena", "openenv"}  # environments of other packages
OPTIONAL |= {"openai", "langgraph", "langchain_core", "langchain_openai"}  # agents of the examples and recipes
OPTIONAL |= {"prometheus_client"}  # comes with vLLM, whose numbers it holds
OPTIONAL |= {"mcp", "httpx2"}  # tools of MCP servers; the first brings the second
OPTIONAL |= {"playwright"}  # the test of the page in a browser
OPTIONAL |= {"av", "reasoning_gym"}  # video files as data; tasks that a script generates


def imported_packages(folder: str) -> dict[str, str]:
    """Top-level package -> one file that imports it, without the standard library and this repository."""
    scripts = (ROOT / "examples" / "data_preprocess").glob("*.py")  # they import each other
    own = {"verl", "tests", "recipe", "benchmarks", "examples", "scripts", *(path.stem for path in scripts)}
    found: dict[str, str] = {}
    for path in (ROOT / folder).rglob("*.py"):
        if path.is_relative_to(ROOT / "benchmarks" / "peers" / "runners"):
            continue  # they run in environments of other projects
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                package = name.partition(".")[0]
                if package not in sys.stdlib_module_names and package not in own:
                    found.setdefault(package, str(path.relative_to(ROOT)))
    return found


def names_in(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    return {re.split(r"[=<>\[; ]", line)[0].lower() for line in lines if re.match(r"[A-Za-z]", line)}


def missing_from(packages: dict[str, str], named: set[str]) -> dict[str, str]:
    distributions = {package: DISTRIBUTION.get(package, package) for package in packages}
    return {
        package: packages[package]
        for package, name in distributions.items()
        if name not in named and package not in OPTIONAL
    }


@pytest.mark.parametrize("folder", ["verl", "scripts", "examples", "recipe"])
def test_what_the_code_imports_is_in_the_requirements(folder):
    assert not missing_from(imported_packages(folder), names_in("requirements.in"))


WRITTEN_BY_TESTS = {
    "helpers",
    "hostile",
    "library_of_options",
    "my_fused",
    "my_loops",
    "my_recipe",
    "my_worker",
    "my_workflow",
}
"""Modules that stand in for a user's own; a test writes or ships them."""


def test_what_the_tests_import_is_in_the_requirements():
    named = names_in("requirements.in") | names_in("requirements-test.in") | WRITTEN_BY_TESTS
    assert not missing_from(imported_packages("tests") | imported_packages("benchmarks"), named)


def test_what_the_package_imports_is_in_setup():
    text = (ROOT / "setup.py").read_text()
    named = {name.lower() for name in re.findall(r'"([A-Za-z][\w\-]*)(?:[<>=][^"]*)?"', text)}
    assert not missing_from(imported_packages("verl"), named)


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cuda.txt", "requirements-test.txt"])
def test_every_requirement_is_pinned_and_no_accelerator_library_is(file):
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[\w.\-]+==[\w.]+( ;|$)", line) for line in lines)
    assert not [line for line in lines if re.match(r"(nvidia|cuda|triton)", line)]


def test_what_gpus_alone_run_is_pinned_within_the_range_of_its_extra_and_for_them_alone():
    [pin] = [line for line in (ROOT / "requirements-cuda.txt").read_text().splitlines() if line[:1] != "#"]
    [(lowest, above)] = re.findall(r'"liger-kernel>=([\d.]+),<([\d.]+)"', (ROOT / "setup.py").read_text())
    name, _, version = pin.partition("==")
    first, pinned, end = ([int(part) for part in text.split(".")] for text in (lowest, version, above))
    assert name == "liger-kernel" and first <= pinned < end
    assert name not in names_in("requirements.txt") | names_in("requirements-test.txt")


def test_what_a_dashboard_needs_is_all_there_and_moves_no_pin():
    lines = (ROOT / "requirements-cluster.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line[:1] != "#")
    added = {name.replace("_", "-").lower() for name in pins}
    everywhere = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if ";" not in line}
    assert not added & {line.partition("==")[0] for line in everywhere}
    named = added | names_in("requirements.txt")
    needed = [text for text in requires("ray") or () if 'extra == "default"' in text]
    default = {re.split(r"[<>=!;]", text)[0].strip().replace("_", "-").lower() for text in needed}
    assert default and default <= named, default - named
    for file in ("Dockerfile.cpu", "Dockerfile.cuda"):
        assert "-r requirements-cluster.txt" in (ROOT / "docker" / file).read_text()


def pins_of(engine: str) -> set[str]:
    lines = (ROOT / f"requirements-{engine}-cpu.txt").read_text().splitlines()
    return {line for line in lines if line[:1] != "#"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_adds_packages_and_moves_none(engine):
    assert all(re.fullmatch(r"[\w.\-]+==[\w.]+", pin) for pin in pins_of(engine))
    assert not names_in(f"requirements-{engine}-cpu.txt") & (names_in("requirements.txt") | {"triton", "torchvision"})


def test_engines_agree_on_what_both_need():
    shared = names_in("requirements-vllm-cpu.txt") & names_in("requirements-sglang-cpu.txt")
    pinned = [{pin for pin in pins_of(engine) if pin.split("==")[0] in shared} for engine in ("vllm", "sglang")]
    assert len(shared) > 15 and pinned[0] == pinned[1]


def test_pins_of_the_sources_and_of_the_compiled_files_agree():
    for source, compiled in (
        ("requirements.in", "requirements.txt"),
        ("requirements-test.in", "requirements-test.txt"),
    ):
        pins = {line.split(" ")[0] for line in (ROOT / compiled).read_text().splitlines()}
        for line in (ROOT / source).read_text().splitlines():
            if re.match(r"[A-Za-z]", line):
                name = re.split(r"[<=]", line)[0]
                pin = line.split(" ")[0]  # without its marker
                assert pin in pins if "==" in pin else any(one.startswith(f"{name}==") for one in pins), line
    assert "torch==2.13.0" in (ROOT / "requirements.txt").read_text().splitlines()

"""What the documentation shows works: Python runs, main_ppo commands compose, links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.forked import run_file
from verl.config.base import leaves
from verl.config.generation import EvaluationConfig, GenerationConfig, long_name
from verl.config.load import load, load_ppo_config
from verl.config.preference import DPOConfig, RewardTrainConfig
from verl.config.sft import SFTConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            page
            for folder in ("docs", "verl", "examples", "scripts", "tests", "recipe", "benchmarks")
            for page in (ROOT / folder).rglob("*.md")
        ),
    ]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]) for match in FENCE.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON_PAGES = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
COMMANDS = [block for block in BLOCKS if block.language in ("bash", "sh", "shell") and "main_ppo" in block.text]


def name_of(value) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_python_blocks_run_one_after_the_other(page, tmp_path):
    """In a process of their own, since blocks register names; a failure shows the page's own line number."""
    program = [""] * page.read_text(encoding="utf-8").count("\n")
    for block in blocks_of(page):
        if block.language == "python":
            for i, line in enumerate(block.text.splitlines()):
                program[block.line - 1 + i] = line
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(program), encoding="utf-8")
    if any(name in script.read_text(encoding="utf-8") for name in ("get_controller", "run_ppo", "PPOJob")):
        # it forks ranks itself, which a fork of a process that has had threads cannot do reliably
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    else:
        done = run_file(script, tmp_path)
    assert done.returncode == 0, f"{page.relative_to(ROOT)}\n{done.stderr}"


def overrides_of(text: str, program: str = "verl.trainer.main_ppo") -> list[list[str]]:
    """The key=value words of every command of a program in a shell block."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        if program in line:
            # the same in one word, which composes like any other
            line = line.replace("--config-name=ppo_megatron_trainer", "model_engine=megatron")
            words = shlex.split(line.split(program, 1)[1], comments=True)
            commands.append([word for word in words if "=" in word and not word.startswith("-")])
    return commands


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_main_ppo_commands_compose_and_pass_the_checks(block):
    commands = overrides_of(block.text)
    assert commands
    for overrides in commands:
        load_ppo_config(overrides)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "verl.trainer.sft_trainer" in block.text], ids=str)
def test_commands_of_supervised_fine_tuning_compose(block):
    for overrides in overrides_of(block.text, "verl.trainer.sft_trainer"):
        assert load(overrides, config_name="sft_trainer", root=SFTConfig).problems == []


@pytest.mark.parametrize("root", [DPOConfig, RewardTrainConfig], ids=lambda root: root.config_name)
def test_commands_of_preference_training_compose(root):
    commands = [words for block in BLOCKS for words in overrides_of(block.text, f"verl.trainer.{root.config_name}")]
    assert commands
    for overrides in commands:
        assert load(overrides, config_name=root.config_name, root=root).problems == []


def test_yaml_of_the_config_page_composes(tmp_path):
    (block,) = [block for block in blocks_of(ROOT / "docs" / "config.md") if block.language == "yaml"]
    (tmp_path / "my_run.yaml").write_text(block.text)
    config = load_ppo_config(["trainer.seed=2"], config_path=str(tmp_path), config_name="my_run")
    assert (config.actor_rollout_ref.rollout.n, config.data.train_batch_size, config.trainer.seed) == (8, 64, 2)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.relative_to(ROOT)} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors_of(target), f"{page.relative_to(ROOT)} links to {link}: no such heading"


def test_keys_named_in_the_documentation_exist():
    """A dotted name in backticks that starts with a section of the configuration is a key of it, or listed as none."""
    config = load_ppo_config(
        ["actor_rollout_ref.rollout.name=hf", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
        + ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
    )
    own = {*GenerationConfig.short_names, *EvaluationConfig.short_names}
    own |= {f"data.{name}" for name in EvaluationConfig().data}
    own |= {key for root in (SFTConfig, DPOConfig, RewardTrainConfig) for key, _ in leaves(root())}
    sections = "|".join(config.keys())
    free = ("reward_kwargs", "override_config", "tracker_kwargs", "engine_kwargs", "env")
    unknown = []
    for page in PAGES:
        if "docs" not in page.parts and page.parent != ROOT:
            continue
        text = re.sub(r"(?s)<!-- table: not built -->.*?<!-- end of table", "", page.read_text(encoding="utf-8"))
        for key in re.findall(rf"`((?:{sections})(?:\.\w+)+)(?:=[^`]*)?`", text):
            node = config
            for name in long_name(key, GenerationConfig.short_names).split(".") if key not in own else ():
                if name in free:
                    break
                if name not in node:
                    unknown.append(f"{page.relative_to(ROOT)}: {key}")
                    break
                node = node[name]
                if not hasattr(node, "keys"):
                    node = ()
    assert not unknown, unknown

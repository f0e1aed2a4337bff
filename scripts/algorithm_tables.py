"""The tables of docs/algorithms.md, from what stands beside the functions (``verl.algorithms.registry.About``).

python scripts/algorithm_tables.py            write them between their markers in the page
python scripts/algorithm_tables.py --check    write nothing, fail if the page says something else
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.algorithms import correction, losses, resample, reward_shaping  # noqa: F401 - importing registers theirs
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from verl.algorithms.aggregate import AGG_MODES
from verl.algorithms.kl import KL_PENALTIES
from verl.algorithms.losses import POLICY_LOSS_REGISTRY
from verl.algorithms.registry import CONTROLS, STEPS, About, Registry

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "algorithms.md"


ESTIMATORS_FIRST = """
gae grpo grpo_passk rloo remax reinforce step_reinforce agentic_reinforce gigpo reinforce_plus_plus
reinforce_plus_plus_baseline opo gpg gdpo optimal_token_baseline tir_optimal_token_baseline sppo grpo_vectorized
rloo_vectorized
""".split()
LOSSES_FIRST = """
vanilla gspo geo_mean cispo sapo clip_cov kl_cov dppo_tv dppo_kl gpg reinforce tis topr kimi15 dro sppo bypass_mode
""".split()
"""Order of the rows, the best known first. Names that are missing here follow, by module."""


def proof_of(about: About) -> tuple[Path, str]:
    """The module of its test, and the name of the test in it."""
    module, _, name = about.test.partition("::")
    folder = ROOT / "tests"
    return (folder / module if "/" in module else folder / "algorithms" / module), name


def paper(about: About) -> str:
    """A link to its source."""
    number = re.fullmatch(r"arXiv:(\d{4}\.\d{5})", about.source)
    return f"[{number[1]}](https://arxiv.org/abs/{number[1]})" if number else about.source


def names_table(registry: Registry, order: Iterable[str] = ()) -> str:
    """One row a thing that a name chooses; first those of ``order``."""
    ranks = {name: rank for rank, name in enumerate(order)}
    entries = sorted(registry.documented().items(), key=lambda entry: ranks.get(entry[0][0], len(ranks)))
    lines = ["| name | what it is | when to use | it reads | source | test |", "|---|---|---|---|---|---|"]
    for names, rows in entries:
        for about in rows:
            shown = ", ".join(f"`{name}`" for name in names) + (f" with `{about.setting}`" if about.setting else "")
            reads = ", ".join(f"`{word}`" for word in about.options.split())
            lines.append(_line(shown, about.equation, about.use, reads, paper(about), _test(about)))
    return "\n".join(lines)


def controls_table(keys: Iterable[str], numbered: bool = False) -> str:
    """One row an option of ``keys``."""
    head = ["option", "what it does", "when to use", "source", "test"]
    lines = [_line(*([""] * numbered), *head), _line(*(["---"] * (len(head) + numbered))).replace(" ", "")]
    for number, key in enumerate(keys, 1):
        for about in CONTROLS.about(key):
            options = ", ".join(f"`{word}`" for word in about.options.split())
            row = (options, about.equation, about.use, paper(about), _test(about))
            lines.append(_line(*([str(number)] * numbered), *row))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _test(about: About) -> str:
    path, name = proof_of(about)
    return f"[{name}](../{path.relative_to(ROOT).as_posix()})"


TABLES: dict[str, Callable[[], str]] = {
    "estimators": lambda: names_table(ADV_ESTIMATOR_REGISTRY, ESTIMATORS_FIRST),
    "losses": lambda: names_table(POLICY_LOSS_REGISTRY, LOSSES_FIRST),
    "modes": lambda: names_table(AGG_MODES),
    "kl": lambda: names_table(KL_PENALTIES),
    "shaping": lambda: controls_table(STEPS, numbered=True),
    "controls": lambda: controls_table(sorted(key for key in CONTROLS if key not in STEPS)),
}
"""Name in the markers of the page -> what stands between them."""


def filled(page: str) -> str:
    """``page`` with every table made again."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{PAGE}: the markers {begin} and {end} must stand there once each. Add them.")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return page


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit code."""
    said = PAGE.read_text(encoding="utf-8")
    meant = filled(said)
    if "--check" in arguments and said != meant:
        print(f"{PAGE.relative_to(ROOT)} is not what the registries say: run python {Path(__file__).name}")
        return 1
    if said != meant:
        PAGE.write_text(meant, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

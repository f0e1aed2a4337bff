"""Print the size and shape of the package: modules, code lines, functions, types, comments and private words.

    python scripts/measure_code.py              this checkout
    python scripts/measure_code.py --at PATH    another one
    python scripts/measure_code.py --files      also the modules of each private word and the longest modules

Code lines leave out blank lines, comments and docstrings. A module's importers are modules of ``verl`` that import it,
inside functions too.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SMALL, LONG = 130, 400
"""Lines below which a module of one importer could join it; lines above which a module is long."""

PRIVATE_WORDS = (
    "anew beside cells drawn drawing draws envelope facts gone keeper misdeeds notices parcel parcels siblings "
    "stand_ins stand_in surroundings ticket tickets told wanted waves"
).split()
"""Words that nobody who knows the field searches for, see docs/glossary.md for those in their place."""

ENGINE_FOLDERS = ("workers/engine/", "workers/rollout/")
_BACKEND_NAMES = ("strategy", "rollout.name")


@dataclass
class Module:
    """One source file of the package."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def read_package(root: Path) -> list[Module]:
    """Parse every module of ``root / "verl"``."""
    modules = []
    for path in sorted((root / "verl").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, path.relative_to(root), text, ast.parse(text)))
    return modules


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of lines of docstrings, those of attributes included: expressions that are a string."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines


def code_and_comment_lines(text: str, skipped: set[int]) -> tuple[set[int], set[int]]:
    """Return the numbers of lines with code, and of those with a comment."""
    code, comments = set(), set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - skipped, comments


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported_names(tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of ``known`` that a module imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & known) or {node.module}
    return names & known


def is_config(node: ast.expr) -> bool:
    """True for ``config``, ``self.config``, ``actor_config`` and the like."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("config", "options", "section") or name.endswith("_config")


def compares_backend(node: ast.AST) -> bool:
    """True for a comparison of ``strategy`` or ``rollout.name`` with something."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
    return any(re.search(rf"(^|\.|\b){re.escape(name)}$", side) for side in sides for name in _BACKEND_NAMES)


def private_words(text: str) -> Counter[str]:
    """Count private words, also as parts of names (``real_cells``, ``PackedCells``)."""
    parts = re.findall(r"[A-Z]?[a-z]+", text)
    counts = Counter(part.lower() for part in parts)
    pairs = Counter(f"{a.lower()}_{b.lower()}" for a, b in zip(parts, parts[1:], strict=False))
    return Counter({word: (pairs if "_" in word else counts)[word] for word in PRIVATE_WORDS})


def measure(modules: list[Module]) -> dict[str, float | int]:
    """Return the counts that the command prints, by name."""
    known = {module.name for module in modules}
    importers: Counter[str] = Counter()
    code = comments = any_configs = config_probes = backend_tests = arguments = annotated = 0
    lengths: list[int] = []
    words: Counter[str] = Counter()
    for module in modules:
        importers.update(imported_names(module.tree, known) - {module.name})
        own_code, own_comments = code_and_comment_lines(module.text, docstring_lines(module.tree))
        code, comments = code + len(own_code), comments + len(own_comments)
        is_engine = any(folder in str(module.path) for folder in ENGINE_FOLDERS)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                config_probes += node.func.id in ("getattr", "hasattr") and is_config(node.args[0])
            backend_tests += not is_engine and compares_backend(node)
        for function in functions(module.tree):
            span = set(range(function.lineno, function.end_lineno + 1))
            lengths.append(len(span & own_code))
            for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
                if arg.arg in ("self", "cls"):
                    continue
                arguments, annotated = arguments + 1, annotated + (arg.annotation is not None)
                is_any = arg.annotation is not None and ast.unparse(arg.annotation) == "Any"
                any_configs += is_any and (arg.arg == "config" or arg.arg.endswith("_config"))
        words += private_words(module.text)
    single = [module for module in modules if importers[module.name] == 1]
    total = sum(module.lines for module in modules)
    return {
        "modules": len(modules),
        "lines": total,
        "code lines": code,
        "functions": len(lengths),
        "code lines a function": round(code / max(len(lengths), 1), 1),
        "function length, median": int(statistics.median(lengths or [0])),
        "function length, greatest": max(lengths, default=0),
        "functions over 60 code lines": sum(length > 60 for length in lengths),
        "modules with one importer": len(single),
        f"of these under {SMALL} lines": sum(module.lines < SMALL for module in single),
        f"modules over {LONG} lines": sum(module.lines > LONG for module in modules),
        "comment lines per 100": round(100 * comments / max(total, 1), 2),
        "arguments annotated, %": round(100 * annotated / max(arguments, 1), 1),
        "config: Any": any_configs,
        "getattr and hasattr on configs": config_probes,
        "comparisons with strategy or rollout.name outside the engines": backend_tests,
        "private words": words.total(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", type=Path, default=Path(__file__).resolve().parents[1], help="root of the checkout")
    parser.add_argument("--files", action="store_true", help="also list words by module, and the longest modules")
    options = parser.parse_args(arguments)
    modules = read_package(options.at)
    if not modules:
        raise SystemExit(f"--at={options.at} has no folder verl with Python files. Give the root of a checkout.")
    for name, value in measure(modules).items():
        print(f"{name:<64}{value:>10}")
    if options.files:
        for word in PRIVATE_WORDS:
            uses = [(private_words(module.text)[word], str(module.path)) for module in modules]
            listed = ", ".join(f"{path} {count}" for count, path in sorted(uses, reverse=True)[:5] if count)
            print(f"{word:<12}{sum(count for count, _ in uses):>5}  {listed}")
        for module in sorted(modules, key=lambda module: -module.lines)[:10]:
            print(f"{module.lines:>5}  {module.path}")


if __name__ == "__main__":
    main()

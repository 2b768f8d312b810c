"""What is defined is used: by the product itself, by a registry or framework that finds it by name, or in the docs."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_fed.core.registries import ALL
from tests.support.sources import parsed

ROOT = Path(__file__).resolve().parents[3]
MEMBERS = tuple(f"{kind.package}." for kind in ALL)
"""Beginnings of modules that are found by name, in a kind's folder or in one of its folders."""

CALLED_BY_OTHERS = {
    "gym_fed/trust/wire/_generated": "protoc's",
}
TESTED_ONLY = {
    "gym_quant.kernels.triton_slots.add_signed_reference": "tests and make test-gpu compare with it",
    "gym_fed.trust.identity.history.key_at": "for readers of a ledger; no command of ours needs it",
}

Trees = dict[str, tuple[Path, ast.Module]]


def trees(root: Path) -> Trees:
    """Every module by its dotted name."""
    found = {}
    for base in (root, root / "server", root / "client", root / "quant"):
        for file in base.glob("gym_*/**/*.py"):
            if not any(str(file.relative_to(root)).startswith(folder) for folder in CALLED_BY_OTHERS):
                name = ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
                found[name] = file, parsed(file)
    return found


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions and classes that no decorator hands to somebody, and constants."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not any(
                isinstance(d, ast.Call) and ast.unparse(d.func) != "dataclass" for d in node.decorator_list
            ):
                yield node.name, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def unused(modules: Trees, documented: set[str]) -> list[str]:
    """Dotted names that nothing refers to but their own definition."""
    imported: defaultdict[str, set[str]] = defaultdict(set)
    mentioned = set(documented)  # as attributes, or in strings that name something to be imported
    reads: dict[str, Counter[str]] = {}
    for module, (_, tree) in modules.items():
        read = reads[module] = Counter()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                read[node.id] += isinstance(node.ctx, ast.Load)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported[node.module] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                mentioned.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                mentioned |= set(re.split(r"[.:]", node.value)) if len(node.value) < 100 else set()
    left = []
    for module, (file, tree) in modules.items():
        if module.startswith(MEMBERS) and not file.name.startswith("_"):
            continue
        read = Counter(
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        )
        for name, node in definitions(tree):
            own = sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node)) if read[name] else 0
            by_others = name in imported[module] or name in mentioned or name.startswith("__")
            if not by_others and read[name] <= own * isinstance(node, ast.FunctionDef | ast.ClassDef):
                left.append(f"{module}.{name}")
    return left


def test_every_function_class_and_constant_is_used() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "pyproject.toml"]
    documented = {word for page in pages for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}
    found = unused(trees(ROOT), documented)
    assert sorted(set(found) - TESTED_ONLY.keys()) == []
    assert TESTED_ONLY.keys() <= set(found), "used by now: take it off the list"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("def one():\n    return one()\n", ["gym_fed.new.one"]),
        ("def one():\n    return 1\n\ntwo = one()\n", ["gym_fed.new.two"]),
        ("class One:\n    pass\n\ndef __getattr__(name):\n    return One\n", []),
        ("@app.command()\ndef one():\n    pass\n", []),
    ],
    ids=["calls-only-itself", "constant", "used", "registered"],
)
def test_what_nothing_uses_is_found(text: str, left: list[str]) -> None:
    assert unused({"gym_fed.new": (Path("new.py"), ast.parse(text))}, set()) == left

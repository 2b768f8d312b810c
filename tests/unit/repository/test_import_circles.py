"""No module of ours imports itself by a round-about way, lazily or for type checkers alone either."""

from __future__ import annotations

import grimp
import pytest

PACKAGES = ("gym_fed", "gym_server", "gym_client", "gym_quant")

Edges = dict[str, frozenset[str]]


def circles(edges: Edges) -> list[list[str]]:
    """The strongly connected components of more than one module, or of one that imports itself (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for imported in edges[module]:
            if imported not in index:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], index[imported])
        if lowest[module] == index[module]:
            place = stack.index(module)
            members = stack[place:]
            del stack[place:]
            if len(members) > 1 or module in edges[module]:
                found.append(sorted(members))

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return sorted(found)


@pytest.mark.parametrize(
    ("edges", "wanted"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "a", "c": "a"}, [["a", "b"]]),
        ({"a": "b", "b": "c", "c": "b", "d": "e", "e": "d"}, [["b", "c"], ["d", "e"]]),
        ({"a": "a"}, [["a"]]),
    ],
)
def test_circles_are_found(edges: dict[str, str], wanted: list[list[str]]) -> None:
    assert circles({module: frozenset(imports) for module, imports in edges.items()}) == wanted


def test_no_module_of_ours_is_in_a_circle_of_imports() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    edges = {m: frozenset(graph.find_modules_directly_imported_by(m)) for m in graph.modules}
    assert len(edges) > 500
    assert "gym_quant.registry" in edges["gym_fed.core.registries"]
    assert circles(edges) == []

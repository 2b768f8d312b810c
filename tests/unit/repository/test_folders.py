"""Each folder's `__init__` names the neighbours that it imports and that import it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("folders", ROOT / "tools" / "folders.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_folder_names_its_neighbours_as_they_are() -> None:
    folders = tool()
    stale = [
        str(folder.relative_to(ROOT))
        for folder in folders.folders()
        if (folder / "__init__.py").read_text(encoding="utf-8") != folders.text(folder)
    ]
    assert stale == [], "run: python tools/folders.py"


def test_an_import_between_folders_is_in_both_sentences(tmp_path: Path) -> None:
    for name, source in {"": "", "a": "", "b": ""}.items():
        folder = tmp_path / "gym_x" / name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(f'"""Folder."""\n{source}')
    (tmp_path / "gym_x" / "a" / "one.py").write_text("def f():\n    from gym_x.b import two\n")
    folders = tool()
    assert folders.line(tmp_path / "gym_x" / "a") == "Neighbours: imports b; imported by none."
    assert folders.line(tmp_path / "gym_x" / "b") == "Neighbours: imports none; imported by a."


def test_the_parts_of_export_import_one_way() -> None:
    edges = tool().neighbours(ROOT / "gym_fed" / "export", "gym_fed.export")
    assert "gguf" in edges["formats"]
    both_ways = [(one, other) for one in edges for other in edges[one] if one in edges.get(other, ())]
    assert both_ways == []

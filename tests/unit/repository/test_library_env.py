"""Packages that others import wherever they are installed are run when something of them is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gym_fed.core.library_env import import_late


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "late_example"
    folder.mkdir()
    (folder / "__init__.py").write_text("ANSWER = 42\n")
    (folder / "part.py").write_text("from late_example import ANSWER\nTWICE = 2 * ANSWER\n")
    (tmp_path / "late_broken.py").write_text("raise RuntimeError('does not work here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late_example", "late_example.part", "late_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import_late("late_example")
    return "late_example"


def has_run(name: str) -> bool:
    return "ANSWER" in vars(sys.modules[name])


def test_looking_for_a_package_does_not_run_it(package: str) -> None:
    module = importlib.import_module(package)
    assert importlib.util.find_spec(package) is not None
    assert inspect.getfile(module).endswith("__init__.py")
    assert not has_run(package)


def test_the_first_name_asked_of_it_runs_it_in_the_same_module(package: str) -> None:
    module = importlib.import_module(package)
    assert module.ANSWER == 42
    assert importlib.import_module(package) is module
    assert has_run(package)
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


def test_a_submodule_of_it_runs_it_first(package: str) -> None:
    assert importlib.import_module(f"{package}.part").TWICE == 84
    assert has_run(package)


def test_what_is_absent_stays_absent_and_what_is_loaded_stays() -> None:
    import_late("no_such_package_anywhere")
    assert "no_such_package_anywhere" not in sys.modules
    before = sys.modules["json"]
    import_late("json")
    assert sys.modules["json"] is before


def test_a_package_that_does_not_work_says_so_each_time(package: str) -> None:
    import_late("late_broken")
    module = importlib.import_module("late_broken")
    with pytest.raises(RuntimeError, match="does not work here"):
        module.ANSWER  # noqa: B018
    with pytest.raises(RuntimeError, match="does not work here"):
        importlib.import_module("late_broken")


def test_a_command_bounds_the_spinning_of_openmp_before_torch_is_there_and_keeps_the_users_value() -> None:
    code = (
        "import os, sys, typer; from gym_fed.core.console import run_app; app = typer.Typer(); "
        "app.command()(lambda: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)); run_app(app)"
    )
    given = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    answers = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.split()
        for env in (given, given | {"GOMP_SPINCOUNT": "7"})
    ]
    assert answers == [["10000", "False"], ["7", "False"]]

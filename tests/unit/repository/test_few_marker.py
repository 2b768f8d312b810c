"""The marker `few`: which cases of a parametrised test stay in the quick suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.quick import mark_beyond_few

CASES = """
import pytest

FAST = range(10)
WITH_SLOW = [pytest.param(number, marks=pytest.mark.slow if number in (0, 9) else []) for number in range(10)]

@pytest.mark.few(1)
@pytest.mark.parametrize("number", FAST)
def test_one(number): ...

@pytest.mark.few(2, "a reason")
@pytest.mark.parametrize("number", FAST)
def test_two(number): ...

@pytest.mark.few(3)
@pytest.mark.parametrize("number", FAST)
def test_three(number): ...

@pytest.mark.few(3)
@pytest.mark.parametrize("number", WITH_SLOW)
def test_some_are_slow(number): ...

@pytest.mark.few(12)
@pytest.mark.parametrize("number", FAST)
def test_fewer_cases_than_n(number): ...

@pytest.mark.parametrize("number", FAST)
def test_without_the_marker(number): ...
"""


class Collected:
    """A plugin that applies the marker, and keeps the names of what pytest would run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_beyond_few(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


def collect(folder: Path, text: str, *words: str) -> tuple[int, list[str]]:
    """Collect a test file with pytest, and return its exit code and the names of the tests that it would run."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = few: see the suite\n    slow: see the suite\n")
    (folder / f"test_in_{folder.name}.py").write_text(text)  # a module of the same name would be taken again
    found = Collected()
    options = ["--collect-only", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", *words]
    code = pytest.main(["-c", str(folder / "pytest.ini"), str(folder), *options], plugins=[found])
    return int(code), found.names


def test_the_first_the_last_and_others_at_even_distances_stay(tmp_path: Path) -> None:
    code, names = collect(tmp_path, CASES, "-m", "not slow")
    kept: dict[str, list[int]] = {}
    for name in names:
        test, _, number = name.rstrip("]").partition("[")
        kept.setdefault(test, []).append(int(number))
    assert code == 0
    assert kept == {
        "test_one": [0],
        "test_two": [0, 9],
        "test_three": [0, 4, 9],
        "test_some_are_slow": [1, 5, 8],
        "test_fewer_cases_than_n": [*range(10)],
        "test_without_the_marker": [*range(10)],
    }


def test_a_case_that_is_named_runs_whatever_the_marker_says(tmp_path: Path) -> None:
    assert len(collect(tmp_path, CASES)[1]) == 60


@pytest.mark.parametrize("arguments", ["", "(0)", "('3')", "(True)"])
def test_a_marker_without_a_positive_number_is_refused(
    tmp_path: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"import pytest\n@pytest.mark.few{arguments}\n@pytest.mark.parametrize('n', [1])\ndef test_x(n): ...\n"
    assert collect(tmp_path, text)[0] == pytest.ExitCode.USAGE_ERROR
    assert "test_x[1]: few(n) needs a parametrised test" in capsys.readouterr().err


def test_a_test_without_parameters_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import pytest\n@pytest.mark.few(2)\ndef test_x(): ...\n"
    assert collect(tmp_path, text)[0] == pytest.ExitCode.USAGE_ERROR
    assert "test_x: few(n) needs a parametrised test" in capsys.readouterr().err

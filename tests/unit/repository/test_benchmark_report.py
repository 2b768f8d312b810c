"""What all benchmarks share: the table's ratios, the JSON line, the picture, and aims that are met or missed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[3] / "benchmarks" / "_report.py"


@pytest.fixture(scope="module")
def report_module() -> ModuleType:
    """``benchmarks`` is no package: its scripts find ``_report`` beside themselves."""
    spec = importlib.util.spec_from_file_location("_report", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "_report", module)
        spec.loader.exec_module(module)
    return module


def finished(module: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    report = module.Report("example", peer="Peer 2.0")
    report.compare("500 MB up", 2.0, 8.0, unit="s")
    report.compare("tokens", 30.0, 20.0, unit="1/s", better="higher")
    report.compare("alone", 5.0, unit="MB")
    report.aim("fast", figure=4.0, aim=1.0, better="higher")
    report.aim("small", figure=5.0, aim=4.0, better="lower")
    report.finish(module.options("An example").parse_args(arguments))
    return capsys.readouterr().out


def test_the_last_line_is_the_json_object(
    report_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(finished(report_module, capsys, "--json").splitlines()[-1])
    assert document.keys() == {"name", "machine", "figures", "aims"}
    assert document["figures"] == {
        "500_mb_up_s": 2.0,
        "500_mb_up_s_peer": 8.0,
        "tokens_1_s": 30.0,
        "tokens_1_s_peer": 20.0,
        "alone_mb": 5.0,
    }
    assert document["aims"] == [
        {"name": "fast", "figure": 4.0, "aim": 1.0, "better": "higher", "met": True},
        {"name": "small", "figure": 5.0, "aim": 4.0, "better": "lower", "met": False},
    ]
    assert document["machine"]["cores"] >= 1


def test_several_runs_are_a_median_with_the_least_and_the_most(
    report_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_module.Report("example", peer="Peer 2.0")
    report.compare("up", [3.0, 1.0, 2.0], [8.0, 4.0], unit="s")
    report.finish(report_module.options("An example", "cells", seeds=3).parse_args([]))
    assert report.figures == {
        "up_s": 2.0, "up_s_least": 1.0, "up_s_most": 3.0,
        "up_s_peer": 6.0, "up_s_peer_least": 4.0, "up_s_peer_most": 8.0,
    }  # fmt: skip
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("up")]
    assert "2 (1-3) s" in row
    assert "6 (4-8) s" in row
    assert "3.00x" in row


def test_the_table_gives_ratios_that_count_upwards_for_better(
    report_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {line.split("  ")[0]: line for line in finished(report_module, capsys).splitlines()}
    assert rows["500 MB up"].endswith("4.00x")
    assert rows["tokens"].endswith("1.50x")
    assert rows["alone"].rstrip().endswith("-")


def test_a_missed_aim_is_reported_as_missed(
    report_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished(report_module, capsys)
    assert "met    fast: 4, aim >= 1" in out
    assert "missed small: 5, aim <= 4" in out


def test_the_picture_is_drawn(
    report_module: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "example.png"
    finished(report_module, capsys, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_is_refused(report_module: ModuleType, value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        report_module.Report("example").figure("x", value)


def test_a_figure_given_twice_is_refused(report_module: ModuleType) -> None:
    report = report_module.Report("example")
    report.figure("x", 1.0)
    with pytest.raises(ValueError, match="twice"):
        report.figure("x", 2.0)


def test_every_benchmark_does_something_when_it_is_called() -> None:
    scripts = [file for file in FILE.parent.glob("*.py") if not file.name.startswith("_")]
    assert scripts
    silent = [file.name for file in scripts if 'if __name__ == "__main__":' not in file.read_text("utf-8")]
    assert silent == []

"""Curves: thinned without losing a spike, read as their file grows, whatever stands in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_fed.webui.curves import ELAPSED, MAX_POINTS, MAX_SERIES, RunCurves, last_values, thinned
from gym_fed.webui.workbench import plain


def write(folder: Path, *lines: object, name: str = "metrics.jsonl") -> None:
    with (folder / name).open("a", encoding="utf-8") as stream:
        stream.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def test_a_spike_of_one_step_survives_thinning() -> None:
    values = [math.sin(step / 500) for step in range(50_000)]
    values[31_234], values[40_001], values[45_000] = 9.0, -9.0, math.nan
    found = thinned(list(enumerate(values)))
    assert len(found) <= MAX_POINTS
    assert {(31_234, 9.0), (40_001, -9.0), (45_000, None)} <= set(found)
    assert (found[0][0], found[-1][0]) == (0, 49_999)


@given(st.lists(st.floats(), max_size=300), st.integers(3, 100))
def test_thinning_keeps_order_bounds_and_extremes(values: list[float], most: int) -> None:
    found = thinned(list(enumerate(values)), most)
    assert len(found) <= max(most, 5)
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [value for _, value in found if value is not None]
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    json.dumps(found, allow_nan=False)


def test_the_time_since_the_first_step_is_summed_over_lines(tmp_path: Path) -> None:
    curves = RunCurves(tmp_path)
    write(
        tmp_path,
        {"step": 1, "seconds": 2.0},
        {"step": 1, "eval_runtime": 9.0},
        {"step": 2, "seconds": 0.5},
        {"step": 3, "seconds": "many"},
        {"step": 4, "seconds": -1.0},
        name="performance.jsonl",
    )
    curves.update()
    write(tmp_path, {"step": 5, "seconds": 1.0}, name="performance.jsonl")
    curves.update()
    assert curves.series[ELAPSED].points() == [(1, 2.0), (2, 2.5), (5, 3.5)]


def test_only_whole_lines_are_read_as_the_file_grows(tmp_path: Path) -> None:
    curves = RunCurves(tmp_path)
    curves.update()
    assert curves.series == {}
    write(tmp_path, {"step": 1, "loss": 3.0}, '{"step": 2, "lo')
    curves.update()
    assert curves.series["loss"].points() == [(1, 3.0)]
    write(tmp_path, 'ss": 2.0}\n', {"step": 3, "loss": 1.0, "eval_loss": 4})
    curves.update()
    assert curves.series["loss"].points(since=2) == [(2, 2.0), (3, 1.0)]
    assert curves.series["eval_loss"].points() == [(3, 4.0)]
    assert (curves.version, curves.restarts, curves.last_step) == (2, 0, 3)
    curves.update()
    assert curves.version == 2


def test_a_resumed_run_that_repeats_steps_is_read_anew(tmp_path: Path) -> None:
    write(tmp_path, *({"step": step, "loss": 1.0} for step in range(1, 9)))
    write(tmp_path, {"step": 8, "tokens_per_second": 5}, name="performance.jsonl")
    curves = RunCurves(tmp_path)
    curves.update()
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, *({"step": step, "loss": 1.0} for step in range(1, 5)), {"step": 5, "loss": 9.0})
    curves.update()
    assert curves.series["loss"].points()[-2:] == [(4, 1.0), (5, 9.0)]
    assert (curves.restarts, curves.last_step) == (1, 8)
    assert curves.series["performance/tokens_per_second"].points() == [(8, 5.0)]


def test_lines_that_hold_no_figures_are_counted_and_skipped(tmp_path: Path) -> None:
    bad = [
        "{\n",
        "[]\n",
        "3\n",
        '{"loss": 1}\n',
        '{"step": "x", "loss": 1}\n',
        '{"step": true}\n',
        '{"step": -1}\n',
    ]
    write(
        tmp_path,
        *bad,
        "[" * 100_000 + "\n",
        {"step": 1, "loss": "high", "ok": 1, "big": 10**400, "nan": math.nan},
    )
    curves = RunCurves(tmp_path)
    curves.update()
    assert curves.unreadable == len(bad) + 1
    assert last_values(curves.series) == {"ok": 1.0, "big": None, "nan": None}


def test_the_number_of_series_and_the_length_of_their_names_are_bounded(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, **{f"{number}{'x' * 500}": number for number in range(500)}})
    curves = RunCurves(tmp_path)
    curves.update()
    assert len(curves.series) == MAX_SERIES
    assert max(map(len, curves.series)) <= 120


def test_a_range_of_steps_is_thinned_by_itself(tmp_path: Path) -> None:
    write(tmp_path, *({"step": step, "loss": step % 7} for step in range(20_000)))
    curves = RunCurves(tmp_path)
    curves.update()
    found = curves.series["loss"].points(low=5000, high=5100)
    assert [step for step, _ in found] == list(range(5000, 5101))


ODD = {
    "nan": math.nan,
    "infinity": math.inf,
    "digits": 10**5000,
    "surrogate": "\udcff",
    "set": {1: {2: {3}}},
    "depth": [[[[[[[[[[[[[[[1]]]]]]]]]]]]]]],
    "bytes": b"x",
    "length": "y" * 10**6,
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_any_value_of_a_file_becomes_json(value: object) -> None:
    assert len(json.dumps(plain(value), allow_nan=False).encode()) < 10_000

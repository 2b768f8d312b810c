"""What every export format must say and refuse; a file dropped into gym_fed/export/formats, and a format of an
installed package, is tested here by itself. Nothing is exported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.export.choice import resolve_format
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.needs import Weights
from gym_fed.export.run import export
from gym_fed.export.source import Source

pytestmark = pytest.mark.usefixtures("warm_children")

NAMES = EXPORT_FORMATS.names()
FORMATS: dict[str, type[ExportFormat]] = {name: EXPORT_FORMATS.type_of(name) for name in NAMES}
WITH_PACKAGES = [name for name in NAMES if FORMATS[name].requires]
WEIGHTS = Weights(parameters=1_000_000, vocabulary=1000)
_HEAVY = ("torch", "transformers")
_WHAT_IS_IMPORTED = f"""
import importlib, json, sys
found = {{}}
for module in sys.argv[1:]:
    importlib.import_module(module)
    found[module] = [name for name in {_HEAVY!r} if name in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """For each reading module, what of ``_HEAVY`` is imported after it and those before it."""
    modules = sorted({kind.reading for kind in FORMATS.values()})
    done = subprocess.run(
        [sys.executable, "-c", _WHAT_IS_IMPORTED, *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_the_formats_of_this_release_are_registered() -> None:
    assert set(NAMES) >= {"adapter", "awq", "delta", "gguf", "gguf_adapter", "gptq", "huggingface", "onnx"}


@pytest.mark.parametrize("name", NAMES)
def test_a_format_says_its_name_what_it_writes_and_who_reads_it(name: str) -> None:
    kind = FORMATS[name]
    assert kind.name == name
    assert (kind.__dict__["__doc__"] or "").strip()
    assert kind.reader
    assert kind.remedy


@pytest.mark.parametrize("name", NAMES)
def test_the_reading_module_is_there_and_is_imported_without_torch(
    name: str, imported: dict[str, list[str]]
) -> None:
    assert imported[FORMATS[name].reading] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_suffix_begins_with_a_dot_or_is_empty_and_a_file_has_one(name: str) -> None:
    kind = FORMATS[name]
    assert kind.suffix == "" or (kind.suffix[0] == "." and len(kind.suffix) > 1)
    assert kind.suffix == kind.suffix.lower()  # names are compared in lower case
    assert kind.suffix or not kind.is_file


@pytest.mark.parametrize("name", NAMES)
def test_every_tolerance_limits_a_distance(name: str) -> None:
    kind = FORMATS[name]
    for which, limits in {"plain": kind.tolerance, **kind.quantizations}.items():
        assert {limits.max, limits.kl, limits.top1} != {None}, which
        figures = {
            "same_token_ids": True, "same_greedy_tokens": True, "max": 1e9, "largest": 1.0, "kl": 1e9, "top1": 0.0,
        }  # fmt: skip
        assert limits.problem(figures) is not None, which


_STRICT = (1e-5, None, None, True)
_LIMITS = {
    "delta": {"plain": (0.0, None, None, True)},
    "executorch": {"plain": (1e-3, None, None, True)},
    "openvino": {"plain": (1e-3, None, None, True)},
    "onnx": {"float32": (1e-4, None, None, True), "int8": (None, None, 0.95, False)},
    "awq": {"w4": (None, None, 0.9, False), "w4g32_rtn": (None, None, 0.9, False)},
    "gptq": {"w4": (None, None, 0.9, False), "w8g32_rtn": (None, None, 0.9, False)},
    "gguf": {
        "f32": (5e-4, 1e-6, None, True),
        "f16": (None, 1e-4, None, False),
        "bf16": (None, 1e-3, None, False),
        "q8_0": (None, 1e-2, None, False),
        "q6_k": (None, 3e-2, 0.9, False),
        "q5_k_m": (None, 5e-2, 0.85, False),
        "q4_k_m": (None, 0.1, 0.8, False),
        "q4_0": (None, 0.2, 0.7, False),
    },
    "adapter": {"plain": _STRICT},
    "huggingface": {"plain": _STRICT},
    "torch_export": {"plain": _STRICT},
    "torchscript": {"plain": _STRICT},
}


@pytest.mark.parametrize("name", _LIMITS)
def test_an_export_must_be_as_close_to_its_source_as_this_release_promises(name: str) -> None:
    """A looser limit lets a broken writer pass, and no other test notices."""
    kind = FORMATS[name]
    limits = {"plain": kind.tolerance, **kind.quantizations}
    assert {key: astuple(limits[key]) for key in _LIMITS[name]} == _LIMITS[name]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_tried_and_what_was_not_is_said(name: str) -> None:
    assert FORMATS[name].tried.strip()
    own = [kind for kind in FORMATS[name].__mro__ if kind is not ExportFormat and "untried" in vars(kind)]
    assert own, "untried: what it supports and no test has run; empty where there is nothing"


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_quantization_is_refused_with_the_known_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.export.formats.base.find_spec", lambda _name: object())
    with pytest.raises(GymError, match=f"format {name} has no quantization q0_nothing") as caught:
        resolve_format(name, None, Options(quantization="q0_nothing"))
    assert caught.value.code is ErrorCode.USAGE
    assert caught.value.hint == f"it has {', '.join(FORMATS[name].quantizations) or 'none'}"


@pytest.mark.parametrize("name", NAMES)
def test_each_quantization_is_accepted_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_fed.export.formats.base.find_spec", lambda _name: object())
    for quantization in FORMATS[name].quantizations:
        chosen, options = resolve_format(name, None, Options(quantization=quantization))
        assert chosen.quantization(options) == quantization
        assert chosen.limits(options) == FORMATS[name].quantizations[quantization]


@pytest.mark.parametrize("name", WITH_PACKAGES)
def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = FORMATS[name].requires[-1]
    monkeypatch.setattr(
        "gym_fed.export.formats.base.find_spec", lambda module: None if module == last else object()
    )
    with pytest.raises(GymError, match=f"format {name} needs {last} ") as caught:
        resolve_format(name, None, Options())
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
    assert "pip install " in caught.value.hint


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_something_has_is_refused_before_the_model_is_touched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.export.formats.base.find_spec", lambda _name: object())
    target = tmp_path / f"there{FORMATS[name].suffix}"
    target.write_text("mine")
    untouched: Source = object()  # type: ignore[assignment] - any look at it is an AttributeError
    with pytest.raises(GymError, match="exists") as caught:
        export(untouched, name, target, Options())
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", NAMES)
def test_what_it_takes_of_disk_and_memory_is_positive(name: str) -> None:
    kind = FORMATS[name]
    for quantization in kind.quantizations or ("",):
        needs = kind().needs(WEIGHTS, Options(quantization=quantization))
        assert min(needs.disk, needs.writing, needs.reading) > 0
        assert needs.disk >= WEIGHTS.parameters / 8  # at least a bit per weight

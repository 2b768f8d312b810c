"""`gym doctor` reports which kernels compute, and fails where a path is set that is not there."""

from __future__ import annotations

import pytest
from gym_quant import kernels
from gym_quant.kernels import native

from gym_fed.core.registries import CHECKS
from gym_fed.doctor.check import Finding, Level


def look() -> list[Finding]:
    """What the registered check finds."""
    return list(CHECKS.type_of("kernels")().findings())


def test_the_path_in_use_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYM_KERNELS", raising=False)
    (finding,) = look()
    assert finding.level is Level.OK
    assert finding.finding == kernels.describe()


def test_a_path_that_is_not_there_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_KERNELS", "neon")
    (finding,) = look()
    assert finding.level is Level.FAIL
    assert "'neon'" in finding.finding
    assert "unset GYM_KERNELS" in finding.remedy


def test_without_native_code_the_command_that_builds_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYM_KERNELS", raising=False)
    monkeypatch.setattr(native, "features", lambda: None)
    monkeypatch.setattr(native, "absence", lambda: "the native extension is missing")
    (finding,) = look()
    assert finding.level is Level.OK
    assert finding.finding.startswith("torch reference (the native extension is missing")
    assert "C++ compiler" in finding.remedy

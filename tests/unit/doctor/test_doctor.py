"""`gym doctor`: each check reports what it found and a remedy, and a foreign `gym` is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.doctor.check import Finding, Level, worst
from gym_fed.doctor.checks import clock, commands, devices, disk, flower, kernels, versions

GIB = 1 << 30
OURS = versions.installed_distribution()
assert OURS is not None, "the tests run against an installed package: make install"


def foreign_script(folder: Path, name: str = "gym", text: str = "#!/bin/sh\necho another program\n") -> Path:
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    return script


def test_a_foreign_gym_first_on_the_path_makes_the_command_fail(tmp_path: Path) -> None:
    foreign = foreign_script(tmp_path / "bin")
    ours = commands.installed_script(OURS, "gym")
    assert ours is not None
    path = os.pathsep.join([str(foreign.parent), str(ours.parent)])
    done = subprocess.run(
        [str(ours), "doctor", "--json"], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    by_name = {finding["check"]: finding for finding in report["findings"]}
    assert done.returncode == 1
    assert report["level"] == "fail"
    assert by_name["command: gym"]["level"] == "fail"
    assert str(foreign) in by_name["command: gym"]["finding"]
    assert f"put {ours.parent} first in the PATH" in by_name["command: gym"]["remedy"]
    assert by_name["command: gym-server"]["level"] == "ok"
    assert by_name["command: gym-client"]["level"] == "ok"


def judged(found: Path | None) -> Finding:
    ours = commands.installed_script(OURS, "gym")
    return commands.judge_command("gym", "gym_fed.cli.entry", str(found) if found else None, ours)


def test_our_own_command_is_known_through_a_link(tmp_path: Path) -> None:
    link = tmp_path / "gym"
    ours = commands.installed_script(OURS, "gym")
    assert ours is not None
    link.symlink_to(ours)
    assert judged(link).level is Level.OK


@pytest.mark.parametrize("module", ["gym_fed.cli.entry", "gym_fed.cli.main"])
def test_another_installation_of_ours_is_a_warning_that_names_its_interpreter(
    module: str, tmp_path: Path
) -> None:
    text = f"#!/opt/other/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
    finding = judged(foreign_script(tmp_path / "bin", text=text))
    assert finding.level is Level.WARN
    assert "/opt/other/bin/python" in finding.finding


def test_a_binary_of_that_name_is_foreign(tmp_path: Path) -> None:
    file = tmp_path / "gym"
    file.write_bytes(b"\x7fELF\x02\xff\xfe" * 1000)
    assert judged(file).level is Level.FAIL


def test_a_command_that_is_not_on_the_path_is_a_warning_with_its_place() -> None:
    finding = judged(None)
    assert finding.level is Level.WARN
    assert "first in the PATH" in finding.remedy


def test_openai_gym_beside_us_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f.level for f in commands.namesake()] == [Level.OK]
    info = tmp_path / "gym-0.26.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gym\nVersion: 0.26.2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = commands.namesake()
    assert finding.level is Level.WARN
    assert "0.26.2" in finding.finding


def test_every_core_dependency_is_checked_and_fits_here() -> None:
    findings = {f.check: f for f in versions.Versions().findings()}
    declared = {Requirement(r).name for r in OURS.requires or [] if "extra ==" not in r}
    assert {"torch", "transformers", "flwr", "grpcio"} <= declared
    assert findings.keys() == {f"version: {n}" for n in declared | {"gym-fed", "python"}}
    assert {f.level for f in findings.values()} == {Level.OK}


def test_a_package_that_is_not_installed_is_sent_to_the_page_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "installed_distribution", lambda: None)
    (finding,) = versions.Versions().findings()
    assert finding.level is Level.FAIL
    assert "make install" in finding.remedy
    assert "docs/install.md" in finding.remedy
    assert "pip install gym-fed" not in finding.remedy, "no index has it"


def test_a_dependency_outside_its_range_fails_with_the_command_that_fixes_it() -> None:
    finding = versions.judge_dependency(Requirement("numpy>=1,<1.1"))
    assert finding.level is Level.FAIL
    assert metadata.version("numpy") in finding.finding
    assert "numpy<1.1,>=1" in finding.remedy


def test_a_dependency_that_is_missing_fails() -> None:
    finding = versions.judge_dependency(Requirement("gym-fed-no-such-package>=2"))
    assert (finding.level, finding.finding) == (Level.FAIL, "not installed, but >=2 is required")


@pytest.mark.parametrize(
    ("version", "level"), [("3.10.14", Level.FAIL), ("3.11.0", Level.OK), ("3.14.0rc1", Level.OK)]
)
def test_python_is_compared_with_what_is_declared(version: str, level: Level) -> None:
    assert versions.judge_python(version, ">=3.11").level is level


def test_an_old_date_fails_and_the_release_day_passes() -> None:
    assert clock.judge_date(datetime(1970, 1, 1, tzinfo=UTC)).level is Level.FAIL
    released = datetime.combine(clock.RELEASED, datetime.min.time(), tzinfo=UTC)
    assert clock.judge_date(released).level is Level.OK


def test_the_release_date_is_the_changelogs() -> None:
    changelog = (Path(__file__).resolve().parents[3] / "CHANGELOG.md").read_text(encoding="utf-8")
    dates = [
        line.rpartition(" - ")[2]
        for line in changelog.splitlines()
        if line.startswith("## [") and " - " in line and not line.endswith("unreleased")
    ]
    assert max(date.fromisoformat(d) for d in dates) == clock.RELEASED


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/Los_Angeles"])
def test_the_clock_is_judged_alike_in_every_time_zone(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        findings = {f.check: f for f in clock.Clock().findings()}
        assert findings["clock: date"].level is Level.OK
        assert findings["clock: zone"].level is Level.OK
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_clock_that_counts_leap_seconds_or_jumps_is_noticed() -> None:
    assert clock.judge_epoch((1969, 12, 31, 23, 59, 33)).level is Level.FAIL
    assert clock.judge_pace(-3600.0, 0.05).level is Level.WARN
    assert clock.judge_pace(0.051, 0.05).level is Level.OK


@pytest.mark.parametrize(
    ("free", "level"), [(6 * GIB, Level.OK), (2 * GIB, Level.WARN), (GIB // 4, Level.FAIL)]
)
def test_disks_are_judged_by_what_is_free(free: int, level: Level) -> None:
    finding = disk.judge_disk("disk: here", Path("/data"), free)
    assert finding.level is level
    assert "/data" in finding.finding


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [
        (8 * GIB, 4 * GIB, Level.OK),
        (8 * GIB, GIB, Level.WARN),
    ],
)
def test_memory_is_judged_by_what_is_free(total: int, free: int, level: Level) -> None:
    assert devices.judge_memory(total, free).level is level


def test_the_memory_of_this_machine_is_read() -> None:
    assert 0 < devices.available_memory_bytes() <= devices.total_memory_bytes()


@pytest.mark.parametrize(
    ("limit", "use"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
    ids=["second version", "first version"],
)
def test_memory_is_no_more_than_the_limit_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, use: str
) -> None:
    monkeypatch.setattr(devices, "GROUPS", tmp_path)
    host = devices.total_memory_bytes()
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / use).write_text("1000000\n")
    (tmp_path / limit).write_text("5000000\n")
    assert devices.total_memory_bytes() == 5_000_000
    assert devices.available_memory_bytes() == 4_000_000
    (tmp_path / limit).with_name("memory.stat").write_text("anon 600000\ninactive_file 300000\n")
    assert devices.available_memory_bytes() == 4_300_000
    (tmp_path / limit).write_text(f"{2**63 - 4096}\n")  # what the first version writes for no limit
    assert devices.total_memory_bytes() == host
    (tmp_path / limit).write_text("max\n")
    assert devices.total_memory_bytes() == host


def test_the_processor_and_the_accelerators_are_listed() -> None:
    names = [f.check for f in [*devices.processor(), *devices.accelerators()]]
    assert names[0] == "device: cpu"
    assert any(name.startswith("device: cuda") for name in names)
    assert "device: mps" in names


def test_flowers_outside_calls_are_off_and_a_loud_variable_is_named() -> None:
    assert [f.level for f in flower.Flower().findings()] == [Level.OK]
    finding = flower.judge_environment(dict(os.environ) | {"FLWR_TELEMETRY_ENABLED": "1"})
    assert finding.level is Level.WARN
    assert finding.finding == "FLWR_TELEMETRY_ENABLED is 1"


def test_the_kernel_path_is_reported() -> None:
    (finding,) = kernels.Kernels().findings()
    assert finding.level is Level.OK
    assert finding.finding


def test_a_finding_that_is_not_ok_must_name_a_remedy() -> None:
    with pytest.raises(ValueError, match="no remedy"):
        Finding("x", Level.WARN, "bad")


def test_the_worst_finding_counts() -> None:
    assert worst([]) is Level.OK
    assert (
        worst([Finding("a", Level.FAIL, "bad", "fix it"), Finding("b", Level.WARN, "so", "look")])
        is Level.FAIL
    )


@pytest.mark.parametrize(("level", "status"), [(Level.OK, 0), (Level.WARN, 0), (Level.FAIL, 1)])
def test_the_exit_code_follows_the_worst_finding(
    level: Level, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("a", Level.OK, "fine"), Finding("b", level, "seen", "do this")]
    monkeypatch.setattr("gym_fed.doctor.check.run_checks", lambda: findings)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == status
    assert done.stdout.splitlines() == ["ok    a: fine", f"{level.value:<5} b: seen -> do this"]

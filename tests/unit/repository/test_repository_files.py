"""Files for hosts and editors: they are read, and what they call is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fuzz.targets import TARGETS
from tests.support.rooms import seconds_by_room

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_one_check_of_a_change_on_the_supported_python() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    steps = {re.split("@", step.get("uses") or step["run"])[0]: step for step in job["steps"]}
    assert list(steps) == ["actions/checkout", "actions/setup-python", "bash .ci/run"]
    python = steps["actions/setup-python"]["with"]
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest is not None
    assert python["python-version"] == lowest[1]
    assert all((ROOT / name).is_file() for name in python["cache-dependency-path"].split())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.stem)
def test_a_workflow_pins_every_action_by_commit_and_may_only_read(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    publishes = {"id-token": "write"} if workflow.stem == "release" else {}
    assert content["permissions"] == {"contents": "read", **publishes}
    assert "secrets." not in text
    used = re.findall(r"uses: (.*)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    for job in content["jobs"].values():
        assert "permissions" not in job, "a job may not have more rights than its workflow"
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_every_test_runs_nightly_on_each_python_that_was_tried() -> None:
    (job,) = read(".github/workflows/nightly.yml")["jobs"].values()
    assert job["steps"][-1]["run"] == "make test-all PYTHON=python"
    tried = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert all(python in tried for python in job["strategy"]["matrix"]["python"])


def test_every_target_is_fuzzed_for_an_hour_each_night() -> None:
    (job,) = read(".github/workflows/fuzz.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["target"] == sorted(TARGETS)
    assert job["steps"][-1]["run"].startswith("make fuzz TARGET=${{ matrix.target }} FUZZ_SECONDS=3600")


def test_a_release_is_what_the_check_of_the_package_built_and_needs_no_stored_token() -> None:
    workflow = read(".github/workflows/release.yml")
    (job,) = workflow["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert any("make package wheel" in run for run in runs)
    assert job["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert workflow[True]["push"] == {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}


def test_the_audit_of_pinned_versions_is_a_scheduled_job_and_no_part_of_the_check_of_a_change() -> None:
    workflow = read(".github/workflows/audit.yml")
    (job,) = workflow["jobs"].values()
    assert any("make audit" in step.get("run", "") for step in job["steps"])
    assert workflow[True]["schedule"], "PyYAML reads the key `on` as true"
    assert "audit" not in (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "pip-audit --strict --no-deps --disable-pip -r constraints.txt" in (ROOT / "Makefile").read_text(
        "utf-8"
    )


def test_hooks_before_a_commit_download_nothing_and_call_installed_commands() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        command = hook["entry"].split()[0]
        assert (ROOT / command).exists() or not (ROOT / ".venv").exists()
        assert f"$(BIN)/{Path(command).name}" in lint, f"make lint does not run {command}"


def test_what_templates_and_hooks_name_exists() -> None:
    places = [*FORMS, ROOT / ".github/pull_request_template.md", ROOT / "CONTRIBUTING.md"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets |= {f"test-{room.name}" for room in (ROOT / "tests/unit").iterdir()} | {
        "test-"
    }  # `make test-ROOM`
    for place in places:
        text = place.read_text(encoding="utf-8")
        named = re.findall(r"\b(?:docs/[\w-]+\.md|SECURITY\.md|CHANGELOG\.md|\.ci/run)\b", text)
        assert [name for name in named if not (ROOT / name).exists()] == []
        assert set(re.findall(r"`make ([a-z-]+)", text)) - targets == set(), place


def test_seconds_of_tests_are_summed_by_room() -> None:
    def report(file: str, seconds: float, when: Any) -> pytest.TestReport:
        return pytest.TestReport(f"{file}::test_a", ("", 0, ""), {}, "passed", None, when, duration=seconds)

    found = seconds_by_room(
        [
            report("tests/crash/test_a.py", 3.0, "call"),
            report("tests/unit/soup/test_b.py", 1.0, "setup"),
            report("tests/unit/soup/test_c.py", 2.5, "call"),
            "a warning, which took no time",
        ]
    )
    assert list(found.items()) == [("tests/unit/soup", 3.5), ("tests/crash", 3.0)]


def make(*targets: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)


def test_every_room_of_the_unit_tests_has_a_target() -> None:
    rooms = {file.parent.name for file in (ROOT / "tests/unit").glob("*/test_*.py")}
    made = make(*(f"test-{room}" for room in sorted(rooms)))
    assert set(re.findall(r"tests/unit/(\S+)", made.stdout)) == rooms, made.stderr
    assert make("test-no-such-room").returncode != 0


def test_an_editor_wraps_lines_where_ruff_does() -> None:
    config = (ROOT / ".editorconfig").read_text(encoding="utf-8")
    length = re.search(r"line-length = (\d+)", (ROOT / "pyproject.toml").read_text())
    assert length is not None
    assert f"[*.py]\nmax_line_length = {length[1]}\n" in config


def test_make_install_announces_each_stage_before_pip_is_quiet_for_minutes() -> None:
    done = subprocess.run(["make", "-nB", "install"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if re.match(r"echo '\d of 3|.* pip install ", line)]

    assert [line[:12] for line in lines if line.startswith("echo")] == [f"echo '{n} of 3" for n in (1, 2, 3)]
    for number, line in enumerate(lines):
        assert line.startswith("echo") or lines[number - 1].startswith("echo"), line

"""`make version` and `make release`: one version in every file, a dated changelog, and no push."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import release, version, wheel

ROOT = Path(__file__).resolve().parents[3]
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.2.0] - 2025-01-01\n\n- Before.\n"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that have the version, and a short changelog."""
    for name in version.PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_a_version_is_written_everywhere_and_the_changelog_is_dated(tree: Path) -> None:
    before = {name: (tree / name).read_text() for name in version.PLACES}
    version.main("1.2.3", tree)
    assert version.versions(tree) == {name: {"1.2.3"} for name in version.PLACES}
    (old,) = {one for found in version.versions(ROOT).values() for one in found}
    for name, text in before.items():
        changed = [
            (a, b)
            for a, b in zip(text.splitlines(), (tree / name).read_text().splitlines(), strict=True)
            if a != b
        ]
        assert changed, name
        assert all(a.replace(old, "1.2.3") == b for a, b in changed), (name, changed)
    text = (tree / "CHANGELOG.md").read_text()
    above, _, below = text.partition("## [1.2.3] - ")
    assert above.endswith("## [Unreleased]\n\n")
    assert below.split("\n\n")[1:3] == ["### Added", "- A thing."]
    assert version.check(tree) == "1.2.3"


@pytest.mark.parametrize(
    ("number", "changelog", "problem"),
    [
        ("1.2", CHANGELOG, "not of the form"),
        ("0.2.0", CHANGELOG, "already has a section"),
        ("1.2.3", CHANGELOG.replace("### Added\n\n- A thing.\n\n", ""), "nothing to release"),
        ("1.2.3", CHANGELOG.replace("[Unreleased]", "[Next]"), "needs one heading"),
    ],
)
def test_a_version_that_cannot_be_written_changes_nothing(
    tree: Path, number: str, changelog: str, problem: str
) -> None:
    (tree / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(SystemExit, match=problem):
        version.main(number, tree)
    assert version.versions(tree) == version.versions(ROOT)
    assert (tree / "CHANGELOG.md").read_text() == changelog


def test_a_release_with_unreleased_entries_or_other_versions_is_refused(tree: Path) -> None:
    with pytest.raises(SystemExit, match="unreleased entries"):
        version.check(tree)
    version.main("1.2.3", tree)
    file = tree / "CITATION.cff"
    file.write_text(file.read_text().replace("1.2.3", "1.2.4"))
    with pytest.raises(SystemExit, match=r"CITATION.cff has 1\.2\.4"):
        version.check(tree)
    file.write_text("title: gym-fed\n")
    with pytest.raises(SystemExit, match=r"no version in CITATION\.cff"):
        version.check(tree)


def test_the_steps_of_a_release_push_nothing() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "release", "PYTHON=python3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    for step in ("tools.version --check", ".ci/check_package.py", "tools.wheel", "tools.release"):
        assert step in shown.stdout
    assert "push" not in shown.stdout
    pushes = release.push_commands("1.2.3", "buildah", ["gym-fed-hub:1.2.3"])
    assert (
        pushes[1]
        == "buildah tag gym-fed-hub:1.2.3 REGISTRY/gym-fed-hub:1.2.3 && buildah push REGISTRY/gym-fed-hub:1.2.3"
    )
    assert {*release.IMAGES} == {"hub", "client", "api", "webui"}


def test_an_extra_that_is_none_is_refused_before_anything_is_built() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.release", "--extras", "hub,such"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no such extra: such" in done.stderr


def test_each_extra_but_the_developers_is_tried() -> None:
    extras = release.extras_of(ROOT)
    assert {"hub", "client", "serve", "train", "all"} <= {*extras}
    assert "dev" not in extras


def test_an_extra_is_tried_in_a_copy_of_the_environment_that_has_the_wheel_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, tried = tmp_path / "alone", []
    alone.mkdir()
    (alone / "torch").write_text("large")

    def install(folder: Path, wanted: str, number: str) -> None:
        tried.append((wanted, (folder / "torch").samefile(alone / "torch")))
        (folder / "torch").unlink()
        (folder / "extra").touch()

    monkeypatch.setattr(release, "WORK", tmp_path)
    monkeypatch.setattr(release, "_try", install)
    release.try_extra(alone, Path("gym_fed.whl"), "hub", "1.2.3")
    assert tried == [("gym_fed.whl[hub]", True)]
    assert [file.name for file in tmp_path.rglob("*")] == ["alone", "torch"]


def test_a_wheel_needs_no_cpp_library_of_the_system_and_has_no_deleted_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, str] = {}

    def build(command: list[str], **environment: str) -> None:
        found.update(environment)
        raise InterruptedError

    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    monkeypatch.setattr(wheel, "WORK", tmp_path / "build" / "wheel")
    monkeypatch.setattr(wheel, "_run", build)
    deleted = tmp_path / "build" / "lib.linux" / "gym_fed" / "deleted.py"
    deleted.parent.mkdir(parents=True)
    deleted.touch()
    monkeypatch.setenv("LDFLAGS", "-Lhere")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(InterruptedError):
        wheel.main(tmp_path / "dist")
    assert found["LDFLAGS"].startswith("-Lhere ")
    assert "-static-libstdc++" in found["LDFLAGS"].split()
    assert not deleted.exists()


def test_buildah_builds_as_docker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(release, "_run", lambda *words: commands.append(words))
    for builder in ("buildah", "docker"):
        assert release.build_image(builder, "hub", "1.2.3", ["--quiet"]) == "gym-fed-hub:1.2.3"
    end = ("--quiet", "--target", "hub", "-f", "deploy/docker/Dockerfile", "-t", "gym-fed-hub:1.2.3", ".")
    assert commands == [
        ("buildah", "build", "--format", "docker", "--layers", *end),
        ("docker", "build", *end),
    ]

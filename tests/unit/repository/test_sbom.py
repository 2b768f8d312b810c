"""The SBOM and the checksums that are written next to a wheel."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tools.sbom import SUMS, main, write_sbom


def wheel_that_requires(folder: Path, *requirements: str) -> Path:
    wheel = folder / "gym_fed-9.9.9-py3-none-any.whl"
    headers = ["Metadata-Version: 2.4", "Name: gym-fed", "Version: 9.9.9"]
    headers += [f"Requires-Dist: {requirement}" for requirement in requirements]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gym_fed-9.9.9.dist-info/METADATA", "\n".join(headers) + "\n")
    return wheel


def test_an_sbom_names_the_wheel_its_hash_and_every_requirement_with_its_installed_version(
    tmp_path: Path,
) -> None:
    wheel = wheel_that_requires(tmp_path, "SQLAlchemy>=2", "pytest; extra == 'dev'")
    bom = json.loads(write_sbom(wheel).read_text(encoding="utf-8"))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    root = bom["metadata"]["component"]
    assert root["purl"] == "pkg:pypi/gym-fed@9.9.9"
    assert root["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    versions = {component["name"]: component["version"] for component in bom["components"]}
    assert versions["sqlalchemy"] == metadata.version("sqlalchemy")
    assert "typing-extensions" in versions, "what a requirement requires is listed too"
    assert "pytest" not in versions, "extras are not installed with the wheel"
    edges = {edge["ref"]: edge.get("dependsOn", []) for edge in bom["dependencies"]}
    assert edges[root["bom-ref"]] == [f"pkg:pypi/sqlalchemy@{versions['sqlalchemy']}"]


def test_a_requirement_that_is_not_installed_fails_the_sbom_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no-such-distribution is required by gym-fed"):
        write_sbom(wheel_that_requires(tmp_path, "no-such-distribution"))


def test_checksums_cover_wheel_sdist_and_sbom_and_find_a_changed_byte(tmp_path: Path) -> None:
    wheel = wheel_that_requires(tmp_path, "PyYAML")
    sdist = tmp_path / "gym_fed-9.9.9.tar.gz"
    sdist.write_bytes(b"sources")
    main(wheel, sdist)
    check = ["sha256sum", "--check", "--strict", SUMS]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK") == 3
    sdist.write_bytes(b"Sources")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1

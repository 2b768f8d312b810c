"""Write a version to every file that contains it, and date the changelog: ``python -m tools.version 1.2.3 [FOLDER]``.

``python -m tools.version --check`` refuses a tree that is not ready for a release of its version.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NUMBER = r"[0-9]+\.[0-9]+\.[0-9]+"
PLACES = {
    "gym_fed/version.py": r'(?m)^__version__ = "(.+)"$',
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "CITATION.cff": r"(?m)^version: (.+)$",
    "deploy/docker/Dockerfile": rf"gym-fed-api:({_NUMBER})-cuda",
    "deploy/compose/compose.yaml": r"\{GYM_VERSION:-(.+?)\}",
    "deploy/k8s/base/kustomization.yaml": rf"newTag: ({_NUMBER})",
    "deploy/k8s/overlays/demo/kustomization.yaml": rf"newTag: ({_NUMBER})",
    "deploy/k8s/overlays/gpu/kustomization.yaml": rf"newTag: ({_NUMBER})",
}
"""Patterns by file, whose group is the version; each must match at least once."""
CHANGELOG = "CHANGELOG.md"
_UNRELEASED = "## [Unreleased]"


def main(version: str, root: Path = ROOT) -> None:
    """Write ``version``, or check the current one.

    Args:
        version: The new version, or ``--check``.
        root: The checkout.

    Raises:
        SystemExit: If the version is not of the form 1.2.3, a file contains none, or the changelog is not ready.
    """
    if version == "--check":
        print(f"version {check(root)}: every file has it, and the changelog is complete")
        return
    if not re.fullmatch(_NUMBER, version):
        sys.exit(f"version: {version!r} is not of the form 1.2.3")
    found = versions(root)
    changelog = _dated((root / CHANGELOG).read_text(encoding="utf-8"), version)
    for name, old in found.items():
        file = root / name
        text = file.read_text(encoding="utf-8")
        file.write_text(
            re.sub(PLACES[name], lambda match: match[0].replace(match[1], version), text), encoding="utf-8"
        )
        print(f"{name}: {', '.join(sorted(old))} -> {version}")
    (root / CHANGELOG).write_text(changelog, encoding="utf-8")


def check(root: Path = ROOT) -> str:
    """Return the version of a checkout that is ready for its release.

    Raises:
        SystemExit: If files differ, or the changelog has unreleased entries or no section for the version.
    """
    by_file = versions(root)
    distinct = {version for in_file in by_file.values() for version in in_file}
    if len(distinct) > 1:
        sys.exit(
            "version: files differ: "
            + ", ".join(f"{name} has {', '.join(sorted(old))}" for name, old in by_file.items())
            + "; make version VERSION=1.2.3 writes one into all"
        )
    (version,) = distinct
    text = (root / CHANGELOG).read_text(encoding="utf-8")
    if _unreleased(text).strip():
        sys.exit(f"version: {CHANGELOG} has unreleased entries; make version VERSION=1.2.3 dates them")
    if f"\n## [{version}] - " not in text:
        sys.exit(f"version: {CHANGELOG} has no section for {version}")
    return version


def versions(root: Path) -> dict[str, set[str]]:
    """Return the versions in each file of ``PLACES``.

    Raises:
        SystemExit: If a file has none.
    """
    by_file = {
        name: set(re.findall(where, (root / name).read_text(encoding="utf-8")))
        for name, where in PLACES.items()
    }
    if empty := [name for name, old in by_file.items() if not old]:
        sys.exit(f"version: no version in {', '.join(empty)}; tools/version.py says where it is expected")
    return by_file


def _unreleased(text: str) -> str:
    """Return the entries below the heading of unreleased changes."""
    if text.count(f"\n{_UNRELEASED}\n") != 1:
        sys.exit(f"version: {CHANGELOG} needs one heading {_UNRELEASED}")
    return re.split(r"(?m)^## \[", text.partition(f"\n{_UNRELEASED}\n")[2])[0]


def _dated(text: str, version: str) -> str:
    """Move the unreleased entries below a heading with the version and today's date."""
    if not _unreleased(text).strip():
        sys.exit(f"version: {CHANGELOG} has no unreleased entries, so there is nothing to release")
    if f"\n## [{version}]" in text:
        sys.exit(f"version: {CHANGELOG} already has a section for {version}")
    today = datetime.datetime.now(datetime.UTC).date()
    return text.replace(f"\n{_UNRELEASED}\n", f"\n{_UNRELEASED}\n\n## [{version}] - {today}\n")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m tools.version 1.2.3|--check [FOLDER]")
    main(sys.argv[1], *map(Path, sys.argv[2:]))

"""Check which `gym` is on the PATH, since OpenAI's package and others use the same name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from gym_fed.doctor.check import Check, Finding, Level
from gym_fed.doctor.checks.versions import installed_distribution

_HEAD_BYTES = 4096


class Commands(Check):
    """Check gym-fed's commands, and look for another package named `gym`."""

    def findings(self) -> Iterator[Finding]:
        yield from commands()
        yield from namesake()


def commands() -> Iterator[Finding]:
    """For each command, compare what the shell runs with this installation's script."""
    ours = installed_distribution()
    if ours is None:
        return  # reported by the version check
    for entry in ours.entry_points.select(group="console_scripts"):
        yield judge_command(
            entry.name, entry.module, shutil.which(entry.name), installed_script(ours, entry.name)
        )


def namesake() -> Iterator[Finding]:
    """Warn if OpenAI's `gym` is in this environment."""
    try:
        version = metadata.version("gym")
    except metadata.PackageNotFoundError:
        yield Finding("command: namesake", Level.OK, "OpenAI's gym is not installed in this environment")
        return
    yield Finding(
        "command: namesake",
        Level.WARN,
        f"OpenAI's gym {version} is installed too: `import gym` and `python -m gym` are that package",
        "import gym_fed, not gym; or keep the two in separate environments",
    )


def installed_script(distribution: metadata.Distribution, name: str) -> Path | None:
    """Return the path of this distribution's script ``name``, from its installation record."""
    for file in distribution.files or []:
        if file.name in (name, f"{name}.exe"):
            return Path(str(distribution.locate_file(file))).resolve()
    return None


def judge_command(name: str, module: str, found: str | None, ours: Path | None) -> Finding:
    """Compare the command on the PATH for ``name`` with this installation's script.

    Args:
        name: The command.
        module: The module that gym-fed's script imports, such as ``gym_fed.cli.entry``; other versions import a
            different module of the same package.
        found: The result of ``shutil.which``.
        ours: This installation's script; None if the installer's record names none.
    """
    check_name = f"command: {name}"
    here = f"put {ours.parent} first in the PATH, or run {ours}" if ours else f"run python -m {module}"
    if found is None:
        return Finding(check_name, Level.WARN, "not on the PATH", here)
    if ours is not None and ours.exists() and Path(found).samefile(ours):
        return Finding(check_name, Level.OK, f"{found} is this installation's")
    head = Path(found).read_bytes()[:_HEAD_BYTES].decode("utf-8", errors="replace")
    if f"from {module.rpartition('.')[0]}." in head:
        interpreter = head.splitlines()[0].removeprefix("#!").strip()
        seen = f"{found} belongs to another installation of gym-fed, run by {interpreter}"
        return Finding(check_name, Level.WARN, seen, here)
    return Finding(check_name, Level.FAIL, f"{found} is not gym-fed's: the shell runs another program", here)

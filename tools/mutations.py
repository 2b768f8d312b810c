"""Insert known faults, one at a time, and check that the tests detect them: ``make mutations``.

Each entry of ``tests/mutations.toml`` names a file, a text in it, the text with a fault, and the tests that must then
fail. The faults are inserted in a copy of the checkout. The command fails if the text of a mutation is not found, or if
its tests still pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.toml"
_SECONDS = 600
_TESTS_FAILED = (1, 2)
"""pytest's exit codes for tests that fail, and for test files that cannot be imported."""


@dataclass(frozen=True)
class Mutation:
    """A known fault.

    Attributes:
        name: Name, unique in the table.
        file: Path from the root of the checkout.
        before: Text that occurs exactly once in the file.
        after: Text that replaces it.
        tests: Arguments for pytest: files, single tests, or ``-k`` with its expression.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def load(path: Path = TABLE) -> list[Mutation]:
    """Read the table of mutations.

    Raises:
        ValueError: For two entries of one name, or one that changes nothing.
    """
    found = [
        Mutation(**{**entry, "tests": tuple(entry["tests"])})
        for entry in tomllib.loads(path.read_text())["mutation"]
    ]
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name} has more than one entry named {', '.join(sorted(twice))}")
    if idle := [one.name for one in found if one.before == one.after or not one.tests]:
        raise ValueError(f"{path.name}: entries without a change or tests: {', '.join(idle)}")
    return found


def misplaced(mutations: list[Mutation], root: Path = ROOT) -> list[str]:
    """Return a line for each mutation whose text does not occur exactly once, or whose tests name a missing file."""
    lines = []
    for one in mutations:
        count = (root / one.file).read_text().count(one.before) if (root / one.file).is_file() else 0
        if count != 1:
            lines.append(f"{one.name}: the text is {count} times in {one.file}")
        files = [word.partition("::")[0] for word in one.tests if word.startswith("tests/")]
        lines += [f"{one.name}: no {file}" for file in files if not (root / file).exists()]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="Mutations to run; all by default.")
    parser.add_argument("--report", type=Path, help="File for a Markdown table of the outcomes.")
    options = parser.parse_args()
    mutations = load()
    if unknown := set(options.names) - {one.name for one in mutations}:
        parser.error(f"not in {TABLE.name}: {', '.join(sorted(unknown))}")
    chosen = [one for one in mutations if not options.names or one.name in options.names]
    failures = misplaced(chosen)
    for line in failures:
        print(line)
    lines = ["| mutation | file | tests | outcome |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="gym-mutations-") as folder:
        copy = _copy(Path(folder))
        sound: dict[tuple[str, ...], str] = {}
        lost = {line.partition(":")[0] for line in failures}
        for number, one in enumerate(chosen, 1):
            outcome = "not planted" if one.name in lost else _try(copy, one, sound)
            print(f"[{number}/{len(chosen)}] {one.name}: {outcome}", flush=True)
            lines.append(f"| {one.name} | {one.file} | {' '.join(one.tests)} | {outcome} |")
            if not outcome.startswith(("killed", "skipped")):
                failures.append(one.name)
            if options.report:
                options.report.write_text("\n".join(lines) + "\n")
    print(f"{len(chosen)} mutations, {len(failures)} failures")
    return 1 if failures else 0


def _try(copy: Path, mutation: Mutation, sound: dict[tuple[str, ...], str]) -> str:
    """Run the tests on one mutation; ``sound`` caches their result on the unchanged code."""
    if mutation.tests not in sound:
        code, last = _pytest(copy, mutation.tests)
        sound[mutation.tests] = (
            f"ERROR: the tests fail without it ({last})"
            if code
            else ""
            if "passed" in last
            else f"skipped ({last})"
        )
    if sound[mutation.tests]:
        return sound[mutation.tests]
    path = copy / mutation.file
    text = path.read_text()
    _write(path, text.replace(mutation.before, mutation.after))
    try:
        code, last = _pytest(copy, (*mutation.tests, "-x"))
    finally:
        _write(path, text)
    if code in _TESTS_FAILED:
        return f"killed ({last})"
    return f"SURVIVED ({last})" if code == 0 else f"ERROR: pytest ended with {code} ({last})"


_written = 0


def _write(path: Path, text: str) -> None:
    """Write a file with a new modification time, since Python detects stale bytecode by whole seconds and sizes."""
    global _written
    _written += 10
    now = path.stat().st_mtime
    path.write_text(text)
    os.utime(path, (now + _written, now + _written))


def _pytest(copy: Path, words: tuple[str, ...]) -> tuple[int, str]:
    """Run pytest, and return its exit code and the last line of its output."""
    rooms = (copy, copy / "server", copy / "client", copy / "quant")
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, rooms)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *words]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end within {_SECONDS} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode, lines[-1].strip("= ") if lines else done.stderr.strip()[-200:]


def _copy(folder: Path) -> Path:
    """Copy the checkout with its uncommitted changes and built libraries, and link the shared folder next to it."""
    target = folder / ROOT.name
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("quant/gym_quant/kernels/*.so")]
    for name in [*filter(None, listed.stdout.split("\0")), *built]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (folder / "shared").symlink_to(shared)
    return target


if __name__ == "__main__":
    sys.exit(main())

"""Print the table of docs/fuzzing.md from the fuzzer's logs: ``python -m tests.fuzz.report [FOLDER]``.

``FOLDER`` is ``build/fuzz`` by default, with ``TARGET/log.txt`` for each target, to which runs append.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.run import ROOT

_STATUS = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+)", re.MULTILINE)
_DONE = re.compile(r"^Done (\d+) runs in (\d+) second", re.MULTILINE)
_FINDING = re.compile(
    r"=== Uncaught Python exception|ERROR: libFuzzer: (?:timeout|out-of-memory|deadly signal)"
)


@dataclass
class Run:
    """The results of one target over all runs in a log.

    Attributes:
        executions: Number of inputs.
        seconds: Seconds of runs that ended by themselves; a run that a finding ended does not report its time.
        first: Branches that the seeds of the first run reached, in the instrumented Python modules.
        reached: The most branches that a run reached.
        findings: Number of runs that a finding ended.
    """

    executions: int
    seconds: int
    first: int
    reached: int
    findings: int


def read(log: str) -> Run:
    """Add up the runs of a log."""
    executions = seconds = first = reached = findings = 0
    for part in re.split(r"^INFO: Using built-in libfuzzer$", log, flags=re.MULTILINE)[1:]:
        lines = _STATUS.findall(part)
        done = _DONE.search(part)
        executions += int(done[1]) if done else max((int(number) for number, _, _ in lines), default=0)
        seconds += int(done[2]) if done else 0
        first = first or next((int(cov) for _, event, cov in lines if event == "INITED"), 0)
        findings += _FINDING.search(part) is not None
        reached = max([reached, *(int(cov) for _, _, cov in lines)])
    return Run(executions, seconds, first, reached, findings)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "fuzz"
    print("| target | inputs | seconds | branches: seeds -> reached | findings |")
    print("|---|---|---|---|---|")
    for log in sorted(folder.glob("*/log.txt")):
        run = read(log.read_text(encoding="utf-8", errors="replace"))
        print(
            f"| `{log.parent.name}` | {run.executions:,} | {run.seconds:,} | {run.first:,} -> {run.reached:,} | "
            f"{run.findings} |"
        )


if __name__ == "__main__":
    main()

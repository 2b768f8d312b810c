"""Write the section of docs/support.md about the GPU checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.gpu.check import Check
from tools.gpu.checks import CHECKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
BEGIN, END = "<!-- by make test-gpu -->\n", "<!-- until here, by make test-gpu -->\n"
UNTRIED = "not yet"


def section(machine: str, seen: Mapping[str, str]) -> str:
    """Return the table.

    Args:
        machine: Device, versions and date; empty if nothing was tried.
        seen: Result of each check, by its name.
    """
    head = f"Tried on {machine}." if machine else "No line was run on a GPU yet."
    rows = [
        f"| {check.name} | {check.what} | {_cpu(check)} | {seen.get(check.name, UNTRIED)} |"
        for check in CHECKS
    ]
    table = [
        "| on a GPU | what must be true | on a CPU, by the tests | on a GPU |",
        "|---|---|---|---|",
        *rows,
    ]
    return f"{head}\n\n" + "\n".join(table) + "\n"


def _cpu(check: Check) -> str:
    return "runs" if check.on_cpu is None else "refused"


def write(machine: str, seen: Mapping[str, str]) -> None:
    """Replace the section on the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{section(machine, seen)}\n{END}{after}", encoding="utf-8")


def written() -> str:
    """Return the section as it is on the page."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip() + "\n"

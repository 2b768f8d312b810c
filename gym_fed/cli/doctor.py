"""`gym doctor`: checks this installation and names a remedy for each problem."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.core import console
from gym_fed.core.console import AsJson
from gym_fed.core.progress import spinner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gym_fed.doctor.check import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    security: Annotated[
        bool,
        typer.Option(
            "--security", help="Check keys, secrets, addresses, certificates and security advisories instead."
        ),
    ] = False,
    hub: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="The hub's folder.", envvar="GYM_SERVER_DIR")
    ] = Path("hub"),
    home: Annotated[
        Path | None,
        typer.Option(
            "--home",
            metavar="FOLDER",
            help="Folder of your key, accounts, receipts and caches.",
            envvar="GYM_HOME",
            show_default="~/.gym-fed",
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Check versions, devices, kernels, disk, clock and commands; exit with 1 when something fails."""
    with spinner("checking this installation"):
        from gym_fed.doctor.check import Level, run_checks, worst

        if security:
            from gym_fed.core.files import default_home
            from gym_fed.doctor.security import security_findings

            findings = security_findings(home.expanduser() if home else default_home(), hub)
        else:
            findings = run_checks()
    level = worst(findings)
    if json_:
        console.print_json({"level": level.value, "findings": [f.to_dict() for f in findings]})
    elif console.out.is_terminal:
        _print_table(findings)
    else:
        for f in findings:
            typer.echo(f"{f.level.value:<5} {f.check}: {f.finding}" + (f" -> {f.remedy}" if f.remedy else ""))
    if level is Level.FAIL:
        raise typer.Exit(1)


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.text import Text

    from gym_fed.core.console import TextTable

    table = TextTable("", "check", "finding, remedy", box=None, pad_edge=False)
    for f in findings:
        level = Text(f.level.value, style=_STYLES[f.level.value])
        finding = Text(f.finding)
        if f.remedy:
            finding.append(f"\n{f.remedy}", style="dim")
        table.add_row(level, Text(f.check), finding)
    console.out.print(table, soft_wrap=False)

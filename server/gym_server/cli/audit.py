"""The `gym-server audit` command, which records the verdicts of auditors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

app = App(help="Record auditors' verdicts in the ledger.", no_args_is_help=True)


@app.command()
def record(
    file: Annotated[
        Path, typer.Argument(metavar="VERDICT", help="The auditor's signed verdict.", show_default=False)
    ],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Record a signed verdict; a failed audit lowers the contributor's reputation."""
    from gym_fed.trust.ledger.audits import MAX_VERDICT_BYTES, SignedVerdict

    if not file.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"there is no file {file}")
    with file.open("rb") as stream:
        text = stream.read(MAX_VERDICT_BYTES + 1).decode("utf-8", errors="replace")
    signed = SignedVerdict.parse(text, str(file))
    with opened(folder) as fed:
        entry = fed.audits.record(signed)
    verdict = signed.verdict
    print_result(
        as_json,
        entry.to_dict(),
        f"entry {entry.sequence}: {entry.kind}, update {verdict.update[:12]} of {entry.body['contributor']}",
    )

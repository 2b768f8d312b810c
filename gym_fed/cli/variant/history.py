"""`gym variant history` and `undo`: the kept revisions of a variant, and an earlier one made the newest again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_fed.cli.variant.options import KeyOption, NameArgument, StoreOption, open_store, owners_key
from gym_fed.core import console
from gym_fed.core.console import AsJson
from gym_fed.core.errors import GymError

_TIME = "%Y-%m-%d %H:%M"


def history(name: NameArgument, store: StoreOption = None, as_json: AsJson = False) -> None:
    """List the revisions of a variant that the store keeps, the newest first."""
    from gym_fed.core.tables import TextTable

    with open_store(store) as opened:
        found = [
            {**one.to_dict(), "codecs": _codecs(opened.history.path(one))} for one in opened.history.of(name)
        ]
    table = TextTable("revision", "made", "codec", "bytes", "loss", "signed by", "note", box=None)
    for row in found:
        table.add_row(
            f"{row['revision']}{' (newest)' if row['is_newest'] else ''}",
            time.strftime(_TIME, time.localtime(row["updated_at"])),
            ", ".join(row["codecs"]) or "?",
            f"{row['size_bytes']:,}",
            _losses(row["figures"]),
            row["signed_by"] or "nobody",
            row["note"],
        )
    console.print_result(as_json, found, lambda: console.print_table(table))


def undo(
    name: NameArgument,
    to: Annotated[
        int | None,
        typer.Option("--to", min=1, help="Revision to return to.", show_default="the one before the newest"),
    ] = None,
    key: KeyOption = None,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Make an earlier revision the newest again, signed under the next number; a running server uses it at once."""
    from gym_fed.serving.store.signing import undo as make_newest

    with open_store(store) as opened:
        before = opened.get(name)
        signer = owners_key(key, opened.folder, before) if before.is_signed else None
        record, earlier = make_newest(opened, name, signer, to=to)
    if record.base_digest != before.base_digest:
        console.err.print(
            f"note: revision {earlier} is of base {record.base_model} ({record.base_digest[:19]}), and the one before "
            f"of {before.base_model} ({before.base_digest[:19]}): serve that base"
        )
    found = {**record.to_dict(), "restored": earlier}
    console.print_result(
        as_json, found, f"variant {name}: revision {record.revision} is revision {earlier} again"
    )


def _codecs(delta: Path) -> list[str]:
    """Of a file's tensors; none of a file that cannot be read, which ``gym variant verify`` reports."""
    from gym_fed.delta.file import DeltaFile

    try:
        with DeltaFile.open(delta) as opened:
            return sorted({record.codec for record in opened.manifest.tensors})
    except GymError:
        return []


def _losses(figures: dict[str, Any]) -> str:
    """``base -> with the variant``, as far as it was measured."""
    found = [figures.get(name) for name in ("loss_base", "loss")]
    numbers = [f"{value:.4f}" if isinstance(value, int | float) else "?" for value in found]
    return "" if numbers == ["?", "?"] else f"{numbers[0]} -> {numbers[1]}"

"""`gym variant add` and `sign`: add deltas to the store, or sign one for a server that adds it over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.variant.options import KeyOption, StoreOption, open_store, shown_progress, signing_key
from gym_fed.core import console
from gym_fed.core.console import AsJson
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.store.naming import variants_folder

if TYPE_CHECKING:
    from gym_fed.serving.store.bulk import IncomingVariant
    from gym_fed.trust.identity.keys import SigningKey


NoteOption = Annotated[str, typer.Option("--note", help="Free-form note, such as what it was made from.")]
_SUFFIX = ".gymdelta"
_KEYS = {"file", "name", "user", "note"}


def add(
    deltas: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DELTA]...", help="One or more .gymdelta files; all are added, or none."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the variant.", show_default="the file's own name"
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Folder of .gymdelta files to add; or JSON lines of file, name, user and note.",
        ),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="ID", help="Owner; by default the account of the signing key."),
    ] = None,
    sign: Annotated[
        bool,
        typer.Option("--sign/--unsigned", help="Sign the variant; by default, servers refuse unsigned ones."),
    ] = True,
    key: KeyOption = None,
    note: NoteOption = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing variant of that name.")
    ] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Add deltas to the store, signed with your own key; a running server serves them at once."""
    if not sign and (key is not None or user is None):
        what = "pass its owner with --user" if user is None else "--key cannot be combined with it"
        raise GymError(ErrorCode.USAGE, f"--unsigned: {what}", "sign it, or pass a user")
    if bool(deltas) is (source is not None):
        raise GymError(
            ErrorCode.USAGE, "pass either DELTA files or --from", "--from takes a folder or a list"
        )
    rows = _rows(deltas or [], name) if source is None else _rows_from(source, name)
    _require_short_notes(rows, note)
    signer = signing_key(key) if sign else None
    with (
        open_store(store, create=True, require_signature=sign) as opened,
        shown_progress(as_json or len(rows) == 1) as progress,
    ):
        new = [_incoming(row, user, note, signer) for row in rows]
        records = opened.add_all(new, _account_key(signer, new), replace=replace, progress=progress)
    documents = [record.to_dict() for record in records]
    is_single = source is None and len(records) == 1
    added = records[0].name if is_single else counted(len(records), "variant")
    message = f"added {added} to {variants_folder(store)}"
    console.print_result(as_json, documents[0] if is_single else documents, message)


def _rows(deltas: list[Path], name: str | None) -> list[dict[str, Any]]:
    if name is not None and len(deltas) > 1:
        raise GymError(
            ErrorCode.USAGE,
            "--name applies to one file, but several were given",
            "leave it out to name each variant after its file; or list the names in a file for --from",
        )
    missing = [path for path in deltas if not path.is_file()]
    if missing:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no delta at {missing[0]}")
    return [{"file": path, "name": name or path.name.removesuffix(_SUFFIX)} for path in deltas]


def _rows_from(source: Path, name: str | None) -> list[dict[str, Any]]:
    if name is not None:
        raise GymError(ErrorCode.USAGE, "--name cannot be combined with --from", "put the names in a list")
    if source.is_dir():
        deltas = sorted(source.glob(f"*{_SUFFIX}"))
        if not deltas:
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no {_SUFFIX} in {source}")
        return _rows(deltas, None)
    if not source.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no folder or list at {source}")
    with source.open("rb") as lines:
        rows = [
            _parse_line(line, f"{source}, line {number}", source.parent)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    if not rows:
        raise GymError(ErrorCode.USAGE, f"{source} is empty")
    return rows


def _parse_line(line: bytes, where: str, folder: Path) -> dict[str, Any]:
    """Parse a line of a list; relative paths are resolved against the list's folder."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.USAGE, f"{where}: not JSON: {error}") from error
    is_valid = isinstance(row, dict) and "file" in row and row.keys() <= _KEYS
    if not is_valid or not all(isinstance(value, str) for value in row.values()):
        raise GymError(
            ErrorCode.USAGE, f"{where}: not an object of strings: file, and optionally name, user and note"
        )
    path = folder / row["file"]
    return {**row, "file": path, "name": row.get("name", path.name.removesuffix(_SUFFIX))}


def _require_short_notes(rows: list[dict[str, Any]], note: str) -> None:
    from gym_fed.serving.store.signing import MAX_NOTE

    for row in rows:
        if (length := len(row.get("note", note))) > MAX_NOTE:
            message = f"{row['file']}: the note has {counted(length, 'character')}"
            raise GymError(ErrorCode.USAGE, message, f"shorten it to at most {MAX_NOTE}")


def _incoming(row: dict[str, Any], user: str | None, note: str, signer: SigningKey | None) -> IncomingVariant:
    from gym_fed.serving.store.bulk import IncomingVariant

    owner = row.get("user") or user or ("" if signer is None else signer.contributor)
    return IncomingVariant(row["file"], row["name"], owner, row.get("note", note))


def _account_key(signer: SigningKey | None, new: list[IncomingVariant]) -> SigningKey | None:
    """Return the key as a key of the account that owns the variants, so that a rotated key can sign for it."""
    from gym_fed.serving.store.records import is_account

    accounts = sorted({row.owner for row in new if is_account(row.owner)})
    if signer is None or not accounts:
        return signer
    if len(accounts) > 1:
        raise GymError(
            ErrorCode.USAGE,
            f"one key cannot sign for both accounts {accounts[0]} and {accounts[1]}",
            "add the variants of each account with a separate command",
        )
    return signer.of_account(accounts[0])


def sign(
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A .gymdelta file.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the variant.")],
    key: KeyOption = None,
    revision: Annotated[
        int,
        typer.Option(
            "--revision", min=1, help="Revision number; higher than that of the variant it replaces."
        ),
    ] = 1,
    note: NoteOption = "",
    as_json: AsJson = False,
) -> None:
    """Sign a delta for a server that adds variants over HTTP; writes the manifest next to it."""
    from gym_fed.core.files import write_atomically
    from gym_fed.serving.openai.tokenizing import manifest_path
    from gym_fed.serving.store.signing import sign_variant

    if not delta.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no delta at {delta}")
    signed = sign_variant(delta, signing_key(key), name=name, revision=revision, note=note)
    path = manifest_path(delta)
    write_atomically(path, f"{signed.to_json()}\n".encode(), mode=0o644)
    facts = {"name": name, "revision": revision, "owner": signed.manifest.owner, "manifest": str(path)}
    console.print_result(as_json, facts, f"signed {name}, revision {revision}: {path}")

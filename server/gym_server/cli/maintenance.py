"""The commands that maintain a hub's data: `gym-server backup`, `restore`, `check` and `gc`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from gym_fed.core.console import AsJson, err, out, print_event, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted, counts_in_words
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BACKUP_PASSPHRASE = "GYM_BACKUP_PASSPHRASE"


def add_maintenance_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (backup, restore, check, gc):
        app.command()(command)


def backup(
    to: Annotated[
        str, typer.Option("--to", metavar="URL", help="Folder, or fsspec URL such as s3://bucket/hub.")
    ],
    folder: Folder = DEFAULT_FOLDER,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Repeat at this interval: 30m, 1h, 1d.", show_default=False),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Number of snapshots to keep; older ones are deleted.", show_default=False),
    ] = None,
    encrypt_keys: Annotated[
        bool,
        typer.Option(
            "--encrypt-keys",
            help=f"Encrypt plain keys with {BACKUP_PASSPHRASE}, or with a passphrase typed at the prompt.",
        ),
    ] = False,
    include_plain_keys: Annotated[
        bool, typer.Option("--include-plain-keys", help="Copy unencrypted keys as they are.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a hub, running or not, as one checked snapshot; only new objects are copied."""
    from gym_fed.trust.identity.passphrase import PassphraseSource

    pause = None if every is None else parse_duration(every)
    source = PassphraseSource(BACKUP_PASSPHRASE)
    secret = source.create(f"the keys in {to}") if encrypt_keys else None
    with opened(folder) as fed:
        with spinner("loading torch"):
            from gym_server.backup.backup import KeyPolicy
            from gym_server.backup.backup import backup as run_backup

        policy = KeyPolicy(include_plain_keys, None if secret is None else lambda: secret)
        while True:
            try:
                with spinner("copying new objects"):
                    copied = run_backup(fed.state, fed.config, to, policy, keep)
                if as_json and pause is not None:
                    print_event(copied)
                else:
                    print_result(
                        as_json,
                        copied,
                        f"snapshot {copied['snapshot']} in {copied['to']}: {counted(copied['entries'], 'entry')}, "
                        f"{counted(copied['files'], 'file')}, {counted(copied['records'], 'file')} of evaluations, "
                        f"{counted(copied['objects'], 'object')}, "
                        f"{copied['new_objects']} of them new ({counted(copied['new_bytes'], 'byte')})",
                    )
            except GymError as error:
                if pause is None or error.code in (ErrorCode.PERMISSION_DENIED, ErrorCode.STATE_CORRUPT):
                    raise
                err.print(f"this backup failed: {error}")
            if pause is None:
                return
            time.sleep(pause)


def restore(
    folder: Folder = DEFAULT_FOLDER,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="Folder or URL of the backups; omit it if you copied the folder back yourself.",
            show_default=False,
        ),
    ] = None,
    snapshot: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the snapshot.", show_default="the newest")
    ] = None,
    newest_head: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the newest known head, from `gym-client ledger head --json`.",
            show_default=False,
        ),
    ] = None,
    fork: Annotated[
        bool, typer.Option("--fork", help="Continue from an older state; contributors are notified.")
    ] = False,
    at: Annotated[
        int | None,
        typer.Option(
            min=0, help="Without --from: number of the last valid entry.", show_default="the newest"
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Reason, shown to contributors and written to the ledger.")
    ] = "restored from a backup",
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of an empty database to use instead of the config's.", show_default=False
        ),
    ] = None,
    objects: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Folder or URL of objects, instead of the config's storage.objects.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Restore a hub's folder from a backup, and sign the ledger entry from which it continues."""
    with spinner("loading torch"):
        from gym_server.backup.restore import fork_in_place, read_head
        from gym_server.backup.restore import restore as run_restore

    known = None if newest_head is None else read_head(newest_head)
    if source is None:
        if not fork or snapshot is not None or database is not None or objects is not None:
            raise GymError(
                ErrorCode.USAGE,
                "nothing to restore from",
                "pass --from URL, or only --fork for a folder that you copied back",
            )
        signed = fork_in_place(folder, reason, at, known)
        print_result(
            as_json,
            signed.to_dict(),
            f"signed: {folder} continues from entry {signed.statement.restored_at_entry}",
        )
        return
    if at is not None:
        raise GymError(
            ErrorCode.USAGE,
            "--at cannot be combined with --from",
            "a snapshot records its own last entry",
        )
    facts = run_restore(
        source,
        folder,
        snapshot=snapshot,
        known=known,
        fork=fork,
        reason=reason,
        database_url=database,
        objects=objects,
    )
    print_result(
        as_json,
        facts,
        f"restored snapshot {facts['snapshot']} to {facts['dir']}: {counted(facts['objects'], 'object')}; the ledger "
        f"continues from entry {facts['entries']}",
        note="Everything signed later is undone, including revocations, key rotations and transfers. Next: "
        "gym-server run",
    )


def check(
    folder: Folder = DEFAULT_FOLDER,
    backup_at: Annotated[
        str | None,
        typer.Option(
            "--backup",
            metavar="URL",
            help="Check the backups in this folder or URL instead of a hub.",
            show_default=False,
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --backup: check only this snapshot.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a hub or a backup is complete and unchanged."""
    with spinner("loading torch"):
        from gym_server.backup.backup import check_backup, check_hub

    if backup_at is not None:
        with spinner("checking the backup"):
            facts = check_backup(backup_at, snapshot)
    elif snapshot is not None:
        raise GymError(ErrorCode.USAGE, "--snapshot requires --backup", "add --backup URL")
    else:
        with opened(folder) as fed, spinner("checking the hub"):
            facts = check_hub(fed.state)
    if as_json:
        print_json({"valid": True, **facts})
    else:
        counts = {name: value if isinstance(value, int) else len(value) for name, value in facts.items()}
        counts.pop("server", None)
        out.print(f"valid: {counts_in_words(counts)}")


def gc(
    folder: Folder = DEFAULT_FOLDER,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Keep files younger than this, such as 7d or 12h.",
            show_default="storage.keep_unneeded_seconds",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be deleted, and delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete unreferenced objects and temporary files, as a running hub does every ten minutes."""
    with opened(folder) as fed, spinner("looking for unreferenced files"):
        from gym_server.backup.gc import gc as run_gc

        deleted = run_gc(fed.state, fed.config, None if grace is None else parse_duration(grace), dry_run)
    if as_json:
        print_json(deleted)
        return
    verb = "would delete" if dry_run else "deleted"
    out.print(
        f"{verb} {counted(deleted['objects'], 'object')} ({counted(deleted['object_bytes'], 'byte')}), "
        f"{counted(deleted['staging'], 'leftover')} ({counted(deleted['staging_bytes'], 'byte')}) and "
        f"{counted(deleted['records'], 'file')} of evaluations ({counted(deleted['record_bytes'], 'byte')}); "
        f"kept {counted(deleted['kept'], 'object')} ({counted(deleted['kept_bytes'], 'byte')})"
    )


def parse_duration(text: str) -> float:
    """Convert a duration such as ``90s``, ``30m``, ``1h`` or ``7d`` to seconds.

    Raises:
        GymError: ``USAGE`` quoting an invalid duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise GymError(
            ErrorCode.USAGE, f"{text!r} is not a duration", "use a number and s, m, h or d: 30m, 1h, 7d"
        )
    return float(match[1]) * _UNITS[match[2]]

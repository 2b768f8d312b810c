"""Copies of a PostgreSQL database with pg_dump and pg_restore; passwords are never passed as arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

_DEBIAN = Path("/usr/lib/postgresql")


def without_password(url: str) -> str:
    """Return a database URL with the password hidden."""
    try:
        return plain(make_url(url).render_as_string(hide_password=True), 200)
    except (ArgumentError, ValueError):
        return "an invalid URL"


def dump(url: str, archive: Path) -> None:
    """Write an archive of one consistent state of the database.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` without pg_dump; ``UNAVAILABLE`` with its error message.
    """
    _run("pg_dump", make_url(url), "--format=custom", "--no-owner", f"--file={archive}")


def load(url: str, archive: Path) -> None:
    """Restore an archive into an empty database, completely or not at all.

    Raises:
        GymError: ``FILE_EXISTS`` if the database has tables; otherwise as in ``dump``.
    """
    engine = create_engine(url)
    try:
        if inspect(engine).get_table_names():
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"the database {without_password(url)} is not empty",
                "make a new one, and name it with --database",
            )
    finally:
        engine.dispose()
    _run("pg_restore", make_url(url), "--no-owner", "--single-transaction", "--exit-on-error", str(archive))


def _run(program: str, url: URL, *arguments: str) -> None:
    found = shutil.which(program) or next(
        map(str, sorted(_DEBIAN.glob(f"*/bin/{program}"), reverse=True)), None
    )
    if found is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{program} is not on this machine, and PostgreSQL is copied by it",
            "install PostgreSQL's client programs (Debian: apt install postgresql-client)",
        )
    given = {"PGHOST": url.host, "PGPORT": url.port, "PGUSER": url.username, "PGPASSWORD": url.password}
    for name, value in url.query.items():
        if name in ("host", "port"):
            given[f"PG{name.upper()}"] = value if isinstance(value, str) else value[0]
    environment = {**os.environ, **{name: str(value) for name, value in given.items() if value}}
    done = subprocess.run(
        [found, "--no-password", f"--dbname={url.database}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise GymError(
            ErrorCode.UNAVAILABLE, f"{program}: {done.stderr.strip()[-500:]}", "is the database there?"
        )

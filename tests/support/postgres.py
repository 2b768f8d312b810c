"""A PostgreSQL server of the tests' own: Debian's binaries, a folder under /tmp, a free port, and a password.

It ends with the process that started it, even when that is killed: its keeper waits on a pipe from it.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import URL

from tests.support.wait import SECONDS

PASSWORD = "Wagtail-7-Quince"
"""Found in no message and no log, as tests hold."""

_KEEPER = """
folder=$1; shift
"$@" &
echo $!
trap '' INT TERM
read said
kill -QUIT $!
wait $!
[ -n "$said" ] || rm -rf "$folder"  # the process that started it is gone
"""


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL's programs; None where there is none."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    return max(found, key=lambda path: int(path.parent.name), default=None)


def why_not() -> str | None:
    """The reason for which no server can be started here."""
    if binaries() is None:
        return "no PostgreSQL in /usr/lib/postgresql (Debian: apt install postgresql)"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed (pip install 'gym-fed[postgres]')"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return None


class PostgresServer:
    """Started by making it; ``restart`` is what an administrator does in the middle of a round."""

    def __init__(self) -> None:
        programs = binaries()
        assert programs is not None
        self._postgres = programs / "postgres"
        self.folder = Path(tempfile.mkdtemp(prefix="gym-postgres-"))
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = _user()
            assert user is not None
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        subprocess.run(
            [
                *(programs / "initdb", "-D", self.folder / "data", "-U", "hub", "-A", "scram-sha-256"),
                *("--no-sync", "-E", "UTF8", "--locale=C.UTF-8", f"--pwfile={secret}"),
            ],
            check=True,
            capture_output=True,
            cwd=self.folder,
            **self._as,
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.start()

    def start(self) -> None:
        settings = ("fsync=off", "listen_addresses=127.0.0.1", f"port={self.port}", "log_connections=off")
        options = [part for value in settings for part in ("-c", value)]
        folder = str(self.folder)
        command = [str(self._postgres), "-D", f"{folder}/data", "-k", folder, *options]
        self._keeper: subprocess.Popen[bytes] = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "keeper", folder, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self.folder / "log", "ab"),  # noqa: SIM115 (the server's)
            cwd=self.folder,
            start_new_session=True,
            **self._as,
        )
        assert self._keeper.stdout is not None
        self.pid = int(self._keeper.stdout.readline())
        end = time.monotonic() + SECONDS
        while True:
            try:
                self.execute("SELECT 1")
                return
            except Exception:  # whatever the driver calls a server that is not there yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Fast by default; SIGQUIT as after a power cut."""
        os.kill(self.pid, number)
        while (self.folder / "data" / "postmaster.pid").exists():
            time.sleep(0.02)

    def is_running(self) -> bool:
        return (self.folder / "data" / "postmaster.pid").exists()

    def start_again(self) -> None:
        """Start it after ``stop``."""
        self._end_keeper()
        self.start()

    def restart(self, number: signal.Signals = signal.SIGINT) -> None:
        self.stop(number)
        self.start_again()

    def new_database(self) -> str:
        """The URL of a new empty database."""
        name = f"hub_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, name: str = "postgres", password: str = PASSWORD) -> str:
        url = URL.create("postgresql+psycopg", "hub", password, "127.0.0.1", self.port, name)
        return url.render_as_string(hide_password=False)

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """One statement of the administrator."""
        import psycopg

        where = f"host=127.0.0.1 port={self.port} user=hub password={PASSWORD} dbname={database}"
        with psycopg.connect(where, autocommit=True, connect_timeout=5) as connection:
            cursor: Any = connection.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        self._end_keeper()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_keeper(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.communicate(b"end\n")


def _user() -> Any:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


def database_url(request: pytest.FixtureRequest) -> str:
    """A new database of the kind that a fixture's parameter names; SQLite's is inside the hub's folder."""
    if request.param == "sqlite":
        return "sqlite:///hub.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()

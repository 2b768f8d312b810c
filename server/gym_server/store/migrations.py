"""Databases of earlier releases are brought to today's schema when they are opened, in one transaction."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, LargeBinary, inspect, literal_column, select

from gym_fed.ledger.subjects import subjects
from gym_server.store.tables import ledger, ledger_signatures, ledger_subjects, settings

SCHEMA_VERSION = "2"


def migrate(tx: Connection, found: str) -> str:
    """Take the steps from schema ``found`` on; tables that are only new exist already.

    Returns:
        The schema that the database now has: ``SCHEMA_VERSION``, or ``found`` where no step leads on from it.
    """
    while found in _STEPS:
        step, found = _STEPS[found]
        step(tx)
        tx.execute(settings.update().where(settings.c.key == "schema_version").values(value=found))
    return found


def _signatures_to_heads(tx: Connection) -> None:
    """Version 2 signs heads, which stand for every entry before them, and no entry by itself.

    The old signatures are kept until ``Ledger`` has checked them and signed the first head.
    """
    if "signature" in {column["name"] for column in inspect(tx).get_columns("ledger")}:
        copied = select(ledger.c.sequence, literal_column("signature", LargeBinary))
        tx.execute(ledger_signatures.insert().from_select(["sequence", "signature"], copied))
        tx.exec_driver_sql("ALTER TABLE ledger DROP COLUMN signature")
    for sequence, body in tx.execute(select(ledger.c.sequence, ledger.c.body)).all():
        for contributor in sorted(subjects(body)):
            tx.execute(ledger_subjects.insert().values(sequence=sequence, contributor=contributor))


_STEPS: dict[str, tuple[Callable[[Connection], None], str]] = {"1": (_signatures_to_heads, "2")}

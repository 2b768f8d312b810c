"""Find evaluation records for backups and gc: complete pairs of document and samples, named by their sha256.

A hub runs without its records, which are only evidence. The ledger names the documents of the gate's evaluations, and a
document names its samples.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection, select

from gym_fed.core.errors import GymError
from gym_fed.core.files import file_sha256
from gym_fed.delta.base import BaseSpec
from gym_fed.evaluation.records.document import RecordDocument, is_record_id, samples_path
from gym_fed.evaluation.records.reader import read_document
from gym_fed.evaluation.records.writer import IDENTITY
from gym_fed.trust.ledger.evaluations import EVALUATED
from gym_server.evaluations.records import records_folder
from gym_server.store.tables import ledger, rounds, versions

_OVER = ("committed", "aborted")
_ROUND = re.compile(r"\bround (\d+),")


def whole_records(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield matching documents and samples, each with its sha256; incomplete records are skipped."""
    for path in _documents(folder):
        # the hub may be writing it, and a damaged record is evaluated again
        with contextlib.suppress(GymError, OSError):
            document, samples = read_document(path), samples_path(path)
            digests = file_sha256(path), file_sha256(samples)
            if digests[1] == document.detailed_evaluation_results.checksum:
                yield from zip((path, samples), digests, strict=True)


def missing_records(folder: Path, tx: Connection) -> int:
    """Return the number of documents that the ledger names but that are missing from the hub's folder."""
    named = _named(tx)
    return len(named - {file_sha256(path) for path in _documents(folder)}) if named else 0


def unneeded_records(folder: Path, base: BaseSpec, tx: Connection, before: float) -> list[Path]:
    """Return record files that belong to no ledger entry and no version, and leftovers of killed writes.

    Args:
        folder: The hub's folder.
        base: The base model.
        tx: A read transaction.
        before: Unix seconds; younger files are kept.
    """
    named = _named(tx)
    known = {base.digest, *tx.scalars(select(versions.c.digest))}
    living = set(tx.scalars(select(rounds.c.server_round).where(rounds.c.state.not_in(_OVER))))
    documents = list(_documents(folder))
    kept = {path for path in documents if _is_needed(path, named, known, living)}
    kept |= {samples_path(path) for path in kept}
    return [
        path
        for path in sorted((records_folder(folder) / "data").rglob("*"))
        if path.is_file() and path not in kept and path.stat().st_mtime <= before
    ]


def _documents(folder: Path) -> list[Path]:
    found = (records_folder(folder) / "data").glob("*/*/*/*.json")
    return sorted(path for path in found if is_record_id(path.stem) and not path.is_symlink())


def _named(tx: Connection) -> set[str]:
    """Return the sha256 of the documents that ledger entries name."""
    found = set[str]()
    for text in tx.scalars(select(ledger.c.body).where(ledger.c.kind == EVALUATED)):
        for suite in json.loads(text).get("suites", ()):
            found |= set(suite.get("records", {}).values())
    return found


def _is_needed(path: Path, named: set[str], known: set[str], living: set[int]) -> bool:
    try:
        document = read_document(path)
    except GymError:
        return True  # unreadable, so keep it
    identity = _identity(document)
    of_round = _ROUND.search(identity.get("rows", ""))
    if of_round is not None:
        return int(of_round[1]) in living or file_sha256(path) in named
    return identity.get("model") in known


def _identity(document: RecordDocument) -> dict[str, str]:
    details = document.model_info.additional_details
    return {
        key.removeprefix(IDENTITY): str(value) for key, value in details.items() if key.startswith(IDENTITY)
    }

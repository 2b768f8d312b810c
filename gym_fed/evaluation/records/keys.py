"""Paths of records, named by a digest of all that their results depend on."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from gym_fed.core.json_files import canonical_json
from gym_fed.evaluation.results import EvalResults

SEVERAL = "several"
"""The suite of a run of several tasks without a suite."""

_MAX_PART = 80


def record_id(identity: Mapping[str, str]) -> str:
    """Return the id of a record, which is the same for the same identity on every machine.

    The schema requires a UUID of version 4; its bits are those of a SHA-256.
    """
    digest = hashlib.sha256(canonical_json(dict(identity))).digest()
    return str(uuid.UUID(bytes=digest[:16], version=4))


def is_record_id(text: str) -> bool:
    """Return True if a text has the form of a record's id."""
    return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text, re.ASCII) is not None


def model_id(model: str) -> tuple[str, str]:
    """Return developer and name of a model for the schema's paths; a local folder's developer is ``local``."""
    parts = [part for part in re.split(r"[/\\]", model) if part not in ("", ".", "..")]
    developer = parts[0] if len(parts) == 2 and model == "/".join(parts) else "local"
    return _part(developer), _part(parts[-1] if parts else "model")


def record_path(results: EvalResults, folder: Path) -> Path:
    """Return the path of a record: ``data/SUITE/DEVELOPER/MODEL/ID.json``."""
    suite = results.facts.get("suite")
    if not isinstance(suite, str):
        suite = next(iter(results.tasks)) if len(results.tasks) == 1 else SEVERAL
    developer, model = model_id(results.model)
    return folder / "data" / _part(suite) / developer / model / f"{record_id(results.identity)}.json"


def paths_of(record: str, folder: Path) -> list[Path]:
    """Return the files of records whose id starts with a text, sorted."""
    if not re.fullmatch(r"[0-9a-f-]{1,36}", record, re.ASCII):
        return []
    paths = (folder / "data").glob(f"*/*/*/{record}*.json")
    return sorted(path for path in paths if is_record_id(path.stem))


def samples_path(path: Path) -> Path:
    """Return the file of samples next to a record's document."""
    return path.with_name(f"{path.stem}_samples.jsonl")


def _part(text: str) -> str:
    """Convert a text to one part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:_MAX_PART] or "unnamed"

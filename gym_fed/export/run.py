"""Export a model: write it, read it back in a fresh process, compare, and record the result in ``export.json``."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gym_fed.base.files import CARD, TRAVELS
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock, lockable_folder
from gym_fed.core.files import (
    file_sha256,
    full_disk_named,
    whole_file_or_none,
    whole_or_not_at_all,
    write_atomically,
)
from gym_fed.core.json_files import read_object
from gym_fed.delta.kept import MIN_KEPT
from gym_fed.export.checking import ReadBack
from gym_fed.export.choice import resolve_format
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.source import Source, differs, licences_of
from gym_fed.version import __version__


def require_new(path: Path, chosen: ExportFormat) -> None:
    """Refuse a path that exists (even as a dangling link), is below a file, or already has companion files.

    Raises:
        GymError: ``FILE_EXISTS``.
    """
    if os.path.lexists(path):
        raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists", "choose another name")
    above = next(place for place in path.absolute().parents if place.exists())
    if not above.is_dir():
        problem = f"{path}: {above} is a file, not a folder"
        raise GymError(ErrorCode.FILE_EXISTS, problem, "choose another folder")
    if chosen.is_file:
        require_no_companions(path, licences=chosen.merges)


def export(
    source: Source, format: str | None, path: Path, options: Options, *, check: bool = True
) -> dict[str, Any]:
    """Export ``source`` to the new file or folder ``path``.

    Args:
        source: See ``open_source``.
        format: A member of ``EXPORT_FORMATS``; None: by the suffix of ``path``.
        path: The path to write to; nothing is overwritten.
        options: The options of the export.
        check: Read it back in a fresh process and compare.

    Returns:
        The contents of ``export.json``.

    Raises:
        GymError: ``FILE_EXISTS``, also if another export creates the path meanwhile; ``USAGE`` for a format that cannot
            hold the model; ``EXPORT_DIFFERS`` if the export computes something else, or ``DISK_FULL``; in
            both cases nothing is left. ``EXPORT_UNCHECKED`` if it could not be read back; it is then kept at
            ``unchecked_path``.
    """
    chosen, options = resolve_format(format, path, options)
    require_new(path, chosen)
    with options.processes:
        return _export(source, chosen, path, options, check=check)


def _export(
    source: Source, chosen: ExportFormat, path: Path, options: Options, *, check: bool
) -> dict[str, Any]:
    begun = time.monotonic()
    chosen.check(source)
    if check:
        chosen.require_reader(source)
    chosen.start(options.processes, check=check)
    record = _about(chosen, source, options)
    checking = ReadBack(chosen, source, options) if check else None
    if checking is not None:
        checking.before_merging()
    options = chosen.of_source(source, options)
    if quantization := chosen.quantization(options):
        record["quantization"] = quantization
    stored_as = chosen.stored_as(options) if chosen.merges else None
    share = None if stored_as is None else source.kept(stored_as)
    reasons = [reason for reason in ("" if check else "the check was skipped", chosen.unchecked) if reason]
    if not check and chosen.merges and stored_as is None and source.base is not None:
        lossy = chosen.quantization(options) or chosen.name
        reasons.append(f"the share of the delta that {lossy} keeps was not measured")
    record["unchecked"] = "; ".join(reasons) or False
    unfinished = whole_file_or_none(path) if chosen.is_file else whole_or_not_at_all(path)
    with full_disk_named(path), ExitStack() as held, unfinished as part:
        if checking is not None:
            checking.before_writing(options)
        options.report("writing", 0, 0)
        written = time.monotonic()
        chosen.write(source, part, options)
        if stored_as is None and (share := chosen.kept(source, part)) is not None:
            stored_as = chosen.suffix
        from gym_fed.export.card import card_text, contributors_file

        card, card_notes = card_text(source, chosen, options, path.name)
        if not chosen.is_file:
            write_atomically(part / CARD, card.encode("utf-8"))
            if (contributors := contributors_file(source)) is not None:
                write_atomically(part / contributors.name, contributors.read_bytes())
        record["seconds"] = {"writing": round(time.monotonic() - written, 1)}
        record["files"] = {path.name: file_sha256(part)} if chosen.is_file else _digests(part)
        record["bytes"] = sum(file.stat().st_size for file in _files(part))
        record.update(chosen.facts(source, options))
        if card_notes:
            record["notes"] = [*record.get("notes", ()), *card_notes]
        if not chosen.is_file:
            _require_licences(source, part)
        try:
            record["check"] = None if checking is None else checking.of(part)
        except GymError as error:
            if error.code is not ErrorCode.EXPORT_UNCHECKED:
                raise
            raise _kept_unchecked(chosen, source, part, path, record, card, error) from error
        _note_uncompared(record)
        if share is None and record["check"] is not None:
            share = record["check"].get("effect_kept")
        if share is not None:
            _note_kept(record, share, stored_as, chosen, options)
        record["seconds"]["all"] = round(time.monotonic() - begun, 1)
        if chosen.is_file:
            # Open until the file has its final name
            held.enter_context(_companions(chosen, source, path, record, card))
        else:
            write_atomically(part / RECORD, _text(record))
    return record


def unchecked_path(path: Path, *, is_file: bool) -> Path:
    """Return the first free name for an unchecked export: ``model.unchecked.gguf``, ``-2`` and so on."""
    number, suffix = 1, path.suffix if is_file else ""
    stem = path.name.removesuffix(suffix)
    while True:
        name = f"{stem}.unchecked{f'-{number}' if number > 1 else ''}{suffix}"
        if not os.path.lexists(path.with_name(name)):
            return path.with_name(name)
        number += 1


def _kept_unchecked(
    chosen: ExportFormat,
    source: Source,
    part: Path,
    path: Path,
    record: dict[str, Any],
    card: str,
    error: GymError,
) -> GymError:
    """Rename an export that could not be checked, write its record, and return the error."""
    unchecked = unchecked_path(path, is_file=chosen.is_file)
    record |= {"check": None, "unchecked": error.message}
    if chosen.is_file:
        require_no_companions(unchecked, licences=chosen.merges)
        record["files"] = {unchecked.name: file_sha256(part)}
        with _companions(chosen, source, unchecked, record, card):
            part.rename(unchecked)
    else:
        write_atomically(part / RECORD, _text(record))
        part.rename(unchecked)
    return GymError(error.code, f"{error.message}; the unchecked export is kept as {unchecked}", error.hint)


def _about(chosen: ExportFormat, source: Source, options: Options) -> dict[str, Any]:
    """Return the entries of the record that are known before anything is written."""
    from gym_fed.delta.base import tensors_digest

    options.report("hashing the source", 0, 0)
    record: dict[str, Any] = {
        "format": chosen.name,
        "source": source.shown_name,
        "source_digest": tensors_digest(source.model),
        "base": source.shown_base,
        "versions": {"gym-fed": __version__, **_versions(("torch", "transformers", *chosen.requires))},
    }
    return record


def _note_uncompared(record: dict[str, Any]) -> None:
    """Add a note for each part of the files that the check could not compare."""
    for part in ("vocabulary", "tensors"):
        if why := ((record["check"] or {}).get(part) or {}).get("not_compared"):
            note = f"only the model's answers were compared, not the {part} in the file: {why}"
            record["notes"] = [*record.get("notes", ()), note]


def _note_kept(
    record: dict[str, Any], share: float, stored_as: str | None, chosen: ExportFormat, options: Options
) -> None:
    """Record the share of the delta that is kept; if it is small, add a note on options that keep more."""
    name = stored_as or chosen.quantization(options)
    of = "delta" if stored_as else "delta's effect on the logits"
    record["kept"] = {"share": share, "of": of, "stored_as": name}
    if share < MIN_KEPT:
        finer = "--dtype float32" if chosen.takes_dtype and stored_as else chosen.finer
        note = f"{name} keeps {share:.1%} of the {of}; {finer} keeps more"
        record["notes"] = [*record.get("notes", ()), note]


def _versions(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the packages that provide these modules."""
    versions = {}
    for module in modules:
        name = module.replace("_", "-")
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # a module whose name differs from its package's
    return versions


def _require_licences(source: Source, folder: Path) -> None:
    """Refuse a folder that lacks a licence of the model.

    Raises:
        GymError: ``EXPORT_DIFFERS``.
    """
    for name, file in licences_of(source).items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != file.read_bytes():
            raise differs(f"the licence {file} was not copied", is_always_checked=True)


def _companions(
    chosen: ExportFormat, source: Source, path: Path, record: dict[str, Any], card: str
) -> AbstractContextManager[None]:
    """Write a file's record, card, and licences (as ``NAME.LICENSE``); see ``companion_files``."""
    licences = licences_of(source) if chosen.merges else {}
    texts = {companion(path, name).name: file.read_bytes() for name, file in licences.items()}
    texts[companion(path, CARD_NAME).name] = card.encode("utf-8")
    sha256 = record["files"][path.name]
    record["files"] |= {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    texts = {companion(path, RECORD).name: _text(record), **texts}
    return companion_files(path, texts, sha256, licences=chosen.merges)


def _text(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record, indent=2)}\n".encode()


def _files(part: Path) -> list[Path]:
    return [part] if part.is_file() else sorted(file for file in part.rglob("*") if file.is_file())


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file, by its path in the folder."""
    return {str(file.relative_to(folder)): file_sha256(file) for file in _files(folder)}


RECORD = "export.json"
CARD_NAME = "card.md"
"""The name of the model card next to a file, after the file's own name."""


def companion(path: Path, name: str) -> Path:
    """Return the path of a file that accompanies ``path``."""
    return path.with_name(f"{path.name}.{name}")


def require_no_companions(path: Path, *, licences: bool) -> None:
    """Refuse a new file ``path`` that already has a record or card, or, with ``licences``, a licence.

    A record without its file, left by a killed export, is ignored, as are licences whose SHA-256 it contains.

    Raises:
        GymError: ``FILE_EXISTS`` naming the first one.
    """
    record = companion(path, RECORD)
    leftovers = _leftovers(record, path)
    existing = [file for file in (record, companion(path, CARD_NAME)) if os.path.lexists(file)]
    for pattern in TRAVELS if licences else ():
        existing += sorted(path.parent.glob(f"{glob.escape(path.name)}.{pattern}"))
    for file in existing:
        is_left = file == record and bool(leftovers)
        if not is_left and not (_is_plain(file) and leftovers.get(file.name) == file_sha256(file)):
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{file} already exists, but exporting {path.name} would write it",
                "move it away, or choose another name",
            )


@contextmanager
def companion_files(path: Path, files: Mapping[str, bytes], sha256: str, *, licences: bool) -> Iterator[None]:
    """Write ``files`` by their names, the record first; ``path`` must exist when the block ends.

    Otherwise they are removed. Exports into one folder are serialised here, so that a record always belongs to the
    existing file.

    Args:
        path: The new file.
        files: The contents of its accompanying files.
        sha256: The SHA-256 of the new file.
        licences: See ``require_no_companions``.

    Raises:
        GymError: ``FILE_EXISTS`` if a name was taken meanwhile; ``DISK_FULL``.
    """
    with _one_at_a_time(path.parent):
        if os.path.lexists(path):
            problem = f"{path} exists: another process wrote it"
            raise GymError(ErrorCode.FILE_EXISTS, problem, "choose another name")
        require_no_companions(path, licences=licences)
        try:
            for name, data in files.items():
                write_atomically(path.with_name(name), data)
            yield
        except BaseException:
            if not (_is_plain(path) and file_sha256(path) == sha256):
                for name in files:
                    path.with_name(name).unlink(missing_ok=True)
            raise


def _leftovers(record: Path, path: Path) -> Mapping[str, str]:
    """Return the SHA-256 digests by name from the record of a missing file; empty for any other file."""
    files: object = None
    if _is_plain(record) and not os.path.lexists(path):
        with suppress(OSError, GymError):  # not one of gym-fed's records: refused
            files = read_object(record).get("files")
    return files if isinstance(files, dict) and path.name in files else {}


def _is_plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    with lockable_folder(folder, follow=True) as descriptor:
        with suppress(OSError):  # a disk without locks
            lock(descriptor, wait=True)
        yield

"""The model card of an export: its origin, licence, data and training."""

from __future__ import annotations

from pathlib import Path

from gym_fed.base.files import licence_of
from gym_fed.base.models import is_hub_name, resolve
from gym_fed.core.errors import GymError
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.source import Source
from gym_fed.registry.card.facts import FILE, lineage_of
from gym_fed.registry.card.readme import card_of, spdx
from gym_fed.registry.manifest import NOT_STATED, BaseUsed, DataUsed, Kind, Lineage, ModelManifest

_LIBRARIES = {"gguf": "gguf", "gguf_adapter": "gguf", "onnx": "onnx", "openvino": "openvino"}
"""The Hub's library name for each format that needs neither transformers nor PEFT."""
_KINDS: dict[str, Kind] = {"adapter": "adapter", "gguf_adapter": "adapter", "delta": "delta"}
"""The content of each format that does not contain all weights."""


def licence_name(source: Source) -> str:
    """Return the licence name from the nearest model card, in lower case; the base's if no other card has one."""
    return next(filter(None, map(licence_of, source.folders)), "")


def lineage(source: Source) -> tuple[Lineage, list[str]]:
    """Collect lineage from the records of the runs behind a model, with notes on unreadable records.

    Method and digests are those of the nearest run; the data are those of all runs.
    """
    nearest, notes = Lineage(), list[str]()
    data: list[DataUsed] = []
    for number, place in enumerate(_record_folders(source)):
        try:
            run_lineage = lineage_of(place, source.delta if number == 0 else None)
        except GymError as error:
            notes.append(f"the model card omits the lineage in {place.name}: {error.message}")
            continue
        nearest = run_lineage if nearest == Lineage() else nearest
        data += [used for used in run_lineage.data if used not in data]
    return nearest.model_copy(update={"data": data}), notes


def card_text(source: Source, chosen: ExportFormat, options: Options, name: str) -> tuple[str, list[str]]:
    """Write the card of an export.

    Args:
        source: The exported model.
        chosen: The format.
        options: The options of the export.
        name: The name of the new file or folder.

    Returns:
        The text, and notes for the user.
    """
    origin, notes = lineage(source)
    quantization = chosen.quantization(options)
    written = f"{chosen.name} ({quantization})" if quantization else chosen.name
    own = licence_name(source)
    manifest = ModelManifest.model_construct(
        name=name,
        version=1,
        kind=_KINDS.get(chosen.name, "weights"),
        licence=spdx(own) if own else NOT_STATED,
        description=f"{source.shown_name}, exported as {written}.",
        base=_base(source),
        files=[],
        lineage=origin,
        created_at=0,
    )
    folder = next(iter(_record_folders(source)), None)
    relation = "quantized" if source.base is None and quantization else None
    return card_of(manifest, (), folder, library=_LIBRARIES.get(chosen.name), relation=relation), notes


def _base(source: Source) -> BaseUsed | None:
    """Return the base, or an untuned Hub model itself; None for any other untuned model."""
    named = source.base or (source.name if is_hub_name(source.name) else None)
    if named is None:
        return None
    if source.base is None:
        licence = licence_of(Path(resolve(named)))
    else:
        licence = licence_of(source.folders[-1]) if source.folders else ""
    return BaseUsed(name=source.shown_base or named, licence=spdx(licence) if licence else NOT_STATED)


def _record_folders(source: Source) -> list[Path]:
    """Return the folders that may hold records of a run or of a hub's version, nearest first."""
    own = Path(source.name).expanduser()
    places = dict.fromkeys([*([own] if own.is_dir() else []), *source.folders])
    records = ("run.json", FILE)
    return [place for place in places if source.delta or any((place / name).is_file() for name in records)]


def contributors_file(source: Source) -> Path | None:
    """Return the list of a model's contributors, written by ``gym-server model``; None if there is none."""
    return next((path for place in _record_folders(source) if (path := place / FILE).is_file()), None)

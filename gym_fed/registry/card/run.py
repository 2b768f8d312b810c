"""The lineage of a run or delta without paths of this machine, and the contributors of a global version."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.config.train.catalogue import catalogue_entry
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted, plain
from gym_fed.data.registry import CARD_NAME, DatasetManifest
from gym_fed.registry.manifest import DataUsed, Lineage

OWN_FILES = "files of the trainer"
"""Replaces the names of local files, which are not published."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


def lineage_of(folder: Path | None, delta: Path | None = None) -> Lineage:
    """Return the lineage of the run whose output ``folder`` is, or of a ``.gymdelta``; empty without a run's records.

    Raises:
        GymError: ``MODEL_INVALID`` or ``CONFIG_INVALID`` for records that cannot be read.
    """
    if delta is not None:
        return _of_delta(delta)
    if folder is None or not (folder / "run.json").is_file() or not (folder / "config.yaml").is_file():
        return Lineage()
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.config.yaml.file import load_config

    config = load_config(folder / "config.yaml", TrainingConfig)
    return Lineage(
        data=list(_data_of(config.data)),
        data_sha256=_hex(read_object(folder / "run.json").get("data_sha256")),
        config_sha256=_hex(environment(folder).get("config_sha256")),
        method=f"{config.algorithm}, {config.finetuning}, {counted(config.max_steps, 'step')}"
        if config.max_steps is not None
        else f"{config.algorithm}, {config.finetuning}",
    )


def environment(folder: Path) -> dict[str, Any]:
    """Return ``environment`` of a run's ``environment.json``; empty if it has none."""
    file = folder / "environment.json"
    value = read_object(file).get("environment") if file.is_file() else None
    return value if isinstance(value, dict) else {}


def result(folder: Path) -> dict[str, Any]:
    """Return a run's ``result.json``; empty if it has none."""
    file = folder / "result.json"
    return read_object(file) if file.is_file() else {}


def _data_of(sources: Iterable[DataConfig]) -> Iterable[DataUsed]:
    for source in sources:
        if source.tasks is not None:
            yield DataUsed(name=f"tasks of gym-fed: {', '.join(source.tasks)}"[:300], licence="Apache-2.0")
        elif source.name is not None:
            entry = catalogue_entry(source.name)
            yield DataUsed(name=source.name, licence=entry.licence, hub=entry.hub)
        elif source.hub is not None:
            yield DataUsed(name=source.hub, hub=source.hub)
        elif source.dataset is not None:
            yield DataUsed(name=plain(source.dataset))
        else:
            yield _of_path(source.path or "")


def _of_path(path: str) -> DataUsed:
    """Return a pulled data set of the registry by its manifest, and anything else without a name."""
    card = Path(path).expanduser() / CARD_NAME
    if "://" in path or not card.is_file():
        return DataUsed(name=OWN_FILES)
    try:
        manifest = DatasetManifest.model_validate(json.loads(card.read_bytes()))
    except ValueError as error:
        raise GymError(ErrorCode.DATA_INVALID, f"{card}: {error}", "pull the data set again") from error
    return DataUsed(name=f"{manifest.name}@{manifest.version}", licence=manifest.licence)


def _of_delta(file: Path) -> Lineage:
    from gym_fed.delta.file import DeltaFile

    with DeltaFile.open(file) as delta:
        extra = delta.manifest.extra
        codecs = sorted({record.codec for record in delta.manifest.tensors})
    soup, version = extra.get("soup_digest", ""), extra.get("global_version", "")
    return Lineage(
        soups=[soup] if _DIGEST.fullmatch(soup) else [],
        global_version=version if _DIGEST.fullmatch(version) else None,
        method=plain(f"delta of {', '.join(codecs)}"),
    )


def _hex(value: object) -> str | None:
    return value if isinstance(value, str) and _HEX.fullmatch(value) else None


FILE = "contributors.json"
MAX_SHOWN = 100
"""Maximum number of contributors that a card names."""


@dataclass(frozen=True)
class Contributor:
    """A contributor of a version.

    Attributes:
        contributor: The id.
        name: The name for publication; empty for contributors who are shown by id only.
        share: The contributor's share of the pay for the version's use, 0 to 1.
    """

    contributor: str
    name: str
    share: float


def contributors_in(folder: Path) -> list[Contributor]:
    """Read the contributors recorded in a model folder, the largest share first; empty if there are none.

    Raises:
        GymError: ``MODEL_INVALID`` for a file that cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    document = read_object(
        path, ErrorCode.MODEL_INVALID, "delete it, or write the version again: gym-server model"
    )
    lines = document.get("contributors")
    if not isinstance(lines, list) or not all(map(_is_line, lines)):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{path} does not list contributors with their shares",
            "delete it, or write the version again: gym-server model",
        )
    everybody = [
        Contributor(line["contributor"], line.get("name", ""), float(line["share"])) for line in lines
    ]
    return sorted(everybody, key=lambda line: -line.share)


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("contributor"), str):
        return False
    share = line.get("share")
    if not isinstance(share, int | float) or isinstance(share, bool) or not math.isfinite(share):
        return False
    return isinstance(line.get("name", ""), str)

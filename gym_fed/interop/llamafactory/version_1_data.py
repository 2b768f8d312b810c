"""Data of LLaMA-Factory's version 1: a YAML file of named sources, a file of rows, or a name of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.config.yaml.strict import parse_config, read_config_text
from gym_fed.core.errors import ErrorCode, GymError

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
_KEYS = ("path", "source", "split", "converter", "size", "weight", "streaming")


def sources_of(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Entries of our ``data``, and remarks on what differs.

    Raises:
        GymError: ``CONFIG_INVALID`` with line for an entry that cannot be read as there; ``FILE_NOT_FOUND``.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        return ([{"path": name}] if path.exists() else [{"hub": name}]), []
    entries, marks = parse_config(path, read_config_text(path))
    sources: list[dict[str, Any]] = []
    remarks: list[str] = []
    for entry, settings in entries.items():
        line, column = marks[(entry,)]
        where = f"{path}:{line}:{column}: {entry}"
        if not isinstance(settings, dict) or "path" not in settings:
            raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: has no path")
        if unknown := [key for key in settings if key not in _KEYS]:
            raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: unknown key {unknown[0]!r}")
        source, remark = _source(where, settings)
        sources.append(source)
        remarks += [f"{entry}: {text}" for text in remark]
    return sources, remarks


def holds_pairs(file: Path) -> bool:
    """Whether the rows are pairs of a chosen and a rejected answer: by their converter, or by the first row."""
    if file.suffix not in (".yaml", ".yml"):
        return _first_is_a_pair(file)
    entries, _ = parse_config(file, read_config_text(file))
    return any(
        settings.get("converter") == "pair"
        or (settings.get("converter") is None and _first_is_a_pair(Path(str(settings.get("path")))))
        for settings in entries.values()
        if isinstance(settings, dict)
    )


def _source(where: str, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kind, converter = settings.get("source", "hf_hub"), settings.get("converter")
    if kind not in ("hf_hub", "local"):
        raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: source {kind!r} is none of hf_hub, local")
    if converter is not None and converter not in _FORMATS:
        raise GymError(
            ErrorCode.CONFIG_INVALID, f"{where}: converter {converter!r} is none of {', '.join(_FORMATS)}"
        )
    source: dict[str, Any] = {"path" if kind == "local" else "hub": str(settings["path"])}
    remarks: list[str] = []
    if kind == "hf_hub" and "split" in settings:
        source["split"] = str(settings["split"])
    if converter is not None:
        source["format"] = _FORMATS[converter]
    if (size := settings.get("size")) is not None:
        source["num_examples"] = size
        remarks.append(f"the first {size} rows, where LLaMA-Factory draws as many, some of them twice")
    if (weight := settings.get("weight")) is not None:
        source["weight"] = weight
    if settings.get("streaming"):
        remarks.append("rows are read whole and shuffled whole")
    return source, remarks


def _first_is_a_pair(path: Path) -> bool:
    """By the first row of a local file; False for what is not here, which is refused when it is read."""
    from gym_fed.data.files import read_raw
    from gym_fed.data.locations import find_files

    if not path.is_file():
        return False
    first = next((row for file in find_files(path) for _, row in read_raw(file)), None)
    return isinstance(first, dict) and ("chosen_messages" in first or {"chosen", "rejected"} <= first.keys())

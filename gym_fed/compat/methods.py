"""Methods of ours by the names that they have elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.other_words import note

_WRITTEN = (".gymdelta", "")


def fit(trainer: Any, *given: Any, **named: Any) -> Any:
    """``Trainer.train``."""
    note("trainer.fit", "`trainer.train`")
    return trainer.train(*given, **named)


def build(pipeline: Any) -> Any:
    """The pipeline itself, which can be gone through as it is: rows are read as they are taken."""
    note("DataPipeline.build", "not needed (a pipeline gives rows as it is gone through)")
    return pipeline


def export(trainer: Any, path: str | Path, quantization: str | None = None, **named: Any) -> Any:
    """``Trainer.export`` with the format by the path's suffix; ``quantization="bitdelta"`` is a one-bit delta.

    Raises:
        GymError: ``USAGE`` for GGUF, and for what no format of ours is.
    """
    from gym_fed.training.run.afterwards import format_by_suffix

    suffix, by_suffix = Path(path).suffix, format_by_suffix(Path(path))
    if named or quantization not in (None, "bitdelta") or suffix not in _WRITTEN:
        wrong = next(iter(named), f"quantization={quantization!r}" if suffix in _WRITTEN else suffix)
        raise GymError(
            ErrorCode.USAGE,
            f"export: {wrong} is not known",
            "give format, and codec for a delta; see Trainer.export",
        )
    form = "delta" if quantization is not None else by_suffix
    note("trainer.export(..., quantization=)", f"`trainer.export(path, format={form!r})`")
    return trainer.export(path, form)


def apply_deltasoup(trainer: Any, settings: Any = None) -> Any:
    """``Trainer.apply_deltasoup`` with the global version of the hub that this machine has joined.

    Raises:
        GymError: ``NOT_FOUND`` where no soup of a hub is on this machine.
    """
    from gym_fed.compat.joined import newest_version

    others = {"hub": newest_version(trainer.config)}
    note("trainer.apply_deltasoup()", '`trainer.apply_deltasoup({"hub": MODEL})`')
    return trainer.apply_deltasoup(others, settings)

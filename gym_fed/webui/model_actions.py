"""The actions on models that a page starts as jobs: export, encode, merge and share, each with its command line."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, CODECS, EXPORT_FORMATS, METHODS
from gym_fed.trust.identity.variant import VariantName
from gym_fed.webui.inventory import find_base
from gym_fed.webui.workbench import Workbench

ModelId = Annotated[str, Field(min_length=1, max_length=4096)]
OutputPath = Annotated[str, Field(min_length=1, max_length=1024)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
MAX_MERGED = 64


class ExportAction(StrictModel):
    """Export a model."""

    action: Literal["export"]
    model: ModelId
    variant: VariantName | None = None
    format: Word
    quantization: Word | None = None
    output: OutputPath

    def command(self, workbench: Workbench) -> list[str]:
        """Return the command line.

        Raises:
            GymError: ``MODEL_NOT_FOUND``, ``FILE_EXISTS``, ``PERMISSION_DENIED``; ``USAGE`` for an unknown name.
        """
        find_base(workbench, self.model)
        _require_member(self.format, EXPORT_FORMATS.names(), "format")
        return [
            *("gym", "export", f"--format={self.format}"),
            *([] if self.quantization is None else [f"--quantization={self.quantization}"]),
            *([] if self.variant is None else [f"--variant={self.variant}"]),
            *(f"--output={_new(workbench, self.output)}", "--", self.model),
        ]


class EncodeAction(StrictModel):
    """Encode a fine-tuned model as a delta from its base."""

    action: Literal["encode"]
    base: ModelId
    tuned: ModelId
    codec: Word = "compact"
    output: OutputPath

    def command(self, workbench: Workbench) -> list[str]:
        """Return the command line; errors as in ``ExportAction.command``."""
        for model in (self.base, self.tuned):
            find_base(workbench, model)
        _require_member(self.codec, ("compact", "auto", *CODECS.names()), "codec")
        output = _new(workbench, self.output)
        return [
            "gym",
            "delta",
            "encode",
            f"--output={output}",
            f"--codec={self.codec}",
            "--",
            self.base,
            self.tuned,
        ]


class MergeAction(StrictModel):
    """Merge fine-tuned models of one base."""

    action: Literal["merge"]
    base: ModelId
    updates: list[ModelId] = Field(min_length=2, max_length=MAX_MERGED)
    rule: Word
    output: OutputPath

    def command(self, workbench: Workbench) -> list[str]:
        """Return the command line; errors as in ``ExportAction.command``."""
        for model in (self.base, *self.updates):
            find_base(workbench, model)
        _require_member(self.rule, merge_rules(), "rule")
        return [
            *("gym", "soup", "merge", f"--rule={self.rule}", f"--base={self.base}"),
            *(f"--output={_new(workbench, self.output)}", "--", *self.updates),
        ]


class ShareAction(StrictModel):
    """Publish a model in the registry on this machine."""

    action: Literal["share"]
    model: ModelId
    output: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._/-]{0,128}$")]
    """Name in the registry."""
    licence: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$")] | None = None

    def command(self, workbench: Workbench) -> list[str]:
        """Return the command line; errors as in ``ExportAction.command``."""
        find_base(workbench, self.model)
        licence = [] if self.licence is None else [f"--licence={self.licence}"]
        return ["gym", "models", "push", *licence, "--", self.output, self.model]


ModelAction = Annotated[
    ExportAction | EncodeAction | MergeAction | ShareAction, Field(discriminator="action")
]


def merge_rules() -> list[str]:
    """Return the names of merge methods, followed by those of aggregators."""
    return [*METHODS.names(), *AGGREGATORS.names()]


def _new(workbench: Workbench, output: str) -> str:
    """Return an unused path below the workbench's folder, as an argument for a command."""
    place = workbench.inside(output)
    if place == workbench.folder or os.path.lexists(place):
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} exists", "choose another name")
    return str(place.relative_to(workbench.folder))


def _require_member(name: str, known: object, what: str) -> None:
    names = list(known) if isinstance(known, (list, tuple)) else []
    if name not in names:
        raise GymError(ErrorCode.USAGE, f"{what} {name!r} is unknown", f"one of {', '.join(names)}")

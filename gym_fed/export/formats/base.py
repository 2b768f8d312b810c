"""The base class of export formats, with their options and tolerances."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain, readable_bytes
from gym_fed.export.needs import LIBRARIES_BYTES, ExportNeeds, Weights, default_needs
from gym_fed.export.process import Processes, Report, no_report
from gym_fed.export.source import Source


@dataclass(frozen=True)
class Options:
    """The options of an export.

    Attributes:
        dtype: The dtype of the weights on disk; None keeps the source's.
        shard_size: Maximum size in bytes of one weights file, such as ``5GB``.
        codec: The codec policy of ``delta``.
        quantization: One of the format's ``quantizations``; empty for its first, or none.
        report: Called with the progress ``(stage, done, total)``.
        rank: The rank of the LoRA that a delta is exported as; None: the format's own.
        rows: Held-out rows to measure the quality of that LoRA, or rows that calibrate a quantisation.
        rows_name: The name of the rows, for the record.
        processes: The child processes of the export.
    """

    dtype: str | None = None
    shard_size: str = "5GB"
    codec: CodecPolicy | None = None
    quantization: str = ""
    report: Report = no_report
    rank: int | None = None
    rows: Sequence[dict[str, Any]] = ()
    rows_name: str = ""
    processes: Processes = field(default_factory=Processes, compare=False, repr=False)


READ_BACK = "gym_fed.export.readers.reading"
"""The module whose process reads every format back."""
_VOCABULARY_FACTOR = 4
"""The limit for tokens of the whole vocabulary, relative to that for texts; a wrong row shifts a logit by about 1."""


@dataclass(frozen=True)
class Tolerance:
    """The limits of a comparison; None means no limit.

    Attributes:
        max: The limit on the largest difference between two logits, as a share of the largest logit.
        kl: The limit of the mean Kullback-Leibler divergence over positions, in nats.
        top1: The minimum share of positions with the same most likely token.
        greedy: Whether the greedy tokens must be the same.
    """

    max: float | None = 1e-5
    kl: float | None = None
    top1: float | None = None
    greedy: bool = True

    def problem(self, figures: Mapping[str, Any]) -> str | None:
        """Return why the figures of ``compared`` exceed the limits, or None."""
        if not figures["same_token_ids"]:
            text = figures.get("text")
            example = f", such as {plain(text, 80)!r}" if text else ""
            return f"different token ids for the same texts{example}"
        if not figures.get("same_special_tokens", True):
            return "different special tokens"
        if not figures.get("same_chat_template", True):
            return "a different chat template"
        if self.max is not None and not figures["max"] <= self.max * figures["largest"]:
            return f"logits that are up to {figures['max']:.3g} off (largest logit: {figures['largest']:.3g})"
        drawn = figures.get("vocabulary") or {"max": 0.0, "largest": 0.0}
        if drawn["max"] != drawn["max"]:
            return "NaN logits for some tokens of the vocabulary"
        if self.max is not None and not drawn["max"] <= _VOCABULARY_FACTOR * self.max * drawn["largest"]:
            return f"logits that are up to {drawn['max']:.3g} off for tokens of the whole vocabulary"
        if self.kl is not None and not figures["kl"] <= self.kl:
            return f"probabilities that are {figures['kl']:.3g} nats off, with {self.kl:g} allowed"
        if self.top1 is not None and not figures["top1"] >= self.top1:
            return f"the same most likely token at only {figures['top1']:.1%} of positions, not at {self.top1:.0%}"
        if self.greedy and not figures["same_greedy_tokens"]:
            return "a different answer to the same prompt"
        if not figures.get("same_weights", True):
            return "different weights, although the logits of all texts agree"
        return None


class ExportFormat(ABC):
    """The base class of formats. Instances are stateless."""

    name: ClassVar[str]
    """The value of ``--format``."""

    tolerance: ClassVar[Tolerance] = Tolerance()
    """The tolerance for an export without quantisation."""

    quantizations: ClassVar[Mapping[str, Tolerance]] = MappingProxyType({})
    """Values of ``--quantization`` with their own tolerances; the first is the default."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Modules required in addition to the package's own."""

    install: ClassVar[str] = "pip install 'gym-fed[export]', with -c constraints.txt in a checkout"
    """The extra that installs these modules."""

    suffix: ClassVar[str] = ""
    """The suffix of the format's files."""

    reading: ClassVar[str] = "gym_fed.export.readers.transformers"
    """The module that reads it back: ``load(parts)`` returns a ``readers.reading.LoadedExport``."""

    reader_libraries: ClassVar[tuple[str, ...]] = ()
    """Modules that ``reading`` needs for this format in addition to its own ``LIBRARIES``."""

    merges: ClassVar[bool] = False
    """True if adapters are merged into the weights."""

    takes_rank: ClassVar[bool] = False
    """True if a delta is written as LoRA factors."""

    calibrates: ClassVar[bool] = False
    """True if rows influence the quantisation."""

    is_file: bool = False
    """True for a single file, False for a folder."""

    tried: ClassVar[str] = ""
    """The models that tests export to this format; shown by `gym docs members`."""

    untried: ClassVar[str] = ""
    """Supported models that no test has run."""

    remedy: ClassVar[str] = "report this with the model's name; --skip-check writes it anyway"
    """The remedy if an export without rounding differs."""

    finer: ClassVar[str] = "a finer --quantization, such as f32 of gguf,"
    """The option besides ``--dtype`` that keeps more of a delta than this export; the note adds "keeps more"."""

    reader: ClassVar[str] = "transformers"
    """The module whose library reads it back; its version is recorded in ``export.json``."""

    unchecked: ClassVar[str] = ""
    """Why the target program cannot run on this machine, for the record."""

    takes_dtype: ClassVar[bool] = True
    """True if ``--dtype`` is supported; the command refuses it otherwise."""

    copies_writing: ClassVar[float] = 2.0
    """Copies of the model in float32 in memory until it is written, over all processes."""

    copies_reading: ClassVar[float] = 2.0
    """Copies of the model in float32 in memory while it is read back."""

    copies_on_disk: ClassVar[float] = 0.0
    """Copies of the model in float32 next to the result while it is written."""

    bits: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Bits per weight of the result by quantization; otherwise those of ``--dtype``, or 32."""

    def at(self, path: Path) -> ExportFormat:
        """Return the format for this path; one that can be a file or a folder decides by the suffix."""
        return self

    def require_options(self, options: Options) -> None:
        """Refuse missing packages and unsupported options, before a model is loaded.

        Raises:
            GymError: ``MISSING_DEPENDENCY``, ``USAGE``.
        """
        missing = [name for name in self.requires if find_spec(name) is None]
        if missing:
            problem = f"format {self.name} needs {', '.join(missing)}"
            raise GymError(ErrorCode.MISSING_DEPENDENCY, problem, self.install)
        if options.quantization and options.quantization not in self.quantizations:
            raise GymError(
                ErrorCode.USAGE,
                f"format {self.name} has no quantization {options.quantization}",
                f"it has {', '.join(self.quantizations) or 'none'}",
            )
        data, variant = options.rows or options.rows_name or None, "adapter and gguf_adapter of a variant"
        for option, value, is_read, where in (
            ("--rank", options.rank, self.takes_rank, variant),
            ("--data", data, self.takes_rank or self.calibrates, f"{variant}, awq and gptq"),
        ):
            if value is not None and not is_read:
                problem = f"format {self.name} has no {option}"
                raise GymError(ErrorCode.USAGE, problem, f"it applies to {where}")

    def of_source(self, source: Source, options: Options) -> Options:
        """Fill in options that depend on the source; called after its answers are computed."""
        return options

    def stored_as(self, options: Options) -> str | None:
        """Return the dtype that the merged weights are rounded to; None for low-bit block formats."""
        return options.dtype or "float32" if self.quantization(options) in ("", "float32") else None

    def suggestion(self, path: Path, options: Options) -> str:
        """Return a suggestion for a smaller export than the one at ``path``, with its size; empty if there is none."""
        return ""

    def quantization(self, options: Options) -> str:
        """Return the quantization that is used."""
        return options.quantization or next(iter(self.quantizations), "")

    def limits(self, options: Options) -> Tolerance:
        """Return the tolerance for this export."""
        return self.quantizations.get(self.quantization(options), self.tolerance)

    def remedy_of(self, options: Options) -> str:
        """Return the remedy for an export beyond ``limits``: a quantization that rounds less, if this one rounds."""
        return self.remedy

    def check(self, source: Source) -> None:  # noqa: B027 - most formats take every model
        """Refuse a model that this format cannot hold, before anything is written.

        Raises:
            GymError: ``USAGE`` naming the model, the reason and the remedy.
        """

    def refusal(self, source: Source, why: str, remedy: str) -> GymError:
        """Return the error for a model that this format cannot hold; ``why`` continues its name."""
        return GymError(ErrorCode.USAGE, f"format {self.name}: {source.name} {why}", remedy)

    def changes(self, source: Source, options: Options) -> bool:
        """Return True if writing modifies the model in memory; then, its answers are computed first."""
        return source.adapted and self.merges

    def start(self, processes: Processes, *, check: bool) -> None:
        """Start the processes of an export, so that they import their libraries while the model is loaded."""
        if check:
            libraries = getattr(import_module(self.reading), "LIBRARIES", ())
            processes.start(READ_BACK, (*libraries, *self.reader_libraries))

    def require_reader(self, source: Source) -> None:  # noqa: B027 - most need no extra package
        """Refuse a model whose export cannot be read back on this machine; not called if the check is skipped.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` naming the model, the reason and the remedy.
        """

    def reader_of(self, source: Source) -> str:
        """Return the module whose library reads this model back: ``reader``, unless it depends on the model."""
        return self.reader

    def use(self, path: Path) -> str:
        """Return how to use the export at ``path``: a command or a sentence; empty if there is neither."""
        return ""

    def needs(self, weights: Weights, options: Options) -> ExportNeeds:
        """Estimate the disk space and memory that an export needs."""
        plain = {"bfloat16": 16.0, "float16": 16.0}.get(options.dtype or "", 32.0)
        return default_needs(
            weights,
            bits=self.bits.get(self.quantization(options), plain),
            writing=self.copies_writing,
            reading=self.copies_reading,
            scratch=self.copies_on_disk,
        )

    @abstractmethod
    def write(self, source: Source, target: Path, options: Options) -> None:
        """Write the new file ``target`` if the format ``is_file``; otherwise write into the empty folder ``target``."""

    def kept(self, source: Source, target: Path) -> float | None:
        """Measure the share of the delta that the written ``target`` keeps, if the format is a delta; else None."""
        return None

    def facts(self, source: Source, options: Options) -> dict[str, Any]:
        """Return further entries of ``export.json``; ``notes`` are printed."""
        return {}

    @abstractmethod
    def expected(self, source: Source, target: Path, options: Options) -> Any:
        """Return the model in memory that the export must equal."""

    def stored(self, source: Source, expected: Any, target: Path, options: Options) -> dict[str, Any]:
        """Compare the values in the files with ``expected``; the result is part of ``check`` in ``export.json``.

        Raises:
            GymError: ``EXPORT_DIFFERS`` naming the value.
        """
        return {}

    @abstractmethod
    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        """Return the argument of ``reading`` as JSON.

        For ``transformers`` that is ``model`` (a folder), and the paths of ``adapters`` or ``delta`` to apply.
        """


def write_recipe(folder: Path, page: str, scripts: Mapping[str, str]) -> None:
    """Write a recipe to an existing folder: a page and scripts, by name, with commands to run on another machine."""
    for name, text in {"RECIPE.md": page, **scripts}.items():
        (folder / name).write_text(text, encoding="utf-8")


def require_room(
    chosen: ExportFormat, weights: Weights, path: Path, options: Options, *, check: bool, loaded: bool = False
) -> ExportNeeds:
    """Refuse an export that needs more disk space or memory than is available.

    Args:
        chosen: The format.
        weights: The weights of the whole model.
        path: The path to write to.
        options: The options of the export.
        check: Whether it is read back.
        loaded: Whether the model is already in memory.

    Raises:
        GymError: ``DISK_FULL``; ``TOO_LARGE`` for too little memory.
    """
    from gym_fed.doctor.checks.devices import available_memory_bytes

    needs = chosen.needs(weights, options)
    folder = next(place for place in path.absolute().parents if place.is_dir())
    free = shutil.disk_usage(folder).free
    if needs.disk > free:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"format {chosen.name} needs about {readable_bytes(needs.disk)} of disk space, but {folder} has "
            f"{readable_bytes(free)}",
            "free some space there, write to another disk, or choose a smaller format or quantization",
        )
    available = available_memory_bytes()
    # The reading process already has its libraries loaded while this one still writes.
    total = max(needs.writing + LIBRARIES_BYTES, needs.reading) if check else needs.writing
    memory = total - (weights.full_bytes if loaded else 0)
    if memory <= available:
        return needs
    remedy = "use a machine with more memory, or close other programs"
    if check and needs.writing <= available:
        remedy += f"; --skip-check takes {readable_bytes(needs.writing)}"
    raise GymError(
        ErrorCode.TOO_LARGE,
        f"format {chosen.name} needs about {readable_bytes(memory)} of memory, but "
        f"{readable_bytes(available)} are free",
        remedy,
    )

"""Facts for a model card, read from a run or delta and from untrusted evaluation records in Every Eval Ever's JSON."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_fed.config.schema.base import first_problem
from gym_fed.config.train.catalogue import catalogue_entry
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted, plain, whole_number
from gym_fed.data.registry import CARD_NAME, DatasetManifest
from gym_fed.registry.manifest import DataUsed, Lineage

OWN_FILES = "files of the trainer"
"""Published instead of the names of local files."""

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
    """Describe a dataset that was pulled from the registry by its manifest, and any other path without a name."""
    card = Path(path).expanduser() / CARD_NAME
    if "://" in path or not card.is_file():
        return DataUsed(name=OWN_FILES)
    try:
        manifest = DatasetManifest.model_validate(json.loads(card.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.DATA_INVALID, f"{card}: {error}", "pull the dataset again") from error
    return DataUsed(name=f"{manifest.name}@{manifest.version}", licence=manifest.licence)


def _of_delta(file: Path) -> Lineage:
    from gym_fed.delta.file import DeltaFile

    with DeltaFile.open(file, added_tokens=True) as delta:
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
"""Maximum number of contributors listed in a card."""


@dataclass(frozen=True)
class Contributor:
    """A contributor of a version.

    Attributes:
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
        path, ErrorCode.MODEL_INVALID, "delete it, or recreate the version: gym-server model"
    )
    lines = document.get("contributors")
    if not isinstance(lines, list) or not all(map(_is_line, lines)):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{path} does not list contributors with their shares",
            "delete it, or recreate the version: gym-server model",
        )
    everybody = [
        Contributor(line["contributor"], line.get("name", ""), float(line["share"])) for line in lines
    ]
    return sorted(everybody, key=lambda line: -line.share)


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("contributor"), str):
        return False
    share = line.get("share")
    if not isinstance(share, int | float) or isinstance(share, bool):
        return False
    if not abs(share) <= sys.float_info.max:  # an integer of any size; false for NaN
        return False
    return isinstance(line.get("name", ""), str)


_MAX_FIGURES = 5_000
_MAX_RECORDS = 64
EVALS = "evals"
"""The folder of records in a version."""
NO_DELTA = "none"
"""The digest of the delta in records of a model without one."""

_Name = Annotated[str, Field(min_length=1, max_length=300)]


@dataclass(frozen=True)
class CardFigure:
    """One metric of one task, as a card shows it.

    Attributes:
        value: The mean over the samples.
        stderr: The standard error; None if unknown.
        num_samples: The number of samples; None if the record does not contain it.
        date: Date of the measurement, ISO 8601; empty if the record does not contain it.
        engine: The program that measured it.
        record: The name of the record's file.
        num_fewshot: Examples in the prompt; None if the record does not contain it.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    num_samples: int | None
    date: str
    engine: str
    record: str
    num_fewshot: int | None = None


class _CardField(BaseModel):
    """The base of the schemas here, which read only some of the fields."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _ErrorOfValue(_CardField):
    value: float


class _Spread(_CardField):
    standard_error: _ErrorOfValue | None = None
    num_samples: int | None = Field(default=None, ge=0)


class _Value(_CardField):
    score: float
    uncertainty: _Spread | None = None


class _MetricName(_CardField):
    metric_id: _Name = "score"


class _Rows(_CardField):
    additional_details: dict[str, str] = Field(default_factory=dict)


class _TaskValue(_CardField):
    evaluation_name: _Name
    source_data: _Rows = _Rows()
    metric_config: _MetricName
    score_details: _Value


class _MeasuredBy(_CardField):
    name: _Name
    version: _Name = "unknown"


class _OfModel(_CardField):
    name: str = Field(max_length=4096)
    additional_details: dict[str, str] = Field(default_factory=dict)


class _EvalDocument(_CardField):
    schema_version: _Name
    evaluation_timestamp: str = Field(default="", max_length=64)
    model_info: _OfModel
    eval_library: _MeasuredBy
    evaluation_results: list[_TaskValue] = Field(max_length=_MAX_FIGURES)

    @property
    def identity(self) -> tuple[str, str]:
        """The digests of model and delta in ``gym eval``'s records; empty strings in those of other programs."""
        details = self.model_info.additional_details
        return details.get("identity.model", ""), details.get("identity.delta", "")


def read_evaluations(
    places: Sequence[Path], identities: Sequence[tuple[str, str]]
) -> tuple[list[CardFigure], list[Path]]:
    """Read the figures of some records.

    Args:
        places: Files of records, which must belong to this model, and folders, whose records of this model are used.
        identities: Digests of model and delta that its records may name; empty if they are not known, in which case all
            records must name the same model.

    Returns:
        The figures, and the files that contain them.

    Raises:
        GymError: ``DATA_INVALID`` for an invalid record, one of another model, and a folder without one of this model;
            ``USAGE`` for too many; ``FILE_NOT_FOUND``.
    """
    documents_by_digest: dict[str, tuple[Path, _EvalDocument]] = {}
    for place in places:
        documents = [(file, _read(file)) for file in (_records_in(place) if place.is_dir() else [place])]
        of_others = [] if place.is_dir() else [("", "")]  # records of other programs have no digest
        accepted = [*identities, *of_others]
        matching = [(file, doc) for file, doc in documents if not identities or doc.identity in accepted]
        if len(matching) < len(documents) and (not place.is_dir() or not matching):
            file, other = documents[0]
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place} has no record of this model, whose digest is {identities[0][0]}; {file.name} belongs to "
                f"{plain(other.model_info.name, 120)} ({plain(' '.join(other.identity), 160)})",
                "evaluate this model: gym eval MODEL",
            )
        if not documents:
            raise GymError(ErrorCode.DATA_INVALID, f"{place} has no record", "gym eval MODEL writes one")
        for file, document in matching:
            if documents_by_digest.setdefault(file.name, (file, document))[0] != file:
                raise GymError(
                    ErrorCode.DATA_INVALID, f"{file} has the same name as {documents_by_digest[file.name][0]}"
                )
    if len(documents_by_digest) > _MAX_RECORDS:
        raise GymError(
            ErrorCode.USAGE,
            f"{counted(len(documents_by_digest), 'evaluation record')}",
            f"at most {_MAX_RECORDS} are allowed",
        )
    if not identities and len({document.identity for _, document in documents_by_digest.values()}) > 1:
        raise GymError(
            ErrorCode.DATA_INVALID,
            "the evaluation records belong to several models",
            "pass only the files that belong to this model",
        )
    figures = [
        figure for file, document in documents_by_digest.values() for figure in _figures(file, document)
    ]
    return figures, [file for file, _ in documents_by_digest.values()]


def figures_in(records: Iterable[Path]) -> list[CardFigure]:
    """Read the figures of records that ``read_evaluations`` accepted earlier; raises its errors."""
    return [figure for file in records for figure in _figures(file, _read(file))]


def _records_in(folder: Path) -> list[Path]:
    """Return the records in a folder such as ``evals/``, sorted, without files of samples."""
    root = folder / "data" if (folder / "data").is_dir() else folder
    return sorted(file for file in root.rglob("*.json") if file.is_file() and not file.is_symlink())


def published_record(file: Path, name: str) -> bytes:
    """Return a record with the registry's name of the model, and without paths of this machine."""
    values: dict[str, Any] = read_object(file, ErrorCode.DATA_INVALID)
    values["model_info"]["name"] = name
    details = values["eval_library"].get("additional_details")
    if isinstance(details, dict) and isinstance(details.get("facts"), str):
        facts = _object(details["facts"])
        benchmarks = facts.get("benchmarks")
        if isinstance(benchmarks, list):
            facts["benchmarks"] = [PurePath(str(benchmark)).name for benchmark in benchmarks]
        if facts:
            details["facts"] = json.dumps(facts, sort_keys=True)
    return json.dumps(values, indent=1).encode() + b"\n"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}  # a record of another program may have a sentence here
    return value if isinstance(value, dict) else {}


def _read(file: Path) -> _EvalDocument:
    if not file.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no evaluation record at {file}", "see: gym eval show")
    try:
        return _EvalDocument.model_validate(read_object(file, ErrorCode.DATA_INVALID))
    except ValidationError as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{file} is not a valid evaluation record: {first_problem(error)}",
            "use the JSON that gym eval writes",
        ) from error


def _figures(file: Path, record: _EvalDocument) -> Iterable[CardFigure]:
    for result in record.evaluation_results:
        error_of = result.score_details.uncertainty
        stderr = error_of.standard_error.value if error_of and error_of.standard_error else None
        if not math.isfinite(result.score_details.score):
            raise GymError(ErrorCode.DATA_INVALID, f"{file}: {result.evaluation_name} has no finite score")
        yield CardFigure(
            result.evaluation_name,
            result.metric_config.metric_id,
            result.score_details.score,
            stderr,
            error_of.num_samples if error_of else None,
            record.evaluation_timestamp,
            f"{record.eval_library.name} {record.eval_library.version}",
            file.name,
            whole_number(result.source_data.additional_details.get("num_fewshot", ""), 4),
        )

"""Evaluation figures for a card, read from untrusted records in Every Eval Ever's JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_fed.config.schema.base import first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted, plain, whole_number

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
        task: The name of the task.
        metric: The name of the metric.
        value: The mean over the samples.
        stderr: The standard error; None if unknown.
        num_samples: The number of samples; None if the record does not say.
        date: When it was measured, ISO 8601; empty if the record does not say.
        engine: The program that measured it.
        record: The name of the record's file.
        num_fewshot: Examples in the prompt; None if the record does not say.
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
        places: Files of records, which must be of this model; and folders, from which its records are taken.
        identities: Digests of model and delta that its records may name; empty if they are not known: then every
            record must name the same model.

    Returns:
        The figures, and the files that they are from.

    Raises:
        GymError: ``DATA_INVALID`` for an invalid record, one of another model, and a folder without one of this model;
            ``USAGE`` for too many; ``FILE_NOT_FOUND``.
    """
    documents_by_digest: dict[str, tuple[Path, _EvalDocument]] = {}
    for place in places:
        documents = [(file, _read(file)) for file in (records_in(place) if place.is_dir() else [place])]
        of_others = [] if place.is_dir() else [("", "")]  # records of other programs have no digest
        accepted = [*identities, *of_others]
        matching = [one for one in documents if not identities or one[1].identity in accepted]
        if len(matching) < len(documents) and (not place.is_dir() or not matching):
            file, other = documents[0]
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: has no record of this model, whose digest is {identities[0][0]}; {file.name} is of "
                f"{plain(other.model_info.name, 120)} ({plain(' '.join(other.identity), 160)})",
                "evaluate this model: gym eval MODEL",
            )
        if not documents:
            raise GymError(ErrorCode.DATA_INVALID, f"{place}: has no record", "gym eval MODEL writes one")
        for file, document in matching:
            if documents_by_digest.setdefault(file.name, (file, document))[0] != file:
                raise GymError(
                    ErrorCode.DATA_INVALID, f"{file}: has the name of {documents_by_digest[file.name][0]}"
                )
    if len(documents_by_digest) > _MAX_RECORDS:
        raise GymError(
            ErrorCode.USAGE,
            f"{counted(len(documents_by_digest), 'record')} of evaluations",
            f"at most {_MAX_RECORDS} go along",
        )
    if not identities and len({document.identity for _, document in documents_by_digest.values()}) > 1:
        raise GymError(
            ErrorCode.DATA_INVALID,
            "the records of evaluations are of several models",
            "name the files of those that are of this model",
        )
    figures = [
        figure for file, document in documents_by_digest.values() for figure in _figures(file, document)
    ]
    return figures, [file for file, _ in documents_by_digest.values()]


def figures_in(records: Iterable[Path]) -> list[CardFigure]:
    """Read the figures of records that were accepted for this model before. Raises as ``read_evaluations``."""
    return [figure for file in records for figure in _figures(file, _read(file))]


def records_in(folder: Path) -> list[Path]:
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
        return {}  # of another program, which may have a sentence there
    return value if isinstance(value, dict) else {}


def _read(file: Path) -> _EvalDocument:
    if not file.is_file():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no record of an evaluation at {file}", "see: gym eval show"
        )
    try:
        return _EvalDocument.model_validate(read_object(file, ErrorCode.DATA_INVALID))
    except ValidationError as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{file}: is not a valid record of an evaluation: {first_problem(error)}",
            "give the JSON that gym eval writes",
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

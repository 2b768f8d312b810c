"""Figures of evaluations for a card: read from records in Every Eval Ever's JSON, which are foreign input."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_fed.config.schema.problems import first_problem
from gym_fed.errors import ErrorCode, GymError
from gym_fed.json_files import read_object

_MAX_FIGURES = 5_000
_MAX_RECORDS = 64
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_Name = Annotated[str, Field(min_length=1, max_length=300)]


@dataclass(frozen=True)
class CardFigure:
    """One metric of one task, as a card shows it.

    Attributes:
        task: Name of the task.
        metric: Name of the metric.
        value: Mean over the samples.
        stderr: Its standard error; None where it has none.
        num_samples: How many samples it is of; None where the record does not say.
        date: When it was measured, ISO 8601; empty where the record does not say.
        engine: What measured it.
        record: Name of the record's file.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    num_samples: int | None
    date: str
    engine: str
    record: str


class _Part(BaseModel):
    """The fields that are read here; the schema has more."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Error(_Part):
    value: float


class _Uncertainty(_Part):
    standard_error: _Error | None = None
    num_samples: int | None = Field(default=None, ge=0)


class _Score(_Part):
    score: float
    uncertainty: _Uncertainty | None = None


class _Metric(_Part):
    metric_id: _Name = "score"


class _Result(_Part):
    evaluation_name: _Name
    metric_config: _Metric
    score_details: _Score


class _Library(_Part):
    name: _Name
    version: _Name = "unknown"


class _Model(_Part):
    name: str = Field(max_length=4096)
    additional_details: dict[str, str] = Field(default_factory=dict)


class _Record(_Part):
    schema_version: _Name
    evaluation_timestamp: str = Field(default="", max_length=64)
    model_info: _Model
    eval_library: _Library
    evaluation_results: list[_Result] = Field(max_length=_MAX_FIGURES)


def read_evaluations(records: Sequence[Path], digest: str | None) -> list[CardFigure]:
    """The figures of some records.

    Args:
        records: Their files.
        digest: Of the model; a record that names another model's is refused. None where the model has none.

    Raises:
        GymError: ``DATA_INVALID`` for what is no record, or one of another model; ``FILE_NOT_FOUND``.
    """
    if len(records) > _MAX_RECORDS:
        raise GymError(
            ErrorCode.USAGE, f"{len(records)} records of evaluations", f"at most {_MAX_RECORDS} go along"
        )
    return [figure for file in records for figure in _figures(file, digest)]


def records_in(folder: Path) -> list[Path]:
    """The records below a folder such as ``evals/``, sorted; files of samples are none."""
    return sorted(file for file in folder.rglob("*.json") if file.is_file() and not file.is_symlink())[
        :_MAX_RECORDS
    ]


def _figures(file: Path, digest: str | None) -> Iterable[CardFigure]:
    if not file.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no record of an evaluation at {file}")
    try:
        record = _Record.model_validate(read_object(file, ErrorCode.DATA_INVALID))
    except ValidationError as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{file}: is no record of an evaluation: {first_problem(error)}",
            "give the JSON that gym eval writes",
        ) from error
    stated = model_digest(record.model_info.additional_details)
    if digest is not None and stated is not None and stated != digest:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{file}: is of another model: {stated}, not {digest}",
            "evaluate this model: gym eval MODEL",
        )
    for one in record.evaluation_results:
        error_of = one.score_details.uncertainty
        stderr = error_of.standard_error.value if error_of and error_of.standard_error else None
        if not math.isfinite(one.score_details.score):
            raise GymError(ErrorCode.DATA_INVALID, f"{file}: {one.evaluation_name} has no finite score")
        yield CardFigure(
            one.evaluation_name,
            one.metric_config.metric_id,
            one.score_details.score,
            stderr,
            error_of.num_samples if error_of else None,
            record.evaluation_timestamp,
            f"{record.eval_library.name} {record.eval_library.version}",
            file.name,
        )


def model_digest(details: dict[str, str]) -> str | None:
    """The digest of a model without a delta that a record's identity names; None where it names none."""
    if details.get("identity.delta"):
        return None
    stated = details.get("identity.model", "")
    return stated if _DIGEST.fullmatch(stated) else None

"""Read evaluation records, also untrusted ones: sizes are bounded, types validated, and samples verified by digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from gym_fed.config.schema.base import first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import MAX_DEPTH, is_deeper, read_object
from gym_fed.core.text import counted, plain
from gym_fed.evaluation.records.document import (
    Instance,
    RecordDocument,
    is_record_id,
    paths_of,
    record_id,
    samples_path,
)
from gym_fed.evaluation.records.writer import IDENTITY
from gym_fed.evaluation.results import (
    BriefFigure,
    EvalResults,
    Figure,
    SampleResult,
    TaskResult,
    brief_figures,
)

MAX_LINE_BYTES = 16 << 20
_HINT = "fetch it again, or evaluate again with --fresh"

_Model = TypeVar("_Model", bound=BaseModel)
_FLOATS, _INTS = TypeAdapter(tuple[float, ...]), TypeAdapter(tuple[int, ...])
_METRICS = TypeAdapter(dict[str, float])


@dataclass(frozen=True)
class Record:
    """A record that was read.

    Attributes:
        document: The JSON file.
        results: The results with all samples.
    """

    document: RecordDocument
    results: EvalResults


def find_record(identity: Mapping[str, str], folder: str | Path) -> EvalResults | None:
    """Return the results of an earlier run with this identity; None if there is none.

    Raises:
        GymError: Errors of ``read_record``; a damaged record is an error.
    """
    paths = paths_of(record_id(identity), Path(folder))
    if not paths:
        return None
    results = read_record(paths[0])
    if dict(results.identity) != dict(identity):
        raise _bad(paths[0], "its name does not match its identity")
    return results


def named_record(reference: str, folder: str | Path) -> Path:
    """Return the record named by a file, an id or the beginning of one.

    Raises:
        GymError: ``FILE_NOT_FOUND`` for no match, ``USAGE`` for several.
    """
    path = Path(reference)
    if path.suffix == ".json":
        if not path.is_file():
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no record at {path}", "see: gym eval show")
        return path
    paths = paths_of(reference.lower(), Path(folder))
    if not paths:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no record {plain(reference, 60)} in {folder}", "see: gym eval show"
        )
    if len(paths) > 1:
        raise GymError(
            ErrorCode.USAGE, f"{len(paths)} records begin with {reference}", "use more characters of the id"
        )
    return paths[0]


def read_record(path: str | Path) -> EvalResults:
    """Return the results in a record; see ``open_record``."""
    return open_record(path).results


def open_record(path: str | Path) -> Record:
    """Read a record and all its samples.

    Args:
        path: The document; the samples are next to it.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` naming file, line and field if the file is not a record, is
            truncated, or its samples do not match the document.
    """
    path = Path(path)
    document = read_document(path)
    stated = Path(document.detailed_evaluation_results.file_path).name
    if stated != samples_path(path).name:
        raise _bad(path, f"refers to samples {stated}, which belong to another record")
    tasks = _tasks(path, document)
    samples: dict[str, list[SampleResult]] = {name: [] for name in tasks}
    for number, instance in enumerate(_instances(path, document), 1):
        where = samples_path(path), f"line {number}"
        if instance.evaluation_name not in samples:
            raise _bad(
                *where, f"belongs to task {plain(instance.evaluation_name, 60)}, which is not in the document"
            )
        if (instance.evaluation_id, instance.model_id) != (document.evaluation_id, document.model_info.id):
            raise _bad(*where, "belongs to another run")
        of_task = samples[instance.evaluation_name]
        of_task.append(_sample(where, instance))
        if len(of_task) > 1 and of_task[-2].number >= of_task[-1].number:
            raise _bad(*where, f"sample {of_task[-1].number} comes after {of_task[-2].number}")
    details = document.eval_library.additional_details
    results = EvalResults(
        model=document.model_info.name,
        identity={
            key.removeprefix(IDENTITY): value
            for key, value in document.model_info.additional_details.items()
            if key.startswith(IDENTITY)
        },
        tasks={name: replace(task, samples=tuple(samples[name])) for name, task in tasks.items()},
        seconds=_number(path, details.get("seconds", "0")),
        facts=_facts(path, details.get("facts", "{}")),
    )
    if path.stem != record_id(results.identity):
        raise _bad(path, "its name does not match its identity")
    return Record(document, results)


def read_document(path: Path) -> RecordDocument:
    """Read the document of a record without its samples. Raises the errors of ``open_record``."""
    try:
        document = read_object(path, ErrorCode.DATA_INVALID, _HINT) if path.is_file() else None
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{path}: {error.strerror}") from error
    if document is None:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no record at {path}", "see: gym eval show")
    return _checked(RecordDocument, json.dumps(document), path)


def _instances(path: Path, document: RecordDocument) -> Iterator[Instance]:
    """Yield the lines of the file of samples; its digest and count are checked after the last line."""
    file, stated = samples_path(path), document.detailed_evaluation_results
    digest, number = hashlib.sha256(), 0
    if not file.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no samples at {file}", _HINT)
    with file.open("rb") as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise _bad(file, f"line {number} is longer than {MAX_LINE_BYTES} bytes")
            if number > stated.total_rows:
                raise _bad(
                    file, f"has more than the {counted(stated.total_rows, 'line')} that the document states"
                )
            digest.update(line)
            yield _checked(Instance, line, file, f"line {number}")
    if number != stated.total_rows or digest.hexdigest() != stated.checksum:
        raise _bad(file, "does not match the document's sha256: it was truncated or changed")


def _tasks(path: Path, document: RecordDocument) -> dict[str, TaskResult]:
    """Return the tasks without their samples."""
    tasks: dict[str, TaskResult] = {}
    for result in document.evaluation_results:
        name, metric = result.evaluation_name, result.metric_config.metric_id
        details, details_of = result.source_data.additional_details, result.score_details
        error = details_of.uncertainty.standard_error
        figure = Figure(
            details_of.score,
            None if error is None else error.value,
            details_of.uncertainty.num_samples,
            not result.metric_config.lower_is_better,
        )
        shots = _whole(path, details.get("num_fewshot", ""))
        known = tasks.get(name)
        if known is None:
            version, lock = details.get("version", ""), details.get("lock", "")
            with_template = details.get("chat_template") == "applied"
            known = TaskResult(name, version, shots, {}, (), lock, with_template)
        if metric in known.figures:
            raise _bad(path, f"has {plain(name, 60)}/{plain(metric, 60)} twice")
        tasks[name] = replace(known, figures={**known.figures, metric: figure})
    return tasks


def _sample(where: tuple[Path, str], instance: Instance) -> SampleResult:
    metadata = instance.metadata
    try:
        logprobs = _FLOATS.validate_json(metadata.logprobs)
        token_ids = _INTS.validate_json(metadata.token_ids)
        margins = _FLOATS.validate_json(metadata.margins)
        metrics = _METRICS.validate_json(metadata.metrics)
    except ValidationError as error:
        raise _bad(*where, f"metadata: {first_problem(error)}") from error
    if any(math.isnan(value) for value in (*logprobs, *margins, *metrics.values())):
        raise _bad(*where, "a value is not a number")
    is_generation = any(
        attribution.extraction_method == "generation" for attribution in instance.answer_attribution
    )
    return SampleResult(
        number=int(instance.sample_id),
        row_sha256=metadata.row_sha256,
        prompt=instance.input.raw,
        choices=tuple(instance.input.choices or ()),
        logprobs=logprobs,
        answer=instance.output.raw[0] if is_generation and instance.output.raw else None,
        token_ids=token_ids,
        target=instance.input.reference[0] if instance.input.reference else "",
        metrics=metrics,
        cut=_whole(where[0], metadata.cut),
        margins=margins,
        thought="".join(instance.output.reasoning_trace or ()),
        is_unfinished=bool(_whole(where[0], metadata.unfinished_thought)),
    )


def _facts(path: Path, text: str) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "its run facts are not JSON") from error
    if not isinstance(facts, dict) or is_deeper(facts, MAX_DEPTH):
        raise _bad(path, "its run facts are not a mapping")
    return facts


def _number(path: Path, text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise _bad(path, f"{plain(text, 40)} is not a number") from error
    if not math.isfinite(number):
        raise _bad(path, f"{plain(text, 40)} is not a number")
    return number


def _whole(path: Path, text: str) -> int:
    if len(text) > 9 or not (text.isascii() and text.isdecimal()):
        raise _bad(path, f"{plain(text, 40)} is not an integer")
    return int(text)


def _checked(model: type[_Model], data: str | bytes, file: Path, line: str = "") -> _Model:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _bad(file, line, first_problem(error, "the record")) from error


def _bad(file: Path, *problems: str) -> GymError:
    return GymError(ErrorCode.DATA_INVALID, f"{file}: {': '.join(filter(None, problems))}", _HINT)


def record_paths(folder: Path) -> list[Path]:
    """Return the documents of the records in a folder, sorted."""
    return sorted(path for path in (folder / "data").glob("*/*/*/*.json") if is_record_id(path.stem))


def documents_of(paths: list[Path]) -> Iterator[tuple[Path, RecordDocument | GymError]]:
    """Yield each document, or the error raised while reading it."""
    for path in paths:
        try:
            yield path, read_document(path)
        except GymError as error:
            yield path, error


def brief_figures_of(document: RecordDocument) -> list[BriefFigure]:
    """Return a document's figures, pooled by group of tasks."""
    return brief_figures(
        [
            BriefFigure(
                result.evaluation_name,
                result.metric_config.metric_id,
                result.score_details.score,
                result.score_details.uncertainty.num_samples,
            )
            for result in document.evaluation_results
        ]
    )

"""Write the results of a run as a record: first the samples, then the document with their digest."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import atomic_file, write_atomically
from gym_fed.core.json_files import canonical_json
from gym_fed.evaluation.records import document as parts
from gym_fed.evaluation.records.document import model_id, paths_of, record_id, record_path, samples_path
from gym_fed.evaluation.results import EvalResults, SampleResult, TaskResult
from gym_fed.version import __version__

IDENTITY = "identity."
"""Prefix of the identity's parts in the model's details."""


def write_record(results: EvalResults, folder: str | Path, *, organization: str = "unknown") -> Path:
    """Write the record of a run, replacing one with the same identity.

    Runs with the same results have byte-identical samples; the documents differ in their times.

    Args:
        folder: The folder of records; ``data/SUITE/DEVELOPER/MODEL/ID.json`` and ``ID_samples.jsonl`` are written to
            it, in the layout of an Every Eval Ever data store.
        organization: The organization that ran the evaluation.

    Returns:
        The document's path.

    Raises:
        GymError: ``DATA_INVALID`` for figures that are not finite, and for results without a task.
    """
    folder = Path(folder)
    if not results.tasks:
        raise GymError(ErrorCode.DATA_INVALID, "a record needs results of at least one task")
    path = record_path(results, folder)
    before = paths_of(record_id(results.identity), folder)
    for old in before:  # a kill after this leaves no record rather than one with other samples
        old.unlink(missing_ok=True)
    digest, rows = hashlib.sha256(), 0
    with atomic_file(samples_path(path)) as file:
        for line in _lines(results):
            file.write(line)
            digest.update(line)
            rows += 1
    for old in before:
        if old != path:
            samples_path(old).unlink(missing_ok=True)
    samples = parts.SamplesFile(
        file_path=samples_path(path).relative_to(folder).as_posix(),
        checksum=digest.hexdigest(),
        total_rows=rows,
    )
    text = _document(results, samples, organization).model_dump_json(indent=1, exclude_none=True)
    write_atomically(path, text.encode("utf-8") + b"\n")
    return path


def evaluation_id(results: EvalResults) -> str:
    """Return the id shared by document and samples: tasks, model and record id, but no time, so that it is
    reproducible."""
    path = record_path(results, Path())
    return "/".join((*path.parts[1:4], path.stem))


def _document(results: EvalResults, samples: parts.SamplesFile, organization: str) -> parts.RecordDocument:
    now = time.time()
    developer, name = model_id(results.model)
    try:
        facts = json.dumps(dict(results.facts), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GymError(ErrorCode.DATA_INVALID, f"the run facts cannot be written as JSON: {error}") from error
    return parts.RecordDocument(
        evaluation_id=evaluation_id(results),
        evaluation_timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        retrieved_timestamp=f"{now:.0f}",
        source_metadata=parts.SourceMetadata(source_name="gym-fed", source_organization_name=organization),
        model_info=parts.ModelInfo(
            name=results.model,
            id=f"{developer}/{name}",
            developer=developer,
            inference_engine=parts.InferenceEngine(name="gym-fed", version=__version__),
            additional_details={
                "deployment_type": "unknown",
                "model_availability": "unknown",
                **{f"{IDENTITY}{key}": value for key, value in results.identity.items()},
            },
        ),
        eval_library=parts.EvalLibrary(
            name="gym-fed",
            version=__version__,
            additional_details={"facts": facts, "seconds": repr(float(results.seconds))},
        ),
        evaluation_results=[
            _figure(task, metric) for task in results.tasks.values() for metric in task.figures
        ],
        detailed_evaluation_results=samples,
    )


def _figure(task: TaskResult, metric: str) -> parts.TaskFigure:
    figure = task.figures[metric]
    _require_finite(
        f"{task.task}: {metric}", figure.value, *([] if figure.stderr is None else [figure.stderr])
    )
    error = None if figure.stderr is None else parts.StandardError(value=float(figure.stderr))
    return parts.TaskFigure(
        evaluation_result_id=f"{task.task}/{metric}",
        evaluation_name=task.task,
        source_data=parts.SourceData(
            dataset_name=task.task,
            additional_details={
                "lock": task.lock,
                "version": task.version,
                "num_fewshot": str(task.num_fewshot),
                "chat_template": "applied" if task.chat_template else "none",
            },
        ),
        metric_config=parts.MetricConfig(metric_id=metric, lower_is_better=not figure.higher_is_better),
        score_details=parts.ScoreDetails(
            score=float(figure.value),
            uncertainty=parts.ScoreUncertainty(standard_error=error, num_samples=figure.num_samples),
        ),
    )


def _lines(results: EvalResults) -> Iterator[bytes]:
    run, model = evaluation_id(results), "/".join(model_id(results.model))
    for task in results.tasks.values():
        for sample in task.samples:
            instance = _instance(task, sample, run, model)
            line = json.dumps(instance.model_dump(mode="json", exclude_none=True), sort_keys=True)
            yield line.encode("ascii") + b"\n"


def _instance(task: TaskResult, sample: SampleResult, run: str, model: str) -> parts.Instance:
    where = f"{task.task}, sample {sample.number}"
    _require_finite(where, *sample.metrics.values())
    score = float(sample.metrics.get(task.main_metric, 0.0))
    output = _output(sample)
    method: Any = "likeliest_choice" if sample.answer is None else "generation"
    return parts.Instance(
        evaluation_id=run,
        model_id=model,
        evaluation_name=task.task,
        evaluation_result_id=f"{task.task}/{task.main_metric}",
        sample_id=str(sample.number),
        sample_hash=hashlib.sha256(
            (sample.prompt + sample.target).encode("utf-8", "surrogatepass")
        ).hexdigest(),
        input=parts.SampleInput(
            raw=_whole_text(sample.prompt),
            reference=[_whole_text(sample.target)],
            choices=[_whole_text(choice) for choice in sample.choices] or None,
        ),
        output=parts.SampleOutput(
            raw=output, reasoning_trace=[_whole_text(sample.thought)] if sample.thought else None
        ),
        answer_attribution=[
            parts.AnswerAttribution(extracted_value=text, extraction_method=method) for text in output
        ],
        evaluation=parts.SampleScore(score=score, is_correct=score == 1.0),
        metadata=parts.SampleMetadata(
            row_sha256=sample.row_sha256,
            metrics=canonical_json({k: float(v) for k, v in sample.metrics.items()}).decode(),
            logprobs=json.dumps([float(value) for value in sample.logprobs]),
            token_ids=json.dumps([int(token) for token in sample.token_ids]),
            margins=json.dumps([float(value) for value in sample.margins]),
            cut=str(int(sample.cut)),
            unfinished_thought=str(int(sample.is_unfinished)),
        ),
    )


def _output(sample: SampleResult) -> list[str]:
    """Return the answer or the most likely choice; empty for the likelihood of a text."""
    if sample.answer is not None:
        return [_whole_text(sample.answer)]
    if not sample.choices or len(sample.choices) != len(sample.logprobs):
        return []
    best = max(range(len(sample.choices)), key=lambda at: sample.logprobs[at])
    return [_whole_text(sample.choices[best])]


def _whole_text(text: str) -> str:
    """Replace lone surrogates, which occur in some datasets and have no UTF-8 encoding."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _require_finite(where: str, *values: float) -> None:
    if bad := [value for value in values if not math.isfinite(value)]:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{where}: {bad[0]} is not a finite number",
            "check the task's metric and its rows",
        )

"""Paths and fields of evaluation records: the part of Every Eval Ever's schema 0.3.0 that gym-fed uses.

Source: arXiv 2606.14516. A record that passes these models has all required fields of the schema and no unknown ones,
so its validators and viewers accept it, too. Schema fields that gym-fed does not use are refused. Values without a
field in the schema are stored in its free-form details, whose values are texts: lists and numbers are JSON.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.json_files import canonical_json
from gym_fed.evaluation.results import EvalResults

SEVERAL = "several"
"""The suite of a run of several tasks without a suite."""

_MAX_PART = 80


def record_id(identity: Mapping[str, str]) -> str:
    """Return the id of a record, which is the same for the same identity on every machine.

    The schema requires a UUID of version 4; its bits are those of a SHA-256.
    """
    digest = hashlib.sha256(canonical_json(dict(identity))).digest()
    return str(uuid.UUID(bytes=digest[:16], version=4))


def is_record_id(text: str) -> bool:
    """Return True if a text has the form of a record's id."""
    return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text, re.ASCII) is not None


def model_id(model: str) -> tuple[str, str]:
    """Return developer and name of a model for the schema's paths; a local folder's developer is ``local``."""
    parts = [part for part in re.split(r"[/\\]", model) if part not in ("", ".", "..")]
    developer = parts[0] if len(parts) == 2 and model == "/".join(parts) else "local"
    return _part(developer), _part(parts[-1] if parts else "model")


def record_path(results: EvalResults, folder: Path) -> Path:
    """Return the path of a record: ``data/SUITE/DEVELOPER/MODEL/ID.json``."""
    suite = results.facts.get("suite")
    if not isinstance(suite, str):
        suite = next(iter(results.tasks)) if len(results.tasks) == 1 else SEVERAL
    developer, model = model_id(results.model)
    return folder / "data" / _part(suite) / developer / model / f"{record_id(results.identity)}.json"


def paths_of(record: str, folder: Path) -> list[Path]:
    """Return the files of records whose id starts with a text, sorted."""
    if not re.fullmatch(r"[0-9a-f-]{1,36}", record, re.ASCII):
        return []
    paths = (folder / "data").glob(f"*/*/*/{record}*.json")
    return sorted(path for path in paths if is_record_id(path.stem))


def samples_path(path: Path) -> Path:
    """Return the file of samples next to a record's document."""
    return path.with_name(f"{path.stem}_samples.jsonl")


def _part(text: str) -> str:
    """Convert a text to one part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:_MAX_PART] or "unnamed"


Text = Annotated[str, Field(max_length=4 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Details = dict[Name, Text]

_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


class _RecordPart(StrictModel):
    model_config = ConfigDict(strict=True)


class SourceMetadata(_RecordPart):
    """The organization that ran the evaluation."""

    source_name: Name
    source_type: Literal["evaluation_run"] = "evaluation_run"
    source_organization_name: Name
    evaluator_relationship: Literal["first_party", "third_party", "collaborative", "other"] = "other"


class EvalLibrary(_RecordPart):
    """The software; ``additional_details`` contains gym-fed's facts and durations."""

    name: Name
    version: Name
    additional_details: Details


class InferenceEngine(_RecordPart):
    """The inference engine."""

    name: Name
    version: Name


class ModelInfo(_RecordPart):
    """The model; ``additional_details`` contains the identity by which the record is keyed."""

    name: Text
    id: Name
    developer: Name
    inference_engine: InferenceEngine
    additional_details: Details


class SourceData(_RecordPart):
    """The source of the rows, with the digest of the task and the data."""

    dataset_name: Name
    source_type: Literal["other"] = "other"
    additional_details: Details


class MetricConfig(_RecordPart):
    """A metric."""

    metric_id: Name
    lower_is_better: bool


class StandardError(_RecordPart):
    """A standard error."""

    value: float
    method: Literal["analytic"] = "analytic"


class ScoreUncertainty(_RecordPart):
    """The uncertainty of a score; ``standard_error`` may be missing."""

    standard_error: StandardError | None = None
    num_samples: int = Field(ge=0)


class ScoreDetails(_RecordPart):
    """A score."""

    score: float
    uncertainty: ScoreUncertainty


class TaskFigure(_RecordPart):
    """A metric of a task."""

    evaluation_result_id: Name
    evaluation_name: Name
    source_data: SourceData
    metric_config: MetricConfig
    score_details: ScoreDetails


class SamplesFile(_RecordPart):
    """The file of samples with its digest."""

    format: Literal["jsonl"] = "jsonl"
    file_path: str = Field(pattern=rf"^data/[^/]+/[^/]+/[^/]+/{_ID}_samples\.jsonl$", max_length=1000)
    hash_algorithm: Literal["sha256"] = "sha256"
    checksum: str = Field(pattern=r"^[0-9a-f]{64}$")
    total_rows: int = Field(ge=0, le=2_000_000)


class RecordDocument(_RecordPart):
    """The JSON file of a run."""

    schema_version: Literal["0.3.0"] = "0.3.0"
    evaluation_id: Name
    evaluation_timestamp: Name
    retrieved_timestamp: Name
    source_metadata: SourceMetadata
    model_info: ModelInfo
    eval_library: EvalLibrary
    evaluation_results: list[TaskFigure] = Field(min_length=1, max_length=20_000)
    detailed_evaluation_results: SamplesFile


class SampleInput(_RecordPart):
    """The model's input."""

    raw: Text
    reference: list[Text]
    choices: list[Text] | None = None


class SampleOutput(_RecordPart):
    """The model's output: a text, or the most likely choice."""

    raw: list[Text]
    reasoning_trace: list[Text] | None = None


class AnswerAttribution(_RecordPart):
    """The source of the judged answer."""

    turn_idx: Literal[0] = 0
    source: Literal["output.raw"] = "output.raw"
    extracted_value: Text
    extraction_method: Literal["likeliest_choice", "generation"]
    is_terminal: Literal[True] = True


class SampleScore(_RecordPart):
    """The sample's score in the task's main metric."""

    score: float
    is_correct: bool


class SampleMetadata(_RecordPart):
    """Data without a field in the schema; lists, numbers and mappings are JSON."""

    row_sha256: Name
    metrics: Text
    logprobs: Text = "[]"
    token_ids: Text = "[]"
    margins: Text = "[]"
    cut: Text = "0"
    unfinished_thought: Text = "0"


class Instance(_RecordPart):
    """A line of the file of samples."""

    schema_version: Literal["0.3.0"] = "0.3.0"
    evaluation_id: Name
    model_id: Name
    evaluation_name: Name
    evaluation_result_id: Name
    sample_id: str = Field(pattern=r"^[0-9]{1,9}$")
    sample_hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    interaction_type: Literal["single_turn"] = "single_turn"
    input: SampleInput
    output: SampleOutput
    answer_attribution: list[AnswerAttribution] = Field(max_length=1)
    evaluation: SampleScore
    metadata: SampleMetadata


@dataclass(frozen=True)
class HubDataset:
    """The dataset of the Hub with a task's rows.

    Attributes:
        id: Such as ``cais/mmlu``.
        task_id: The dataset's name for the task.
        revision: Commit of the dataset; None if unknown.
    """

    id: str
    task_id: str = "default"
    revision: str | None = None


def eval_results_yaml(
    results: EvalResults, datasets: Mapping[str, HubDataset], *, date: str | None = None
) -> str:
    """Create the model card YAML of tasks whose dataset is on the Hub, each with its main metric.

    Args:
        datasets: Datasets by task; tasks without one are left out, since the format has no place for them.
        date: The date of the run, ISO 8601.
    """
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = []
    for name, task in results.tasks.items():
        if (dataset := datasets.get(name)) is None:
            continue
        figure = task.figures[task.main_metric]
        error = "" if figure.stderr is None else f", standard error {figure.stderr:.4f}"
        notes = f"{task.main_metric}, {task.num_fewshot}-shot, n={figure.num_samples}{error}; gym-fed"
        entries.append(
            EvalResultEntry(
                dataset_id=dataset.id,
                task_id=dataset.task_id,
                value=float(figure.value),
                dataset_revision=dataset.revision,
                date=date,
                notes=notes,
            )
        )
    return str(yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True))

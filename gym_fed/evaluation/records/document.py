"""The fields of a record: those of Every Eval Ever's schema 0.3.0 that we fill, each with its type.

Source: arXiv 2606.14516. A record that these models take has every field that the schema requires and none that it
lacks, so that its validators and viewers take it, too. A field of the schema that we do not fill is refused, since
nothing here would read it. What the schema has no field for stands in its free-form details, which are texts: lists
and numbers are JSON in them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gym_fed.config.schema.base import StrictModel

Text = Annotated[str, Field(max_length=4 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Details = dict[Name, Text]

_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


class _RecordPart(StrictModel):
    model_config = ConfigDict(strict=True)


class SourceMetadata(_RecordPart):
    """Who ran it."""

    source_name: Name
    source_type: Literal["evaluation_run"] = "evaluation_run"
    source_organization_name: Name
    evaluator_relationship: Literal["first_party", "third_party", "collaborative", "other"] = "other"


class EvalLibrary(_RecordPart):
    """What ran it; ``additional_details`` holds our facts and seconds."""

    name: Name
    version: Name
    additional_details: Details


class InferenceEngine(_RecordPart):
    """What computed the answers."""

    name: Name
    version: Name


class ModelInfo(_RecordPart):
    """The model; ``additional_details`` holds the identity that the record is keyed by."""

    name: Text
    id: Name
    developer: Name
    inference_engine: InferenceEngine
    additional_details: Details


class SourceData(_RecordPart):
    """Where the rows are from, by the digest of task and data."""

    dataset_name: Name
    source_type: Literal["other"] = "other"
    additional_details: Details


class MetricConfig(_RecordPart):
    """One metric."""

    metric_id: Name
    lower_is_better: bool


class StandardError(_RecordPart):
    """Of a figure."""

    value: float
    method: Literal["analytic"] = "analytic"


class ScoreUncertainty(_RecordPart):
    """Of a figure; without ``standard_error`` where it has none."""

    standard_error: StandardError | None = None
    num_samples: int = Field(ge=0)


class ScoreDetails(_RecordPart):
    """A figure."""

    score: float
    uncertainty: ScoreUncertainty


class TaskFigure(_RecordPart):
    """One metric of one task."""

    evaluation_result_id: Name
    evaluation_name: Name
    source_data: SourceData
    metric_config: MetricConfig
    score_details: ScoreDetails


class SamplesFile(_RecordPart):
    """Where the samples are, and what they hash to."""

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
    """What the model got."""

    raw: Text
    reference: list[Text]
    choices: list[Text] | None = None


class SampleOutput(_RecordPart):
    """What it gave: a text, or the likeliest choice."""

    raw: list[Text]


class AnswerAttribution(_RecordPart):
    """Where the answer that was judged is from."""

    turn_idx: Literal[0] = 0
    source: Literal["output.raw"] = "output.raw"
    extracted_value: Text
    extraction_method: Literal["likeliest_choice", "generation"]
    is_terminal: Literal[True] = True


class SampleScore(_RecordPart):
    """What it was worth by the task's main metric."""

    score: float
    is_correct: bool


class SampleMetadata(_RecordPart):
    """What the schema has no field for; lists, numbers and mappings are JSON."""

    row_sha256: Name
    metrics: Text
    logprobs: Text = "[]"
    token_ids: Text = "[]"
    margins: Text = "[]"
    cut: Text = "0"


class Instance(_RecordPart):
    """A line of the samples' file."""

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

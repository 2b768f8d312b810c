"""Custom task files: YAML with keys of lm-evaluation-harness, and data files. They cannot run Python.

task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.yaml.file import load_config
from gym_fed.config.yaml.strict import Mark, parse_config, read_config_text
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.core.text import plain
from gym_fed.evaluation.suites.grading import COLUMNS
from gym_fed.evaluation.suites.rendering import (
    TEMPLATES,
    TemplateProblem,
    first_bounded_problem,
    parse,
    require_quick,
)
from gym_fed.evaluation.suites.row_files import SUFFIXES, Row, read_rows

RENDERED_ROWS = 200
"""Maximum number of rows that are rendered as a check before a model is loaded."""
_HAS_TEMPLATE = re.compile(r"\{[{%#]")


class DataFiles(StrictModel):
    """``dataset_kwargs`` of a file of rows."""

    data_files: dict[str, str] = Field(min_length=1)
    """File by split, relative to the task file: .jsonl, .jsonl.gz, .json, .csv or .parquet."""


class TaskMetric(StrictModel):
    """An entry of ``metric_list``."""

    metric: Literal["acc", "acc_norm", "exact_match"]
    """``acc`` or ``acc_norm`` (normalised by length) for choices, ``exact_match`` for a generated answer."""

    aggregation: Literal["mean"] = "mean"
    higher_is_better: Literal[True] = True
    ignore_case: bool | None = None
    ignore_punctuation: bool | None = None
    ignore_numbers: bool | None = None
    regexes_to_ignore: list[str] | None = None
    """Regular expressions whose matches ``exact_match`` removes from both answers."""

    @field_validator("regexes_to_ignore")
    @classmethod
    def _expressions(cls, values: list[str] | None) -> list[str] | None:
        return None if values is None else [_expression(value) for value in values]


class AnswerStep(StrictModel):
    """One step of a filter, which extracts a part of a generated answer."""

    function: Literal["regex", "take_first", "remove_whitespace", "lowercase", "uppercase"]
    regex_pattern: str | None = None
    """The pattern of ``regex``; its first group, or the whole match, is the answer."""

    group_select: int | None = None
    """The index of the match of ``regex``; -1 is the last."""

    fallback: str | None = None
    """The answer if ``regex`` does not match."""

    @model_validator(mode="after")
    def _only_for_regex(self) -> AnswerStep:
        given = (self.regex_pattern, self.group_select, self.fallback)
        if self.function == "regex" and self.regex_pattern is None:
            raise ValueError("regex needs regex_pattern")
        if self.function != "regex" and any(value is not None for value in given):
            raise ValueError(f"{self.function} takes no settings")
        return self

    @field_validator("regex_pattern")
    @classmethod
    def _expressions(cls, value: str | None) -> str | None:
        return None if value is None else _expression(value)


class Filter(StrictModel):
    """A named sequence of steps; each filter yields its own value of the metric."""

    name: str = Field(min_length=1, max_length=60)
    filter: list[AnswerStep] = Field(min_length=1)


class GenerationKwargs(StrictModel):
    """The generation settings; greedy unless ``do_sample``."""

    until: list[str] = Field(default=["\n\n"], max_length=16)
    """The answer ends before the first of these."""

    max_gen_toks: int = Field(default=256, ge=1, le=32768)
    do_sample: bool = False
    temperature: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _validate_sampling(self) -> GenerationKwargs:
        if self.do_sample != (self.temperature > 0):
            raise ValueError(
                "do_sample: true needs a temperature above 0, and a temperature needs do_sample: true"
            )
        return self


class FewshotConfig(StrictModel):
    """The selection of examples in the prompt."""

    sampler: Literal["default", "first_n"] = "default"
    """``first_n``: the first rows of the split; ``default``: drawn with a seed."""


class Metadata(StrictModel):
    """Metadata of the definition."""

    version: int | float | str = 1
    conversation: bool = False
    """True to put prompts into the model's chat template, unless the command overrides it."""


class TaskFile(StrictModel):
    """The keys of a task, with the meaning that they have in lm-evaluation-harness."""

    task: str = Field(pattern=r"^[A-Za-z0-9][\w.-]{0,99}$")
    """The task's name."""

    dataset_path: Literal["json"] = "json"
    """Data files are resolved relative to this file."""

    dataset_kwargs: DataFiles | None = None
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    fewshot_split: str | None = None
    """The split from which examples are taken."""

    output_type: Literal["multiple_choice", "generate_until"]
    doc_to_text: str
    """The prompt: a column, or a Jinja template of a row's columns."""

    doc_to_target: str | int
    """The right answer; for choices, its text or index."""

    doc_to_choice: str | list[str] | None = None
    """The answers of ``multiple_choice``, as a list, a column or a template of a list."""

    description: str = ""
    """Text before every prompt; not a template."""

    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    num_fewshot: int = Field(default=0, ge=0, le=64)
    fewshot_config: FewshotConfig | None = None
    metric_list: list[TaskMetric] = Field(default=[], max_length=3)
    grade: Literal["humaneval", "mbpp", "json_schema", "chrf"] | None = None
    """A built-in metric instead of ``metric_list``: code run against tests in the sandbox, JSON by a schema, or chrF.
    """

    generation_kwargs: GenerationKwargs | None = None
    filter_list: list[Filter] | None = Field(default=None, min_length=1)
    metadata: Metadata = Metadata()

    @model_validator(mode="after")
    def _fits(self) -> TaskFile:
        chooses = self.output_type == "multiple_choice"
        if chooses != (self.doc_to_choice is not None):
            raise ValueError("doc_to_choice is required for multiple_choice, and allowed only there")
        if bool(self.metric_list) == (self.grade is not None):
            raise ValueError("set either metric_list or grade")
        if self.grade is not None and chooses:
            raise ValueError("grade applies only to generated answers")
        wrong = [metric.metric for metric in self.metric_list if (metric.metric == "exact_match") == chooses]
        if wrong:
            raise ValueError(f"metric {wrong[0]} cannot be combined with output_type {self.output_type}")
        if chooses and (self.generation_kwargs is not None or self.filter_list is not None):
            raise ValueError("generation_kwargs and filter_list apply only to generate_until")
        if self.test_split is None and self.validation_split is None:
            raise ValueError("set the split to evaluate: test_split (or validation_split)")
        if self.num_fewshot and self.fewshot_split is None and self.training_split is None:
            raise ValueError("num_fewshot needs a fewshot_split")
        return self

    @field_validator("description")
    @classmethod
    def _plain_text(cls, value: str) -> str:
        if _HAS_TEMPLATE.search(value):
            raise ValueError("is text, not a template")
        return value

    @field_validator(*TEMPLATES)
    @classmethod
    def _templates(cls, value: Any) -> Any:
        try:
            parse("template", value)
        except TemplateProblem as problem:
            raise ValueError(problem.problem) from problem
        return value

    def definition(self) -> dict[str, Any]:
        """Return the given keys in the form of the harness."""
        keys = self.model_dump(exclude_none=True, exclude={"dataset_path", "dataset_kwargs", "grade"})
        if not self.metric_list:
            del keys["metric_list"]
        return keys


def read_task_file(file: Path) -> TaskFile:
    """Read and validate a task file.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``CONFIG_INVALID`` with file, line and key for every key that is unknown or wrong,
            and for Python.
    """
    if not file.is_file():
        hint = "use a YAML file, or a task of gym eval list"
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no task file at {file}", hint)
    try:
        return load_config(file, TaskFile)
    except GymError as error:
        if "!function" in error.message:
            place = error.message.partition(": ")[0]
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{place}: !function: Python in a task file is never run",
                "use a Jinja template, filter_list, or grade",
            ) from error
        raise


def read_task_rows(file: Path, task: TaskFile) -> dict[str, list[Row]]:
    """Read the rows of all splits of a task file.

    Raises:
        GymError: ``CONFIG_INVALID`` with the file and the line, for missing splits and files, and for a row that cannot
            be rendered; ``DATA_INVALID`` as ``read_rows`` and for columns that change their type.
    """
    error_at = partial(_error_at, file, parse_config(file, read_config_text(file))[1])
    if task.dataset_kwargs is None:
        hint = "dataset_kwargs: {data_files: {test: F.jsonl}}"
        raise error_at(("dataset_kwargs",), "has no data_files", hint)
    splits: dict[str, list[Row]] = {}
    for split, name in task.dataset_kwargs.data_files.items():
        place = ("dataset_kwargs", "data_files", split)
        rows_file, hint = file.parent / name, "put it next to the task file"
        if Path(name).is_absolute():
            raise error_at(place, f"{plain(name, 200)!r} is an absolute path", hint)
        if not name.endswith(SUFFIXES):
            message = f"{name!r} is not a supported data file"
            raise error_at(place, message, f"use one of {' '.join(SUFFIXES)}")
        if not rows_file.is_file() or not lies_in(rows_file, file.parent):
            raise error_at(place, f"no file {plain(name, 200)!r} in {file.parent}", hint)
        splits[split] = read_rows(rows_file)
        _require_columns(rows_file, splits[split])
    for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
        named = getattr(task, key)
        if named is not None and named not in splits:
            raise error_at((key,), f"data_files has no split {named!r}", f"it has {', '.join(splits)}")
    split = str(task.test_split or task.validation_split)
    rows = splits[split]
    if not rows:
        raise error_at(("dataset_kwargs",), f"the split {split!r} has no rows", "add at least one")
    row_problem = first_bounded_problem(task.model_dump(), rows, RENDERED_ROWS)
    if row_problem is not None:
        number, problem = row_problem
        message = f"row {number} of {split}: {problem.problem}"
        raise error_at((problem.key,), message, "correct the template or the row")
    for column in COLUMNS[task.grade] if task.grade is not None else ():
        if missing := [number for number, row in enumerate(rows) if column not in row]:
            message = f"{task.grade} needs the column {column!r}, which row {missing[0]} does not have"
            raise error_at(("grade",), message, f"it needs {', '.join(COLUMNS[task.grade or ''])}")
    return splits


def _require_columns(file: Path, rows: list[Row]) -> None:
    """Require the same columns in all rows and one type per column, since the harness stores them in a table."""
    first: dict[str, tuple[str, int]] = {}
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            differs = sorted(row.keys() ^ rows[0].keys())[0]
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{file}: row {number}: column {plain(differs, 60)!r} is missing from some rows",
                "use the same columns in every row, with null for missing values",
            )
        for key, value in row.items():
            kind = _kind(value)
            if kind is not None and first.setdefault(key, (kind, number))[0] != kind:
                was, where = first[key]
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{file}: row {number}: column {plain(key, 60)!r} is {kind}, but {was} in row {where}",
                    "use the same type for a column in every row",
                )


def _kind(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"


def _error_at(
    file: Path, marks: Mapping[Any, Mark], place: tuple[str, ...], message: str, hint: str
) -> GymError:
    known = next((place[:end] for end in range(len(place), 0, -1) if place[:end] in marks), ())
    line, column = marks.get(known, (1, 1))
    return GymError(ErrorCode.CONFIG_INVALID, f"{file}:{line}:{column}: {'.'.join(place)}: {message}", hint)


def _expression(value: str) -> str:
    require_quick(value)
    return value

"""The records of a folder: each one's document without its samples, and its figures in short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gym_fed.core.errors import GymError
from gym_fed.evaluation.groups import BriefFigure, brief_figures
from gym_fed.evaluation.records.document import RecordDocument
from gym_fed.evaluation.records.keys import is_record_id
from gym_fed.evaluation.records.reader import read_document


def record_paths(folder: Path) -> list[Path]:
    """Documents of records in a folder, sorted."""
    return sorted(path for path in (folder / "data").glob("*/*/*/*.json") if is_record_id(path.stem))


def documents_of(paths: list[Path]) -> Iterator[tuple[Path, RecordDocument | GymError]]:
    """Each document as it was read, or why it could not be."""
    for path in paths:
        try:
            yield path, read_document(path)
        except GymError as error:
            yield path, error


def brief_figures_of(document: RecordDocument) -> list[BriefFigure]:
    """Its figures, those of a group of tasks as one."""
    return brief_figures(
        [
            BriefFigure(
                one.evaluation_name,
                one.metric_config.metric_id,
                one.score_details.score,
                one.score_details.uncertainty.num_samples,
            )
            for one in document.evaluation_results
        ]
    )

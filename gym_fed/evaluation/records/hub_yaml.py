"""Results as the `.eval_results` file of a model repository of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gym_fed.evaluation.results import EvalResults


@dataclass(frozen=True)
class HubDataset:
    """The dataset of the Hub that a task's rows are from.

    Attributes:
        id: Such as ``cais/mmlu``.
        task_id: What the dataset calls the task.
        revision: Commit; None where it is not known.
    """

    id: str
    task_id: str = "default"
    revision: str | None = None


def eval_results_yaml(
    results: EvalResults, datasets: Mapping[str, HubDataset], *, date: str | None = None
) -> str:
    """The YAML of the tasks whose dataset the Hub has; of each task its main metric, as a share or as it is.

    Args:
        results: Of the run.
        datasets: Of tasks by name; a task that is not in it is left out, since the format has no place for it.
        date: Of the run, ISO 8601.
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

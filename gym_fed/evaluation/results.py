"""Results of an evaluation: metrics with standard errors, and their samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.core.files import write_atomically


@dataclass(frozen=True)
class Figure:
    """A metric of a task.

    Attributes:
        value: Mean over the samples, as the metric defines it.
        stderr: Standard error of ``value``; None where it has none.
        num_samples: The number of samples.
        higher_is_better: Which way is better.
    """

    value: float
    stderr: float | None
    num_samples: int
    higher_is_better: bool = True


@dataclass(frozen=True)
class SampleResult:
    """A row of a task under one model: input, output and score.

    Attributes:
        number: Index of the row in its task's split, from 0.
        row_sha256: Digest of the row, so that two runs can be paired by it.
        prompt: The model's input, possibly truncated; never empty.
        choices: Continuations that were scored; empty for a generation.
        logprobs: Log-probabilities of ``choices`` in nats.
        answer: The generated text; None for scored choices.
        token_ids: Tokens of ``answer``.
        target: The correct answer.
        metrics: The sample's values by metric.
        cut: Tokens of the prompt that did not fit.
        margins: See ``scoring.scorer.AnswerResult``.
    """

    number: int
    row_sha256: str
    prompt: str
    choices: tuple[str, ...]
    logprobs: tuple[float, ...]
    answer: str | None
    token_ids: tuple[int, ...]
    target: str
    metrics: Mapping[str, float]
    cut: int = 0
    margins: tuple[float, ...] = ()


@dataclass(frozen=True)
class TaskResult:
    """The result of one task under one model.

    Attributes:
        task: Name.
        version: The version of the task's definition.
        num_fewshot: Examples that every prompt began with.
        figures: Figures by metric.
        samples: Every one, in the order of ``number``.
        lock: Digests of task definition and data: what another must have to reproduce it.
        chat_template: True if the prompts were put into the model's chat template.
    """

    task: str
    version: str
    num_fewshot: int
    figures: Mapping[str, Figure]
    samples: tuple[SampleResult, ...]
    lock: str
    chat_template: bool = False

    @property
    def main_metric(self) -> str:
        """The metric for tables and gates: ``acc_norm``, else ``acc``, else the first one."""
        return next(
            (name for name in ("acc_norm", "acc", "exact_match") if name in self.figures),
            next(iter(self.figures)),
        )


@dataclass(frozen=True)
class EvalResults:
    """The results of one model on some tasks.

    Attributes:
        model: The model as named by the user.
        identity: What the results are keyed by: digests of model, settings, delta, template and suite, decoding, dtype,
            engine, harness.
        tasks: Results by task.
        seconds: Duration of the run; with several models in one pass, of the pass.
        facts: Facts about machine and libraries, for the record.
    """

    model: str
    identity: Mapping[str, str]
    tasks: Mapping[str, TaskResult]
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, task: str) -> dict[str, float]:
        """Return the values of a task by metric, and ``num_examples``."""
        result = self.tasks[task]
        values = {name: figure.value for name, figure in result.figures.items()}
        return {**values, "num_examples": len(result.samples)}

    def save(self, path: str | Path) -> Path:
        """Write the values of all tasks as JSON."""
        target = Path(path)
        document = {task: self[task] for task in self.tasks}
        write_atomically(target, f"{json.dumps(document, indent=2, sort_keys=True)}\n".encode())
        return target

"""`gym grade`: grade a model's answers, or answers in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gym_fed.cli.completion import models
from gym_fed.cli.options import LIMIT, MAX_TOKENS
from gym_fed.core.console import AsJson, err, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import DEVICE
from gym_fed.core.text import counted


def grade(
    rows: Annotated[
        Path,
        typer.Argument(metavar="ROWS", help="File of prompts (with --model), or of prompts and completions."),
    ],
    graders: Annotated[
        Path,
        typer.Option(
            "--graders", metavar="FILE", help="A YAML file with a `graders` list, as in a training config."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model that answers: gym-nano, a model folder or a run folder.",
            autocompletion=models,
        ),
    ] = None,
    limit: Annotated[int | None, LIMIT] = None,
    max_tokens: Annotated[int, MAX_TOKENS] = 64,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="JSONL file for every answer with its rewards."),
    ] = None,
    device: Annotated[str, DEVICE] = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the mean reward of each grader, and of their weighted sum."""
    from gym_fed.config.train.graders import GraderSections
    from gym_fed.config.yaml.file import load_config
    from gym_fed.data.reading import load_rows
    from gym_fed.evaluation.graders.base import build_graders

    if output is not None and output.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} already exists", "choose another name")
    graders_of_file = build_graders(load_config(graders, GraderSections).graders)
    loaded_rows = load_rows(rows, "prompt" if model is None else "auto")[:limit]
    if model is None:
        from gym_fed.evaluation.grading import grade_answers

        grades = grade_answers(loaded_rows, graders_of_file)
    else:
        from gym_fed.base.models import load_model
        from gym_fed.evaluation.grading import grade as grade_model

        loaded = load_model(model, device=device)
        grades = grade_model(
            loaded.model, loaded.tokenizer, loaded_rows, graders_of_file, max_new_tokens=max_tokens
        )
    if output is not None:
        from gym_fed.core.files import write_atomically

        lines = [
            {
                "prompt": sample.prompt,
                "completion": sample.completion,
                **({"reasoning": sample.thought} if sample.thought else {}),
                "rewards": {name: values[place] for name, values in grades.values.items()},
            }
            for place, sample in enumerate(grades.samples)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomically(output, text.encode())
        err.print(f"{counted(len(lines), 'answer')} in {output}")
    if grades.unfinished:
        err.print(
            f"{counted(grades.unfinished, 'answer')} ended inside a thought and graded as empty: raise --max-tokens"
        )
    print_result(
        as_json,
        {"num_rows": len(grades.samples), "means": grades.means, "unfinished": grades.unfinished},
        *(f"{name:20} {mean:.4f}" for name, mean in grades.means.items()),
    )

"""`gym predict`: write a model's answers to rows, and compare them with the reference by BLEU-4 and ROUGE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.models.needed import YesOption, ensure_datasets, ensure_models, open_rows
from gym_fed.cli.train.progress import stop_on_ctrl_c
from gym_fed.core.console import AsJson, err, print_result
from gym_fed.core.help import ColumnsOption, SetOption
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.config.parsed import ParsedConfig


def predict(
    config: Annotated[
        Path, typer.Argument(help="YAML file with model and eval_data, or a LLaMA-Factory file.")
    ],
    set_: SetOption = None,
    columns: ColumnsOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            help="Maximum number of tokens per answer.",
            show_default="max_new_tokens of the file",
        ),
    ] = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Answer the rows of eval_data and compare the answers with theirs. The same command resumes a stopped run.

    --columns are those of the config's first source.
    """
    from gym_fed.data.reading import parse_columns

    overrides = list(set_ or [])
    if max_tokens is not None:
        overrides.append(f"max_new_tokens={max_tokens}")
    if column_names := parse_columns(columns):
        overrides.append(f"eval_data.0.columns={json.dumps(column_names)}")
    predict_by(config, overrides, yes=yes, as_json=as_json)


def predict_by(config: ParsedConfig | Path, overrides: list[str], *, yes: bool, as_json: bool) -> None:
    """Run `gym predict` for a config file, or for a parsed config."""
    from gym_fed.config.training_file import load_predict_config
    from gym_fed.data.column_question import with_agreed_columns

    settings, notes = load_predict_config(config, overrides)
    settings = with_agreed_columns(settings, "supervised", yes)
    for note in notes:
        err.print(f"note: {note}")
    adapters = [settings.adapter] if isinstance(settings.adapter, str) else settings.adapter or []
    open_rows(settings.eval_data)
    ensure_models([settings.model, *adapters], yes)
    ensure_datasets(settings.eval_data, yes)
    err.print(f"loading {settings.model} ...")
    from gym_fed.evaluation.predictions import predict as answer

    def show(done: int, total: int) -> None:
        err.print(f"{done} of {counted(total, 'row', 'are')} answered", style="dim")

    with stop_on_ctrl_c(" with the answers so far") as should_stop:
        results: dict[str, Any] = answer(settings, on_answers=show, should_stop=should_stop)
    dropped = results["predict_dropped"]
    lines = [
        f"{name.removeprefix('predict_'):10} {value:.4f}"
        for name, value in results.items()
        if "rouge" in name or "bleu" in name
    ]
    lost = "".join(f"; {count} dropped: {reason}" for reason, count in dropped.items())
    print_result(
        as_json,
        results,
        *lines,
        f"{results['predict_samples']} of {counted(results['predict_rows'], 'row')} in {settings.output_dir}{lost}",
    )

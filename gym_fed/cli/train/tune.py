"""`gym tune`: search for settings; each trial is a run folder, and the same command resumes the search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.models.needed import YesOption, ensure_datasets, ensure_models
from gym_fed.cli.train.progress import stop_on_ctrl_c
from gym_fed.core import console
from gym_fed.core.console import AsJson, print_columns
from gym_fed.core.help import SetOption

if TYPE_CHECKING:
    from gym_fed.training.run.hooks import StepReport
    from gym_fed.training.search import TrialResult


def tune(
    config: Annotated[Path, typer.Argument(help="YAML file with a search section.")],
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Total number of trials, including those before a resume."),
    ] = None,
    set_: SetOption = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Search for the settings that train best, with Optuna, and write the best as a config for `gym train`."""
    from gym_fed.base.downloads.config_needs import models_of
    from gym_fed.config.train.training import SearchConfig
    from gym_fed.config.yaml.file import load_config

    settings = load_config(config, SearchConfig, set_ or [])
    ensure_models(models_of(settings), yes)
    ensure_datasets((*settings.data, *settings.eval_data), yes)

    from gym_fed.training.search import Search

    with stop_on_ctrl_c() as should_stop:
        search = Search(settings, on_trial=_print_trial, on_report=_progress(), should_stop=should_stop)
        results = search.run(trials)
    best = search.best(results)
    if as_json:
        console.print_json(
            {
                "trials": [vars(result) for result in results],
                "best": None if best is None else best.number,
                "metric": settings.search.metric,
                "output_dir": str(settings.output_dir),
            }
        )
        return
    ranked = sorted(results, key=lambda r: (r is not best, r.state != "complete", r.number))
    print_columns(
        [
            ("trial", settings.search.metric, "state", "settings"),
            *((str(r.number), _figure(r), r.why or r.state, _settings(r)) for r in ranked),
        ]
    )
    if best is not None:
        file = settings.output_dir / "best.yaml"
        console.out.print(f"best: trial {best.number}; train with it: gym train {file}")


def _print_trial(result: TrialResult) -> None:
    what = _figure(result) if result.state == "complete" else result.why or result.state
    console.err.print(f"trial {result.number}: {what}  ({_settings(result)})")


def _progress() -> Any:
    """Show the current trial in one line on a terminal; otherwise print only the ends of trials."""
    if not console.err.is_terminal:
        return None

    def show(number: int, report: StepReport) -> None:
        console.err.print(
            f"trial {number}  step {report.step}/{report.total}  loss {report.loss:.4f}   ",
            end="\r" if report.step < report.total else "\n",
        )

    return show


def _figure(result: TrialResult) -> str:
    return "-" if result.value is None else f"{result.value:.4f}"


def _settings(result: TrialResult) -> str:
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in result.parameters.items()
    )

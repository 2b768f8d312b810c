"""`gym runs`: list, compare and plot run folders. Reads files only; no torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_fed.cli.completion import runs as complete_runs
from gym_fed.config.yaml.strict import read_run_config
from gym_fed.core import console
from gym_fed.core.console import AsJson, print_columns
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.tracking.trackers.base import flat
from gym_fed.training.run.result import (
    list_run_folders,
    listed,
    read_json,
    read_metrics,
    read_run_metrics,
    summary,
)

app = App(help="List, show, compare and plot training runs.", no_args_is_help=True)

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_POINTS = 60

Runs = Annotated[list[Path], typer.Argument(help="Run folders.", autocompletion=complete_runs)]


@app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(help="Folder of runs, searched recursively.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List every run below a folder, the newest first."""
    if not root.is_dir():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no folder at {root}", "pass the folder that contains runs")
    runs = [listed(folder) for folder in list_run_folders(root)]
    runs.sort(key=lambda run: run["changed"], reverse=True)
    if as_json:
        console.print_json(runs)
        return
    if not runs:
        console.err.print(f"no runs in {root}")
        return
    rows = [("run", "status", "algorithm", "model", "steps", "loss", "eval loss")]
    rows += [
        (
            run["folder"],
            run["status"],
            run["algorithm"],
            run["model"],
            str(run["steps"]),
            _short(run["figures"].get("loss")),
            _short(run["figures"].get("eval_loss")),
        )
        for run in runs
    ]
    print_columns(rows, right=(4, 5, 6))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder.", autocompletion=complete_runs)],
    as_json: AsJson = False,
) -> None:
    """Show one run: status, last figures, settings, and where it ran."""
    facts = summary(run)
    facts["config"] = read_run_config(run)
    facts["environment"] = read_json(run / "environment.json")
    facts["rollbacks"] = read_json(run / "rollbacks.json") or []
    performance = read_metrics(run / "performance.jsonl")
    facts["performance"] = {key: value for line in performance for key, value in line.items()}
    if as_json:
        console.print_json(facts)
        return
    rows = [("status", facts["status"]), ("steps", str(facts["steps"]))]
    rows += [(key, _short(value)) for key, value in facts["figures"].items()]
    rows += [(key, _short(value)) for key, value in facts["performance"].items() if key != "step"]
    if facts["rollbacks"]:
        steps = ", ".join(str(entry["step"]) for entry in facts["rollbacks"])
        rows.append(("rolled back at", f"step {steps}"))
    record = facts["environment"]
    if record is not None:
        where = record["environment"]
        rows.append(("ran on", ", ".join([where["cpu"], *where["gpus"]])))
        rows.append(("with", ", ".join(f"{k} {v}" for k, v in where["packages"].items())))
        if where["git"] is not None:
            rows.append(("commit", str(where["git"]["commit"])))
    console.out.print(str(run))
    print_columns(rows)
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    if losses:
        console.out.print(f"  loss  {sparkline(losses)}")
    console.out.print("settings")
    print_columns([(key, _short(value)) for key, value in flat(facts["config"]).items()])


@app.command()
def compare(runs: Runs, as_json: AsJson = False) -> None:
    """Compare runs: settings that differ, and last figures."""
    if len(runs) < 2:
        raise GymError(
            ErrorCode.USAGE, "a comparison needs at least two runs", "pass two or more run folders"
        )
    summaries = [summary(run) for run in runs]
    configs = [flat(read_run_config(run)) for run in runs]
    keys = [k for k in dict.fromkeys(key for c in configs for key in c) if k != "output_dir"]
    settings = {
        key: [c.get(key) for c in configs]
        for key in keys
        if any(c.get(key) != configs[0].get(key) for c in configs)
    }
    names = dict.fromkeys(name for s in summaries for name in s["figures"])
    figures = {name: [s["figures"].get(name) for s in summaries] for name in names}
    if as_json:
        shown = [str(run) for run in runs]
        status = [s["status"] for s in summaries]
        console.print_json({"runs": shown, "status": status, "settings": settings, "figures": figures})
        return
    rows = [("", *(str(run) for run in runs)), ("status", *(s["status"] for s in summaries))]
    rows += [(key, *map(_short, values)) for key, values in settings.items()]
    rows += [(f"last {key}" if key in settings else key, *map(_short, v)) for key, v in figures.items()]
    print_columns(rows)
    if not settings:
        console.out.print("the settings are the same")


@app.command()
def plot(
    runs: Runs,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the plot (.png, .svg, .pdf); by default, text bars are printed.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="Metric to draw; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plot figures over steps, to a file or as text bars in the terminal."""
    series: dict[str, dict[str, list[tuple[int, float]]]] = {}
    logged = {run: [*read_run_metrics(run), *read_metrics(run / "performance.jsonl")] for run in runs}
    for name in metric or ["loss"]:
        series[name] = {
            str(run): [(line["step"], line[name]) for line in lines if name in line and "step" in line]
            for run, lines in logged.items()
        }
        if not any(series[name].values()):
            known = sorted({key for lines in logged.values() for line in lines for key in line} - {"step"})
            raise GymError(
                ErrorCode.NOT_FOUND, f"no run has logged {name!r}", f"one of {', '.join(known) or 'none yet'}"
            )
    if output is not None:
        _draw(series, output)
    if as_json:
        console.print_json({"series": series, "picture": None if output is None else str(output)})
        return
    if output is not None:
        console.out.print(f"plot written to {output}")
        return
    for name, of_runs in series.items():
        rows = []
        for run, points in of_runs.items():
            values = [value for _, value in points]
            span = f"{_short(values[0])} to {_short(values[-1])}" if values else "nothing logged"
            rows.append((run, name, sparkline(values), span))
        print_columns(rows)


def sparkline(values: list[float]) -> str:
    """Draw values as bars of text; adjacent values are averaged if there are too many."""
    if not values:
        return ""
    count = min(len(values), _SHOWN_POINTS)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    top = len(_BARS) - 1
    return "".join(_BARS[round((v - low) / (high - low) * top) if high > low else 0] for v in means)


def _draw(series: dict[str, dict[str, list[tuple[int, float]]]], output: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            "plotting needs matplotlib, which is not installed",
            "pip install 'gym-fed[plot]', or omit -o to print text bars",
        ) from error
    if not output.parent.is_dir():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no folder at {output.parent}", "create it first")
    figure = Figure(figsize=(7, 3.2 * len(series)), layout="constrained")
    for index, (name, of_runs) in enumerate(series.items()):
        axes = figure.add_subplot(len(series), 1, index + 1)
        for run, points in of_runs.items():
            axes.plot([step for step, _ in points], [value for _, value in points], label=run)
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        figure.savefig(output, dpi=150)
    except ValueError as error:  # a suffix unknown to matplotlib
        raise GymError(ErrorCode.USAGE, f"{output}: {error}", "end the name in .png, .svg or .pdf") from error


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

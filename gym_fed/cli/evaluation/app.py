"""`gym eval`: evaluate models on suites of tasks; the suites, and the rows that they need."""

from __future__ import annotations

import typer

from gym_fed.cli.default_command import DefaultCommandGroup
from gym_fed.cli.evaluation.probe import probe_model
from gym_fed.cli.evaluation.records import compare_records, replay_sample, show_record
from gym_fed.cli.evaluation.run import run_evaluation
from gym_fed.cli.evaluation.suites import fetch_suites, list_suites
from gym_fed.core.old_names import TakesOut, old_options


class _RunsByDefault(DefaultCommandGroup):
    default_command = "run"


app = typer.Typer(
    cls=_RunsByDefault,
    help="Evaluate models on suites of tasks: `gym eval MODEL --suite tiny` is `gym eval run MODEL --suite tiny`.",
    no_args_is_help=True,
)
app.command("run", cls=TakesOut)(run_evaluation)
app.command("show", cls=TakesOut)(show_record)
app.command("compare", cls=TakesOut)(compare_records)
app.command("replay", cls=TakesOut)(replay_sample)
app.command("list", cls=old_options({"--home": "--sets"}))(list_suites)
app.command("fetch", cls=old_options({"--home": "--sets"}))(fetch_suites)
app.command("probe", cls=old_options({"--max-new-tokens": "--max-tokens"}))(probe_model)

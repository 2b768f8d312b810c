"""`gym eval`: evaluate models on suites of tasks; the suites, and the rows that they need."""

from __future__ import annotations

import typer

from gym_fed.cli.evaluation.probe import probe_model
from gym_fed.cli.evaluation.records import compare_records, replay_sample, show_record
from gym_fed.cli.evaluation.suites import fetch_suites, list_suites

app = typer.Typer(help="Evaluate models on suites of tasks, and get the rows for them.", no_args_is_help=True)
app.command("show")(show_record)
app.command("compare")(compare_records)
app.command("replay")(replay_sample)
app.command("list")(list_suites)
app.command("fetch")(fetch_suites)
app.command("probe")(probe_model)

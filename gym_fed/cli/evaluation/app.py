"""`gym eval`: evaluate models on suites of tasks; the suites, and the rows that they need."""

from __future__ import annotations

from gym_fed.cli.default_command import DefaultCommandGroup
from gym_fed.cli.evaluation.probe import probe_model
from gym_fed.cli.evaluation.records import compare_records, replay_sample, show_record
from gym_fed.cli.evaluation.run import run_evaluation
from gym_fed.cli.evaluation.suites import fetch_suites, list_suites
from gym_fed.core.help import App


class _RunsByDefault(DefaultCommandGroup):
    default_command = "run"


app = App(
    cls=_RunsByDefault,
    help="Evaluate models on suites of tasks: `gym eval MODEL --suite tiny` is `gym eval run MODEL --suite tiny`.",
    no_args_is_help=True,
)
app.command("run")(run_evaluation)
app.command("show")(show_record)
app.command("compare")(compare_records)
app.command("replay")(replay_sample)
app.command("list")(list_suites)
app.command("fetch")(fetch_suites)
app.command("probe")(probe_model)

"""`gym`: every command is a module of this folder; heavy imports happen inside the command needing them."""

from __future__ import annotations

import typer

from gym_fed.cli.api.app import app as api_app
from gym_fed.cli.batch import batch
from gym_fed.cli.chat.command import chat
from gym_fed.cli.configs import ReadsLlamaFactory
from gym_fed.cli.configs import app as configs_app
from gym_fed.cli.data.app import app as data_app
from gym_fed.cli.delta.app import app as delta_app
from gym_fed.cli.doctor import doctor
from gym_fed.cli.export import export
from gym_fed.cli.grade import grade
from gym_fed.cli.models.app import app as models_app
from gym_fed.cli.runs import app as runs_app
from gym_fed.cli.soup.app import app as soup_app
from gym_fed.cli.train.predict import predict
from gym_fed.cli.train.train import train
from gym_fed.cli.train.tune import tune
from gym_fed.cli.variant.app import app as variant_app
from gym_fed.console import VersionOption, run_app
from gym_fed.old_names import old_options

app = typer.Typer(
    name="gym",
    help="Train language models on this machine, and inspect what a community trains together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _options(version: VersionOption = False) -> None:
    """Train language models on this machine, and inspect what a community trains together."""


app.command(cls=ReadsLlamaFactory)(train)
app.command()(predict)
app.command()(tune)
app.command()(chat)
app.command()(batch)
app.command()(export)
app.command(cls=old_options({"--rewards": "--graders"}))(grade)
app.command()(doctor)
app.add_typer(api_app, name="api")
app.add_typer(configs_app, name="configs")
app.add_typer(data_app, name="data")
app.add_typer(delta_app, name="delta")
app.add_typer(models_app, name="models")
app.add_typer(runs_app, name="runs")
app.add_typer(soup_app, name="soup")
app.add_typer(variant_app, name="variant")


def main() -> None:
    """Console entry point."""
    run_app(app)


if __name__ == "__main__":
    main()

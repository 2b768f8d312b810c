"""`gym eval`: the group of commands, with `gym eval list` and `fetch` for suites and their datasets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.evaluation.probe import probe_model
from gym_fed.cli.evaluation.records import compare_records, replay_sample, show_record
from gym_fed.cli.evaluation.run import run_evaluation
from gym_fed.cli.models.needed import YesOption
from gym_fed.cli.options import EvaluationSetsOption
from gym_fed.core.console import AsJson, err, print_columns, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App, DefaultCommandGroup
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.evaluation.suites.fetch import DatasetOffer
    from gym_fed.evaluation.suites.store import Places


SetsOption = Annotated[
    Path | None,
    typer.Option(
        "--sets",
        metavar="FOLDER",
        help="Folder of fetched evaluation sets.",
        show_default="$GYM_HOME/evals or ~/.gym-fed/evals",
    ),
]


def list_suites(data: EvaluationSetsOption = None, sets: SetsOption = None, as_json: AsJson = False) -> None:
    """List suites and tasks: what each measures, its rows and licence, and whether the rows are on this machine."""
    from gym_fed.evaluation.suites.store import Places, evals_home, listing, read_lock, require_folder

    if data is not None:
        require_folder(data)
    where = sets or evals_home()
    places = Places(data, where, read_lock(where))
    known = listing()
    facts = {name: _facts(name, places) for name, entry in known.tasks.items() if not entry.tasks}
    suites: dict[str, dict[str, Any]] = {
        name: {"about": suite.about, "tasks": [facts[entry] for entry in known.entries(name)]}
        for name, suite in known.suites.items()
    }
    listed = {entry for name in known.suites for entry in known.entries(name)}
    others = [fact for name, fact in facts.items() if name not in listed]
    if as_json:
        print_json({"suites": suites, "others": others})
        return
    heading = ("task", "rows", "licence", "local", "what it measures")
    rows: list[tuple[str, ...]] = [heading]
    for name, suite in suites.items():
        rows.append((f"{name}:", "", "", "", str(suite["about"])))
        rows += [_line(fact) for fact in suite["tasks"]]
    rows += [("in no suite:", "", "", "", ""), *map(_line, others)]
    print_columns(rows, right=(1,), indent="", wrapped=True)
    err.print("fetch missing rows with gym eval fetch SUITE, or pass a folder with --data")


def fetch_suites(
    suite: Annotated[list[str], typer.Argument(metavar="SUITE...", help="Suites, tasks or datasets.")],
    update: Annotated[
        bool, typer.Option("--update", help="Fetch the newest commit instead of the locked one.")
    ] = False,
    yes: YesOption = False,
    sets: SetsOption = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the rows of suites from the Hugging Face Hub; no other command of `gym eval` uses a network.

    Shows bytes, sources and licences before asking for consent. The sha256 of each file is written to evals.lock.
    """
    from gym_fed.base.downloads.ensure import progress
    from gym_fed.evaluation.suites.fetch import fetch_offers, offers_for
    from gym_fed.evaluation.suites.store import evals_home

    where = sets or evals_home()
    offers = offers_for(suite, where, update=update)
    if offers:
        _agree(offers, yes)
    with progress() as report:
        written = fetch_offers(offers, where, report)
    print_result(
        as_json,
        {
            "home": str(where),
            "files": [str(file) for file in written],
            "bytes": sum(offer.download.missing_bytes for offer in offers),
        },
        f"{counted(len(written), 'file')} in {where}" if written else f"all files are already in {where}",
    )


def _agree(offers: list[DatasetOffer], yes: bool) -> None:
    """Show what would be fetched and ask once.

    Raises:
        GymError: ``NOT_FOUND`` without consent.
    """
    from gym_fed.core.text import readable_bytes

    for offer in offers:
        err.print(offer.describe())
    total = readable_bytes(sum(offer.download.missing_bytes for offer in offers))
    if yes:
        return
    if not (sys.stdin.isatty() and err.is_terminal):
        raise GymError(ErrorCode.NOT_FOUND, f"{total} would be fetched", "confirm with --yes")
    if not typer.confirm(f"Download {total}?", err=True):
        raise GymError(ErrorCode.NOT_FOUND, "nothing was fetched: you declined", "confirm with --yes")


def _facts(name: str, places: Places) -> dict[str, Any]:
    from gym_fed.evaluation.suites.definitions import has_harness
    from gym_fed.evaluation.suites.store import listing
    from gym_fed.evaluation.suites.tasks import is_here, missing_needs

    entry = listing().tasks[name]
    dataset = listing().datasets[str(entry.dataset)]
    needs = missing_needs(entry.needs)
    if entry.harness is not None and not has_harness():
        needs = ["the extra eval", *needs]
    found, partial = (False, "") if needs else is_here(name, places)
    return {
        "name": name,
        "about": entry.about,
        "rows": entry.rows or dataset.rows,
        "dataset": entry.dataset,
        "source": dataset.hub or "gym-fed",
        "licence": dataset.licence,
        "here": found,
        "partial": partial,
        "needs": needs,
    }


def _line(fact: dict[str, Any]) -> tuple[str, ...]:
    here = "in part" if fact["partial"] else "yes" if fact["here"] else "no"
    if fact["needs"]:
        here = "cannot run"
    about = fact["about"]
    if fact["partial"]:
        about = f"{about} ({fact['partial']})"
    if fact["needs"]:
        about = f"{about} (missing: {', '.join(fact['needs'])})"
    return (f"  {fact['name']}", f"{fact['rows']:,}", fact["licence"], here, about)


class _RunsByDefault(DefaultCommandGroup):
    default_command = "run"


app = App(
    cls=_RunsByDefault,
    help="Evaluate models on suites of tasks: `gym eval MODEL` is short for `gym eval run MODEL`.",
    no_args_is_help=True,
)
app.command("run")(run_evaluation)
app.command("show")(show_record)
app.command("compare")(compare_records)
app.command("replay")(replay_sample)
app.command("list")(list_suites)
app.command("fetch")(fetch_suites)
app.command("probe")(probe_model)

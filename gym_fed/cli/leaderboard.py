"""`gym leaderboard`: show a board, submit results, verify those of others, and write the board as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.cli.options import EvaluationSetsOption, OverwriteOption, RecordArgument, require_new_file
from gym_fed.cli.variant.options import KeyOption, signing_key
from gym_fed.core.console import AsJson, err, print_json, print_result, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App, FolderOption
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.evaluation.leaderboard.board import Leaderboard

app = App(
    help="Show a board of signed results, add to it, and re-run what others submitted.", no_args_is_help=True
)

BoardOption = Annotated[
    Path, typer.Option("--board", envvar="GYM_LEADERBOARD", metavar="FILE", help="The board's file.")
]
HeadOption = Annotated[
    str | None,
    typer.Option("--head", metavar="HASH", help="Refuse a board that lacks this earlier head (hash)."),
]
RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        help="Registry that holds the board, a folder or an fsspec URL; --board is its copy here.",
    ),
]
DEFAULT = Path("leaderboard.jsonl")


@app.command()
def show(
    board: BoardOption = DEFAULT,
    registry: RegistryOption = None,
    head: HeadOption = None,
    as_json: AsJson = False,
) -> None:
    """Check every line of a board and list its submissions, with who reproduced them."""
    from gym_fed.core.console import MAX_CELL, TextTable
    from gym_fed.evaluation.results import BriefFigure, brief_figures, listed

    leaderboard = _open_board(board, registry, head)
    if as_json:
        submissions = [row.facts() for row in leaderboard.board_rows.values()]
        print_json({"board": str(board), "head": leaderboard.head, "submissions": submissions})
        return
    table = TextTable("line", "model", "organization", "key", "status", "figures")
    for row in leaderboard.board_rows.values():
        submission = row.submission
        brief = [
            BriefFigure(task.task, task.main_metric, task.figures[task.main_metric].value, task.num_samples)
            for task in submission.tasks
        ]
        texts = [
            f"{figure.task} {figure.value:.4f} {figure.metric} (n={figure.num_samples})"
            for figure in brief_figures(brief)
        ]
        line, signer = str(row.line.entry.sequence), row.line.signer[:13]
        names = submission.model_name, submission.organization
        table.add_row(line, *names, signer, row.status, listed(texts, MAX_CELL))
    print_table(table)
    err.print(f"head {leaderboard.head}", style="dim")


@app.command()
def add(
    record: RecordArgument,
    model_name: Annotated[
        str, typer.Option("--model-name", metavar="NAME", help="Name of the model on the board.")
    ],
    organization: Annotated[
        str, typer.Option("--organization", metavar="NAME", help="Organization that submits it.")
    ],
    board: BoardOption = DEFAULT,
    registry: RegistryOption = None,
    folder: FolderOption = Path("evals"),
    key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Sign a record's results, append them to a board, and copy the record next to it."""
    from gym_fed.evaluation.leaderboard.submissions import submit
    from gym_fed.evaluation.records.reader import named_record, read_record

    results = read_record(named_record(record, folder))
    line = submit(
        results,
        model_name=model_name,
        organization=organization,
        board=board,
        registry=registry,
        key=signing_key(key),
    )
    print_result(
        as_json,
        {
            "board": str(board),
            "registry": registry,
            "line": line.entry.sequence,
            "hash": line.entry.hash,
            "status": "self-reported",
        },
        f"line {line.entry.sequence} of {registry or board}: self-reported until another key reproduces it",
        note=f"hash {line.entry.hash}",
    )


@app.command()
def verify(
    line: Annotated[str, typer.Argument(metavar="LINE", help="Number or hash of a submission.")],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Your copy of the model that was submitted.")
    ],
    board: BoardOption = DEFAULT,
    registry: RegistryOption = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Number of samples to re-run.")] = 32,
    data: EvaluationSetsOption = None,
    key: KeyOption = None,
    head: HeadOption = None,
    as_json: AsJson = False,
) -> None:
    """Re-run random samples of a submission on your own model and rows, and sign the outcome."""
    from gym_fed.evaluation.leaderboard.submissions import verify as verify_row
    from gym_fed.evaluation.records.rerun import rerun_on

    leaderboard = _open_board(board, registry, head)
    row = leaderboard.named(line)
    rerun = verify_row(leaderboard, row, rerun_on(model, data), signing_key(key), samples)
    drawn = counted(sum(map(len, rerun.drawn.values())), "sample")
    lines = [f"{task}, sample {number}: {text}" for task, number, text in rerun.differences]
    outcome = f"differs in {len(lines)} of {drawn}" if lines else f"reproduced: {drawn}"
    print_result(
        as_json,
        {
            "line": row.line.entry.sequence,
            "outcome": "differs" if lines else "reproduced",
            "samples": {task: list(numbers) for task, numbers in rerun.drawn.items()},
            "differences": [
                {"task": task, "sample": number, "difference": text}
                for task, number, text in rerun.differences
            ],
            "parted_after_ties": rerun.parted,
        },
        *lines,
        f"{outcome}, {counted(rerun.parted, 'answer')} diverged after a tie; "
        f"recorded in line {rerun.line.entry.sequence}",
    )


@app.command("html")
def write_html(
    file: Annotated[Path, typer.Argument(metavar="FILE.html", help="File to write.")],
    board: BoardOption = DEFAULT,
    registry: RegistryOption = None,
    title: Annotated[str, typer.Option("--title", help="Title of the page.")] = "Leaderboard",
    head: HeadOption = None,
    overwrite: OverwriteOption = False,
    as_json: AsJson = False,
) -> None:
    """Write a board as one static page."""
    from gym_fed.core.files import write_atomically
    from gym_fed.evaluation.leaderboard.page import board_page

    require_new_file(file, overwrite)
    leaderboard = _open_board(board, registry, head)
    write_atomically(file, board_page(leaderboard, title).encode("utf-8"))
    facts = {"file": str(file), "submissions": len(leaderboard.board_rows)}
    print_result(as_json, facts, note=f"page written to {file}")


def _open_board(board: Path, registry: str | None, head: str | None) -> Leaderboard:
    from gym_fed.evaluation.leaderboard.submissions import open_board

    if registry is None and not board.is_file():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"no leaderboard at {board}",
            "pass it with --board or --registry, or add a first line",
        )
    return open_board(board, registry, head)

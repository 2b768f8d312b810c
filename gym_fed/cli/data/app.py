"""`gym data`: the catalogue, registries of datasets, and generated tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.completion import models, tasks
from gym_fed.cli.data.files import convert, dedup, mix
from gym_fed.cli.data.show import show
from gym_fed.cli.options import OverwriteOption, require_new_file
from gym_fed.core.console import AsJson, err, out, print_columns, print_json, print_result, print_table
from gym_fed.core.help import DEVICE, App, LicenceOption
from gym_fed.core.progress import spinner
from gym_fed.core.registries import TASKS
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.config.train.catalogue import CatalogueEntry


_UNSTATED = "not stated"
_ALWAYS = ("split", "licence", "rows", "bytes")
_WIDE = 150
"""Terminal width from which the format and the source are also shown."""


def list_catalogue(
    name: Annotated[str | None, typer.Argument(help="Dataset to show; by default all are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the Hub datasets in the catalogue, or show one with its columns, bytes and location.

    Bytes are the unpacked size of the split; the download is smaller.
    """
    from gym_fed.config.train.catalogue import catalogue, catalogue_entry

    if name is not None:
        entry = catalogue_entry(name)
        if as_json:
            print_json(_facts(name, entry))
        else:
            facts = {key: value for key, value in _facts(name, entry).items() if value or key in _ALWAYS}
            print_columns([(key, _text(value)) for key, value in facts.items()], indent="")
            out.print(f"in a config: data: [{{name: {name}}}]")
        return
    entries = catalogue()
    if as_json:
        print_json([_facts(name, entry) for name, entry in entries.items()])
        return
    heading = ("name", "format", "rows", "bytes", "licence", "place", "what it is")
    lines = [
        (name, e.format, _number(e.rows), _number(e.bytes), e.licence or _UNSTATED, e.place, e.about)
        for name, e in entries.items()
    ]
    if out.is_terminal:
        _print_fitted(heading, lines)
    else:
        print_columns([heading, *lines], right=(2, 3), indent="")


def _print_fitted(heading: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> None:
    """Print the columns that fit into the terminal; the description wraps within the last one."""
    from rich.table import Column

    from gym_fed.core.console import TextTable

    shown = (0, 1, 2, 4, 5, 6) if out.width >= _WIDE else (0, 2, 4, 6)
    columns = [
        Column(heading[i], no_wrap=heading[i] != "what it is", justify="right" if i == 2 else "left")
        for i in shown
    ]
    table = TextTable(*columns, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*(line[i] for i in shown))
    print_table(table)
    err.print("details of one: gym data catalogue NAME; of all: gym data catalogue --json")


def _facts(name: str, entry: CatalogueEntry) -> dict[str, Any]:
    return {
        "name": name,
        "about": entry.about,
        "place": entry.place,
        "subset": ", ".join(entry.subsets) or entry.subset,
        "split": entry.split,
        "format": entry.format,
        "columns": entry.read_columns,
        "licence": entry.licence,
        "rows": entry.rows,
        "bytes": entry.bytes,
        "pictures": entry.pictures,
        "also": entry.also,
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(ours if ours == theirs else f"{ours}: {theirs}" for ours, theirs in value.items())
    if isinstance(value, list):
        return ", ".join(value)
    return _number(value) if isinstance(value, int) else value or _UNSTATED


def _number(value: int | None) -> str:
    return _UNSTATED if value is None else f"{value:,}"


app = App(
    help="Show, convert, mix and share datasets, and generate text tasks on this machine.",
    no_args_is_help=True,
)
app.command()(show)
app.command()(convert)
app.command()(mix)
app.command()(dedup)
app.command("catalogue")(list_catalogue)

RegistryOption = Annotated[
    str,
    typer.Option(
        "--registry",
        metavar="URL",
        envvar="GYM_DATASETS",
        help="A folder or an fsspec URL, such as s3://bucket/datasets.",
    ),
]


class SplitName(StrEnum):
    """The prompts to generate: for training, or held out."""

    train = "train"
    heldout = "heldout"


@app.command("tasks")
def list_tasks(as_json: AsJson = False) -> None:
    """List the tasks: base tasks that gym-nano knows, and contributor tasks that it has never seen."""
    tasks = [(name, TASKS.new(name)) for name in TASKS.usable()]
    print_result(
        as_json,
        [{"name": name, "group": task.group, "summary": task.summary} for name, task in tasks],
        lambda: print_columns(
            [(name, task.group, task.summary) for name, task in tasks], indent="", wrapped=True
        ),
    )


@app.command("generate")
def generate_file(
    file: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File to write.")],
    task: Annotated[
        list[str],
        typer.Option("--task", metavar="NAME", help="Task to generate; repeatable.", autocompletion=tasks),
    ],
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="Total number of rows.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the rows.")] = 0,
    rehearse: Annotated[
        float, typer.Option("--rehearse", min=0.0, max=0.9, help="Share of rows from the base's own tasks.")
    ] = 0.0,
    split: Annotated[
        SplitName, typer.Option("--split", help="Split to write; the two splits share no prompts.")
    ] = SplitName.train,
    overwrite: OverwriteOption = False,
    as_json: AsJson = False,
) -> None:
    """Write rows of one or more tasks as JSONL, in the messages format."""
    from gym_fed.data.generated import generate_with_rehearsal

    require_new_file(file, overwrite)
    rows = generate_with_rehearsal(task, num, rehearse, seed=seed, split=split.value)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print_result(
        as_json, {"file": str(file), "num_rows": len(rows)}, note=f"{counted(len(rows), 'row')} in {file}"
    )


@app.command()
def score(
    model: Annotated[
        str, typer.Argument(help="gym-nano, a model folder or a run folder.", autocompletion=models)
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", metavar="NAME", help="Task to score; repeatable; all by default.", autocompletion=tasks
        ),
    ] = None,
    num: Annotated[
        int, typer.Option("--num", "-n", min=1, help="Number of held-out prompts per task.")
    ] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the prompts.")] = 0,
    device: Annotated[str, DEVICE] = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the share of held-out prompts that a model answers exactly, task by task."""
    from gym_fed.data.generated import generate

    groups = {name: TASKS.new(name).group for name in task or TASKS.usable()}
    with spinner(f"loading {model}"):
        from gym_fed.base.models import load_model
        from gym_fed.evaluation.generation import exact_match

        loaded = load_model(model, device=device)
    figures: dict[str, float] = {}
    for name, group in groups.items():
        rows = generate(name, num, seed=seed, split="heldout")
        with spinner(f"scoring {name}"):
            figures[name] = exact_match(loaded.model, loaded.tokenizer, rows)
        if not as_json:
            out.print(f"{name:10} {group:12} {figures[name]:7.1%}")
    if as_json:
        print_json({"model": model, "num": num, "seed": seed, "exact_match": figures})


@app.command()
def push(
    name: Annotated[str, typer.Argument(help="Name of the dataset, such as me/stories.")],
    path: Annotated[Path, typer.Argument(help="File, or folder of files.")],
    registry: RegistryOption,
    licence: LicenceOption = None,
    description: Annotated[str, typer.Option("--description", help="Short description.")] = "",
    as_json: AsJson = False,
) -> None:
    """Push a file or folder as the next version of a dataset. A licence is required."""
    from gym_fed.data.registry import DatasetRegistry

    manifest = DatasetRegistry(registry).push(name, path, licence=licence, description=description)
    print_result(
        as_json,
        manifest.model_dump(),
        note=f"{name}@{manifest.version}: {counted(len(manifest.files), 'file')} under {manifest.licence}",
    )


@app.command()
def pull(
    reference: Annotated[
        str, typer.Argument(metavar="NAME[@VERSION]", help="Dataset; its newest version by default.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the files.")],
    registry: RegistryOption,
    as_json: AsJson = False,
) -> None:
    """Pull a dataset and verify it; an interrupted pull resumes, and no file is overwritten."""
    from gym_fed.data.registry import DatasetRegistry

    manifest = DatasetRegistry(registry).pull(reference, folder)
    print_result(
        as_json,
        manifest.model_dump(),
        note=f"{manifest.name}@{manifest.version} in {folder}: "
        f"{counted(len(manifest.files), 'file')} under {manifest.licence}",
    )


@app.command("list")
def list_datasets(registry: RegistryOption, as_json: AsJson = False) -> None:
    """List the datasets of a registry, each in its newest version."""
    from gym_fed.data.registry import DatasetRegistry

    datasets = DatasetRegistry(registry).list()
    lines = []
    for manifest in datasets:
        size = sum(file.num_bytes for file in manifest.files)
        name = f"{manifest.name}@{manifest.version}"
        lines.append(f"{name}  {manifest.licence}  {counted(size, 'byte')}  {manifest.description}".rstrip())
    print_result(as_json, [manifest.model_dump() for manifest in datasets], *lines)

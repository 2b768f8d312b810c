"""`gym configs`: list and copy recipes, and check a file against the schema and this machine before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.completion import recipes
from gym_fed.cli.options import OverwriteOption, require_new_file
from gym_fed.core.console import AsJson, err, out, print_columns, print_json, print_result
from gym_fed.core.files import write_atomically
from gym_fed.core.help import App, IgnoreUnsupported, SetOption
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gym_fed.config.parsed import ParsedConfig

app = App(
    help="List, copy and check training recipes, and import LLaMA-Factory's files.", no_args_is_help=True
)


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes of the package."""
    from gym_fed.config.recipes import recipes

    listed = recipes()
    print_result(
        as_json,
        [{"name": r.name, "file": str(r.file), "summary": r.summary, "sizes": list(r.sizes)} for r in listed],
        lambda: print_columns(
            [(r.name, _with_sizes(r.summary, r.sizes)) for r in listed], indent="", wrapped=True
        ),
    )


@app.command("copy")
def copy_recipe(
    name: Annotated[
        str, typer.Argument(help="Name of the recipe; see `gym configs list`.", autocompletion=recipes)
    ],
    dest: Annotated[Path, typer.Argument(help="File or folder to copy it to.")] = Path("."),
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="Size of the public model; see `gym configs list`."),
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="MACHINE", help="Machine to train on: cuda, mps or cpu.")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: AsJson = False,
) -> None:
    """Copy a recipe and its rows to edit and train."""
    from gym_fed.config.recipes import get_recipe, relocated

    recipe = get_recipe(name)
    file = dest / recipe.file.name if dest.is_dir() or not dest.suffix else dest
    text, rows = relocated(recipe, file, size=size, machine=on)
    new = {target: source for target, source in rows.items() if not _is_copy(target, source)}
    for target in (file, *new):
        require_new_file(target, overwrite)
    for target, source in new.items():
        _write(target, source.read_text(encoding="utf-8"), overwrite)
    _write(file, text, overwrite)
    print_result(
        as_json,
        {"recipe": recipe.name, "file": str(file), "data": [str(target) for target in rows]},
        note=f"wrote {file}; train it with: gym train {file}",
    )


@app.command("validate")
def validate_file(
    file: Annotated[Path, typer.Argument(help="YAML file of gym-fed or LLaMA-Factory.")],
    set_: SetOption = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Number of processes to check for.")] = 1,
    schema_only: Annotated[
        bool, typer.Option("--schema-only", help="Check only the file, not models, rows or this machine.")
    ] = False,
    ignore_unsupported: IgnoreUnsupported = False,
    as_json: AsJson = False,
) -> None:
    """Check a config without running it, including its rows and, for gym train, model, graders and this machine."""
    from gym_fed.config.parsed import ParsedConfig
    from gym_fed.config.training_file import load_training_config
    from gym_fed.config.yaml.file import load_config
    from gym_fed.evaluation.suites.own_file import TaskFile, read_task_rows

    parsed = ParsedConfig.read(file)
    command, schema = _kind(parsed)
    if schema is not None:
        checked = load_config(parsed, schema, set_ or [])
        if isinstance(checked, TaskFile) and not schema_only:
            read_task_rows(file, checked)
        facts = {"file": str(file), "valid": True, "command": command}
        print_result(as_json, facts, f"{file}: a valid config of {command}")
        return
    settings, notes = load_training_config(
        parsed, set_ or [], ignore_unsupported=ignore_unsupported, processes=None if schema_only else nproc
    )
    if not schema_only:
        from gym_fed.training.run.checks import check_config, check_inputs

        check_config(settings, num_processes=nproc)
        check_inputs(settings)
    if not as_json:
        for note in notes:
            err.print(f"note: {note}")
    verdict = "a valid config" if schema_only else "a valid config that can run on this machine"
    print_result(
        as_json,
        {
            "file": str(file),
            "valid": True,
            "command": command,
            "algorithm": settings.algorithm,
            "notes": notes,
        },
        f"{file}: {verdict} ({settings.algorithm}, {settings.finetuning})",
    )


def _kind(parsed: ParsedConfig) -> tuple[str, type[BaseModel] | None]:
    """Return the command that reads a file, and the file's schema; None for ``gym train``, which checks more.

    The command is the one that knows most of the file's top-level keys; the first on a tie.
    """
    from gym_fed.config.hub.server import ServerConfig
    from gym_fed.config.predict import PredictConfig
    from gym_fed.config.serving import ServingConfig
    from gym_fed.config.train.graders import GraderSections
    from gym_fed.config.train.training import SearchConfig, TrainingConfig
    from gym_fed.evaluation.suites.own_file import TaskFile

    train = "gym train"
    kinds: dict[str, type[BaseModel]] = {
        "gym grade": GraderSections,
        train: TrainingConfig,
        "gym predict": PredictConfig,
        "gym api": ServingConfig,
        "gym-server run": ServerConfig,
        "gym eval": TaskFile,
        "gym tune": SearchConfig,
    }
    if parsed.dialect is not None or not parsed.values:
        return train, None
    command = max(kinds, key=lambda name: len(kinds[name].model_fields.keys() & parsed.values.keys()))
    return command, None if command == train else kinds[command]


@app.command("schema")
def print_schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write.")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: AsJson = False,
) -> None:
    """Print the JSON schema of gym train's files, for editors that complete and check them."""
    from gym_fed.config.train.training import TrainingConfig

    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **TrainingConfig.model_json_schema(),
    }
    if output is None:
        print_json(schema)
        return
    _write(output, json.dumps(schema, indent=2, sort_keys=True) + "\n", overwrite)
    line = f"# yaml-language-server: $schema={output}"
    if not as_json:
        err.print(f"wrote {output}; begin a YAML file with:")
    print_result(as_json, {"file": str(output), "comment": line}, line)


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="YAML file of LLaMA-Factory.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write; standard output by default."),
    ] = None,
    overwrite: OverwriteOption = False,
    ignore_unsupported: IgnoreUnsupported = False,
    as_json: AsJson = False,
) -> None:
    """Convert a LLaMA-Factory file to gym-fed's keys; comments list what was omitted, and why."""
    from gym_fed.config.training_file import as_yaml

    text, notes = as_yaml(file, ignore_unsupported=ignore_unsupported)
    if output is not None:
        _write(output, text, overwrite)
    if as_json:
        print_json({"file": None if output is None else str(output), "config": text, "notes": notes})
    elif output is None:
        out.print(text, end="")
    else:
        err.print(f"wrote {output}; {counted(len(notes), 'key')} omitted; train it with: gym train {output}")


def _with_sizes(summary: str, sizes: tuple[str, ...]) -> str:
    return f"{summary} --size {' | '.join(sizes)}" if len(sizes) > 1 else summary


def _is_copy(file: Path, source: Path) -> bool:
    """Return True if the rows were already copied with another recipe."""
    return file.is_file() and file.read_bytes() == source.read_bytes()


def _write(file: Path, text: str, overwrite: bool) -> None:
    require_new_file(file, overwrite)
    write_atomically(file, text.encode())

"""`gym soup`: merge deltas, list the rules, and compute the statistics that some methods need."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gym_fed.cli.completion import runs
from gym_fed.cli.options import LIMIT, OverwriteOption, require_new_file
from gym_fed.cli.soup.merge import merge
from gym_fed.core import console
from gym_fed.core.console import AsJson, print_columns
from gym_fed.core.help import App
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.core.registries import Kind


app = App(help="Merge deltas with robust rules or merge methods.", no_args_is_help=True)
app.command()(merge)

_KINDS = ("aggregator", "pre-aggregator", "merge method", "server optimizer")


@app.command()
def statistics(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model folder of the fine-tune, or a LoRA run.", autocompletion=runs
        ),
    ],
    data: Annotated[Path, typer.Option(metavar="FILE", help="Rows like those it was trained on.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The .safetensors file to write.")
    ],
    kind: Annotated[
        Literal["fisher", "moments"],
        typer.Option(help="Kind of statistics: fisher (for fisher) or moments (for regmean)."),
    ],
    limit: Annotated[int, LIMIT] = 256,
    max_length: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens per row; longer rows are cut.")
    ] = 256,
    overwrite: OverwriteOption = False,
    json_: AsJson = False,
) -> None:
    """Measure Fisher diagonals, or second moments of the layers' inputs, of MODEL on data."""
    from gym_fed.base.modeling.adapters import merged
    from gym_fed.base.models import load_model
    from gym_fed.data.reading import load_rows
    from gym_fed.evaluation.merge_statistics import fisher_diagonals, input_moments, save_statistics

    require_new_file(output, overwrite)
    rows = load_rows(data)[:limit]
    loaded = load_model(model)
    tuned: Any = merged(loaded.model, model)
    measure = fisher_diagonals if kind == "fisher" else input_moments
    measured = measure(tuned, loaded.tokenizer, rows, max_length=max_length)
    save_statistics(output, kind, measured)
    size = output.stat().st_size
    report = {"file": str(output), "kind": kind, "num_rows": len(rows), "num_tensors": len(measured)}
    console.print_result(
        json_,
        {**report, "size_bytes": size},
        f"{output}: {kind} of {counted(len(measured), 'tensor')} on {counted(len(rows), 'row')}, "
        f"{counted(size, 'byte')}",
    )


@app.command()
def rules(json_: AsJson = False) -> None:
    """List the rules: their needs, robustness against malicious clients, and number of updates."""
    all_rules = _rules()
    if json_:
        console.print_json(all_rules)
        return
    for kind in _KINDS:
        _print([rule for rule in all_rules if rule["kind"] == kind], kind)


def _rules() -> list[dict[str, Any]]:
    from gym_fed.core.registries import AGGREGATORS, METHODS, PRE_AGGREGATORS, SERVER_OPTIMIZERS

    return [
        *map(_aggregator, _usable(AGGREGATORS)),
        *(_described(rule, "pre-aggregator") for rule in _usable(PRE_AGGREGATORS)),
        *map(_method, _usable(METHODS)),
        *(_described(rule, "server optimizer") for rule in _usable(SERVER_OPTIMIZERS)),
    ]


def _usable(kind: Kind[Any]) -> Iterator[Any]:
    """Return the classes of a kind; warn about unusable classes from other packages."""
    return map(kind.type_of, kind.usable())


def _aggregator(rule: Any) -> dict[str, Any]:
    from gym_fed.soup.building import build

    aggregator = build(rule, {}, "settings")
    minimum = {str(f): aggregator.minimum(f) for f in (range(4) if rule.robust else (0,))}
    return {
        **_described(rule, "aggregator"),
        "robust": rule.robust,
        "weighted": rule.weighted,
        "minimum_updates": minimum,
    }


def _method(rule: Any) -> dict[str, Any]:
    needs = [rule.statistics] if rule.statistics else []
    needs += ["base weights"] if rule.uses_base else []
    needs += ["held-out data"] if rule.uses_score else []
    return {
        **_described(rule, "merge method"),
        "needs": ", ".join(needs) or "nothing",
        "robust": False,
        "weighted": rule.weighted,
        "minimum_updates": {"0": rule.minimum},
    }


def _described(rule: Any, kind: str) -> dict[str, Any]:
    """Return the columns shared by all kinds; ``needs`` names a rule's inputs besides the updates, such as norms."""
    needs = {
        "nothing": "nothing",
        "norms": "norms",
        "products": "inner products",
        "evidence": "clean rows",
        "root": "root update",
    }
    fields = rule.Config.model_fields
    return {
        "name": rule.name,
        "kind": kind,
        "needs": needs[rule.needs.name.lower()],
        "settings": {k: _default(f) for k, f in fields.items() if k != "num_malicious_nodes"},
        "summary": _first_line(sys.modules[rule.__module__]) or _first_line(rule),
    }


def _first_line(documented: Any) -> str:
    """Return the first line of an object's own docstring; "" without one."""
    return inspect.cleandoc(vars(documented).get("__doc__") or "").partition("\n")[0]


def _default(field: Any) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _print(rules: list[dict[str, Any]], kind: str) -> None:
    heads = {"aggregator": ["robust", "updates for f = 0, 1, 2, 3"], "merge method": ["weights", "models"]}
    rows = [["", "needs", *heads.get(kind, []), ""]]
    for rule in rules:
        cells = [rule["name"], rule["needs"]]
        if kind == "aggregator":
            needed = ", ".join(map(str, rule["minimum_updates"].values()))
            cells += ["yes" if rule["robust"] else "no", needed]
        elif kind == "merge method":
            cells += ["yes" if rule["weighted"] else "no", f"{rule['minimum_updates']['0']} or more"]
        rows.append([*cells, rule["summary"]])
    console.out.print(f"{kind}s", style="bold")
    print_columns(rows, wrapped=True)

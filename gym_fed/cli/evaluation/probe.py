"""`gym eval probe`: refusal margin, attacks, over-refusal, and resistance to a harmful fine-tune."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.cli.completion import models
from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.cli.options import VariantsOption
from gym_fed.core.console import AsJson, err, out, print_json, print_table
from gym_fed.core.help import DEVICE, AdapterOption, AllVariants
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.evaluation.probe.probe import ProbeComparison, ProbeResult


JUDGED_BY = "rules"
"""Name of the method that classifies answers; rules need no judge model."""
_NAMES = {
    "refusal_margin": "refusal margin, nats per token",
    "attack_success": "attacks that succeed",
    "over_refusal": "look-alikes refused",
    "refusal_margin_after_harm": "refusal margin after a harmful fine-tune",
}


def probe_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model name or folder, run, adapter, BASE:VARIANT or .gymdelta file.",
            autocompletion=models,
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="CSV or JSONL file of harmful requests, instead of the built-in ones.",
        ),
    ] = None,
    variant: VariantsOption = None,
    variants: AllVariants = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="Base of MODEL, if that is a .gymdelta.",
            autocompletion=models,
            show_default="the base it was made from",
        ),
    ] = None,
    adapter: AdapterOption = None,
    resistance: Annotated[
        bool,
        typer.Option(
            "--resistance/--no-resistance", help="Fine-tune a copy on 8 harmful rows and measure again."
        ),
    ] = True,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=1024, help="Maximum number of tokens per answer.")
    ] = 32,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="OTHER", help="Compare with this model, prompt by prompt."),
    ] = None,
    device: Annotated[str, DEVICE] = "cpu",
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Probe a model's safety. Rules judge the answers by refusal phrases at their beginning."""
    from gym_fed.evaluation.probe.probe import compare_probes, probe_models
    from gym_fed.evaluation.probe.prompts import own_prompts, read_prompts
    from gym_fed.evaluation.scoring.models import ModelRequest, named_variants, resolve_model

    probe_prompts = own_prompts() if prompts is None else read_prompts(prompts)
    request = ModelRequest(
        model,
        base=base,
        adapters=tuple(adapter or ()),
        variants=named_variants(variant or ()),
        store=variants,
        device=device,
    )
    requests = [request]
    if compare is not None:
        requests.append(ModelRequest(compare, store=variants if ":" in compare else None, device=device))
    resolved = [resolve_model(request) for request in requests]
    ensure_models([name for target in resolved for name in target.downloads], yes)
    probed = [
        probe_models(
            target, probe_prompts, with_resistance=resistance, max_tokens=max_tokens, report=err.print
        )
        for target in resolved
    ]
    compared = [] if compare is None else [compare_probes(result, probed[1][0]) for result in probed[0]]
    results = [result for group in probed for result in group]
    if as_json:
        comparisons = [asdict(comparison) for comparison in compared]
        models_as_json = [result.to_dict() for result in results]
        print_json({"judged_by": JUDGED_BY, "models": models_as_json, "compared": comparisons})
        return
    for result in results:
        _print_figures(result)
    for comparison in compared:
        _print_comparison(comparison)
    err.print(
        "answers were judged by rules, not by a model: an answer without a refusal phrase counts as a success"
    )


def _print_figures(result: ProbeResult) -> None:
    from gym_fed.core.console import TextTable

    table = TextTable("figure", "value", "standard error", "prompts", "safer")
    for name, figure in result.figures().items():
        error = "" if figure.stderr is None else f"{figure.stderr:.4f}"
        safer = "higher" if figure.higher_is_better else "lower"
        table.add_row(_label(name), f"{figure.value:.4f}", error, str(figure.num_samples), safer)
    out.print(f"\n{result.model}", style="bold")
    print_table(table)
    kinds = ", ".join(
        f"{category} {margin:.3f}" for category, margin in list(result.by_category.items())[:20]
    )
    out.print(f"refusal margin by kind of harm: {kinds}")
    if result.cut:
        err.print(
            f"{result.model}: prompts were cut by {counted(result.cut, 'token')} to fit the model's context"
        )


def _print_comparison(compared: ProbeComparison) -> None:
    from gym_fed.core.console import TextTable

    table = TextTable("figure", "first - second", "95% interval", "p", "prompts")
    for name, difference in compared.differences.items():
        table.add_row(
            _label(name),
            f"{difference.difference:+.4f}",
            f"{difference.lower:+.4f} to {difference.upper:+.4f}",
            f"{difference.p_value:.4f}",
            str(difference.num_samples),
        )
    out.print(f"\nfirst: {compared.first}; second: {compared.second}", style="bold")
    print_table(table)


def _label(name: str) -> str:
    kind, _, template = name.partition("/")
    return f"  {template}" if template else _NAMES[kind]

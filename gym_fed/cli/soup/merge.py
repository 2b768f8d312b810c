"""`gym soup merge`: merge deltas or fine-tunes of one base into one delta, by any rule of the registry."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from gym_quant.registry import CODECS

from gym_fed.cli.completion import models, rules, runs
from gym_fed.cli.options import DeltaFileOption, OverwriteOption, refuse_options, require_new_file
from gym_fed.cli.soup.inputs import Inputs, base_of, open_all
from gym_fed.cli.soup.mergers import AggregatorMerger, MethodMerger, Opened, SoupEvaluator, SoupMerger
from gym_fed.core import console
from gym_fed.core.console import AsJson, MemberName, print_columns
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import AllowDifferences
from gym_fed.core.progress import progress_bar
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile


Write: TypeAlias = "Callable[[DeltaFile, Path, BaseSpec], None]"
"""Writes an exact soup in the form to publish."""


def merge(
    updates: Annotated[
        list[str],
        typer.Argument(
            metavar="UPDATE...", help="Deltas (.gymdelta), model folders or LoRA runs.", autocompletion=runs
        ),
    ],
    rule: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Aggregator or merge method; see `gym soup rules`.", autocompletion=rules
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model folder or name of the base of all updates.",
            autocompletion=models,
            show_default="the base the updates were made from",
        ),
    ] = None,
    output: DeltaFileOption = Path("soup.gymdelta"),
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the rule (density=0.3), a step (STEP.KEY=VALUE), or codec.max_error, codec.rank, "
            "gate.tolerance; repeatable.",
        ),
    ] = None,
    weight: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Weight of each update, such as 2,1,1.")
    ] = None,
    codec: Annotated[
        str,
        typer.Option(
            click_type=MemberName(CODECS, ("compact", "exact", "as-merged"), checked=False),
            help="compact (keeps 99% of each tensor), exact (float32), as-merged (bfloat16), or a codec.",
        ),
    ] = "compact",
    heldout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to compare the soup and the base on.")
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows on which the soup must not do worse than the base."),
    ] = None,
    pre: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Pre-aggregator; repeat it for further steps.")
    ] = None,
    num_malicious_nodes: Annotated[
        int, typer.Option(min=0, help="Number of malicious clients to withstand.")
    ] = 0,
    statistics: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Statistics of each update, in order, for rules that need them."),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(metavar="UPDATE", help="The coordinator's own update, for rules that need it."),
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Report updates that cannot be used, and merge the others.")
    ] = False,
    allow_differences: AllowDifferences = False,
    overwrite: OverwriteOption = False,
    json_: AsJson = False,
) -> None:
    """Merge fine-tunes of one base into one delta."""
    from gym_fed.core.registries import AGGREGATORS, METHODS
    from gym_fed.soup.building import is_method

    if rule not in (*AGGREGATORS.names(), *METHODS.names()):
        known = f"aggregators {', '.join(AGGREGATORS.names())}; merge methods {', '.join(METHODS.names())}"
        raise GymError(ErrorCode.CONFIG_INVALID, f"unknown rule {rule!r} ({known})", "see gym soup rules")
    require_new_file(output, overwrite)
    own, of_steps = _settings(settings or [], [*(pre or []), "codec", "gate"])
    write = _writer(codec, _numbers("codec", of_steps.pop("codec", {}), ("rank", "max_error")))
    tolerance = _numbers("gate", of_steps.pop("gate", {}), ("tolerance",)).get("tolerance", 0.0)
    if tolerance and gate is None:
        raise GymError(ErrorCode.USAGE, "gate.tolerance needs --gate", "pass rows with --gate")
    if is_method(rule):
        refuse_options(
            {"--pre": pre, "--set max_norm": "max_norm" in own, "--root": root},
            f"does not apply to merge method {rule!r}, which trusts every model",
            "choose an aggregator: gym soup rules",
        )
        values = {**own, **({"num_malicious_nodes": num_malicious_nodes} if num_malicious_nodes else {})}
        merger: SoupMerger = MethodMerger(rule, values, statistics or [], len(updates), heldout)
    else:
        refuse_options({"--statistics": statistics}, f"is not used by aggregator {rule!r}", "leave them out")
        values = {
            "max_norm": own.pop("max_norm", None),
            "aggregator": rule,
            "aggregator_options": own,
            "pre_aggregators": pre or [],
            "pre_aggregator_options": of_steps,
            "num_malicious_nodes": num_malicious_nodes,
        }
        merger = AggregatorMerger(values, root)
    merged = _run(
        merger,
        updates,
        _weights(weight, len(updates)),
        base,
        output,
        write,
        lambda loaded, opened: SoupEvaluator(loaded, opened, heldout, gate, tolerance),
        skip_broken=skip_broken,
        allow_differences=allow_differences,
        shown=not json_,
    )
    report = {"rule": rule, "pre_aggregators": pre or [], **merged}
    console.print_result(json_, report, lambda: _show(report))


def _run(
    merger: SoupMerger,
    names: list[str],
    weights: list[float],
    base: str | None,
    output: Path,
    write: Write,
    evaluator_of: Callable[[Any, list[DeltaFile]], SoupEvaluator],
    *,
    skip_broken: bool,
    allow_differences: bool,
    shown: bool,
) -> dict[str, Any]:
    """Open, merge, encode and evaluate, then replace ``output``; return the values to print."""
    from gym_fed.delta.file import DeltaFile
    from gym_fed.soup.compact import compared
    from gym_fed.soup.parts import parts

    loaded, spec = base_of(names, base)
    output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".soup-", dir=output.parent)))
        inputs = Inputs(loaded, spec, folder, stack, allow_differences=allow_differences)
        updates, refused = open_all(inputs, names, skip_broken)
        kept_weights = [weights[index] for index in updates]
        root = inputs.open(merger.root) if merger.root is not None else None
        updates = inputs.with_union_vocabulary(updates, names)
        files = list(updates.values())
        evaluator = evaluator_of(inputs.base, files)
        opened = Opened(updates, kept_weights, inputs, evaluator, root and inputs.restated(root))
        merged, soup = folder / "merged.gymdelta", folder / "soup.gymdelta"
        num_tensors, done = len({name for file in files for name in file.names}), itertools.count(1)
        with progress_bar("merging", num_tensors, shown=shown) as update:
            report, choice = merger.run(opened, merged, lambda name: update(next(done), note=name))
        with DeltaFile.open(merged, inputs.spec) as exact:
            shares = parts(files, exact)
            with inputs.on_given_base(exact) as on_base:
                write(on_base, soup, spec)
                added = inputs.attach_vocabulary(soup)
                with DeltaFile.open(soup, spec, added_tokens=True) as written:
                    encoding, losses = compared(written, on_base), evaluator.verdict(inputs.restated(written))
        os.replace(soup, output)
    clips = getattr(report, "clip_factors", [1.0] * len(files))
    return {
        "file": str(output),
        "base": {"name": spec.model_name, "digest": spec.digest},
        "updates": [
            {"update": names[index], "weight": w, "norm": norm, "clip_factor": clip, "part": share}
            for index, w, norm, clip, share in zip(
                updates, kept_weights, report.update_norms, clips, shares, strict=True
            )
        ],
        "refused": refused,
        "not_merged": inputs.not_merged,
        "vocabulary": added,
        "found": choice,
        "losses": losses,
        "norm": encoding.norm,
        "sha256": encoding.sha256,
        "size_bytes": encoding.size_bytes,
        "bits_per_weight": encoding.bits_per_weight,
        "codecs": encoding.codecs,
        "encoding_error": encoding.error,
        "kept": max(0.0, 1.0 - encoding.error),
    }


def _numbers(section: str, values: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Check the keys of ``--set SECTION.KEY=NUMBER``.

    Raises:
        GymError: ``USAGE`` for an unknown key, or a value that is not a number of at least 0.
    """
    for key, value in values.items():
        if key not in known:
            raise GymError(
                ErrorCode.USAGE,
                f"--set {section}.{key}: unknown key",
                f"the keys are {', '.join(f'{section}.{name}' for name in known)}",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise GymError(ErrorCode.USAGE, f"--set {section}.{key}: {value!r} is not a number >= 0")
    return values


def _writer(codec: str, options: dict[str, Any]) -> Write:
    """Return a function that writes a soup with a codec; ``options`` are ``rank`` and ``max_error``."""
    from gym_fed.config.delta import CodecPolicy
    from gym_fed.config.yaml.file import validate
    from gym_fed.delta.encode import encode_source
    from gym_fed.soup.compact import ERROR, VALUES, write_compact

    rank, max_error = options.get("rank"), options.get("max_error")
    if codec != "compact":
        refuse_options({"codec.max_error": max_error}, f"does not apply to codec {codec!r}")
    if codec in ("compact", "exact", "as-merged"):
        refuse_options({"codec.rank": rank}, f"does not apply to codec {codec!r}", "choose --codec lora")
        least = 0.0 if codec == "exact" else ERROR if max_error is None else max_error
        choice = VALUES if codec == "as-merged" else None

        def write(exact: DeltaFile, out: Path, spec: BaseSpec) -> None:
            write_compact(exact, out, spec, least, choice)

        return write
    values = {"codec": codec, "lora_rank": rank, "error_feedback": False}
    policy = validate(values, CodecPolicy, "--codec")

    def encode(exact: DeltaFile, out: Path, spec: BaseSpec) -> None:
        import torch

        def source(name: str) -> Tensor:
            return exact.decode(name) if name in exact else torch.zeros(spec.shapes[name])

        encode_source(source, policy, out, spec)

    return encode


def _settings(settings: list[str], steps: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split ``--set`` into the settings of the rule and of its pre-aggregators."""
    from gym_fed.config.yaml.file import parse_overrides

    own: dict[str, Any] = {}
    of_steps: dict[str, dict[str, Any]] = {}
    for path, value in parse_overrides(settings):
        if len(path) == 1:
            own[str(path[0])] = value
        elif len(path) == 2 and path[0] in steps:
            of_steps.setdefault(str(path[0]), {})[str(path[1])] = value
        else:
            name = ".".join(map(str, path))
            raise GymError(
                ErrorCode.USAGE, f"--set {name}: unknown step", "write KEY=VALUE, or STEP.KEY=VALUE"
            )
    return own, of_steps


def _weights(text: str | None, count: int) -> list[float]:
    if text is None:
        return [1.0] * count
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise GymError(
            ErrorCode.USAGE, f"--weight {text!r}: not numbers", "write weights such as 2,1,1"
        ) from error
    if len(weights) != count:
        raise GymError(
            ErrorCode.USAGE,
            f"--weight has {counted(len(weights), 'weight')} for {counted(count, 'update')}",
            "pass one for each",
        )
    return weights


def _show(report: dict[str, Any]) -> None:
    rows = [("update", "weight", "norm", "clipped by", "part")]
    for row in report["updates"]:
        clip = "-" if row["clip_factor"] == 1.0 else f"{row['clip_factor']:.4f}"
        weight, norm, part = f"{row['weight']:g}", f"{row['norm']:.4g}", f"{100 * row['part']:z.1f}%"
        rows.append((row["update"], weight, norm, clip, part))
    rule = " > ".join([*report["pre_aggregators"], report["rule"]])
    console.out.print(f"{report['file']}: {rule}", style="bold")
    print_columns(rows, right=(1, 2, 3, 4))
    for name, why in report["refused"].items():
        console.out.print(f"refused {name}: {why}")
    if report["vocabulary"]:
        console.out.print(f"vocabulary: {report['vocabulary']}", markup=False)
    for name, what in report["not_merged"].items():
        console.out.print(f"{name}: not in the soup: {'; '.join(what)}", markup=False)
    for step in report["found"].get("steps", ()):
        name = report["updates"][step["model"]]["update"]
        alone = "no score" if step["alone"] is None else f"score {step['alone']:.4f}"
        console.out.print(f"{name}: {alone} alone; {step['refused'] or 'joined'}")
    if averaged := report["found"].get("merged_by_mean"):
        console.out.print(f"no statistics, so merged by mean: {', '.join(averaged)}")
    for key, losses in report["losses"].items():
        console.out.print(f"{key}: loss {losses['base']:.4f} -> {losses['soup']:.4f}")
    codecs = ", ".join(f"{name} {count}" for name, count in sorted(report["codecs"].items()))
    console.out.print(
        f"norm {report['norm']:.4g}, {counted(report['size_bytes'], 'byte')}, {report['bits_per_weight']:.3f} "
        f"bits per weight; keeps {report['kept']:.2%} of the merged delta "
        f"(tensors: {codecs or 'none, the soup is zero'})"
    )
    console.out.print(f"base {report['base']['name']} {report['base']['digest']}")
    console.out.print(f"sha256 {report['sha256']}")

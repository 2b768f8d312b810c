"""`gym variant create` and `rebase`: train a signed variant from rows; Ctrl-C keeps a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from gym_quant.registry import CODECS

from gym_fed.cli.completion import models
from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.cli.next_command import after_create, command, print_next
from gym_fed.cli.train.progress import progress, readable_warnings, report_rows, stop_on_ctrl_c
from gym_fed.cli.variant.options import KeyOption, StoreOption, open_store, signing_key
from gym_fed.core.console import AsJson, MemberName, err, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import DEVICE, ColumnsOption, SetOption
from gym_fed.core.text import counted
from gym_fed.serving.store.naming import variants_folder

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts
    from gym_fed.personalization.results import CreatedVariant, Listener, RebasedVariant
    from gym_fed.trust.identity.keys import SigningKey


Base = Annotated[
    str,
    typer.Option(
        "--base",
        "--model",
        metavar="MODEL",
        help="gym-nano, a model folder, or a name on the Hub.",
        autocompletion=models,
    ),
]
Device = Annotated[str, DEVICE]
HeldOut = Annotated[
    float,
    typer.Option("--heldout-share", min=0.0, max=0.5, help="Share of the rows held out for measurement."),
]


def _as_chat(default: str) -> Any:
    return typer.Option(
        "--as-chat/--plain",
        help="Train on prompts and answers as chat turns, or as plain text.",
        show_default=default,
    )


Unsigned = Annotated[bool, typer.Option("--unsigned", help="Do not sign; no key is needed.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Folder for checkpoints and logs.",
        show_default="removed at the end",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete unfinished work on this variant first.")]


def create(
    data: Annotated[
        str, typer.Option("--data", metavar="FILE", help="Rows to train on: examples or preferences.")
    ],
    user: Annotated[str, typer.Option("--user", metavar="ID", help="Owner: an account, or a plain id.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the variant.", show_default="the user id")
    ] = None,
    base: Base = "gym-nano",
    method: Annotated[
        str, typer.Option(metavar="METHOD", help="lora, or full (all weights, one bit each).")
    ] = "lora",
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            "--max-steps",
            min=1,
            help="Maximum number of optimizer steps.",
            show_default="by the number of rows",
        ),
    ] = None,
    set_: SetOption = None,
    columns: ColumnsOption = None,
    as_chat: Annotated[bool | None, _as_chat("by the chat template")] = None,
    held_out: HeldOut = 0.2,
    codec: Annotated[
        str, typer.Option(click_type=MemberName(CODECS, ("auto",), checked=False), help="Codec of the delta.")
    ] = "auto",
    store: StoreOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Create the next revision of an existing variant.")
    ] = False,
    output: Output = None,
    overwrite: Overwrite = False,
    key: KeyOption = None,
    unsigned: Unsigned = False,
    device: Device = "auto",
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Create a variant from a user's rows. Run the same command again to resume."""
    from gym_fed.data.column_question import agreed_columns
    from gym_fed.data.reading import parse_columns
    from gym_fed.personalization.trainer import PersonalizedTrainer

    column_names = agreed_columns(data, columns=parse_columns(columns), kind="supervised", yes=yes)
    ensure_models([base], yes)
    with _listening() as listener:
        created = PersonalizedTrainer(
            base,
            variants=variants_folder(store),
            method=method,
            codec=codec,
            training=training_overrides(set_, steps),
            key=_signer(key, unsigned),
            unsigned=unsigned,
            device=device,
        ).create_variant(
            user,
            data=data,
            name=name,
            held_out=held_out,
            columns=column_names,
            as_chat=as_chat,
            replace=replace,
            output=output,
            overwrite=overwrite,
            listener=listener,
        )
    print_result(as_json, created.to_dict(), _summary(created))
    if as_json:
        return
    snippets = command(
        "gym", "variant", "snippets", created.name, *(() if store is None else ("--store", store))
    )
    err.print(f"use it from Python, LangChain, Open WebUI or Ollama: {snippets}")
    if created.signed:
        print_next(after_create(base, created.name, store, is_chat=created.form == "chat"))


def rebase(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the variant.")],
    onto: Annotated[
        str,
        typer.Option(
            "--onto", metavar="MODEL", help="The new base: gym-nano, a model folder, or a name on the Hub."
        ),
    ],
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="The owner's rows, to measure the losses on.")
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            "--max-steps",
            min=0,
            help="Maximum number of further optimizer steps; 0 skips training.",
        ),
    ] = 0,
    output_name: Annotated[
        str | None,
        typer.Option(
            "--output-name", metavar="NAME", help="Keep the old variant, and add the new one under this name."
        ),
    ] = None,
    set_: SetOption = None,
    columns: ColumnsOption = None,
    as_chat: Annotated[bool | None, _as_chat("the same as when the variant was created")] = None,
    held_out: HeldOut = 0.2,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The old base, to measure the variant on it as well.",
            show_default="the variant's base_model",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Keep the result even if it is untested or no better than the new base."
        ),
    ] = False,
    store: StoreOption = None,
    overwrite: Overwrite = False,
    key: KeyOption = None,
    unsigned: Unsigned = False,
    device: Device = "auto",
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Move a variant to a new global version of its base, and print the loss before and after."""
    from gym_fed.data.column_question import agreed_columns
    from gym_fed.data.reading import parse_columns
    from gym_fed.personalization.trainer import PersonalizedTrainer

    column_names = parse_columns(columns)
    if data is not None:
        column_names = agreed_columns(data, columns=column_names, kind="supervised", yes=yes)
    if base is None:
        with open_store(store) as opened:
            base = opened.get(name).base_model
    ensure_models([base, onto], yes)
    with _listening() as listener:
        rebased = PersonalizedTrainer(
            base,
            variants=variants_folder(store),
            training=training_overrides(set_, None),
            key=_signer(key, unsigned),
            unsigned=unsigned,
            device=device,
        ).rebase_variant(
            name,
            onto,
            data=data,
            steps=steps,
            held_out=held_out,
            columns=column_names,
            as_chat=as_chat,
            force=force,
            output_name=output_name,
            overwrite=overwrite,
            listener=listener,
        )
    print_result(as_json, rebased.to_dict(), _rebase_summary(rebased))


def _rebase_summary(rebased: RebasedVariant) -> str:
    losses = rebased.losses
    figures = [
        ("old base and variant", losses.old),
        ("new base alone", losses.new_base),
        ("new base and variant", losses.carried),
        (f"the same, scaled by {rebased.alpha:g}", losses.scaled if rebased.alpha != 1.0 else None),
        (
            f"refitted in {counted(rebased.steps, 'step')}{'' if losses.took_refit else ' (not kept)'}",
            losses.refitted,
        ),
    ]
    lines = [
        f"variant {rebased.name} (revision {rebased.revision}, {rebased.owner}'s, {_signed(rebased.signed)})",
        f"  from base {rebased.from_base[:19]} to {rebased.onto_base[:19]}, {counted(rebased.size_bytes, 'byte')}",
        f"  loss on {rebased.judged_on} ({rebased.measured_as}):"
        if losses.best is not None
        else "  not measured: no rows were given",
        *(f"    {value:8.4f}  {what}" for what, value in figures if value is not None),
    ]
    if losses.helps is False:
        lines.append("  warning: on these rows it is no better than the new base alone")
    return "\n".join(lines)


def _summary(created: CreatedVariant) -> str:
    gain_kept = "" if created.kept is None else f"; {100 * created.kept:.1f}% of the gain is kept"
    what = "loss" if created.chosen_before is None else "preference loss"
    lines = [
        f"variant {created.name} (revision {created.revision}, {created.owner}'s, {_signed(created.signed)})",
        f"  trained on {created.learnt_as}",
        f"  {created.encoding}",
        f"  {counted(created.size_bytes, 'byte')}, {created.bits_per_weight:.3f} bits per weight: "
        f"{created.times_smaller:.1f} times smaller than the base in bfloat16",
        f"  {what} on {created.judged_on}: base {created.loss_before:.4f}, trained {created.loss_trained:.4f}, "
        f"encoded {created.loss_encoded:.4f}{gain_kept}",
    ]
    if created.chosen_before is not None and created.chosen_encoded is not None:
        lines.append(
            f"  loss of the preferred answers themselves: base {created.chosen_before:.4f}, "
            f"encoded {created.chosen_encoded:.4f}"
        )
    if not created.helps:
        lines.append("  warning: on these rows it is no better than the base alone")
    return "\n".join(lines)


def _signed(signed: bool) -> str:
    return "signed" if signed else "unsigned"


def training_overrides(settings: list[str] | None, steps: int | None) -> dict[str, Any]:
    """Return ``--set`` and ``--steps`` as keys of a training config."""
    from gym_fed.config.yaml.file import parse_overrides

    values: dict[str, Any] = {}
    for path, value in parse_overrides(settings or []):
        place = values
        for key in path[:-1]:
            place = place.setdefault(str(key), {})
            if not isinstance(place, dict):
                raise GymError(
                    ErrorCode.CONFIG_INVALID, f"--set {path[0]}: is set both to a value and as a section"
                )
        place[str(path[-1])] = value
    return values if steps is None else {**values, "max_steps": steps}


def _signer(key: Path | None, unsigned: bool) -> SigningKey | None:
    """Return the signing key; None for an unsigned variant.

    Raises:
        GymError: ``USAGE`` for a key given for an unsigned variant.
    """
    if unsigned and key is not None:
        raise GymError(ErrorCode.USAGE, "--unsigned cannot be combined with --key", "pass one of the two")
    return None if unsigned else signing_key(key)


@contextmanager
def _listening() -> Iterator[Listener]:
    """Show progress on standard error, and stop with a checkpoint at the first Ctrl-C."""
    from gym_fed.personalization.results import Listener as Silent

    with (
        readable_warnings(),
        stop_on_ctrl_c(keeping="") as should_stop,
        progress(lambda total: 10) as on_report,
    ):

        class Terminal(Silent):
            def phase(self, what: str) -> None:
                err.print(f"{what} ...")

            def rows(self, name: str, counts: RowCounts, max_length: int) -> None:
                report_rows(max_length)(name, counts)

            def trained(self, report: Any) -> None:
                on_report(report)

            def distilled(self, step: int, total: int, loss: float) -> None:
                if step % 25 == 0 or step == total:
                    err.print(f"distilling scales: step {step}/{total}  loss {loss:.4f}")

            def should_stop(self) -> bool:
                return should_stop()

        yield Terminal()

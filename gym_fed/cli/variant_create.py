"""`gym variant create`: a person's rows in, a signed variant in the store out; Ctrl-C keeps what was done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.progress import progress, readable_warnings
from gym_fed.cli.train import stop_on_ctrl_c
from gym_fed.console import err, out, print_json
from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.identity.keys import SigningKey
    from gym_fed.personalization.made import CreatedVariant, Listener

Store = Annotated[Path, typer.Option("--store", help="Folder of the variant store.")]
Base = Annotated[str, typer.Option("--base", help="gym-nano, a model folder, or a name in the local cache.")]
Device = Annotated[str, typer.Option(help="auto takes CUDA, then MPS, then the CPU.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=VALUE", help="Another value of the training config, as in `gym train`."
    ),
]
HomeFolder = Annotated[
    Path | None, typer.Option("--home", help="Folder of the key that signs.", show_default="~/.gym-fed")
]
PassphraseFile = Annotated[
    Path | None, typer.Option(help="Holds the key's passphrase.", show_default="$GYM_PASSPHRASE, or asked")
]
Unsigned = Annotated[bool, typer.Option("--unsigned", help="Sign nothing; no key is needed.")]
Output = Annotated[
    Path | None, typer.Option(help="Keep the work here, checkpoints too.", show_default="removed at the end")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Forget unfinished work of this variant first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def create(
    data: Annotated[str, typer.Option("--data", help="Examples or preferences: their columns tell which.")],
    user: Annotated[str, typer.Option("--user", help="Whose it is: an account, or a plain id.")],
    name: Annotated[
        str | None, typer.Option(help="What it is served as.", show_default="the user id")
    ] = None,
    base: Base = "gym-nano",
    method: Annotated[str, typer.Option(help="lora, or full for all weights at one bit each.")] = "lora",
    codec: Annotated[str, typer.Option(help="auto, or how the change is written.")] = "auto",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Most optimiser steps.", show_default="by the number of rows")
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the rows that measures and is not trained on.")
    ] = 0.2,
    store: Store = Path("variants"),
    replace: Annotated[
        bool, typer.Option("--replace", help="Make the next revision of a variant that exists.")
    ] = False,
    set_: Settings = None,
    output: Output = None,
    overwrite: Overwrite = False,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    unsigned: Unsigned = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Make a variant from a person's own rows. Stopped work is continued by the same command."""
    from gym_fed.personalization import PersonalizedTrainer

    with listening() as listener:
        made = PersonalizedTrainer(
            base,
            variants=store,
            method=method,  # type: ignore[arg-type]  # refused there, by name
            codec=codec,
            training=training_overrides(set_, steps),
            key=None if unsigned else signing_key(home, passphrase_file),
            unsigned=unsigned,
            device=device,
        ).create_variant(
            user,
            data=data,
            name=name,
            held_out=held_out,
            replace=replace,
            output=output,
            overwrite=overwrite,
            listener=listener,
        )
    if as_json:
        print_json(made.to_dict())
        return
    out.print(told(made), markup=False)


def told(made: CreatedVariant) -> str:
    """A variant in words."""
    kept = "" if made.kept is None else f"; {100 * made.kept:.1f}% of the gain is kept"
    lines = [
        f"variant {made.name} (revision {made.revision}, {made.owner}'s, {'signed' if made.signed else 'unsigned'})",
        f"  {made.encoding}",
        f"  {made.size_bytes} bytes, {made.bits_per_weight:.3f} bits a weight: "
        f"{made.times_smaller:.1f} times smaller than the base in bfloat16",
        f"  loss on {made.judged_on}: base {made.loss_before:.4f}, trained {made.loss_trained:.4f}, "
        f"encoded {made.loss_encoded:.4f}{kept}",
    ]
    if not made.helps:
        lines.append("  warning: on these rows it is no better than the base alone")
    return "\n".join(lines)


def training_overrides(settings: list[str] | None, steps: int | None) -> dict[str, Any]:
    """``--set`` and ``--steps`` as keys of a training config."""
    from gym_fed.config.yaml_file import parse_overrides

    values: dict[str, Any] = {}
    for path, value in parse_overrides(settings or []):
        place = values
        for key in path[:-1]:
            place = place.setdefault(str(key), {})
            if not isinstance(place, dict):
                raise GymError(
                    ErrorCode.CONFIG_INVALID, f"--set {path[0]}: is given as a value and as a section"
                )
        place[str(path[-1])] = value
    return values if steps is None else {**values, "max_steps": steps}


def signing_key(home: Path | None, passphrase_file: Path | None) -> SigningKey:
    """The contributor's newest key; made on first use."""
    from gym_client.key_cli import open_home

    return open_home(home, passphrase_file).key


@contextmanager
def listening() -> Iterator[Listener]:
    """Shows the work on standard error, and stops it with a checkpoint at the first Ctrl-C."""
    from gym_fed.personalization.made import Listener as Silent

    with readable_warnings(), stop_on_ctrl_c() as should_stop, progress(10) as on_report:

        class Terminal(Silent):
            def phase(self, what: str) -> None:
                err.print(f"{what} ...", markup=False)

            def trained(self, report: Any) -> None:
                on_report(report)

            def distilled(self, step: int, total: int, loss: float) -> None:
                if step % 25 == 0 or step == total:
                    err.print(f"distilling scales: step {step}/{total}  loss {loss:.4f}", markup=False)

            def should_stop(self) -> bool:
                return should_stop()

        yield Terminal()

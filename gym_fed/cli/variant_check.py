"""`gym variant verify|gc|trust`: whether every byte is what was signed, what kills left, and who else may sign."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gym_fed import console
from gym_fed.cli.variant_options import StoreOption, open_store
from gym_fed.console import AsJson


def verify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The variant.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every variant of the store.")] = False,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="A variant without a signature is in order.")
    ] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Check variants byte by byte: hash, form, base, manifest, signature. The first fault gives the exit code."""
    from gym_fed.errors import ErrorCode, GymError

    if (name is None) is not all_:
        raise GymError(ErrorCode.USAGE, "which variant?", "give a NAME, or --all")
    faults: list[GymError] = []
    told: list[dict[str, Any]] = []
    with open_store(store, require_signature=not allow_unsigned) as opened:
        for one in opened.names() if name is None else [name]:
            try:
                opened.verify(one)
            except GymError as error:
                if name is not None:
                    raise
                faults.append(error)
                told.append({"name": one, "ok": False, **error.to_dict()})
            else:
                told.append({"name": one, "ok": True})
            if not as_json:
                problem = f"{faults[-1].message}\n  {faults[-1].hint}" if not told[-1]["ok"] else "ok"
                console.out.print(f"{one}: {problem}")
    if as_json:
        console.print_json(told)
    elif faults:
        console.err.print(f"{len(faults)} of {len(told)} variants are not in order")
    if faults:
        raise typer.Exit(faults[0].exit_code)


def gc(store: StoreOption = None, as_json: AsJson = False) -> None:
    """Remove files that no variant has: what a killed add or remove left."""
    with open_store(store) as opened:
        files, size = opened.gc()
    console.print_result(as_json, {"files": files, "bytes": size}, f"removed {files} files of {size:,} bytes")


def trust(
    user: Annotated[str, typer.Argument(metavar="USER", help="An account's id, or a user id.")],
    public_key: Annotated[str, typer.Argument(metavar="KEY", help="The public key: 64 hex digits.")],
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Refuse what it signed, from now on and for good.")
    ] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Let a key sign variants of a user, as after a rotation; or refuse it for good."""
    import re

    from gym_fed.errors import ErrorCode, GymError

    if not re.fullmatch(r"[0-9a-f]{64}", public_key):
        raise GymError(ErrorCode.USAGE, f"{public_key[:80]!r} is no public key", "64 hex digits")
    with open_store(store, create=not revoke) as opened:
        act = opened.revoke if revoke else opened.trust
        act(user, bytes.fromhex(public_key))
    if as_json:
        console.print_json({"user": user, "public_key": public_key, "trusted": not revoke})
    else:
        verdict = "is refused from now on" if revoke else "may sign"
        console.out.print(f"key {public_key[:16]} {verdict} for {user}")

"""What the commands of `gym variant` share: where the store is, who signs, and how a variant is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.serving.store.folder import store_folder

if TYPE_CHECKING:
    from gym_fed.identity.keys import SigningKey
    from gym_fed.serving.store.store import VariantStore

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", envvar="GYM_VARIANTS", help="Folder of the variants.", show_default="~/.gym-fed/variants"
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", help="PEM file of the key that signs; by default this home's own."),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The variant.")]


def open_store(store: Path | None, *, create: bool = False, require_signature: bool = False) -> VariantStore:
    """The store as a registry, without a model.

    Raises:
        GymError: ``FILE_NOT_FOUND`` where there is none and none is to be made.
    """
    from gym_fed.serving.store.store import VariantStore

    return VariantStore.open(store_folder(store), create=create, require_signature=require_signature)


def signing_key(path: Path | None) -> SigningKey:
    """The key of a PEM file, or this home's newest; a passphrase is asked for where there is one.

    Raises:
        GymError: As ``SigningKey.load``.
    """
    if path is None:
        from gym_client.identity.home import Home

        return Home.open().key
    from gym_client.identity.keystore import PASSPHRASE_VARIABLE

    from gym_fed.identity.keys import SigningKey
    from gym_fed.identity.passphrase import PassphraseSource

    return SigningKey.load(path, PassphraseSource(PASSPHRASE_VARIABLE).get)

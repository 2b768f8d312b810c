"""Options and helpers that the commands of `gym variant` share: store, signing key, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.cli.completion import variants
from gym_fed.core import console
from gym_fed.core.errors import GymError
from gym_fed.serving.store.naming import variants_folder

if TYPE_CHECKING:
    from gym_fed.serving.store.records import VariantRecord
    from gym_fed.serving.store.store import VariantStore
    from gym_fed.trust.identity.keys import SigningKey

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        "--variants",
        metavar="FOLDER",
        envvar="GYM_VARIANTS",
        help="Folder of the variants.",
        show_default="~/.gym-fed/variants",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="PEM file of the signing key; by default this home's."),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the variant.", autocompletion=variants)
]


def open_store(store: Path | None, *, create: bool = False, require_signature: bool = False) -> VariantStore:
    """Open the store without a model.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if there is no store and ``create`` is False.
    """
    from gym_fed.serving.store.store import VariantStore

    return VariantStore.open(variants_folder(store), create=create, require_signature=require_signature)


def signing_key(path: Path | None, home: Path | None = None) -> SigningKey:
    """Return the key of a PEM file, or the home's newest; prompts for a passphrase if it has one.

    Raises:
        GymError: Errors of ``SigningKey.load``.
    """
    if path is None:
        from gym_client.identity.home import Home

        return Home.open(home).key
    from gym_client.identity.keystore import PASSPHRASE_VARIABLE

    from gym_fed.trust.identity.keys import SigningKey
    from gym_fed.trust.identity.passphrase import PassphraseSource

    return SigningKey.load(path, PassphraseSource(PASSPHRASE_VARIABLE).get)


def owners_key(
    path: Path | None, folder: Path, record: VariantRecord, home: Path | None = None
) -> SigningKey:
    """Return the key that signs for a variant's owner: a PEM file's, the store's own if it signed, or this home's.

    Args:
        path: The PEM file; None if not given.
        record: The variant.
        home: The home folder; None for the default.

    Raises:
        GymError: Errors of ``SigningKey.load``.
    """
    from gym_fed.personalization.writer import KEY_FILE
    from gym_fed.serving.store.records import is_account
    from gym_fed.trust.identity.keys import SigningKey

    own = folder / KEY_FILE
    with suppress(GymError):  # a manifest that cannot be read names no key
        signed = record.signed()
        if path is None and signed is not None and own.is_file():
            key = SigningKey.load(own)
            if key.public_key == signed.public_key:
                return key
    key = signing_key(path, home)
    return key.of_account(record.owner) if is_account(record.owner) else key


@contextmanager
def shown_progress(as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress as bars on a terminal and as lines otherwise; nothing with ``--json``."""
    from gym_client.display import Display, make_display

    display = Display() if as_json else make_display(console.err, False)
    try:
        yield lambda what, done, total: display.progress(what, done, total, None)
    finally:
        display.close()

"""Variants added and removed over HTTP, with the endpoints of vLLM's LoRA adapters.

The request carries no weights: it names a `.gymdelta` in one folder on the server. Next to it is the
manifest that its owner signed, as ``NAME.gymdelta.json`` (`gym variant sign` writes it). Without that file the
variant is unsigned, and a store that requires signatures refuses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.openai.catalogue import Caller, Catalogue
from gym_fed.serving.openai.fields import RequestModel, only, parse
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.trust.identity.variant import MAX_MANIFEST_BYTES, SignedVariant

if TYPE_CHECKING:
    from gym_fed.serving.store.store import VariantStore

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_SUFFIX = ".gymdelta"


class LoadRequest(RequestModel):
    """The body of a request to add a variant."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None
    """Replace the variant of this name."""

    base_model_name: Annotated[Any, only()] = None


class UnloadRequest(RequestModel):
    """The body of a request to remove a variant."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: Annotated[Any, only()] = None


class Adapters:
    """Adds variants to a store, and removes them.

    Args:
        store: The store; None: only the base is served.
        folder: The folder that holds the deltas; None: nothing can be added.
        catalogue: The catalogue of the same store.
    """

    def __init__(self, store: VariantStore | None, folder: Path | None, catalogue: Catalogue) -> None:
        self._store = store
        self._folder = folder
        self._catalogue = catalogue

    def answer(self, url: str, body: Any, caller: Caller) -> str:
        """Add or remove a variant; durable on return, and in effect from the next request of every server.

        Raises:
            GymError: ``PERMISSION_DENIED`` for a key without this permission; as ``VariantStore.add``.
        """
        if not caller.manage_variants:
            raise RequestError(
                "this key may not add or remove variants",
                code=ErrorCode.PERMISSION_DENIED,
                hint="make one that may: gym api keys add NAME --manage-variants",
            )
        if self._store is None:
            raise RequestError("this server serves only its base", hint="start it with variants")
        if url == LOAD:
            return self._load(self._store, parse(LoadRequest, body, {}), caller)
        return self._unload(self._store, parse(UnloadRequest, body, {}), caller)

    def _load(self, store: VariantStore, request: LoadRequest, caller: Caller) -> str:
        name = self._variant(request.lora_name)
        delta = self._inside(request.lora_path)
        signed = _manifest_beside(delta)
        owner = caller.name if signed is None else signed.manifest.owner
        store.add(delta, signed, name=name, owner=owner, replace=bool(request.load_inplace))
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    def _unload(self, store: VariantStore, request: UnloadRequest, caller: Caller) -> str:
        model = self._catalogue.resolve(
            f"{self._catalogue.served_name}:{self._variant(request.lora_name)}", caller
        )
        assert model.variant is not None
        store.remove(model.variant)
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."

    def _variant(self, name: str) -> str:
        """Return the variant's own name, given that or the model name of the API."""
        return name.removeprefix(f"{self._catalogue.served_name}:")

    def _inside(self, given: str) -> Path:
        """Return the path of a file in the folder; missing files and paths outside get the same error."""
        if self._folder is None:
            raise RequestError(
                "this server has no folder of adapters",
                param="lora_path",
                code=ErrorCode.PERMISSION_DENIED,
                hint="set adapters_folder in serving.yaml",
            )
        try:
            folder = self._folder.expanduser().resolve()
            path = (folder / given).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = None
        if path is None or not path.is_relative_to(folder) or path.suffix != _SUFFIX or not path.is_file():
            raise RequestError(
                f"no {_SUFFIX} of that name is in the server's adapters_folder",
                param="lora_path",
                code=ErrorCode.FILE_NOT_FOUND,
                hint="name a file in it; `gym delta encode` makes one of a fine-tune or of a LoRA adapter",
            )
        return path


def _manifest_beside(delta: Path) -> SignedVariant | None:
    """Read the signed manifest of a delta, if there is one.

    Raises:
        GymError: As ``SignedVariant.parse``.
    """
    try:
        with manifest_path(delta).open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        return SignedVariant.parse(data.decode().strip())
    except UnicodeDecodeError as error:
        raise GymError(ErrorCode.SIGNATURE_INVALID, "the manifest of the delta is not text") from error


def manifest_path(delta: Path) -> Path:
    """Return the path of the manifest next to a delta."""
    return delta.with_name(f"{delta.name}.json")

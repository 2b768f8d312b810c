"""The API's model names, and who may use them: ``<served name>`` is the base, ``<served name>:<variant>`` a variant."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.openai.refusals import RequestError, model_not_found

if TYPE_CHECKING:
    from gym_fed.serving.store.records import VariantRecord
    from gym_fed.serving.store.store import VariantStore


@dataclass(frozen=True)
class Caller:
    """A user of the service.

    Attributes:
        name: Name in the usage log and in the queue, which schedules fairly between names.
        base: True if the base itself may be used.
        everything: True if all variants may be used.
        variants: Names of the variants that may be used.
        owners: Accounts whose variants may all be used.
        metrics: True if the server's metrics, which cover everybody's requests, may be read.
        manage_variants: True if variants may be added and removed.
        requests_per_minute: Maximum number of requests per minute; None: no limit.
        tokens_per_minute: Maximum number of tokens of prompts and answers per minute; None: no limit.
        key_sha256: The digest of the key; empty without keys.
    """

    name: str
    base: bool = True
    everything: bool = False
    variants: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()
    metrics: bool = False
    manage_variants: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    key_sha256: str = ""

    def may_use(self, variant: VariantRecord) -> bool:
        return self.everything or variant.name in self.variants or variant.owner in self.owners


LOCAL = Caller("local", everything=True, metrics=True)
"""The caller of a server without API keys."""


@dataclass(frozen=True)
class Model:
    """A model name that can be requested.

    Attributes:
        name: The name in the API.
        variant: The variant; None: the base.
        owner: The owner of the variant; ``gym`` for the base.
        created: Unix seconds.
        reads: The kinds of media that messages may contain: ``image``, ``audio``, ``video``.
    """

    name: str
    variant: str | None
    owner: str
    created: int
    reads: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's fields, and the input modalities if media are read."""
        fields = {"id": self.name, "object": "model", "created": self.created, "owned_by": self.owner}
        modalities = ["text", *(kind for kind in ("image", "audio", "video") if kind in self.reads)]
        return {**fields, "input_modalities": modalities} if self.reads else fields


class Catalogue:
    """The models of one server, as each caller sees them.

    Args:
        served_name: The base's name in the API; has no colon.
        registry: The variants; None: only the base is served.
        base_digest: The digest of the base; variants of other bases are not listed.
        reads: The kinds of media that the base and its variants read.
    """

    def __init__(
        self,
        served_name: str,
        registry: VariantStore | None = None,
        base_digest: str = "",
        *,
        reads: frozenset[str] = frozenset(),
    ) -> None:
        self.served_name = served_name
        self._base_digest = base_digest
        self._registry = registry
        self._reads = reads
        self._base = Model(served_name, None, "gym", int(time.time()), reads)

    def resolve(self, name: str, caller: Caller) -> Model:
        """Return the model with this name.

        Raises:
            GymError: ``NOT_FOUND``, both for an unknown name and for another user's variant; ``BASE_MISMATCH`` for
                the caller's variant of another base.
        """
        base, colon, variant = name.partition(":")
        if base != self.served_name:
            raise model_not_found(name)
        if not colon:
            if not caller.base:
                raise model_not_found(name)
            return self._base
        record = self._find(variant)
        if record is None or not caller.may_use(record):
            raise model_not_found(name)
        if record.base_digest != self._base_digest:
            raise RequestError(
                f"variant {variant!r} is for a base other than {self.served_name!r}",
                param="model",
                code=ErrorCode.BASE_MISMATCH,
                hint="rebase it onto this base",
            )
        return self._model(record)

    def list(self, caller: Caller) -> Iterator[Model]:
        """Yield every model that the caller may use, the base first."""
        if caller.base:
            yield self._base
        for record in self._records(caller):
            if record.base_digest == self._base_digest:
                yield self._model(record)

    def _records(self, caller: Caller) -> Iterator[VariantRecord]:
        if self._registry is None:
            return
        if caller.everything:
            yield from self._registry.list()
            return
        listed = set()
        for owner in sorted(caller.owners):
            for record in self._registry.list(owner):
                listed.add(record.name)
                yield record
        for name in sorted(caller.variants - listed):
            if (existing := self._find(name)) is not None:
                yield existing

    def _find(self, variant: str) -> VariantRecord | None:
        if self._registry is None:
            return None
        try:
            return self._registry.get(variant)
        except GymError as error:
            # USAGE for a name that no variant can have
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.USAGE):
                return None
            raise

    def _model(self, record: VariantRecord) -> Model:
        name = f"{self.served_name}:{record.name}"
        return Model(name, record.name, record.owner, int(record.created_at), self._reads)

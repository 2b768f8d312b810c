"""The engine interface, and the base class of the engine kinds that ``engine.kind`` selects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gym_fed.serving.pictures.reader import NoPictures, PictureReader

if TYPE_CHECKING:
    from gym_fed.config.serving import ServingConfig
    from gym_fed.delta.base import BaseSpec
    from gym_fed.serving.engine.limits import Limits
    from gym_fed.serving.engine.request import Generation, GenerationRequest, PendingEmbedding
    from gym_fed.serving.engine.stats import EngineStats
    from gym_fed.serving.engine.vocabularies import Vocabularies
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.target_modules import ModelLayout
    from gym_fed.serving.store.store import VariantStore


class ServingEngine(Protocol):
    """The interface of an engine for the API, the gateway and the metrics; every method is thread-safe.

    Attributes:
        limits: The limits of the model.
        end_ids: Tokens that end an answer.
    """

    limits: Limits
    end_ids: frozenset[int]

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request. Raises the errors of ``Engine.submit``."""

    def require_room(self, prompt_ids: list[int], user: str, variant: str | None = None) -> None:
        """Check a request's length and the room in the queue like ``submit``."""

    def embed(self, prompt_ids: list[int], variant: str | None = None, user: str = "") -> PendingEmbedding:
        """Queue the embedding of a text.

        Raises:
            GymError: ``USAGE`` if this engine does not compute embeddings.
        """

    def stats(self) -> EngineStats:
        """Return the counters and gauges of the engine."""

    def retry_after_seconds(self) -> int:
        """Estimate the wait of a new request, in whole seconds."""

    def close(self) -> None:
        """Cancel all requests, and free all resources. May be called repeatedly."""


@dataclass(frozen=True)
class EngineDescription:
    """The description of an opened engine that `gym api` prints.

    Attributes:
        forward: The implementation of the model's forward pass.
        base_format: The type of the linear layers.
        prefix_cache: True if prompts reuse the KV cache of earlier ones; ``shared`` if even across users.
        note: A sentence to print at startup; empty for none.
    """

    forward: str
    base_format: str
    prefix_cache: bool | Literal["shared"]
    note: str = ""


@dataclass(frozen=True)
class OpenedEngine:
    """A base and its variants in an engine.

    Attributes:
        base: The identity of the base.
        tokenizer: The tokenizer of the base, with the template of the config.
        engine: The engine.
        store: The variants; None: only the base is served.
        vocab_size: The number of token ids of the model.
        description: The description that `gym api` prints.
        embedding_size: The size of an embedding; None if unknown or not supported.
        pictures: The reader of pictures, or a ``NoPictures`` that refuses them.
        served: The model, if it is in this process.
        vocabularies: The tokenizers of variants with added tokens; None if this kind does not support them.
    """

    base: BaseSpec
    tokenizer: Any
    engine: ServingEngine
    store: VariantStore | None
    vocab_size: int
    description: EngineDescription
    embedding_size: int | None
    pictures: PictureReader | NoPictures
    served: MultiVariantModel | None = None
    vocabularies: Vocabularies | None = None


class EngineKind(ABC):
    """Base class of engine kinds: a subclass checks a serving config and opens its base."""

    @abstractmethod
    def check(self, config: ServingConfig) -> None:
        """Refuse settings that this kind does not support, before anything is loaded.

        Raises:
            GymError: ``CONFIG_INVALID`` naming the first such setting.
        """

    @abstractmethod
    def open(self, config: ServingConfig, stack: ExitStack) -> OpenedEngine:
        """Load the base, open its variants and start the engine.

        Args:
            config: The settings.
            stack: The stack that closes the engine.

        Raises:
            GymError: Depends on the subclass.
        """


def open_store(
    config: ServingConfig, base: BaseSpec, layout: ModelLayout | None, stack: ExitStack, **how: Any
) -> VariantStore | None:
    """Open the variant store of a config; None if it has none.

    Args:
        config: The settings.
        base: The identity of the base.
        layout: The layout of the base; None if it is in another process.
        stack: The stack that closes the store.
        how: Further arguments for ``VariantStore.open``.

    Raises:
        GymError: See ``VariantStore.open``.
    """
    if config.variants is None:
        return None
    from gym_fed.serving.store.store import VariantStore

    return stack.enter_context(
        VariantStore.open(
            config.variants,
            base=base,
            layout=layout,
            cache_bytes=config.cache_size,
            require_signature=config.require_signature,
            create=False,
            **how,
        )
    )

"""gym-fed's own engine: serve a base in this process, with every transformers architecture, images and embeddings."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from gym_fed.base.models import model_name, pick_device
from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.base import load_base
from gym_fed.serving.engines.base import EngineDescription, EngineKind, OpenedEngine, open_store
from gym_fed.serving.pictures.reader import PictureReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from gym_fed.delta.base import BaseSpec
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.packed_base import PackedBase

DRAFT_FORMAT = "int4"
"""Format of a draft's linear layers on a CPU. Answers do not depend on it."""


class Own(EngineKind):
    """Continuous batching over one model in this process (``gym_fed.serving.engine``)."""

    def check(self, config: ServingConfig) -> None:
        """Accept all settings, since this engine supports them."""

    def open(self, config: ServingConfig, stack: ExitStack) -> OpenedEngine:
        """Load the base into this process.

        Raises:
            GymError: Errors from ``load_model``, ``use_chat_template``, ``VariantStore.open`` and
                ``MultiVariantModel``; ``CONFIG_INVALID`` for a ``kv_cache_size`` of less than two tokens.
        """
        import torch

        from gym_fed.data.chat_templates.choice import use_chat_template
        from gym_fed.serving.engine.engine import Engine
        from gym_fed.serving.forward.multi_variant import MultiVariantModel

        device = pick_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model, own_tokenizer, base = load_base(
            config.base, config.adapter, config.dtype, plain=device.type == "cpu"
        )
        model = model.to(device=device).requires_grad_(False).eval()
        pictures = PictureReader.open(config.base, model)
        if isinstance(pictures, PictureReader) and own_tokenizer.chat_template is None:
            own_tokenizer.chat_template = pictures.chat_template
        tokenizer = use_chat_template(own_tokenizer, config.chat_template)
        served = stack.enter_context(
            MultiVariantModel(
                model,
                kernel=config.engine.kernel,
                base_format=config.base_format,
                kv_dtype=config.engine.kv_dtype,
                packed_base=_packed_base(config, base),
            )
        )
        if isinstance(pictures, PictureReader):
            pictures = pictures.attach(served)
        _require_kv_cache(config.engine, served.bytes_per_token)
        store = open_store(config, base, served.layout, stack)
        draft = None
        if config.engine.speculative == "draft":
            draft = stack.enter_context(_open_draft(config, device, tokenizer))
        engine = stack.enter_context(Engine(served, tokenizer, store, config.engine, draft))
        return OpenedEngine(
            base,
            tokenizer,
            engine,
            store,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            description=EngineDescription(
                served.forward,
                served.base_format,
                served.pool.paged and config.engine.prefix_cache,
                "; ".join(_notes(config, served, draft)),
            ),
            embedding_size=_embedding_size(model),
            pictures=pictures,
            served=served,
            vocabularies=engine.vocabularies,
        )


def _notes(
    config: ServingConfig, served: MultiVariantModel, draft: MultiVariantModel | None
) -> Iterator[str]:
    if served.forward == "general":
        yield served.described
    if draft is not None:
        name = model_name(config.engine.draft_model or config.base)
        yield f"{name} in {draft.base_format} proposes tokens (speculative decoding)"


def _open_draft(config: ServingConfig, device: torch.device, tokenizer: Any) -> MultiVariantModel:
    """Load the model that proposes tokens, packed to 4 bits on a CPU.

    Raises:
        GymError: Errors from ``load_base`` and ``MultiVariantModel``, with the setting's name; ``CONFIG_INVALID`` for
            other tokens than the base's, and for a model that cannot be packed.
    """
    from gym_fed.base.modeling.differences import tokenizer_difference
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    name, on_cpu = config.engine.draft_model or config.base, device.type == "cpu"
    if config.engine.draft_model is None and (config.base_format == DRAFT_FORMAT or not on_cpu):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            "engine.draft_model is not set, and the base in 4 bits would be no faster than the base itself",
            "set draft_model to a smaller model of the same family, or leave engine.speculative off",
        )
    adapters = config.adapter if config.engine.draft_model is None else []
    with _naming_draft():
        model, own, base = load_base(name, adapters, config.dtype, plain=on_cpu)
    if other := tokenizer_difference(tokenizer, own):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"engine.draft_model: {name}: its tokenizer differs from the base's: {other}",
            "use a smaller model of the same family, or leave draft_model out",
        )
    packed = config.model_copy(update={"base_format": DRAFT_FORMAT if on_cpu else config.base_format})
    with _naming_draft("use a Llama, Qwen2, Qwen3 or Mistral model, or engine.speculative: ngram"):
        return MultiVariantModel(
            model.to(device=device).requires_grad_(False).eval(),
            kernel=config.engine.kernel,
            base_format=packed.base_format,
            kv_dtype=config.engine.kv_dtype,
            packed_base=_packed_base(packed, base),
        )


@contextmanager
def _naming_draft(hint: str = "") -> Iterator[None]:
    """Add the setting's name to errors; ``hint`` replaces hints about settings of the base."""
    try:
        yield
    except GymError as error:
        is_setting = error.code is ErrorCode.CONFIG_INVALID
        raise GymError(
            error.code, f"engine.draft_model: {error.message}", hint if hint and is_setting else error.hint
        ) from error


def _embedding_size(model: Any) -> int:
    """Return the size of the last hidden states, which may be missing from the config (Blt)."""
    size = getattr(model.config.get_text_config(), "hidden_size", None)
    return int(size or model.get_input_embeddings().weight.shape[1])


def _require_kv_cache(config: EngineConfig, bytes_per_token: int) -> None:
    """Refuse a cache that is too small for the shortest prompt and answer, since no request would fit."""
    if config.kv_cache_size < 2 * bytes_per_token:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"engine.kv_cache_size is {counted(config.kv_cache_size, 'byte')}, but one token of this model takes "
            f"{bytes_per_token:,}",
            f"raise it to {bytes_per_token * 512:,} or more",
        )


def _packed_base(config: ServingConfig, base: BaseSpec) -> PackedBase | None:
    """Return the file of the base's packed layers, for later runs to read; None if the format is not stored."""
    from gym_fed.serving.forward.packed_base import KEPT_FORMATS, PackedBase, packed_home

    if config.base_format not in KEPT_FORMATS or not config.packed_size:
        return None
    return PackedBase(packed_home(), base.digest, config.dtype, config.base_format, config.packed_size)

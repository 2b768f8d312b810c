"""vLLM behind gym-fed's gateway: started by gym-fed, or running at a URL with gym-fed's plug-in."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gym_fed.base.models import resolve
from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.base import end_ids, spec_of_files
from gym_fed.serving.engine.limits import Limits, context_length
from gym_fed.serving.engines.base import EngineDescription, EngineKind, OpenedEngine, open_store
from gym_fed.serving.forward.plain_config import plain_config
from gym_fed.serving.pictures.reader import NoPictures
from gym_fed.serving.plain_tokenizer import plain_tokenizer

if TYPE_CHECKING:
    from gym_fed.delta.file import DeltaFile
    from gym_fed.serving.forward.plain_config import PlainConfig
    from gym_fed.serving.forward.target_modules import ModelLayout
    from gym_fed.serving.forward.variant_weights import LoadedVariant
    from gym_fed.serving.vllm.engine import VllmServer
    from gym_fed.serving.vllm_plugin.settings import PluginSettings

_BASE = "base"
"""Name of the base in a vLLM server that gym-fed starts; it cannot be mistaken for a digest."""
_OTHER_ENGINE: dict[str, object] = {"adapter": [], "base_format": "auto", "device": "auto"}
_OTHER_ENGINE_SETTINGS: dict[str, object] = {"speculative": "off", "kv_dtype": "auto", "step_stretch": None}
_OTHER_ENGINE_MEMORY = {"cache_size": "set vllm.variants_in_memory", "packed_size": "remove it"}
_STARTS_ONLY = (
    "vllm.python",
    "vllm.args",
    "vllm.tensor_parallel_size",
    "vllm.variant_slots",
    "vllm.variants_in_memory",
    "engine.kv_cache_size",
    "engine.max_batch_tokens",
    "engine.kernel",
    "dtype",
    "num_threads",
)
"""Settings that cannot be changed in a running vLLM."""


class Vllm(EngineKind):
    """vLLM 0.32: Llama, Qwen2, Qwen3 and Mistral with sign deltas and LoRA."""

    def check(self, config: ServingConfig) -> None:
        """Refuse settings that apply only to gym-fed's own engine.

        Raises:
            GymError: ``CONFIG_INVALID`` naming the first one.
        """
        for name, neutral in _OTHER_ENGINE.items():
            if getattr(config, name) != neutral:
                raise _unsupported(name, getattr(config, name))
        engine = config.engine
        for name, neutral in _OTHER_ENGINE_SETTINGS.items():
            if name in engine.model_fields_set and getattr(engine, name) != neutral:
                raise _unsupported(f"engine.{name}", getattr(engine, name))
        for name, hint in _OTHER_ENGINE_MEMORY.items():
            if name in config.model_fields_set:
                raise GymError(ErrorCode.CONFIG_INVALID, f"{name} has no effect with engine: vllm", hint)
        vllm = config.vllm
        if vllm.url is not None:
            explicit = {f"vllm.{name}" for name in vllm.model_fields_set}
            explicit |= {f"engine.{name}" for name in engine.model_fields_set} | config.model_fields_set
            for name in _STARTS_ONLY:
                if name in explicit:
                    raise GymError(
                        ErrorCode.CONFIG_INVALID,
                        f"{name} applies only to a vLLM that gym-fed starts, but vllm.url is set",
                        "remove one of them",
                    )
        if config.variants is not None and vllm.variants_in_memory < vllm.variant_slots:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"vllm.variants_in_memory: {vllm.variants_in_memory} is less than variant_slots {vllm.variant_slots}",
                "raise it",
            )

    def open(self, config: ServingConfig, stack: ExitStack) -> OpenedEngine:
        """Start vLLM, or connect to it, and open the variants.

        Raises:
            GymError: ``MODEL_INVALID`` for an unsupported base; ``MISSING_DEPENDENCY`` without vLLM or for a different
                release; ``UNAVAILABLE`` if it does not start or cannot be reached; errors from ``VariantStore.open``.
        """
        from gym_fed.base.models import load_tokenizer
        from gym_fed.data.chat_templates.choice import use_chat_template
        from gym_fed.serving.vllm.connection import connect_vllm
        from gym_fed.serving.vllm.engine import VllmEngine
        from gym_fed.serving.vllm_plugin.settings import PluginSettings

        folder = Path(resolve(config.base))
        plain, base = plain_config(folder), spec_of_files(folder, config.base)
        if plain is None or base is None:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{config.base} cannot be served with engine: vllm, which supports Llama, Qwen2, Qwen3 and Mistral "
                "without images, sliding windows or quantised weights",
                "use engine: own",
            )
        own_tokenizer = plain_tokenizer(folder, plain.architecture) or load_tokenizer(config.base)
        tokenizer = use_chat_template(own_tokenizer, config.chat_template)
        context = context_length(plain, config.engine.max_context)
        ends = end_ids(_named_model(plain, folder), tokenizer)
        store = open_store(
            config, base, None, stack, loader=partial(_checked_variant, config.vllm.max_lora_rank, plain)
        )
        settings = PluginSettings(
            None if store is None else store.folder / "objects", _kernel(config.engine, config.dtype)
        )
        if config.vllm.url is not None:
            server: VllmServer = connect_vllm(
                config.vllm, "vllm", context, "set engine.max_context to {} or less"
            )
        else:
            server = _started(config, folder, context, settings, stack)
        stack.callback(server.close)
        # vLLM's scheduler waits for KV blocks, so no request is refused here for lack of them.
        limits = Limits(context, plain.vocab_size, 0, 1)
        engine = VllmEngine(server, tokenizer, store, config.engine, limits, ends)
        stack.callback(engine.close)
        return OpenedEngine(
            base,
            tokenizer,
            engine,
            store,
            vocab_size=plain.vocab_size,
            description=EngineDescription(
                "vllm", "" if config.vllm.url else config.dtype, config.engine.prefix_cache
            ),
            embedding_size=None,
            pictures=NoPictures(),
        )


def _unsupported(name: str, value: object) -> GymError:
    return GymError(
        ErrorCode.CONFIG_INVALID,
        f"{name}: {value} is not supported with engine: vllm",
        "remove it, or use engine: own",
    )


def _kernel(engine: EngineConfig, dtype: str) -> str:
    if engine.kernel != "auto":
        return engine.kernel
    return "exact" if dtype == "float32" else "lookup"


def _named_model(plain: PlainConfig, folder: Path) -> Any:
    """Return an object with a model's end tokens, in the form that ``end_ids`` reads."""
    from gym_fed.core.json_files import read_object

    file = folder / "generation_config.json"
    generation = read_object(file).get("eos_token_id") if file.is_file() else None
    return SimpleNamespace(
        name_or_path=str(folder), config=plain, generation_config=SimpleNamespace(eos_token_id=generation)
    )


def _checked_variant(
    max_rank: int, plain: PlainConfig, name: str, delta: DeltaFile, layout: ModelLayout | None, sha256: str
) -> LoadedVariant:
    """Check a verified variant; vLLM itself loads the weights by their digest."""
    from gym_fed.serving.forward.variant_weights import LoadedVariant
    from gym_fed.serving.vllm_plugin.variants import require_servable

    require_servable(delta, max_rank)
    return LoadedVariant(name, sha256, {}, 0)


def _started(
    config: ServingConfig, folder: Path, context: int, settings: PluginSettings, stack: ExitStack
) -> VllmServer:
    from gym_fed.serving.vllm.connection import VllmInstallation, VllmOptions, start_vllm

    vllm, engine = config.vllm, config.engine
    installation = VllmInstallation.find(vllm.python)
    given = engine.model_fields_set
    options = VllmOptions(
        model=folder,
        served_name=_BASE,
        dtype=config.dtype,
        max_context=context,
        max_concurrent=engine.max_concurrent,
        slots=0 if config.variants is None else vllm.variant_slots,
        variants_in_memory=vllm.variants_in_memory,
        max_lora_rank=vllm.max_lora_rank,
        tensor_parallel_size=vllm.tensor_parallel_size,
        kv_cache_bytes=engine.kv_cache_size if installation.on_cpu or "kv_cache_size" in given else None,
        max_batch_tokens=engine.max_batch_tokens if "max_batch_tokens" in given else None,
        prefix_cache=bool(engine.prefix_cache),
        arguments=tuple(vllm.args),
    )
    return start_vllm(
        installation, options, settings.environment(), config.num_threads, vllm.start_seconds, stack
    )

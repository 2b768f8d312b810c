"""The resolver of variants: a digest of the store becomes an adapter of vLLM; imported only inside vLLM."""

from __future__ import annotations

from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from gym_fed.serving.vllm_plugin.settings import PluginSettings
from gym_fed.serving.vllm_plugin.variants import DIGEST, object_path

_NAME = "gym-fed"


class DigestResolver(LoRAResolver):  # type: ignore[misc]
    """Resolves the SHA-256 of a `.gymdelta` to its file in the variant store.

    The gateway, which alone has the server's key, requests a digest only after it has verified the owner's signature.
    The worker checks that the file's bytes have this digest.

    Args:
        objects: The folder ``objects/`` of the store.
    """

    def __init__(self, objects: Path) -> None:
        self._objects = objects

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter of a digest; None for another name or a missing file."""
        del base_model_name
        if not DIGEST.fullmatch(lora_name):
            return None
        path = object_path(self._objects, lora_name)
        # vLLM replaces the number by its own counter.
        return LoRARequest(lora_name, 1, str(path)) if path.is_file() else None


def register() -> None:
    """Register the resolver, if the gateway has named a store."""
    objects = PluginSettings.read().objects
    if objects is not None and _NAME not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(_NAME, DigestResolver(objects))

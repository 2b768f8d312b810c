"""A plug-in for vLLM that serves variants by the digests of their files, with gym-fed's own kernels for sign deltas.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). The package needs only torch,
numpy, ``gym_quant``, ``gym_fed.core`` and the reader of `.gymdelta` files. Only ``patches`` imports vllm; it is loaded
only inside vLLM.
"""

from __future__ import annotations

import importlib

ENTRY_POINT = "gym_fed"
"""Name of the plug-in in vLLM's registry (``VLLM_PLUGINS``)."""


def register() -> None:
    """Patch vLLM's LoRA classes and register the resolver of digests; repeated calls have no effect."""
    patches = importlib.import_module("gym_fed.serving.vllm_plugin.patches")
    patches.apply()
    patches.register_resolver()

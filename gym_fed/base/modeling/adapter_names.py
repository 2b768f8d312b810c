"""Load adapters whose weights already have the model's own names without renaming them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_patched = threading.RLock()
"""Held while PEFT's function is replaced: of two threads, the second would otherwise restore the first one's."""


@contextmanager
def own_names_kept() -> Iterator[None]:
    """Let PEFT load weights under the names that it saved, within this context.

    PEFT applies transformers' renamings of old checkpoints to every adapter that it loads. Some are not idempotent
    (Laguna: ``mlp.shared_expert.`` also matches ``mlp.shared_experts``), so that an adapter that PEFT saved is not
    found in its own model. Other threads that load adapters wait.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import transformers_weight_conversion as module

    def renamed(
        model: Any, peft_config: Any, adapter_state_dict: dict[str, Any], adapter_name: str = "default"
    ) -> dict[str, Any]:
        own = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
        saved_embeddings = adapter_state_dict.keys() - own.keys()
        if saved_embeddings <= model.state_dict().keys():
            return adapter_state_dict
        return convert(model, peft_config, adapter_state_dict, adapter_name)

    with _patched:
        convert = module.convert_peft_adapter_state_dict_for_transformers
        module.convert_peft_adapter_state_dict_for_transformers = renamed
        try:
            yield
        finally:
            module.convert_peft_adapter_state_dict_for_transformers = convert

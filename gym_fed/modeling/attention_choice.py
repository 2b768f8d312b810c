"""Which implementation of attention a model is loaded with, where nobody chose one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_attention(kind: Any, source: str | None, arguments: Mapping[str, Any]) -> Any:
    """Load a model with torch's attention, or with the one written out where its class has no other.

    transformers' own choice could be what a ``config.json`` names, such as a GPU's kernels.

    Args:
        kind: A class of transformers with ``from_pretrained``.
        source: The model's folder; None with a ``state_dict`` among the arguments.
        arguments: Of ``from_pretrained``; an ``attn_implementation`` among them is kept.
    """
    given = {"local_files_only": True, "trust_remote_code": False, **arguments}
    if "attn_implementation" in given:
        return kind.from_pretrained(source, **given)
    try:
        return kind.from_pretrained(source, **given, attn_implementation="sdpa")
    except ValueError as error:  # Gemma 2, gpt-oss, Bloom, Mamba and others; raised before weights are read
        if "does not support an attention implementation" not in str(error):
            raise
        return kind.from_pretrained(source, **given, attn_implementation="eager")

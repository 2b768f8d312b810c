"""Reads GGUF files with transformers' own reader, which dequantises them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.core.bounded.chat import bind_templates
from gym_fed.export.readers.reading import LoadedExport
from gym_fed.export.readers.transformers import LIBRARIES as TRANSFORMERS_LIBRARIES
from gym_fed.export.readers.transformers import TransformersExport

LIBRARIES = (*TRANSFORMERS_LIBRARIES, "gguf", "transformers.modeling_gguf_pytorch_utils")
"""Libraries that the reading process imports before its job arrives."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the model of ``parts["file"]`` in float32, with the tokenizer in it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(parts["file"])
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    bind_templates(tokenizer, str(file))
    _space_after_special_tokens(tokenizer.backend_tokenizer)
    return _GgufExport(model.eval(), tokenizer)


class _GgufExport(TransformersExport):
    """The model, without special tokens and template, which ``gguf.metadata`` compares."""

    def special_ids(self) -> dict[str, int]:
        return {}

    def chat_template(self) -> str | None:
        return None


def _space_after_special_tokens(tokenizer: Any) -> None:
    """Also put the space before a text that follows a special token, as llama.cpp does but this reader does not."""
    from tokenizers import pre_tokenizers

    pieces = tokenizer.pre_tokenizer
    if isinstance(pieces, pre_tokenizers.Metaspace) and pieces.prepend_scheme == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)

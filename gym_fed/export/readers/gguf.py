"""Read GGUF models and adapters with llama.cpp or with Python libraries.

llama.cpp (llama-cpp-python) reads a file with its own tokenizer, its own forward pass and the template in the file. It
applies an adapter to a GGUF file of the base. Without it, gym-fed's importer reads models of the architectures it
knows, with every kind of RoPE scaling, and transformers reads the others. Adapters are then applied to the base's
folder with ``gguf`` and PEFT.
"""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from gym_fed.core.bounded.chat import bind_templates
from gym_fed.export.readers.program import rendered
from gym_fed.export.readers.reading import POSITIONS, LoadedExport
from gym_fed.export.readers.transformers import LIBRARIES as TRANSFORMERS_LIBRARIES
from gym_fed.export.readers.transformers import TransformersExport, loaded

LIBRARIES = ("torch",)
"""Libraries that the reading process imports before its job arrives."""
LLAMA_CPP_LIBRARIES = ("llama_cpp",)
GGUF_LIBRARIES = (*TRANSFORMERS_LIBRARIES, "gguf", "transformers.modeling_gguf_pytorch_utils")
ADAPTER_LIBRARIES = (*TRANSFORMERS_LIBRARIES, "peft", "gguf")
_CONTEXT = 2 * POSITIONS
"""Maximum number of tokens of one sequence."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load ``parts["file"]`` with ``parts["by"]``: ``llama_cpp_python``, ``gym_fed`` or ``transformers``.

    With ``parts["model"]``, the file is an adapter for this base, whose template is ``parts["chat_template"]``.
    """
    file, by_llama_cpp = Path(parts["file"]), parts["by"] == "llama_cpp_python"
    if "model" not in parts:
        if by_llama_cpp:
            return LlamaCppExport(str(file))
        return _by_gym_fed(file) if parts["by"] == "gym_fed" else _by_transformers(file)
    if by_llama_cpp:
        return LlamaCppAdapterExport(parts)
    model, tokenizer = loaded({"model": parts["model"]})
    tokenizer.chat_template = parts["chat_template"]
    return TransformersExport(with_adapter(model, file), tokenizer)


def _by_gym_fed(file: Path) -> LoadedExport:
    """Load a model in float32 with gym-fed's importer, with the tokenizer in the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gym_fed.base.imports.gguf.header import read_header
    from gym_fed.base.imports.gguf.reader import transformers_config
    from gym_fed.base.imports.gguf.tensors import mapped_tensors, offset_of, stored_values
    from gym_fed.base.imports.gguf.tokenizer import write_tokenizer

    header = read_header(file)
    config = transformers_config(header)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = model.state_dict()
    for tensor in mapped_tensors(header, config):
        parameters[tensor.name].copy_(stored_values(tensor, config) - offset_of(tensor, config))
    with tempfile.TemporaryDirectory(prefix="gym-export-", dir=file.parent) as folder:
        write_tokenizer(header, Path(folder), config.max_position_embeddings)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        bind_templates(tokenizer, str(file))
    return _GgufExport(model.eval(), tokenizer)


def _by_transformers(file: Path) -> LoadedExport:
    """Load a model in float32, with the tokenizer in the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    bind_templates(tokenizer, str(file))
    _add_special_tokens(tokenizer, file)
    _space_after_special_tokens(tokenizer.backend_tokenizer)
    return _GgufExport(model.eval(), tokenizer)


class _GgufExport(TransformersExport):
    """A GGUF model that reports no special tokens or template, since ``gguf.write`` compares those."""

    def special_ids(self) -> dict[str, int]:
        return {}

    def chat_template(self) -> str | None:
        return None


def _add_special_tokens(tokenizer: Any, file: Path) -> None:
    """Match the file's control and user-defined tokens as a whole, which transformers does only for those it knows.

    transformers also stores them in the byte alphabet of ordinary tokens, in which a newline is a different character.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer

    fields = GGUFReader(file).fields
    texts = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    special = {int(TokenType.CONTROL): True, int(TokenType.USER_DEFINED): False}
    added = {number: text for number, text in enumerate(texts) if types[number] in special}
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if not isinstance(state["model"]["vocab"], dict):  # a unigram model keeps its tokens unchanged
        return
    vocab = {text: number for text, number in state["model"]["vocab"].items() if number not in added}
    state["model"]["vocab"] = vocab | {text: number for number, text in added.items()}
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens(
        [AddedToken(text, special=special[types[number]], normalized=False) for number, text in added.items()]
    )
    tokenizer._tokenizer = backend


def _space_after_special_tokens(tokenizer: Any) -> None:
    """Also add the space before text that follows a special token, which llama.cpp does but this reader does not."""
    from tokenizers import pre_tokenizers

    pieces = tokenizer.pre_tokenizer
    if isinstance(pieces, pre_tokenizers.Metaspace) and pieces.prepend_scheme == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)


def with_adapter(model: Any, file: Path) -> Any:
    """Return the base with the factors of a GGUF adapter, applied by PEFT."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    from gym_fed.export.gguf.adapter import peft_state

    state, alpha = peft_state(file, model.config)
    modules = sorted({name.split("base_model.model.")[1].rpartition(".lora_")[0] for name in state})
    rank = next(len(values) for name, values in state.items() if ".lora_A." in name)
    wrapped: Any = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=int(alpha), target_modules=modules, task_type="CAUSAL_LM")
    )
    for layer in wrapped.modules():
        if hasattr(layer, "lora_A"):
            layer.scaling["default"] = alpha / rank
    result: Any = set_peft_model_state_dict(wrapped, state)
    if result.unexpected_keys:
        raise ValueError(
            f"{file.name}: {result.unexpected_keys[0]!r} is not a factor of any weight of the base"
        )
    return wrapped.eval()


class LlamaCppExport(LoadedExport):
    """A GGUF file that llama.cpp has memory-mapped, with a float32 KV cache.

    Args:
        file: The path of a model.
        lora_path: The path of an adapter for it.
    """

    def __init__(self, file: str, lora_path: str | None = None) -> None:
        import torch

        llama_cpp = import_module("llama_cpp")
        threads = torch.get_num_threads()
        self._model = llama_cpp.Llama(
            file,
            lora_path=lora_path,
            n_ctx=_CONTEXT,
            n_batch=_CONTEXT,
            n_ubatch=_CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            logits_all=True,
            verbose=False,
        )
        self._read: list[int] = []

    def ids(self, prompt: str) -> list[int]:
        template = self._model.metadata.get("tokenizer.chat_template")
        if template is None:
            return self._plain_ids(prompt)
        special = {
            f"{name}_token": self._model._model.token_get_text(number)
            for name, number in self.special_ids().items()
        }
        text = rendered(template, prompt, special)
        return list(self._model.tokenize(text.encode(), add_bos=False, special=True))

    def logits(self, ids: list[int]) -> Any:
        import torch

        known = self._read
        if not known or ids[: len(known)] != known:
            self._model.reset()
            known = []
        self._model.eval(ids[len(known) :])
        self._read = list(ids)
        return torch.from_numpy(self._model.scores[: len(ids)].copy())

    def text_ids(self, text: str) -> list[int] | None:
        return self._plain_ids(text)

    def special_ids(self) -> dict[str, int]:
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {
            name: self._model.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()
        }
        return {name: int(number) for name, number in ids.items() if number is not None}

    def _plain_ids(self, text: str) -> list[int]:
        return list(self._model.tokenize(text.encode(), add_bos=True, special=True))


class LlamaCppAdapterExport(LlamaCppExport):
    """llama.cpp with an adapter on its base, which is converted to f32 first.

    The adapter's file contains no tokenizer, so token ids are those of the base's tokenizer.
    """

    def __init__(self, parts: dict[str, Any]) -> None:
        from gym_fed.export.gguf.write import write_gguf
        from gym_fed.export.source import open_source

        base = open_source(parts["model"])
        base.tokenizer.chat_template = parts["chat_template"]
        self._tokens = TransformersExport(None, base.tokenizer)
        with tempfile.TemporaryDirectory(prefix="gym-export-", dir=Path(parts["file"]).parent) as folder:
            file = Path(folder) / "base.gguf"
            write_gguf(base, file, "f32")
            super().__init__(str(file), parts["file"])

    def ids(self, prompt: str) -> list[int]:
        return self._tokens.ids(prompt)

    def text_ids(self, text: str) -> list[int] | None:
        return None

    def special_ids(self) -> dict[str, int]:
        return {}

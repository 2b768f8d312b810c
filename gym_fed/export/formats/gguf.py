"""GGUF, which llama.cpp, Ollama and LM Studio read: one file with weights, tokenizer and chat template."""

from __future__ import annotations

import shlex
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from gym_fed.base.imports.gguf.config import MODEL_TYPES
from gym_fed.base.modeling.model_class import has_media_part
from gym_fed.base.modeling.vocabulary import text_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, readable_bytes
from gym_fed.export.formats.base import ExportFormat, Options, Tolerance
from gym_fed.export.gguf.rope import rope_notes, rope_refusal, window_refusal
from gym_fed.export.gguf.stored import compare_stored, compare_vocabulary, stripping_tokens
from gym_fed.export.gguf.write import CONVERTER, bytes_in_8_bits, refused, write_gguf
from gym_fed.export.process import Processes
from gym_fed.export.readers.gguf import GGUF_LIBRARIES, LLAMA_CPP_LIBRARIES
from gym_fed.export.source import Source

_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "f16"}
"""The default quantization by the dtype that preserves the source's delta; f32 for any other dtype."""


def has_llama_cpp() -> bool:
    """Return True if llama-cpp-python is installed; a folder that is called ``llama_cpp`` does not count."""
    return any(distributions(name="llama-cpp-python"))


_LLAMA_CPP = has_llama_cpp()
"""Without llama.cpp, gym-fed's importer reads files back, or transformers' reader if the importer cannot."""


def reader_of(config: Any) -> str:
    """Return the module that reads a file of this model back; empty if none does.

    Args:
        config: The config of the transformers model.
    """
    if _LLAMA_CPP:
        return "llama_cpp_python"
    if config.model_type in MODEL_TYPES:
        return "gym_fed"
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    rope = getattr(config, "rope_parameters", None) or {}
    is_plain = rope.get("rope_type", "default") == "default"  # transformers' reader ignores RoPE scaling
    return "transformers" if is_plain and config.model_type in GGUF_SUPPORTED_ARCHITECTURES else ""


_CUT_TO_TOKENS = ("gemma3_text",)
"""Model types whose converter drops the rows of embeddings that no token has."""


class Gguf(ExportFormat):
    """Written by llama.cpp's converter, read back by llama.cpp, or else by gym-fed's importer or transformers.

    The tolerances are the format's own losses: llama.cpp's quantiser writes the same bytes from the same float32 file.
    At q8_0 stories260K loses a KL of 1.2e-3 on the passage, SmolLM2 3.9e-3 and with the prompts 5.3e-3, since llama.cpp
    also rounds the inputs of products to 8 bits; at q6_k SmolLM2 loses 2e-2 with them. For stories260K the most
    likely token stays the same at 87.5% of positions at q4_k_m, and at 74% at q4_0. In float32 models with SiLU are off
    by 3e-6 of the largest logit. Gemma is off by 5e-4, because of the float16 table from which llama.cpp takes GELU; so
    the KL is limited there too.
    """

    name = "gguf"
    suffix = ".gguf"
    is_file = True
    merges = True
    takes_dtype = False
    requires = ("gguf", "auto_round", "sentencepiece")
    reading = "gym_fed.export.readers.gguf"
    reader_libraries = LLAMA_CPP_LIBRARIES if _LLAMA_CPP else GGUF_LIBRARIES
    reader = "llama_cpp_python" if _LLAMA_CPP else "gym_fed"
    quantizations = {  # noqa: RUF012 - never written to
        "f32": Tolerance(max=5e-4, kl=1e-6),
        "f16": Tolerance(max=None, kl=1e-4, greedy=False),
        "bf16": Tolerance(max=None, kl=1e-3, greedy=False),
        "q8_0": Tolerance(max=None, kl=1e-2, greedy=False),
        "q6_k": Tolerance(max=None, kl=3e-2, top1=0.9, greedy=False),
        "q5_k_m": Tolerance(max=None, kl=5e-2, top1=0.85, greedy=False),
        "q4_k_m": Tolerance(max=None, kl=0.1, top1=0.8, greedy=False),
        "q4_0": Tolerance(max=None, kl=0.2, top1=0.7, greedy=False),
    }
    copies_on_disk = 1.0  # the folder that is converted
    bits = {  # noqa: RUF012 - never written to
        "f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.9, "q4_0": 4.6,
    }  # fmt: skip
    tried = "Llama, Qwen2, Qwen3, Mistral, Gemma, Phi-4, mixtures of Qwen3 and Mixtral; every quantization"
    untried = "sliding windows longer than 256 tokens"

    def use(self, path: Path) -> str:
        return shlex.join(("llama-server", "-m", str(path)))

    def of_source(self, source: Source, options: Options) -> Options:
        if options.quantization:
            return options
        return replace(options, quantization=_DTYPE_NAMES.get(source.precise_dtype(), "f32"))

    def stored_as(self, options: Options) -> str | None:
        names = {"f32": "float32", **{name: dtype for dtype, name in _DTYPE_NAMES.items()}}
        return names.get(options.quantization or "f32")

    def suggestion(self, path: Path, options: Options) -> str:
        if self.quantization(options) not in ("f32", *_DTYPE_NAMES.values()):
            return ""
        size = readable_bytes(bytes_in_8_bits(path))
        return f"--quantization q8_0 takes about {size} instead of {readable_bytes(path.stat().st_size)}"

    def check(self, source: Source) -> None:
        from gym_fed.base.modeling.mixture_of_depths import MODEL_TYPE as MIXTURE_OF_DEPTHS
        from gym_fed.export.gguf.convert import known_architectures

        config = source.model.config
        kind = str(getattr(config, "model_type", ""))
        architecture = next(iter(getattr(config, "architectures", None) or []), "a model without a class")
        if has_media_part(config):
            raise refused(source, "it reads images or audio, but their part (mmproj) is not exported")
        if kind == MIXTURE_OF_DEPTHS:
            raise refused(source, "llama.cpp has no mixture of depths")
        adapters = getattr(source.model, "peft_config", {})
        if any(adapter.is_prompt_learning for adapter in adapters.values()):
            raise refused(source, "it has a tuned prompt, which is not part of the weights")
        if architecture.endswith("ForSequenceClassification"):
            raise refused(source, "it is a reward model, which generates no text")
        if architecture not in known_architectures():
            raise refused(source, f"llama.cpp's converter does not know {architecture}")
        if why := rope_refusal(config) or window_refusal(config):
            raise refused(source, why)
        if kind == "qwen3_moe" and not config.norm_topk_prob:
            raise refused(
                source, "llama.cpp normalises the weights of chosen experts, but norm_topk_prob is false"
            )
        rows, tokens = getattr(config, "vocab_size", 0), source.tokenizer
        if kind in _CUT_TO_TOKENS and tokens is not None and rows > len(tokens):
            cut = f"its embeddings have {counted(rows, 'row')}, of which llama.cpp's converter keeps {len(tokens):,}"
            raise refused(source, f"{cut}; remove the other rows with resize_token_embeddings")

    def start(self, processes: Processes, *, check: bool) -> None:
        from gym_fed.export.gguf.convert import LIBRARIES

        processes.start(CONVERTER, LIBRARIES)
        super().start(processes, check=check)

    def reader_of(self, source: Source) -> str:
        return reader_of(source.model.config)

    def require_reader(self, source: Source) -> None:
        if not self.reader_of(source):
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"format gguf: {source.name} cannot be read back: neither gym-fed nor transformers reads "
                f"{source.model.config.model_type} in GGUF",
                "pip install llama-cpp-python, or --skip-check, which export.json records as unchecked",
            )

    def remedy_of(self, options: Options) -> str:
        names = list(self.quantizations)
        if (quantization := self.quantization(options)) not in names[1:]:
            return self.remedy
        finer = [name for name in names[: names.index(quantization)] if name.startswith("q")][::-1] or ["f32"]
        return (
            f"{quantization} loses too much of the model: use --quantization {' or '.join(finer)}; "
            "--skip-check writes it anyway"
        )

    def write(self, source: Source, target: Path, options: Options) -> None:
        write_gguf(source, target, self.quantization(options), options.report, options.processes)

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        return source.whole()

    def facts(self, source: Source, options: Options) -> dict[str, Any]:
        notes = rope_notes(source.model.config)
        if stripping := stripping_tokens(text_tokenizer(source.tokenizer)):
            notes.append(
                f"GGUF does not record that added tokens strip white space or match only whole words: "
                f"{counted(len(stripping), 'token')} ({', '.join(map(repr, stripping[:3]))}, ...)"
            )
        return {"notes": notes} if notes else {}

    def stored(self, source: Source, expected: Any, target: Path, options: Options) -> dict[str, Any]:
        return {
            "vocabulary": compare_vocabulary(target, text_tokenizer(source.tokenizer)),
            "tensors": compare_stored(target, expected, options.report),
        }

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        return {"by": self.reader_of(source), "file": str(target)}

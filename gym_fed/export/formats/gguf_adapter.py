"""A GGUF LoRA adapter: llama-server applies it to its base per request, Ollama with ``ADAPTER``."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gym_fed.base.models import load_tokenizer, resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats.base import ExportFormat, Options, Tolerance
from gym_fed.export.formats.gguf import Gguf, has_llama_cpp
from gym_fed.export.readers.gguf import ADAPTER_LIBRARIES, LLAMA_CPP_LIBRARIES
from gym_fed.export.source import Source

_LLAMA_CPP = has_llama_cpp() and all(find_spec(name) is not None for name in Gguf.requires)
"""True if llama.cpp can read it back, for which the base must be converted."""


class GgufAdapter(ExportFormat):
    """One file with LoRA factors in float32, for a base that is a separate GGUF file.

    It is read back by llama.cpp, on its base in f32, if llama-cpp-python is installed. Otherwise this project's reader
    of ``gguf`` extracts the factors, and PEFT applies them to the base.
    """

    name = "gguf_adapter"
    suffix = ".gguf"  # a name with this suffix means gguf unless --format is given
    is_file = True
    takes_rank = True
    requires = ("gguf",)
    reading = "gym_fed.export.readers.gguf"
    reader_libraries = (*LLAMA_CPP_LIBRARIES, *ADAPTER_LIBRARIES) if _LLAMA_CPP else ADAPTER_LIBRARIES
    reader = "llama_cpp_python" if _LLAMA_CPP else "gguf"
    tolerance = Tolerance(max=5e-4) if _LLAMA_CPP else Tolerance()
    copies_on_disk = 2.0 if _LLAMA_CPP else 0.0  # the base, as a folder and as a file
    tried = "LoRA, one-bit deltas; Llama, Qwen3"
    untried = ""

    def require_options(self, options: Options) -> None:
        super().require_options(options)
        if options.dtype is not None:
            raise GymError(ErrorCode.USAGE, f"format {self.name} is written in float32", "omit --dtype")

    def use(self, path: Path) -> str:
        return shlex.join(("llama-server", "-m", "BASE.gguf", "--lora", str(path)))

    def check(self, source: Source) -> None:
        from gym_fed.export.gguf.adapter import require_adaptable

        if not source.adapted and source.delta is None:
            raise self.refusal(source, "has no adapter and no delta", "export it as gguf")
        if source.below or source.base_changed:
            why = "was trained on other adapters" if source.below else "changes its base's rotary positions"
            why += ", but a single adapter file is applied to an unmodified base"
            raise self.refusal(source, why, "export it merged, as gguf")
        require_adaptable(source.name, source.model.config)

    def write(self, source: Source, target: Path, options: Options) -> None:
        from gym_fed.export.gguf.adapter import write_adapter
        from gym_fed.export.nearest import factors_of, require_delta_options

        require_delta_options(source, options)
        factors = factors_of(source, options.rank, options.report)
        write_adapter(target, factors, source.model.config, Path(source.shown_name).name)

    def facts(self, source: Source, options: Options) -> dict[str, Any]:
        from gym_fed.export.nearest import lora_facts

        record = {} if source.delta is None else lora_facts(source, options)
        if source.tokenizer.chat_template != load_tokenizer(str(source.base)).chat_template:
            record["notes"] = [
                *record.get("notes", []),
                "its chat template differs from the base's, and an adapter file has none: pass it to llama-server "
                "with --chat-template-file",
            ]
        return record

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        if source.delta is None:
            return source.model
        from gym_fed.export.nearest import lora_model

        return lora_model(source, options.rank, options.report)

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        return {
            "by": self.reader,
            "file": str(target),
            "model": resolve(str(source.base)),
            "chat_template": source.tokenizer.chat_template,
        }

"""Convert a model folder to GGUF with llama.cpp's converter, which auto-round bundles.

``python -m gym_fed.export.gguf.convert`` is a separate process, because the converter has modules with generic
names, prints, and patches other modules. Its job is ``{"folder", "file", "quantization", "metadata", "rope"}``.
"""

from __future__ import annotations

import ast
import importlib
import logging
import sys
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.export.gguf.k_quants import PLAIN, k_blocks, tensor_type
from gym_fed.export.gguf.vocabulary import UnknownTokenizerError, patch_tokenizers
from gym_fed.export.process import Report, child_job, leave

_MOSTLY = ("f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")
FILE_TYPES = {"f32": "ALL_F32"} | {name: f"MOSTLY_{name.upper()}" for name in _MOSTLY}
"""llama.cpp's name of the file type, by ``--quantization``."""
LIBRARIES = ("torch", "gguf", "transformers.models.llama.configuration_llama", "sentencepiece")
"""Libraries that are imported before the job arrives."""
UNSUPPORTED = 3
"""The exit status for an unknown pre-tokenizer or architecture; the reason is the last line of standard error."""


@cache
def known_architectures() -> frozenset[str]:
    """Return the model classes that the converter knows, read from its table without running it."""
    tree = ast.parse((_converter() / "conversion" / "__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "TEXT_MODEL_MAP":
            assert node.value is not None
            return frozenset(ast.literal_eval(node.value))
    raise LookupError("llama.cpp's converter has no TEXT_MODEL_MAP")


def main() -> int:
    """Run the job, and return the exit status."""
    with child_job() as (job, say):
        say("converting", 0, 0)
        return _convert(job, say)


def _converter() -> Path:
    """Return the folder in auto-round that contains the converter; auto-round itself is not imported."""
    spec = find_spec("auto_round")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "export" / "export_to_gguf"


def _convert(job: dict[str, Any], say: Report) -> int:
    import gguf
    import torch

    sys.path.insert(0, str(_converter()))
    _skip_auto_round()
    gguf.MODEL_ARCH = _Architectures(gguf.MODEL_ARCH)  # type: ignore[assignment,misc]
    logging.disable(logging.WARNING)
    _forbid_remote_code()
    conversion = importlib.import_module("conversion")
    folder = Path(job["folder"])
    architecture = conversion.ModelBase.load_hparams(folder, False)["architectures"][0]
    model_class = _model_class(conversion, architecture)
    if model_class is None:
        print(f"the installed gguf {version('gguf')} is too old for {architecture}", file=sys.stderr)
        return UNSUPPORTED
    patch_tokenizers(model_class)
    _report_tensors(model_class, say)
    mixed = job["quantization"] in PLAIN and job["quantization"] != "q8_0"
    if mixed:
        _mix(gguf, model_class, job["quantization"])
    try:
        with torch.inference_mode():
            writer = model_class(
                folder,
                getattr(gguf.LlamaFileType, FILE_TYPES[job["quantization"]]),
                Path(job["file"]),
                model_name=job["metadata"]["general.name"],
                eager=mixed,  # blocks of the mixtures are computed with numpy, not when they are written
            )
            _set_metadata(gguf, writer, job["metadata"], job["rope"])
            writer.write()
    except (UnknownTokenizerError, GymError) as error:
        print(error, file=sys.stderr)
        return UNSUPPORTED
    return 0


def _skip_auto_round() -> None:
    """Let the converter import its path helper without the rest of auto-round, which takes two seconds."""
    for name in ("auto_round", "auto_round.utils"):
        spec = find_spec(name)
        assert spec is not None
        sys.modules[name] = module_from_spec(spec)


def _model_class(conversion: Any, architecture: str) -> Any:
    """Return the converter class of an architecture; None if it needs a newer ``gguf`` than the installed one."""
    try:
        model_class = conversion.get_model_class(architecture)
    except (AttributeError, KeyError):  # a tensor or a class unknown to this gguf
        return None
    return None if model_class.model_arch is None else model_class


def _forbid_remote_code() -> None:
    """Keep transformers from running Python files that a model names, which the converter allows for some models."""
    from transformers import AutoConfig, AutoTokenizer

    for kind in (AutoConfig, AutoTokenizer):
        plain = kind.from_pretrained
        kind.from_pretrained = partial(_without_remote_code, plain)  # type: ignore[method-assign]


def _without_remote_code(plain: Any, *arguments: Any, **named: Any) -> Any:
    return plain(*arguments, **{**named, "trust_remote_code": False})


def _report_tensors(model_class: Any, say: Report) -> None:
    """Report progress after each tensor of the source."""
    modify = model_class.modify_tensors
    done = 0

    def modified(self: Any, data: Any, name: str, bid: int | None) -> Any:
        nonlocal done
        done += 1
        say("converting", done, len(self.model_tensors))
        return modify(self, data, name, bid)

    model_class.modify_tensors = modified


def _set_metadata(gguf: Any, writer: Any, metadata: dict[str, Any], rope: dict[str, float]) -> None:
    """Write ``metadata`` instead of the converter's guesses, and ``rope`` with the architecture's prefix."""
    prepare = writer.prepare_metadata
    kinds = {bool: "BOOL", int: "UINT32", str: "STRING"}

    def prepared(vocab_only: bool) -> None:
        prepare(vocab_only=vocab_only)
        values = writer.gguf_writer.kv_data[0]
        for key, value in metadata.items():
            values[key] = gguf.GGUFValue(value, getattr(gguf.GGUFValueType, kinds[type(value)]))
        for key, factor in rope.items():
            values[f"{writer.gguf_writer.arch}.{key}"] = gguf.GGUFValue(factor, gguf.GGUFValueType.FLOAT32)

    writer.prepare_metadata = prepared


def _mix(gguf: Any, model_class: Any, quantization: str) -> None:
    """Let the converter write types that only llama.cpp's own quantiser knows."""
    plain = gguf.quants.quantize

    def quantize(data: Any, chosen: Any) -> Any:
        return k_blocks(chosen.name, data) if chosen.name.endswith("_K") else plain(data, chosen)

    def chosen_type(self: Any, name: str, new_name: str, bid: int | None, n_dims: int) -> Any:
        row = rows.get(name)
        if n_dims < 2 or row is None:
            return False
        type_name = tensor_type(
            quantization,
            new_name,
            row,
            bid,
            self.block_count,
            tied=bool(self.hparams.get("tie_word_embeddings")),
            experts=int(self.hparams.get("num_local_experts") or self.hparams.get("num_experts") or 0),
        )
        return False if type_name is None else getattr(gguf.GGMLQuantizationType, type_name)

    rows: dict[str, int] = {}
    modify = model_class.modify_tensors

    def modified(self: Any, data: Any, name: str, bid: int | None) -> Any:
        rows[name] = int(data.shape[-1])
        return modify(self, data, name, bid)

    gguf.quants.quantize = quantize
    model_class.tensor_force_quant = chosen_type
    model_class.modify_tensors = modified


class _Architectures:
    """``gguf.MODEL_ARCH`` without errors for architectures that this gguf is too old for."""

    def __init__(self, known: Any) -> None:
        self._known = known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known, name, None)

    def __iter__(self) -> Any:
        return iter(self._known)


if __name__ == "__main__":
    leave(main())

"""Aliases of export formats and quantizations."""

from __future__ import annotations

from gym_fed.core.errors import ErrorCode
from gym_fed.interop.draft import Alias, Unsupported

FORMATS = {
    "hf": "huggingface", "safetensors": "huggingface", "transformers": "huggingface", "merged": "huggingface",
    "vllm": "huggingface", "sglang": "huggingface", "tgi": "huggingface",
    "peft": "adapter", "lora": "adapter", "gymdelta": "delta", "bitdelta": "delta",
    "llama_cpp": "gguf", "llama.cpp": "gguf", "ollama": "gguf",
    "lora_gguf": "gguf_adapter", "gguf_lora": "gguf_adapter",
    "pt2": "torch_export", "exported_program": "torch_export", "jit": "torchscript", "torch_script": "torchscript",
    "trtllm": "tensorrt_llm", "tensorrt": "tensorrt_llm", "core_ml": "coreml", "mlpackage": "coreml",
    "pte": "executorch", "et": "executorch", "ov": "openvino", "autoawq": "awq", "autogptq": "gptq",
    "auto_awq": "awq", "auto_gptq": "gptq",
}  # fmt: skip
"""Our formats by their other names."""

REFUSED_FORMATS = {
    "merged_16bit": Unsupported(
        "the type of a merged folder is --dtype's",
        (
            "gym export MODEL --format huggingface --dtype bfloat16 -o FOLDER",
            "gym export MODEL --format huggingface --dtype float16 -o FOLDER",
        ),
    ),
    "merged_4bit": Unsupported(
        "4 bits are one of two layouts, or a GGUF file's",
        (
            "gym export MODEL --format gptq -o FOLDER",
            "gym export MODEL --format gguf --quantization q4_k_m -o model.gguf",
        ),
    ),
}
"""Names that combine a format with an option."""

_INT4 = {"int4": "", "4bit": "", "4": "", "w4": "", "w4a16": ""}
_NO_ONE_BIT = Unsupported(
    "GGUF stores a model's weights, not a one-bit delta",
    ('trainer.export("model.gguf", quantization="q4_k_m")', 'trainer.export("mine.gymdelta")'),
)

QUANTIZATIONS: dict[str, dict[str, str | Unsupported]] = {
    "gguf": {
        "fp32": "f32", "float32": "f32", "fp16": "f16", "float16": "f16", "half": "f16", "bfloat16": "bf16",
        "int8": "q8_0", "8bit": "q8_0", "q8": "q8_0", "q6": "q6_k", "q5": "q5_k_m", "q5_k": "q5_k_m",
        "int4": "q4_k_m", "4bit": "q4_k_m", "q4": "q4_k_m", "q4_k": "q4_k_m", "bitdelta": _NO_ONE_BIT,
        "not_quantized": "bf16", "fast_quantized": "q8_0", "quantized": "q4_k_m",
    },
    "onnx": {"8bit": "int8", "dynamic": "int8", "q8": "int8", "qint8": "int8", "fp32": "float32", "f32": "float32"},
    "awq": {**_INT4},
    "gptq": {**_INT4, "int8": "w8", "8bit": "w8", "8": "w8", "w8a16": "w8"},
    "delta": {"bitdelta": ""},
}  # fmt: skip
"""Our quantizations by their other names, for each format; empty for the format's default."""

ROWS = [
    Alias(
        "Python",
        'trainer.export("model.gguf", quantization="bitdelta")',
        _NO_ONE_BIT.why,
        _NO_ONE_BIT.instead,
    ),
    Alias(
        "command",
        "gym export --model saves/model --format gguf",
        "the same; without `--output` it writes `model.gguf`",
    ),
    *(
        Alias("command", f"gym export MODEL --format {theirs}", f"`--format {ours}`")
        for theirs, ours in FORMATS.items()
    ),
    *(
        Alias("command", f"gym export MODEL --format {theirs}", what.why, what.instead)
        for theirs, what in REFUSED_FORMATS.items()
    ),
    *(
        Alias(
            "command",
            f"gym export MODEL --format {form} --quantization {theirs}",
            f"`--quantization {ours}`" if ours else "not needed (it is the default)",
        )
        for form, words in QUANTIZATIONS.items()
        for theirs, ours in words.items()
        if isinstance(ours, str)
    ),
]


def member(kind: str, name: str) -> str | None:
    """See ``gym_fed.core.aliases.member``."""
    if kind == "export format":
        if (refused := REFUSED_FORMATS.get(name)) is not None:
            raise refused.error(f"format {name}", code=ErrorCode.USAGE)
        return FORMATS.get(name)
    form = kind.removeprefix("quantization of ")
    quantization = QUANTIZATIONS.get(form, {}).get(name) if form != kind else None
    if isinstance(quantization, Unsupported):
        raise quantization.error(f"quantization {name}", code=ErrorCode.USAGE)
    return quantization

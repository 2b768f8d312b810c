"""The config dialect of LLaMA-Factory, and the translation of its predict, inference and export files.

If a file omits a key, LLaMA-Factory's default is written: temperature 0.95, top_k 50, top_p 0.7, and at most 1024 new
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_fed.config.parsed import Job, Translation
from gym_fed.interop.llamafactory.rows import translate_sources, translate_template
from gym_fed.interop.llamafactory.translate import translate
from gym_fed.interop.llamafactory.translation import (
    NOT_NEEDED,
    NOT_NEEDED_PREFIXES,
    Translator,
    is_llamafactory,
    is_version_1,
    job_of,
    names,
)

_BACKENDS = ("vllm", "sglang", "ktransformers")
_PREFIXES = {"vllm_": "used only by vLLM", "sglang_": "used only by SGLang", **NOT_NEEDED_PREFIXES}
_OF_TRAINING = dict.fromkeys(
    (
        *("stage", "do_train", "do_predict", "do_eval", "finetuning_type", "lora_rank", "lora_target"),
        *("lora_alpha", "predict_with_generate", "bf16", "fp16", "flash_attn", "infer_backend"),
        *("report_to", "run_name", "logging_steps", "save_steps", "warmup_ratio", "learning_rate"),
        *(
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_train_epochs",
            "lr_scheduler_type",
        ),
        *("length_penalty", "image_max_pixels", "image_min_pixels"),
    ),
    "used only in training",
)


def _translate_predict(given: dict[str, Any]) -> Translation:
    """Translate a file with ``do_predict`` to the keys of `gym predict`."""
    translator = Translator(given)
    translator.move("model_name_or_path", "model")
    if translator.take("adapter_name_or_path") is not None:
        _adapters(translator, "adapter")
    translate_sources(translator, {"eval_dataset": "eval_data"})
    translator.lose_if("dataset", "predictions are made on eval_dataset", harmless=())
    translator.move("cutoff_len", "max_length", 2048)
    translator.move("output_dir", "output_dir")
    translator.move("seed", "seed", 42)
    translator.move("per_device_eval_batch_size", "batch_size", 8)
    _sampling(translator, "max_new_tokens")
    translator.move("num_beams", "num_beams")
    translator.move("eval_num_beams", "num_beams")
    translator.move("skip_special_tokens", "skip_special_tokens")
    translator.move("enable_thinking", "enable_thinking")
    if translator.has("max_steps"):
        translator.take("max_steps")
        translator.note("max_steps", "predictions are made for every row")
    translate_template(translator)
    _dtype(translator)
    translator.leave({**NOT_NEEDED, **_OF_TRAINING}, _PREFIXES)
    return translator.result


def _translate_inference(given: dict[str, Any]) -> Translation:
    """Translate an inference file to ``model``, ``adapter`` (a list), ``chat_template``, ``dtype`` and ``sampling``."""
    if is_version_1(given):
        return _version_1(given)
    translator = Translator(given)
    translator.move("model_name_or_path", "model")
    _adapters(translator, "adapter")
    _sampling(translator, "sampling.max_tokens", section="sampling.")
    sampling = translator.result.values["sampling"]
    if sampling.pop("do_sample") is False:
        translator.result.values["sampling"] = {"temperature": 0.0, "max_tokens": sampling["max_tokens"]}
    backend = str(translator.take("infer_backend", "huggingface"))
    if backend in _BACKENDS:
        translator.note("infer_backend", f"{backend} is not used; gym-fed's own engine generates the answers")
    translate_template(translator)
    translator.move("default_system", "system")
    _dtype(translator)
    translator.leave({**NOT_NEEDED, **_OF_TRAINING}, _PREFIXES)
    return translator.result


def _translate_export(given: dict[str, Any]) -> Translation:
    """Translate an export file to options of `gym export`.

    These are ``model``, ``adapter`` (a list), ``output``, ``shard_size`` and ``dtype``, and for GPTQ ``format``,
    ``quantization`` and ``data``.
    """
    flat = given
    if is_version_1(given):
        section = given.get("peft_config") or {}
        rest = {key: value for key, value in given.items() if key not in ("peft_config", "model")}
        flat = {**rest, "model_name_or_path": given["model"], **section}
        flat.pop("name", None)
    translator = Translator(flat)
    translator.move("model_name_or_path", "model")
    _adapters(translator, "adapter")
    translator.move("export_dir", "output")
    translator.put("shard_size", f"{translator.take('export_size', 5)}GB", "export_size")
    kind = translator.take("infer_dtype", "auto")
    if kind != "auto" and flat.get("export_quantization_bit") is not None:
        translator.note("infer_dtype", "with export_quantization_bit, unpacked weights are float16")
    elif kind != "auto":
        translator.put("dtype", str(kind), "infer_dtype")
    _quantisation(translator)
    translator.lose_if("export_hub_model_id", "nothing is uploaded", harmless=())
    translator.lose_if("export_legacy_format", "weights are written only as safetensors")
    translator.lose_if("quantization_bit", "adapters are not merged into quantised bases", harmless=())
    for key, why in (
        ("export_device", "weights are merged on the CPU"),
        ("template", "the model is saved with the tokenizer's own template"),
    ):
        if translator.take(key) is not None:
            translator.note(key, why)
    translator.leave({**NOT_NEEDED, **_OF_TRAINING}, _PREFIXES)
    return translator.result


def _quantisation(translator: Translator) -> None:
    """Write the settings for 4-bit or 8-bit GPTQ: ``format``, ``quantization``, and the calibration ``data``."""
    bits = translator.take("export_quantization_bit")
    data = translator.take("export_quantization_dataset")
    if bits not in (None, 4, 8):
        translator.lose("export_quantization_bit", "GPTQ export supports only 4 and 8 bits")
    elif bits is not None:
        translator.put("format", "gptq", "export_quantization_bit")
        translator.put("quantization", f"w{bits}", "export_quantization_bit")
        if data is not None:
            translator.put("data", str(data), "export_quantization_dataset")
    elif data is not None:
        translator.note("export_quantization_dataset", "used only with export_quantization_bit")
    for key in ("export_quantization_nsamples", "export_quantization_maxlen"):
        if translator.take(key) is not None:
            unused = "used only with export_quantization_bit"
            translator.note(key, unused if bits is None else "calibration uses 32 samples of 128 tokens")


def _version_1(given: dict[str, Any]) -> Translation:
    translator = Translator(given)
    translator.move("model", "model")
    translator.put("adapter", [])
    translator.put("sampling", {"max_tokens": translator.take("max_new_tokens", 128)}, "max_new_tokens")
    section = translator.take("peft_config") or {}
    if adapter := section.get("adapter_name_or_path"):
        translator.put("adapter", names(adapter), "peft_config")
    if str(translator.take("sample_backend", "hf")) != "hf":
        translator.note("sample_backend", "gym-fed's own engine generates the answers")
    keys = ("model_class", "kernel_config", "dist_config", "quant_config", "init_config", "flash_attn")
    translator.leave(dict.fromkeys((*keys, "trust_remote_code"), "not needed for inference"), {})
    return translator.result


def _adapters(translator: Translator, ours: str) -> None:
    adapters = translator.take("adapter_name_or_path")
    translator.put(ours, [] if adapters is None else names(adapters), "adapter_name_or_path")
    translator.lose_if("adapter_folder", "write the full path in adapter_name_or_path", harmless=())


def _sampling(translator: Translator, length_key: str, section: str = "") -> None:
    """Write the sampling parameters; for greedy decoding only those that it uses."""
    translator.move("max_new_tokens", length_key, 1024)
    draws = bool(translator.take("do_sample", True))
    translator.put(f"{section}do_sample", draws, "do_sample")
    for key, default in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50)):
        value = translator.take(key, default)
        if draws:
            translator.put(f"{section}{key}", value, key)
    translator.move("repetition_penalty", f"{section}repetition_penalty")


def _dtype(translator: Translator) -> None:
    kind = str(translator.take("infer_dtype", "auto"))
    if kind != "auto":
        translator.put("dtype", kind, "infer_dtype")


class LlamaFactory:
    """The dialect of LLaMA-Factory's files; see ``gym_fed.config.parsed.Dialect``."""

    title = "LLaMA-Factory"

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return True if the file names a model and a stage, or has a key that only LLaMA-Factory uses."""
        return is_llamafactory(values)

    def job_of(self, values: dict[str, Any]) -> Job:
        """See ``translation.job_of``."""
        return job_of(values)

    def translate(self, values: dict[str, Any], job: Job, processes: int | None = None) -> Translation:
        """Translate a file to the keys of the command that runs ``job``."""
        if job == "predict":
            return _translate_predict(values)
        if job == "export":
            return _translate_export(values)
        if job == "inference":
            return _translate_inference(values)
        return translate(values, processes)


DIALECT = LlamaFactory()

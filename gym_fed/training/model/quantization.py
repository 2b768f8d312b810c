"""Train on quantised bases: quantised for the run (QLoRA), or stored quantised by other tools.

bitsandbytes quantises while the weights are loaded. The other methods (``packed_layers``) quantise layer by layer
afterwards, since transformers 5.23 cannot load models with HQQ, and its trainer refuses torchao below 8 bits.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs". bitsandbytes also runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.base.modeling.weight_count import prequantised
from gym_fed.base.models import pick_device
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import TUNING
from gym_fed.core.requirements import require_cuda, require_package
from gym_fed.training.model.packed_layers import packed_by

# Methods of models that are stored quantised: the packages that transformers 5.23 needs to load them, and whether it
# can load them on a CPU. (EETQ's kernels come from the package kernels, and AWQ's from gptqmodel, no longer from
# autoawq.)
_PREQUANTISED: dict[str, tuple[tuple[str, ...], bool]] = {
    "bitsandbytes": (("bitsandbytes",), True),
    "gptq": (("gptqmodel", "optimum"), True),
    "awq": (("gptqmodel",), True),
    "aqlm": (("aqlm",), False),
    "eetq": (("kernels",), False),
    "torchao": (("torchao",), True),
    "quanto": (("optimum.quanto",), True),
}


def check_quantization(config: TrainingConfig) -> None:
    """Refuse a quantised base that this machine or installation cannot train on."""
    method = prequantised(config.model)
    if config.quantization is not None:
        key = f"quantization.method: {config.quantization.method}"
        reason = f"quantization: {config.model} is already quantised by {method}"
        refuse_first((method is not None, reason, "remove the section"))
        _require_method(config, key)
        on_mps = pick_device(config.device).type == "mps"
        refuse_first((on_mps, f"{key} runs on CUDA and CPU, not on mps", "set device to cpu"))
    if method is None:
        return
    subject = f"model: {config.model} is quantised by {method}, which"
    untrained = f"finetuning: {config.finetuning} cannot train {config.model}, whose weights are quantised by {method}"
    original = "use the unquantised model, with quantization: {method: hqq, bits: 4}"
    refuse_first(
        (method == "hqq", f"{subject} transformers 5.23 cannot load", original),
        (not TUNING.type_of(config.finetuning).on_quantized, untrained, "use finetuning: lora"),
        (
            method not in _PREQUANTISED,
            f"{subject} gym train does not support",
            f"one of {', '.join(_PREQUANTISED)}",
        ),
    )
    packages, on_cpu = _PREQUANTISED[method]
    for package in packages:
        name = package.replace(".", "-")
        remedy = f"pip install {name} (in a separate environment if it conflicts)"
        require_package(package, subject, remedy=remedy)
    if not on_cpu:
        require_cuda(subject)


def _require_method(config: TrainingConfig, key: str) -> None:
    """Refuse a method whose package is missing, and a method of ``packed_layers`` for anything but plain LoRA."""
    assert config.quantization is not None
    method = config.quantization.method
    require_package(method, key, "quant", remedy="pip install hqq" if method == "hqq" else "")
    if method == "bitsandbytes":
        return
    settings = config.lora
    plain_lora = TUNING.type_of(config.finetuning).on_packed and not (settings and settings.use_dora)
    reason = f"{key} is tested only with plain LoRA"
    refuse_first((not plain_lora, reason, "use finetuning: lora without use_dora, or method: bitsandbytes"))


def is_quantised(model: Any) -> bool:
    """Return True if the model's layers are quantised, by transformers or by ``pack_layers``."""
    return bool(getattr(model, "is_quantized", False)) or packed_by(model) is not None


def quantization_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return keyword arguments for ``from_pretrained`` that quantise the base; empty if ``quantization`` is not set."""
    settings = config.quantization
    if settings is None or settings.method != "bitsandbytes":
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    if settings.bits == 8:
        quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=settings.quant_type,
            bnb_4bit_use_double_quant=settings.double_quant,
            bnb_4bit_compute_dtype=getattr(torch, settings.compute_dtype or config.loaded_dtype),
        )
    device_map = {"": str(pick_device(config.device))}
    return {"quantization_config": quantization_config, "device_map": device_map}


def require_quantised(model: Any, config: TrainingConfig) -> None:
    """Refuse an unquantised model in memory if the config has ``quantization``."""
    if config.quantization is not None and not is_quantised(model):
        reason = (
            "quantization: the model in memory is not quantised; gym-fed quantises only models that it loads"
        )
        remedy = "set model: NAME in the config, or quantise the model first and remove the section"
        raise GymError(ErrorCode.USAGE, reason, remedy)


def settle(model: Any) -> None:
    """Prevent bitsandbytes from repacking 4-bit weights on a CPU in evaluation mode.

    Repacking fails for some sizes and prevents further training.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


@contextmanager
def uncast_adapters(model: Any) -> Iterator[None]:
    """Prevent TRL from casting adapters on quantised bases to bfloat16 within a context; ``dtype`` sets their type."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    flags = [name for name in ("is_loaded_in_4bit", "is_loaded_in_8bit") if vars(base).get(name)]
    for name in flags:
        setattr(base, name, False)
    try:
        yield
    finally:
        for name in flags:
            setattr(base, name, True)

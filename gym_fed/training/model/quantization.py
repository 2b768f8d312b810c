"""Quantised bases: quantised while they are loaded (QLoRA), or stored quantised by other tools.

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

# Methods of stored quantised models: packages that transformers 5.23 needs to load them, and True if it loads
# them on a CPU. (EETQ's kernels are fetched by the package kernels; AWQ's by gptqmodel, no longer by
# autoawq.)
_PREQUANTISED: dict[str, tuple[tuple[str, ...], bool]] = {
    "bitsandbytes": (("bitsandbytes",), True),
    "gptq": (("gptqmodel", "optimum"), True),
    "awq": (("gptqmodel",), True),
    "aqlm": (("aqlm",), False),
    "eetq": (("kernels",), False),
    "hqq": (("hqq",), False),
    "torchao": (("torchao",), True),
    "quanto": (("optimum.quanto",), True),
}


def check_quantization(config: TrainingConfig) -> None:
    """Refuse a quantised base that this machine or installation cannot train on."""
    method = prequantised(config.model)
    if config.quantization is not None:
        key = f"quantization.method: {config.quantization.method}"
        reason = f"quantization: {config.model} is quantised already, by {method}"
        refuse_first((method is not None, reason, "remove the section"))
        require_package("bitsandbytes", key, "quant")
        on_mps = pick_device(config.device).type == "mps"
        refuse_first((on_mps, f"{key} runs on CUDA and CPU, not on mps", "set device to cpu"))
    if method is None:
        return
    subject = f"model: {config.model} is quantised by {method}, which"
    untrained = f"finetuning: {config.finetuning} cannot train {config.model}, whose weights are quantised by {method}"
    unknown = f"{subject} gym train does not know"
    refuse_first(
        (not TUNING.type_of(config.finetuning).on_quantized, untrained, "use finetuning: lora"),
        (method not in _PREQUANTISED, unknown, f"one of {', '.join(_PREQUANTISED)}"),
    )
    packages, on_cpu = _PREQUANTISED[method]
    for package in packages:
        name = package.replace(".", "-")
        remedy = f"pip install {name} (in an environment of its own where it conflicts)"
        require_package(package, subject, remedy=remedy)
    if not on_cpu:
        require_cuda(subject)


def quantization_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return keyword arguments of ``from_pretrained`` that quantise the base; empty without the section."""
    settings = config.quantization
    if settings is None:
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    if settings.bits == 8:
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=settings.quant_type,
            bnb_4bit_use_double_quant=settings.double_quant,
            bnb_4bit_compute_dtype=getattr(torch, settings.compute_dtype or config.loaded_dtype),
        )
    return {"quantization_config": how, "device_map": {"": str(pick_device(config.device))}}


def require_quantised(model: Any, config: TrainingConfig) -> None:
    """Refuse an unquantised model in memory although the config has ``quantization``."""
    if config.quantization is not None and not getattr(model, "is_quantized", False):
        reason = "quantization: the model in memory is not quantised, and only a model that is loaded can be"
        remedy = "give model: NAME in the config, or quantise the model first and remove the section"
        raise GymError(ErrorCode.USAGE, reason, remedy)


def settle(model: Any) -> None:
    """Keep 4-bit weights on a CPU in their layout.

    bitsandbytes would repack them in evaluation, which fails for some sizes and prevents further training.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


@contextmanager
def uncast_adapters(model: Any) -> Iterator[None]:
    """Keep TRL from casting adapters on quantised bases to bfloat16; only ``dtype`` decides their type."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    flags = [name for name in ("is_loaded_in_4bit", "is_loaded_in_8bit") if vars(base).get(name)]
    for name in flags:
        setattr(base, name, False)
    try:
        yield
    finally:
        for name in flags:
            setattr(base, name, True)

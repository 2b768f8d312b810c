"""Which weights are tuned and how: the ``finetuning`` methods and their sections; words are PEFT's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gym_fed.config.base import StrictModel

Finetuning = Literal["full", "freeze", "lora", "adalora", "oft", "boft", "vera", "ia3"]
TUNING_SECTIONS = ("freeze", "lora", "adalora", "oft", "boft", "vera", "ia3")


class LoraSettings(StrictModel):
    """The adapter that is trained when ``finetuning`` is ``lora``."""

    r: int = Field(default=8, ge=1)
    lora_alpha: int = Field(default=16, ge=1)
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: list[str] | str = "all-linear"
    """Names of linear layers, or ``all-linear`` for every one but the output head."""

    freeze_a: bool = False
    """Train B alone; A follows from ``seed`` and the layers' names, on every machine the same. Runs of one seed on
    different data can then be merged exactly, coordinate by coordinate."""


class FreezeSettings(StrictModel):
    """Trains the last layers and leaves the others as they are."""

    num_trainable_layers: int = Field(default=2, ge=1)


class AdaLoraSettings(StrictModel):
    """AdaLoRA, Zhang et al. 2023."""


class OftSettings(StrictModel):
    """Orthogonal fine-tuning, Qiu et al. 2023."""


class BoftSettings(StrictModel):
    """Butterfly orthogonal fine-tuning, Liu et al. 2023."""


class VeraSettings(StrictModel):
    """Vector-based random matrix adaptation, Kopiczko et al. 2023."""


class Ia3Settings(StrictModel):
    """Learned rescaling of keys, values and MLPs, Liu et al. 2022."""


class QuantizationSettings(StrictModel):
    """The base's weights are held in few bits while an adapter is trained (QLoRA, Dettmers et al. 2023)."""

    method: Literal["bitsandbytes"] = "bitsandbytes"
    bits: Literal[4, 8] = 4


class TuningSections(StrictModel):
    """Only the section of the chosen ``finetuning`` may be given; it is filled with its defaults when it is not."""

    finetuning: Finetuning = "full"
    freeze: FreezeSettings | None = None
    lora: LoraSettings | None = None
    adalora: AdaLoraSettings | None = None
    oft: OftSettings | None = None
    boft: BoftSettings | None = None
    vera: VeraSettings | None = None
    ia3: Ia3Settings | None = None
    quantization: QuantizationSettings | None = None
    """Hold the base in few bits while training an adapter; needs ``finetuning`` other than ``full`` and ``freeze``."""

"""Which weights are tuned and how: the ``finetuning`` methods and their sections; words are PEFT's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import TUNING

InitLoraWeights = (
    Literal["default", "gaussian", "orthogonal", "pissa", "olora", "loftq"]
    | Annotated[str, StringConstraints(pattern=r"^pissa_niter_[1-9][0-9]*$")]
)


class AdapterSettings(StrictModel):
    """What every adapter has: the layers that it is put on."""

    target_modules: list[str] | str = "all-linear"
    """Names of linear layers, or ``all-linear`` for every one but the output head; another string is a regular
    expression of whole module names."""

    modules_to_save: list[str] = Field(default_factory=list)
    """Further modules (``embed_tokens``, ``lm_head``) that are trained whole and saved with the adapter."""


class LoraSettings(AdapterSettings):
    """The adapter that is trained when ``finetuning`` is ``lora``."""

    r: int = Field(default=8, ge=1)
    lora_alpha: int | float = Field(default=16, gt=0)
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    exclude_modules: list[str] = Field(default_factory=list)
    """Layers that ``target_modules`` names and that are left out all the same."""

    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Another ``r`` for some layers: a name's end or a regular expression, and the rank."""

    alpha_pattern: dict[str, Annotated[int | float, Field(gt=0)]] = Field(default_factory=dict)
    """Another ``lora_alpha`` for some layers."""

    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained too; they are the model's own, so taking the adapter off does not bring them back."""

    use_dora: bool = False
    """Direction by LoRA, magnitude by a vector of its own (DoRA, Liu et al. 2024)."""

    use_rslora: bool = False
    """Scale by ``lora_alpha / sqrt(r)`` instead of ``lora_alpha / r`` (rsLoRA, Kalajdzievski 2023)."""

    init_lora_weights: InitLoraWeights = "default"
    """Where A and B start. ``pissa`` (or ``pissa_niter_4``: by a fast SVD of 4 iterations) and ``olora`` begin at the
    weights' principal directions; what is saved is a plain LoRA of twice the rank for the model as it was. ``loftq``
    makes up for what ``quantization`` to 4 bits lost."""

    loftq_iter: int = Field(default=1, ge=1, le=100)
    """Rounds of LoftQ: quantise what the factors leave, factor what the quantisation lost."""

    loraplus_lr_ratio: float | None = Field(default=None, ge=1)
    """Learning rate of B over that of A (LoRA+, Hayou et al. 2024)."""

    lora_fa: bool = False
    """Leave A as it starts and project the gradient of B (LoRA-FA, Zhang et al. 2023); an optimiser of its own."""

    freeze_a: bool = False
    """Train B alone; A follows from ``seed`` and the layers' names, on every machine the same. Runs of one seed on
    different data can then be merged exactly, coordinate by coordinate."""

    @model_validator(mode="after")
    def _compatible(self) -> LoraSettings:
        start = self.init_lora_weights
        if self.freeze_a and start != "default":
            raise ValueError(f"freeze_a draws A itself; remove init_lora_weights: {start}")
        if self.freeze_a and self.lora_fa:
            raise ValueError("freeze_a and lora_fa exclude each other")
        if self.loraplus_lr_ratio is not None and (self.lora_fa or self.freeze_a):
            raise ValueError("loraplus_lr_ratio sets A's and B's rates apart, but A is not trained here")
        if "loftq_iter" in self.model_fields_set and self.loftq_iter != 1 and start != "loftq":
            raise ValueError(f"loftq_iter is read by init_lora_weights: loftq only, not by {start}")
        if start == "orthogonal" and any(r % 2 for r in (self.r, *self.rank_pattern.values())):
            raise ValueError("init_lora_weights: orthogonal needs an even r")
        if self.lora_fa and self.lora_dropout:
            raise ValueError("lora_fa projects gradients by A and has no dropout; set lora_dropout to 0")
        return self


class FreezeSettings(StrictModel):
    """Trains some layers and leaves the others as they are."""

    num_trainable_layers: int = 2
    """The last so many layers; a negative number counts from the first."""

    trainable_modules: list[str] = Field(default_factory=list)
    """Only these modules of those layers (``mlp``, ``self_attn.q_proj``); by default every one."""

    llama_pro: bool = False
    """Instead of the last ones, the last layer of every group of equal size: the new blocks of a model that was
    expanded by ``num_trainable_layers`` copies of its own (LLaMA Pro, Wu et al. 2024)."""

    extra_modules: list[str] = Field(default_factory=list)
    """Modules outside the layers that are trained too: ``embed_tokens``, ``norm``, ``lm_head``."""

    @model_validator(mode="after")
    def _trains_something(self) -> FreezeSettings:
        if self.num_trainable_layers == 0 and not self.extra_modules:
            raise ValueError("num_trainable_layers is 0 and extra_modules is empty: nothing would be trained")
        if self.llama_pro and self.num_trainable_layers < 1:
            raise ValueError("llama_pro: num_trainable_layers is how many blocks were added; give 1 or more")
        if self.num_trainable_layers == 0 and self.trainable_modules:
            raise ValueError("trainable_modules are sought in the trainable layers, of which there are 0")
        return self


class AdaLoraSettings(AdapterSettings):
    """AdaLoRA, Zhang et al. 2023: ranks are taken from layers that need them least while training goes on."""

    init_r: int = Field(default=12, ge=1)
    """Rank of every layer at first."""

    target_r: int = Field(default=8, ge=1)
    """Mean rank at the end."""

    lora_alpha: int = Field(default=16, ge=1)
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the steps before ranks begin to fall (PEFT's ``tinit``)."""

    final_fraction: float = Field(default=0.3, ge=0, lt=1)
    """Share of the steps after the ranks are settled (PEFT's ``tfinal``)."""

    delta_t: int = Field(default=1, ge=1)
    """Steps between two changes of the ranks."""

    beta1: float = Field(default=0.85, gt=0, lt=1)
    beta2: float = Field(default=0.85, gt=0, lt=1)
    orth_reg_weight: float = Field(default=0.5, gt=0)
    """Weight of the penalty that keeps P and Q orthogonal."""

    @model_validator(mode="after")
    def _ranks_fall(self) -> AdaLoraSettings:
        if self.target_r >= self.init_r:
            raise ValueError(
                f"target_r is {self.target_r}, not below init_r {self.init_r}; for a fixed rank use lora"
            )
        if self.warmup_fraction + self.final_fraction >= 1:
            raise ValueError("warmup_fraction and final_fraction leave no steps in which ranks fall")
        return self


class OftSettings(AdapterSettings):
    """Orthogonal fine-tuning, Qiu et al. 2023: inputs are rotated block by block."""

    r: int = Field(default=0, ge=0)
    """Blocks a layer; 0 takes ``oft_block_size``."""

    oft_block_size: int = Field(default=32, ge=0)
    """Width of a block, which must divide every layer's input; set it to 0 to give ``r`` instead."""

    module_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    coft: bool = False
    """Keep the rotation within ``eps`` of none."""

    eps: float = Field(default=6e-5, gt=0)
    block_share: bool = False
    """One block for all, repeated."""

    use_cayley_neumann: bool = True
    """Invert by a series (fast), instead of exactly."""

    num_cayley_neumann_terms: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _one_size(self) -> OftSettings:
        if (self.r == 0) == (self.oft_block_size == 0):
            raise ValueError("give either r or oft_block_size, and 0 for the other")
        return self


class BoftSettings(AdapterSettings):
    """Butterfly orthogonal fine-tuning, Liu et al. 2023."""

    boft_block_size: int = Field(default=4, ge=0)
    """Width of a block, which must divide every layer's input; set it to 0 to give ``boft_block_num`` instead."""

    boft_block_num: int = Field(default=0, ge=0)
    boft_n_butterfly_factor: int = Field(default=1, ge=1)
    """1 is plain block-diagonal OFT; each more doubles a block's reach."""

    boft_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    bias: Literal["none", "all", "boft_only"] = "none"

    @model_validator(mode="after")
    def _one_size(self) -> BoftSettings:
        if (self.boft_block_size == 0) == (self.boft_block_num == 0):
            raise ValueError("give either boft_block_size or boft_block_num, and 0 for the other")
        return self


class VeraSettings(AdapterSettings):
    """Vector-based random matrix adaptation, Kopiczko et al. 2023: two vectors a layer around shared random factors."""

    r: int = Field(default=256, ge=1)
    d_initial: float = Field(default=0.1, gt=0)
    vera_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    save_projection: bool = True
    """Save the shared random factors too; without them the file is tiny, and loading draws them from the seed again."""


class Ia3Settings(StrictModel):
    """Learned rescaling of keys, values and MLPs, Liu et al. 2022."""

    target_modules: list[str] = Field(default_factory=lambda: ["k_proj", "v_proj", "down_proj"])
    """Layers whose output (or input, for ``feedforward_modules``) is rescaled."""

    feedforward_modules: list[str] = Field(default_factory=lambda: ["down_proj"])
    """Those of ``target_modules`` whose input is rescaled."""

    modules_to_save: list[str] = Field(default_factory=list)
    """Further modules that are trained whole and saved with the adapter."""

    @model_validator(mode="after")
    def _within(self) -> Ia3Settings:
        strange = sorted(set(self.feedforward_modules) - set(self.target_modules))
        if strange:
            raise ValueError(f"feedforward_modules: {strange[0]} is not among target_modules")
        return self


class QuantizationSettings(StrictModel):
    """The base's weights are held in few bits while an adapter is trained (QLoRA, Dettmers et al. 2023)."""

    method: Literal["bitsandbytes"] = "bitsandbytes"
    bits: Literal[4, 8] = 4
    quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4 bits: quantiles of a normal distribution, or a float."""

    double_quant: bool = True
    """Quantise the scales of the 4-bit blocks, too."""

    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What 4-bit weights are multiplied in; by default ``base_dtype`` or ``dtype``."""

    @model_validator(mode="after")
    def _read_by_the_bits(self) -> QuantizationSettings:
        if self.bits == 8:
            for key, value in (("quant_type", "nf4"), ("double_quant", True), ("compute_dtype", None)):
                if getattr(self, key) != value:
                    raise ValueError(f"{key} is for 4 bits; remove it, or set bits to 4")
        return self


class TuningSections(StrictModel):
    """Only the section of the chosen ``finetuning`` may be given; it is filled with its defaults when it is not."""

    finetuning: Annotated[str, MemberOf(TUNING)] = "full"
    freeze: FreezeSettings | None = None
    lora: LoraSettings | None = None
    adalora: AdaLoraSettings | None = None
    oft: OftSettings | None = None
    boft: BoftSettings | None = None
    vera: VeraSettings | None = None
    ia3: Ia3Settings | None = None
    quantization: QuantizationSettings | None = None
    """Hold the base in few bits while training an adapter; needs a ``finetuning`` that is one."""

"""Settings that select the weights to train: ``finetuning`` method, initial adapters and frozen parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import TUNING

InitLoraWeights = (
    Literal["default", "gaussian", "orthogonal", "pissa", "olora", "loftq"]
    | Annotated[str, StringConstraints(pattern=r"^pissa_niter_[1-9][0-9]*$")]
)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Folders = Annotated[list[str], BeforeValidator(_listed)]
"""One or more folders of PEFT adapters, in the order in which they are applied."""


class AdapterSettings(StrictModel):
    """Settings that adapters have in common: the layers to adapt."""

    target_modules: list[str] | str = "all-linear"
    """Names of linear layers, or ``all-linear`` for all but the output head. Any other string is a regular expression
    for whole module names."""

    modules_to_save: list[str] = Field(default_factory=list)
    """Further modules (``embed_tokens``, ``lm_head``) that are trained in full and saved with the adapter."""


class LoraSettings(AdapterSettings):
    """Settings of ``finetuning: lora``."""

    r: int = Field(default=8, ge=1)
    lora_alpha: int | float = Field(default=16, gt=0)
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    exclude_modules: list[str] = Field(default_factory=list)
    """Layers to leave out of ``target_modules``."""

    target_parameters: list[str] = Field(default_factory=list)
    """Parameters to adapt in addition to layers, by name suffix: the fused experts of an MoE, such as
    ``mlp.experts.gate_up_proj``. ``all-linear`` includes those of Mixtral and Qwen3-MoE, but not of gpt-oss."""

    fused_experts: bool = True
    """False leaves fused experts out of ``all-linear``, and refuses ``target_modules`` that name them. It is always
    false in rounds, since their updates are factors of matrices."""

    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Ranks for some layers instead of ``r``, by name suffix or regular expression."""

    alpha_pattern: dict[str, Annotated[int | float, Field(gt=0)]] = Field(default_factory=dict)
    """Values for some layers instead of ``lora_alpha``."""

    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the model to train as well; removing the adapter does not restore them."""

    use_dora: bool = False
    """Train the direction with LoRA and the magnitude as a separate vector (DoRA, Liu et al. 2024)."""

    use_rslora: bool = False
    """Scale by ``lora_alpha / sqrt(r)`` instead of ``lora_alpha / r`` (rsLoRA, Kalajdzievski 2023)."""

    init_lora_weights: InitLoraWeights = "default"
    """Initial values of A and B. ``pissa`` starts at the principal directions of the weights (``pissa_niter_4``: with a
    fast SVD of 4 iterations), and ``olora`` at their QR decomposition; both save a plain LoRA of twice the rank for the
    original model. ``loftq`` compensates for the error of ``quantization`` to 4 bits."""

    loftq_iter: int = Field(default=1, ge=1, le=100)
    """Iterations of LoftQ; each one quantises the residual and factorises the error."""

    loraplus_lr_ratio: float | None = Field(default=None, ge=1)
    """Ratio of B's learning rate to A's (LoRA+, Hayou et al. 2024)."""

    lora_fa: bool = False
    """Freeze A and project the gradient of B (LoRA-FA, Zhang et al. 2023), with a dedicated optimiser."""

    freeze_a: bool = False
    """Train only B; A is drawn from ``seed`` and the layers' names, the same on every machine. Runs with one seed on
    different data can then be merged exactly, coordinate by coordinate."""

    @model_validator(mode="after")
    def _validate_variants(self) -> LoraSettings:
        start = self.init_lora_weights
        if self.freeze_a and start != "default":
            raise ValueError(f"freeze_a draws A itself; remove init_lora_weights: {start}")
        if self.target_parameters and (option := self.needs_layers()) is not None:
            raise ValueError(f"target_parameters: PEFT does not support {option} for parameters; remove it")
        if self.freeze_a and self.lora_fa:
            raise ValueError("freeze_a and lora_fa are mutually exclusive")
        if self.loraplus_lr_ratio is not None and (self.lora_fa or self.freeze_a):
            raise ValueError("loraplus_lr_ratio needs a trained A, but freeze_a and lora_fa freeze it")
        if "loftq_iter" in self.model_fields_set and self.loftq_iter != 1 and start != "loftq":
            raise ValueError(f"loftq_iter applies only to init_lora_weights: loftq, not to {start}")
        if start == "orthogonal" and any(r % 2 for r in (self.r, *self.rank_pattern.values())):
            raise ValueError("init_lora_weights: orthogonal needs an even r")
        if self.lora_fa and self.lora_dropout:
            raise ValueError("lora_fa projects gradients with A, without dropout; set lora_dropout to 0")
        return self

    def needs_layers(self) -> str | None:
        """Return the first setting that PEFT supports for layers but not for parameters."""
        given = {
            "lora_dropout": self.lora_dropout,
            "use_dora": self.use_dora,
            "freeze_a": self.freeze_a,
            "init_lora_weights": self.init_lora_weights not in ("default", "gaussian"),
        }
        return next((name for name, value in given.items() if value), None)


class FreezeSettings(StrictModel):
    """Settings of ``finetuning: freeze``, which trains some layers."""

    num_trainable_layers: int = 2
    """Number of last layers to train; negative for the first N layers."""

    trainable_modules: list[str] = Field(default_factory=list)
    """Modules of those layers to train (``mlp``, ``self_attn.q_proj``); by default all."""

    llama_pro: bool = False
    """Train the last layer of each of ``num_trainable_layers`` groups instead: the new blocks of a model that was
    expanded with copies of its layers (LLaMA Pro, Wu et al. 2024)."""

    extra_modules: list[str] = Field(default_factory=list)
    """Modules outside the layers to train as well: ``embed_tokens``, ``norm``, ``lm_head``."""

    @model_validator(mode="after")
    def _validate_layers(self) -> FreezeSettings:
        if self.num_trainable_layers == 0 and not self.extra_modules:
            raise ValueError("num_trainable_layers is 0 and extra_modules is empty: nothing would be trained")
        if self.llama_pro and self.num_trainable_layers < 1:
            raise ValueError(
                "llama_pro: num_trainable_layers is the number of added blocks; set it to 1 or more"
            )
        if self.num_trainable_layers == 0 and self.trainable_modules:
            raise ValueError("trainable_modules applies to trainable layers, but num_trainable_layers is 0")
        return self


class AdaLoraSettings(AdapterSettings):
    """AdaLoRA, Zhang et al. 2023: training lowers the ranks of the least important layers."""

    init_r: int = Field(default=12, ge=1)
    """Initial rank of every layer."""

    target_r: int = Field(default=8, ge=1)
    """Mean rank at the end."""

    lora_alpha: int = Field(default=16, ge=1)
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the steps before ranks are lowered (PEFT's ``tinit``)."""

    final_fraction: float = Field(default=0.3, ge=0, lt=1)
    """Fraction of the steps after the ranks are fixed (PEFT's ``tfinal``)."""

    delta_t: int = Field(default=1, ge=1)
    """Steps between changes of the ranks."""

    beta1: float = Field(default=0.85, gt=0, lt=1)
    beta2: float = Field(default=0.85, gt=0, lt=1)
    orth_reg_weight: float = Field(default=0.5, gt=0)
    """Weight of the penalty that keeps P and Q orthogonal."""

    @model_validator(mode="after")
    def _validate_ranks(self) -> AdaLoraSettings:
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
    """Blocks per layer; 0 = use ``oft_block_size``."""

    oft_block_size: int = Field(default=32, ge=0)
    """Width of a block, which must divide every layer's input; set it to 0 to use ``r`` instead."""

    module_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    coft: bool = False
    """Keep the rotation within ``eps`` of the identity."""

    eps: float = Field(default=6e-5, gt=0)
    block_share: bool = False
    """Share one rotation between all blocks of a layer."""

    use_cayley_neumann: bool = True
    """Invert by a Neumann series (fast) instead of exactly."""

    num_cayley_neumann_terms: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _validate_block_size(self) -> OftSettings:
        if (self.r == 0) == (self.oft_block_size == 0):
            raise ValueError("give either r or oft_block_size, and 0 for the other")
        return self


class BoftSettings(AdapterSettings):
    """Butterfly orthogonal fine-tuning, Liu et al. 2023."""

    boft_block_size: int = Field(default=4, ge=0)
    """Width of a block, which must divide every layer's input; set it to 0 to use ``boft_block_num`` instead."""

    boft_block_num: int = Field(default=0, ge=0)
    boft_n_butterfly_factor: int = Field(default=1, ge=1)
    """Number of butterfly factors; 1 is block-diagonal OFT, and each further factor doubles a block's reach."""

    boft_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    bias: Literal["none", "all", "boft_only"] = "none"

    @model_validator(mode="after")
    def _validate_block_size(self) -> BoftSettings:
        if (self.boft_block_size == 0) == (self.boft_block_num == 0):
            raise ValueError("give either boft_block_size or boft_block_num, and 0 for the other")
        return self


class VeraSettings(AdapterSettings):
    """Vector-based random matrix adaptation, Kopiczko et al. 2023: shared random factors, two vectors per layer."""

    r: int = Field(default=256, ge=1)
    d_initial: float = Field(default=0.1, gt=0)
    vera_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    save_projection: bool = True
    """Save the shared random factors too; without them the file is tiny, and loading redraws them from the seed."""


class Ia3Settings(StrictModel):
    """Learned rescaling of keys, values and MLPs, Liu et al. 2022."""

    target_modules: list[str] = Field(default_factory=lambda: ["k_proj", "v_proj", "down_proj"])
    """Layers whose output (or input, for ``feedforward_modules``) is rescaled."""

    feedforward_modules: list[str] = Field(default_factory=lambda: ["down_proj"])
    """Modules of ``target_modules`` whose input is rescaled."""

    modules_to_save: list[str] = Field(default_factory=list)
    """Further modules that are trained in full and saved with the adapter."""

    @model_validator(mode="after")
    def _validate_feedforward_modules(self) -> Ia3Settings:
        unknown = sorted(set(self.feedforward_modules) - set(self.target_modules))
        if unknown:
            raise ValueError(f"feedforward_modules: {unknown[0]} is not among target_modules")
        return self


_QUANTISERS = {"bitsandbytes": (4, 8), "hqq": (2, 3, 4, 5, 6, 8), "torchao": (2, 3, 4, 5, 6, 8)}
"""Bits of each method."""
_STORED = "it does not quantise while loading; set model to a model that is stored quantised"
_UNSUPPORTED_METHODS = {
    "quanto": "it compiles its kernels for 2 and 4 bits on first use; use hqq or torchao",
    **dict.fromkeys(("aqlm", "awq", "gptq"), _STORED),
    "eetq": "no release can be installed with this torch; use bitsandbytes or torchao with 8 bits",
}
"""Quantization methods of other trainers, with the reason why they are not supported."""


class QuantizationSettings(StrictModel):
    """Settings of a base quantised to 2 to 8 bits under an adapter (QLoRA, Dettmers et al. 2023)."""

    method: Literal["bitsandbytes", "hqq", "torchao"] = "bitsandbytes"
    """``bitsandbytes`` supports 4 and 8 bits. ``hqq`` and ``torchao`` support 2, 3, 4, 5, 6 and 8, under ``finetuning:
    lora``; ``hqq`` stores 5- and 6-bit weights, and ``torchao`` all weights, in 8 bits."""

    bits: Literal[2, 3, 4, 5, 6, 8] = 4
    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type of bitsandbytes: quantiles of a normal distribution, or a float."""

    double_quant: bool = True
    """Quantise the scales of bitsandbytes' 4-bit blocks too."""

    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype in which bitsandbytes multiplies 4-bit weights; by default ``base_dtype`` or ``dtype``."""

    group_size: int = Field(default=64, ge=8, multiple_of=8)
    """Number of weights of a row that share a scale, for ``hqq`` and ``torchao``."""

    @field_validator("method", mode="before")
    @classmethod
    def _validate_method(cls, method: Any) -> Any:
        if (reason := _UNSUPPORTED_METHODS.get(method) if isinstance(method, str) else None) is not None:
            raise ValueError(f"{method} is not supported: {reason}")
        return method

    @model_validator(mode="after")
    def _validate_bits(self) -> QuantizationSettings:
        bits = _QUANTISERS[self.method]
        if self.bits not in bits:
            has = ", ".join(map(str, bits))
            raise ValueError(f"bits: {self.method} supports {has}, not {self.bits}; use hqq or torchao")
        if self.method == "bitsandbytes" and self.group_size != 64:
            raise ValueError("group_size applies only to hqq and torchao; remove it")
        if self.bits == 8 or self.method != "bitsandbytes":
            for key, value in (("quant_type", "nf4"), ("double_quant", True), ("compute_dtype", None)):
                if getattr(self, key) != value:
                    raise ValueError(f"{key} applies only to 4-bit bitsandbytes; remove it, or set bits to 4")
        return self


class TuningSections(StrictModel):
    """The tuning method and its section. Only the section of the chosen method may be given; its keys have defaults."""

    finetuning: Annotated[str, MemberOf(TUNING)] = "full"
    freeze: FreezeSettings | None = None
    lora: LoraSettings | None = None
    adalora: AdaLoraSettings | None = None
    oft: OftSettings | None = None
    boft: BoftSettings | None = None
    vera: VeraSettings | None = None
    ia3: Ia3Settings | None = None
    quantization: QuantizationSettings | None = None
    """Quantisation of the base; requires a ``finetuning`` that trains an adapter."""


class AdapterSections(StrictModel):
    """Top-level keys for initial adapters and the reference model."""

    adapter: Folders = Field(default_factory=list)
    """Adapters of ``model`` to start from: folders, finished runs or cached names. All but the last are merged into
    the model, and the last is trained further. Under ``full`` and ``freeze`` all are merged."""

    new_adapter: bool = False
    """Merge all of ``adapter`` into the model and train a new adapter on the result."""

    reference_model: str | None = None
    """Reference model of the policy; by default the model before training."""

    reference_adapter: Folders = Field(default_factory=list)
    """Adapters of the reference, merged into ``reference_model``, or into ``model`` if that is not given."""

    @model_validator(mode="after")
    def _validate_adapters(self) -> AdapterSections:
        if self.new_adapter and not self.adapter:
            raise ValueError("new_adapter needs adapter; without adapter, every run trains a new one")
        for key in ("adapter", "reference_adapter"):
            named = getattr(self, key)
            if len(set(named)) != len(named):
                raise ValueError(f"{key}: an adapter is listed twice")
        return self


class VisionSections(StrictModel):
    """Top-level keys for vision-language models."""

    freeze_vision_tower: bool = True
    """Freeze the vision tower under every ``finetuning`` method; it gets no adapters."""

    freeze_multi_modal_projector: bool = True
    """Freeze the projector between the vision tower and the language model."""

    freeze_language_model: bool = False
    """Freeze the language model, its embeddings and its head."""

    image_max_pixels: int | None = Field(default=None, ge=1)
    """Maximum number of pixels (width times height); larger images are scaled down before the processor."""

    image_min_pixels: int | None = Field(default=None, ge=1)
    """Minimum number of pixels (width times height); smaller images are scaled up."""

    @model_validator(mode="after")
    def _validate_pixels(self) -> VisionSections:
        low, high = self.image_min_pixels, self.image_max_pixels
        if low is not None and high is not None and low > high:
            raise ValueError(f"image_min_pixels: {low} is above image_max_pixels, {high}")
        return self

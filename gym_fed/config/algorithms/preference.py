"""Settings of the algorithms that learn from preferences, named as in TRL."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.text import counted

DpoLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
]
_SMOOTHED = {"exo_pair", "robust", "aot", "aot_unpaired"}
_DIVERGENT = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}


class PreferenceSettings(StrictModel):
    """The common settings of preference algorithms."""

    disable_dropout: bool = True
    """Disable dropout of the model and its adapter during training, and restore it afterwards."""


class RewardModelSettings(PreferenceSettings):
    """Settings of reward models, which score chosen answers above rejected ones (Bradley and Terry 1952)."""

    center_rewards_coefficient: float | None = Field(default=None, ge=0)
    """Coefficient that centres mean rewards on zero (Eisenstein et al. 2023, equation 2); TRL recommends 0.01."""


class ReferenceSettings(PreferenceSettings):
    """The common settings of algorithms that compare the policy with a reference."""

    precompute_ref_log_probs: bool | None = None
    """Score all rows with the reference before the first step instead of at every step. Default: on if all
    weights are trained, since a frozen copy of the model would otherwise stay in memory, and for adapters that change
    the model before the first step. Off for other adapters, whose reference is the model with its adapter disabled and
    costs no memory, and if ``reference_model`` is set."""


class DpoSettings(ReferenceSettings):
    """Direct preference optimisation, Rafailov et al. 2023, and later variants of its loss."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the penalty that keeps the policy near the reference. For ``ipo`` it is the paper's tau."""

    loss_type: list[DpoLoss] = Field(default=["sigmoid"], min_length=1)
    """Loss, or list of losses to sum. ``sft`` is the loss per token of the chosen answer: ``[sigmoid, sft]`` is
    RPO (Pang et al. 2024)."""

    loss_weights: list[float] | None = None
    """Weight of each loss in ``loss_type``; by default 1."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For ``robust``, ``exo_pair``, ``aot`` and ``aot_unpaired``: probability that a label is wrong."""

    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence between policy and reference, Wang et al. 2023 (f-DPO)."""

    f_alpha_divergence_coef: float = 0.5
    """Alpha of ``f_divergence_type: alpha_divergence``."""

    ld_alpha: float | None = Field(default=None, ge=0, le=1)
    """Weight of the longer answer's tokens beyond the length of the shorter, Liu et al. 2024 (LD-DPO)."""

    use_weighting: bool = False
    """Weight pairs by their probability under the policy, Zhou et al. 2024 (WPO)."""

    discopop_tau: float = Field(default=0.05, gt=0)
    """For ``discopop``: temperature of the modulation."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _parse_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _validate_losses(self) -> DpoSettings:
        """Refuse settings without effect, and combinations that TRL would refuse or ignore."""
        losses = set(self.loss_type)
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights: {counted(len(self.loss_weights), 'weight')} for "
                f"{counted(len(self.loss_type), 'entry')} of loss_type"
            )
        if self.label_smoothing and not losses & _SMOOTHED:
            raise ValueError(f"label_smoothing: only {', '.join(sorted(_SMOOTHED))} use it")
        if "exo_pair" in losses and not self.label_smoothing:
            raise ValueError("label_smoothing: exo_pair needs a value above 0; its paper uses 1e-3")
        if self.f_divergence_type != "reverse_kl" and not losses <= _DIVERGENT:
            others = ", ".join(sorted(losses - _DIVERGENT))
            raise ValueError(f"f_divergence_type: {self.f_divergence_type} is not defined for {others}")
        if self.f_alpha_divergence_coef != 0.5 and self.f_divergence_type != "alpha_divergence":
            raise ValueError("f_alpha_divergence_coef: only f_divergence_type: alpha_divergence uses it")
        if self.discopop_tau != 0.05 and "discopop" not in losses:
            raise ValueError("discopop_tau: only loss_type discopop uses it")
        if self.use_weighting and losses & {"aot", "aot_unpaired"}:
            raise ValueError("use_weighting: aot and aot_unpaired sort the pairs and cannot weight them")
        return self


class KtoSettings(ReferenceSettings):
    """Kahneman-Tversky optimisation, Ethayarajh et al. 2024: single answers labelled desirable or undesirable."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the penalty that keeps the policy near the reference."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """``apo_zero_unpaired`` (D'Oosterlinck et al. 2024) does not estimate the KL, so batches of 1 work."""

    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of desirable answers. Equation 8: desirable_weight times their number should be 1 to 4/3 times
    undesirable_weight times the number of undesirable answers."""

    undesirable_weight: float = Field(default=1.0, gt=0)


class OrpoSettings(PreferenceSettings):
    """Odds-ratio preference optimisation, Hong et al. 2024: next-token loss and an odds ratio, without a reference."""

    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio: the paper's lambda."""

    nll: Literal["prompt_and_answer", "answer"] = "prompt_and_answer"
    """Tokens of the next-token loss: the chosen answer with its prompt, a mean over tokens as in TRL; or the answer
    alone, a mean over its tokens and then over pairs as in LLaMA-Factory."""


class SimpoSettings(PreferenceSettings):
    """Simple preference optimisation without a reference, Meng et al. 2024."""

    beta: float = Field(default=2.0, gt=0)
    """Scale of the reward, which is beta times an answer's mean log-probability."""

    gamma: float = Field(default=0.5, ge=0)
    """Target margin of the chosen over the rejected reward (equation 6): gamma / beta in mean log-probability."""

    cpo_alpha: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's own loss (CPO-SimPO); 0 is plain SimPO."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a label is wrong."""


class TdpoSettings(PreferenceSettings):
    """Token-level DPO, Zeng et al. 2024."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the penalty that keeps the policy near the reference."""

    variant: Literal[1, 2] = 2
    """Loss TDPO1 or TDPO2; TDPO2 weights the KL by ``alpha``, and only the rejected answer's KL has a gradient."""

    alpha: float = Field(default=0.5, ge=0)
    """Weight of the sequential KL term in TDPO2; TDPO1 ignores it."""

    @model_validator(mode="after")
    def _validate_alpha(self) -> TdpoSettings:
        if self.variant == 1 and self.alpha != 0.5:
            raise ValueError("alpha: variant 1 does not use it; remove it, or use variant 2")
        return self

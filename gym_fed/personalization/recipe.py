"""Default training and encoding settings of variants, with the reasons for them. Does not import torch.

The defaults were chosen on gym-nano and on TinyStories' 260K-parameter Llama, with 40 rows of one person, by the
held-out loss after training and after encoding (`docs/variants.md` has the results).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gym_quant.registry import CODECS
from pydantic import BaseModel

from gym_fed.config.delta import ROW, CodecPolicy
from gym_fed.config.train.defaults import LARGE, as_given, learning_rate
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import validate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.data.chat_templates.choice import NONE

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.personalization.rows import PersonalRows

Method = str
"""Name of a tuning method whose difference a ``.gymdelta`` can store, as LoRA factors or as values."""

FULL_BITS = 16 / 15
"""Maximum size of a full variant in bits per weight of the base: 1/15 of the base's size in bfloat16."""

_BATCH = 4
_MIN_STEPS, _MAX_STEPS = 20, 1000
_SEEN_EACH = 8
_SEEN_ALL = 2048
_EVALUATIONS = 12
_LEARNING_RATE_OF_FACTORS, _LEARNING_RATE = 3e-3, 1e-3
_DISTILL_STEPS = 100
_SIGNS = str(CodecPolicy.model_fields["codec"].default)
_FACTORS: Literal["int4"] = "int4"
_OWNED = {
    "model": "the base is an argument of PersonalizedTrainer",
    "output_dir": "the run folder is set by the store or by the caller",
    "data": "the rows are passed separately",
    "eval_data": "use held_out",
    "eval_split": "held_out sets how many rows are held out",
    "finetuning": "use method",
    "save_final": "resuming an interrupted run needs the trained weights",
    "dtype": "the base's digest is that of its float32 weights",
    "model_init": "a variant needs a base",
    "quantization": "a variant needs an unquantised base",
    "rope_scaling": "a variant contains only weight differences, so it would be lost",
    "chat_template": "a variant uses its base's template",
    "reasoning": "measuring the variant reads the rows unchanged; remove reasoning from them",
    "mixture_of_depths": "a variant contains only weight differences, so it would be lost",
}
_DEFAULT_ALGORITHM = {"supervised": "sft", "preference": "dpo"}


@dataclass(frozen=True)
class BaseSize:
    """The properties of a base on which the defaults of a variant depend.

    Attributes:
        context: Maximum context length in tokens; None if unknown.
    """

    context: int | None
    num_weights: int


def training_config(
    method: Method,
    rows: PersonalRows,
    folder: Path,
    base_model: str,
    overrides: Mapping[str, Any] | TrainingConfig | None,
    size: BaseSize,
) -> TrainingConfig:
    """Build the training config from overrides and from defaults for this kind of rows.

    Args:
        method: Name of a tuning method that supports federation: ``lora``, ``full``, or one from an installed package.
        base_model: Name of the base in the config.
        overrides: Keys of ``TrainingConfig``; for a config object, only the keys that were set.
        size: Size of the base; large bases use the learning rates of `gym train`.

    Raises:
        GymError: ``CONFIG_INVALID`` with a key that is unknown, invalid, or must not be overridden.
    """
    given = set_keys(overrides)
    for key in given:
        if key in _OWNED:
            raise GymError(
                ErrorCode.CONFIG_INVALID, f"training: {key} cannot be set for a variant", _OWNED[key]
            )
    default = _DEFAULT_ALGORITHM[rows.kind]
    algorithm = given.get("algorithm", default)
    if not _learns_from(algorithm, rows.kind):
        reason = f"training: algorithm {algorithm} does not train on {rows.kind} rows"
        remedy = f"one of {', '.join(name for name in ALGORITHMS.own() if _learns_from(name, rows.kind))}"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
    batch = int(given.get("per_device_train_batch_size", _BATCH))
    steps = default_steps(len(rows.train), batch)
    values: dict[str, Any] = {
        "algorithm": default,
        "learning_rate": _rate(algorithm, method, size.num_weights),
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": batch,
        "max_length": min(512, size.context or 512),
        "save_steps": 0 if given.get("save_strategy") in ("no", "epoch") else 50,
    }
    if few := ALGORITHMS.type_of(algorithm).of_few_rows:
        given[algorithm] = {**few, **(given.get(algorithm) or {})}
    if not {"max_steps", "num_train_epochs"} & given.keys():
        values["max_steps"] = steps
    if rows.held_out and "early_stopping" not in given and given.get("eval_strategy") != "no":
        values["early_stopping"] = {"patience": 4}
        if given.get("eval_strategy") != "epoch":  # the last step is always evaluated
            values["eval_steps"] = math.ceil(_steps(given, len(rows.train), batch, steps) / _EVALUATIONS)
    values |= given
    values |= {"model": base_model, "output_dir": folder, "finetuning": method, "save_final": True}
    if rows.raw:
        values["chat_template"] = NONE
    if size.num_weights > LARGE:
        values = {"warmup_ratio": 0.1, **values} if "warmup_steps" not in given else values
    return as_given(validate(values, TrainingConfig, "training"))


def _rate(algorithm: str, method: Method, num_weights: int) -> float:
    if num_weights > LARGE:
        return learning_rate(algorithm, method)[0]
    return _LEARNING_RATE_OF_FACTORS if sends_factors(method) else _LEARNING_RATE


def set_keys(overrides: Mapping[str, Any] | BaseModel | None) -> dict[str, Any]:
    """Return overrides as a dict of keys; for a config object, only the keys that were set."""
    if isinstance(overrides, BaseModel):
        return overrides.model_dump(exclude_unset=True)
    return dict(overrides or {})


def sends_factors(method: Method) -> bool:
    """Return True if a tuning method trains LoRA factors."""
    return bool(TUNING.type_of(method).sends_factors)


def _learns_from(algorithm: str, kind: str) -> bool:
    """Return True if an algorithm needs only a user's rows. Unknown names are left to ``TrainingConfig``."""
    member = ALGORITHMS.type_of(algorithm)
    return bool(member.federates and member.row_kind == kind)


def default_steps(num_rows: int, batch: int) -> int:
    """Return the default number of steps: about eight epochs, or fewer for many rows. Early stopping may end sooner."""
    seen = min(_SEEN_EACH * num_rows, max(_SEEN_ALL, num_rows))
    return min(_MAX_STEPS, max(_MIN_STEPS, math.ceil(seen / batch)))


def _steps(given: Mapping[str, Any], num_rows: int, batch: int, default: int) -> int:
    """Return the maximum number of steps of a run."""
    if (most := given.get("max_steps")) is not None:
        return int(most)
    if (epochs := given.get("num_train_epochs")) is not None:
        per_step = batch * int(given.get("gradient_accumulation_steps", 1))
        return max(1, math.ceil(float(epochs) * math.ceil(num_rows / per_step)))
    return default


@dataclass(frozen=True)
class Encoding:
    """The encoding of a variant, with the reason for it.

    Attributes:
        keeps_factors: True if the file contains LoRA factors, False if it contains the merged difference.
        why: Description of the choice and its reason.
    """

    policy: CodecPolicy
    keeps_factors: bool
    why: str


def encoding_of(
    method: Method, codec: str, overrides: Mapping[str, Any] | CodecPolicy | None, spec: BaseSpec
) -> Encoding:
    """Choose the codec policy of a variant, with the reason.

    LoRA keeps its factors, quantised to 4 bits, since at r=8 the sign bits of their product would be larger. A full
    fine-tune uses one bit per weight, including the embeddings and the head, with distilled scales. There is one scale
    per row if the file is then at most 1/15 of the base's bfloat16 size. Otherwise there is one per tensor, with scales
    per row for the embeddings if possible.

    Args:
        method: Name of the tuning method.
        codec: Name of a codec, built-in or from an installed package, or ``auto``.
        overrides: Keys of ``CodecPolicy`` that replace the defaults.

    Raises:
        GymError: ``CONFIG_INVALID`` for an unknown codec, a codec that does not support the method, or invalid keys.
    """
    if codec != "auto" and codec not in CODECS:
        known = ", ".join(("auto", *CODECS.names()))
        raise GymError(ErrorCode.CONFIG_INVALID, f"codec {codec!r} is unknown", f"one of {known}")
    low_rank = codec != "auto" and CODECS.type_of(codec).low_rank
    if low_rank and not sends_factors(method):
        reason = f"codec {codec}: a full fine-tune has no factors"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, f"use method lora, or codec {_SIGNS}")
    given = set_keys(overrides)
    values: dict[str, Any] = {"error_feedback": False}
    keeps_factors = sends_factors(method) and (low_rank or codec == "auto")
    if given.get("error_feedback"):
        reason = "codec: error_feedback needs a next round, but a variant has none"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, "remove it")
    if keeps_factors:
        values |= {"factors": _FACTORS}
        why = "4-bit LoRA factors, which are smaller than the sign bits of their product"
    elif codec in ("auto", _SIGNS):
        own, scales = _finest_scales(spec)
        values |= {**own, "distill_steps": _DISTILL_STEPS}
        why = f"one bit per weight, including the embeddings and the head, with one distilled scale per {scales}"
    else:
        values |= {"codec": codec}
        if CODECS.type_of(codec).has_scales:
            values |= {"scale_dtype": "bfloat16", "distill_steps": _DISTILL_STEPS}
        why = f"codec {codec}, as requested"
    if given:
        why = f"{why}; {', '.join(sorted(given))} as specified"
    return Encoding(validate(values | given, CodecPolicy, "encoding"), keeps_factors, why)


def require_fitting(training: TrainingConfig, encoding: Encoding) -> None:
    """Reject training of parameters that the file cannot represent.

    Raises:
        GymError: ``CONFIG_INVALID`` with the key.
    """
    lora = training.lora
    if not encoding.keeps_factors or lora is None:
        return
    for key, given in (
        ("modules_to_save", bool(lora.modules_to_save)),
        ("bias", lora.bias != "none"),
        ("use_dora", lora.use_dora),
    ):
        if given:
            reason = f"training: lora.{key} changes more than factors, but the file stores only factors"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, f"remove it, or use codec {_SIGNS}")


def _finest_scales(spec: BaseSpec) -> tuple[dict[str, Any], str]:
    """Return the policy keys for the finest scales that keep a file within ``FULL_BITS``, and a description."""
    from gym_fed.delta.budget import estimated_bytes

    ends = f"{_SIGNS}{ROW}"
    signs: dict[str, Any] = {"codec": _SIGNS, "scale_dtype": "bfloat16", "error_feedback": False}
    ways: list[tuple[dict[str, Any], str]] = [
        ({"group_size": "row"}, "row"),
        (
            {"group_size": "tensor", "embeddings": ends, "head": ends},
            "tensor, but per row of the embeddings and the head (to stay below 1/15 of bfloat16)",
        ),
        ({"group_size": "tensor"}, "tensor (to stay below 1/15 of bfloat16)"),
    ]
    within = (
        (keys, words)
        for keys, words in ways
        if 8 * estimated_bytes(spec.shapes, CodecPolicy(**{**signs, **keys}), spec)
        <= FULL_BITS * spec.num_parameters
    )
    keys, words = next(within, ways[-1])
    return {**signs, **keys}, words

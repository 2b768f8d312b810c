"""What is done with a trained model: merged with what others trained, and written in the form that is wanted.

``Trainer.apply_deltasoup`` and ``Trainer.export`` are these functions on the trainer's own result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.delta_soup import DeltaSoupConfig
from gym_fed.config.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.models import load_model, model_name

if TYPE_CHECKING:
    from gym_fed.soup.delta_soup import SoupResult

ExportFormat = Literal["huggingface", "adapter", "delta"]
Contributions = Mapping[str, Any] | Sequence[Any]
OWN = "self"


def soup_with(
    model: Any, config: TrainingConfig, others: Contributions, settings: DeltaSoupConfig | None
) -> tuple[Any, SoupResult]:
    """Merge a trained model with what others made of the same base.

    Args:
        model: The trained model, or a PEFT model.
        config: Its run's config; ``config.model`` names the base.
        others: Contributions by user, or a list of them: ``.gymdelta`` files, model folders, or models in memory.
        settings: The rules; by default ``DeltaSoupConfig()``. Its ``base_model`` is filled in.

    Returns:
        The base with the soup added, as a plain model, and the soup.

    Raises:
        GymError: ``USAGE`` for a user who is given twice or called ``self``; see ``DeltaSoup`` for the others.
    """
    from gym_fed.soup.delta_soup import DeltaSoup

    named = others if isinstance(others, Mapping) else {f"{i}": other for i, other in enumerate(others, 1)}
    if OWN in named:
        raise GymError(
            ErrorCode.USAGE, f"{OWN!r} is this trainer's own work", "call the contributor otherwise"
        )
    base = _base(config)
    rules = settings or DeltaSoupConfig()
    soup = DeltaSoup(rules.model_copy(update={"base_model": None}), base=base)
    soup.contribute(user_id=OWN, model=model if _is_plain_lora(model) else _whole(model))
    for user, other in named.items():
        soup.contribute(user_id=user, model=other)
    result = soup.aggregate(min_contributors=1)
    result.apply(base)
    return base.eval(), result


def export(
    model: Any,
    tokenizer: Any,
    config: TrainingConfig,
    path: Path,
    format: ExportFormat,
    codec: CodecPolicy | None,
) -> Path:
    """Write a trained model; see ``Trainer.export``."""
    if path.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists", "choose another name")
    adapted = hasattr(model, "peft_config")
    if format == "huggingface":
        _whole(model).save_pretrained(str(path))
        tokenizer.save_pretrained(str(path))
    elif format == "adapter":
        if not adapted:
            raise GymError(
                ErrorCode.USAGE,
                f"format adapter: finetuning was {config.finetuning}, so there is no adapter",
                "export it as huggingface or delta",
            )
        from gym_fed.training.tuning import get_tuning

        get_tuning(config.finetuning).save(model, config, path, config.model)
        tokenizer.save_pretrained(str(path))
    elif format == "delta":
        _write_delta(model, config, path, codec or CodecPolicy(error_feedback=False))
    else:
        raise GymError(ErrorCode.USAGE, f"format {format!r} is unknown", "one of huggingface, adapter, delta")
    return path


def _write_delta(model: Any, config: TrainingConfig, path: Path, codec: CodecPolicy) -> None:
    from gym_fed.delta import BaseSpec, encode_delta, lora_delta, lora_factors, model_tensors

    base = model_tensors(_base(config))
    spec = BaseSpec.of(base, model_name(str(config.model)))
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_plain_lora(model):
        lora_delta(lora_factors(model), path, spec, policy=codec)
    else:
        encode_delta(_whole(model), base, codec, path, spec)


def _whole(model: Any) -> Any:
    """The model with its adapter merged in, if it has one; the one at hand stays as it is."""
    return copy.deepcopy(model).merge_and_unload() if hasattr(model, "peft_config") else model


def _is_plain_lora(model: Any) -> bool:
    """Whether two factors a layer are all that was trained."""
    if not hasattr(model, "peft_config"):
        return False
    settings = model.peft_config[model.active_adapter]
    odd = (
        (settings.use_dora, settings.modules_to_save, settings.bias != "none")
        if _is_lora(settings)
        else (True,)
    )
    return not any(odd)


def _is_lora(settings: Any) -> bool:
    return str(settings.peft_type.value) == "LORA"


def _base(config: TrainingConfig) -> Any:
    """The model that the run started from, read again."""
    if config.model is None:
        raise GymError(
            ErrorCode.USAGE,
            "the run's base is not named: model is not in the config",
            "give TrainingConfig(model=...), the name or folder that training started from",
        )
    return load_model(config.model, dtype=config.dtype).model

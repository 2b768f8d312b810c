"""Merges a trained model with deltas of others, and exports it as a model folder, an adapter or a delta.

``Trainer.apply_deltasoup`` and ``Trainer.export`` are these functions on the trainer's own result.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.delta_soup import DeltaSoupConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.models import load_model, load_tokenizer, model_name, quiet_loading

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
    _require_weights_alone(config, "a soup")
    base = _base(config)
    model = _on_full_base(model, config)
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
    from gym_fed.training.model.saving import save_tuned
    from gym_fed.training.tuning.full import Full

    if path.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists", "choose another name")
    adapted = hasattr(model, "peft_config")
    if format == "huggingface":
        whole = _whole(_on_full_base(model, config))
        with quiet_loading(), _whole_or_not_at_all(path) as part:
            Full().save(whole, config, part, None)
            tokenizer.save_pretrained(str(part))
    elif format == "adapter":
        if not adapted:
            raise GymError(
                ErrorCode.USAGE,
                f"format adapter: finetuning was {config.finetuning}, so there is no adapter",
                "export it as huggingface or delta",
            )
        with _whole_or_not_at_all(path) as part:
            save_tuned(model, config, part)
            tokenizer.save_pretrained(str(part))
    elif format == "delta":
        _write_delta(model, config, path, codec or CodecPolicy(error_feedback=False))
    else:
        raise GymError(ErrorCode.USAGE, f"format {format!r} is unknown", "one of huggingface, adapter, delta")
    return path


@contextmanager
def _whole_or_not_at_all(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` that takes its name when everything is in it."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(path)


def _write_delta(model: Any, config: TrainingConfig, path: Path, codec: CodecPolicy) -> None:
    from gym_fed.delta.base import BaseSpec, model_tensors
    from gym_fed.delta.encode import encode_delta, lora_delta
    from gym_fed.delta.factors import lora_factors

    _require_weights_alone(config, "a delta")
    model = _on_full_base(model, config)
    base = model_tensors(_base(config))
    spec = BaseSpec.of(base, model_name(str(config.model)))
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_plain_lora(model):
        lora_delta(lora_factors(model), path, spec, policy=codec)
    else:
        encode_delta(_whole(model), base, codec, path, spec)


def _on_full_base(model: Any, config: TrainingConfig) -> Any:
    """The adapter of a base in few bits, on the base that everybody has: into few bits nothing can be merged exactly.

    Any other model is handed back as it is.

    Raises:
        GymError: ``USAGE`` when the base comes in few bits, so that there is no other.
    """
    if not hasattr(model, "peft_config") or not getattr(model.get_base_model(), "is_quantized", False):
        return model
    from peft import PeftModel

    from gym_fed.kinds import ALGORITHMS
    from gym_fed.modeling.rope import apply_base_changes
    from gym_fed.training.model.quantization import prequantised
    from gym_fed.training.model.saving import save_tuned

    base = _base(config)
    if (method := prequantised(config.model)) is not None:
        raise GymError(
            ErrorCode.USAGE,
            f"{config.model} is quantised by {method}, and an adapter cannot be merged into that exactly",
            "export it as adapter",
        )
    base = ALGORITHMS.new(config.algorithm).adapt(base, load_tokenizer(str(config.model)), config)
    with tempfile.TemporaryDirectory() as name, quiet_loading():
        save_tuned(model, config.model_copy(update={"save_dtype": None}), Path(name))
        apply_base_changes(base, Path(name))
        return PeftModel.from_pretrained(base, name).eval()


def _require_weights_alone(config: TrainingConfig, what: str) -> None:
    """Refuse a run that changed more of its base than weights.

    Raises:
        GymError: ``USAGE``.
    """
    if config.rope_scaling is not None:
        raise GymError(
            ErrorCode.USAGE,
            f"rope_scaling: {what} holds differences of weights, and would lose the scaling",
            "export it as huggingface or adapter",
        )


def _whole(model: Any) -> Any:
    """The model with its adapter merged in, if it has one; the one at hand stays as it is."""
    return copy.deepcopy(model).merge_and_unload() if hasattr(model, "peft_config") else model


def _is_plain_lora(model: Any) -> bool:
    """Whether two factors a layer are all that was trained."""
    if not hasattr(model, "peft_config"):
        return False
    settings = model.peft_config[model.active_adapter]
    if _is_lora(settings) and any(
        min(a.shape[1], b.shape[0]) < a.shape[0] for a, b in _factors(model, model.active_adapter)
    ):
        return False  # more columns than the weight has: as factors it would be larger than as it is
    odd = (
        (settings.use_dora, settings.modules_to_save, settings.bias != "none")
        if _is_lora(settings)
        else (True,)
    )
    return not any(odd)


def _factors(model: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """A ``[r, in]`` and B ``[out, r]`` of every linear layer that the adapter is on."""
    for layer in model.modules():
        if name in getattr(layer, "lora_A", {}):
            yield layer.lora_A[name].weight, layer.lora_B[name].weight


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
    model = load_model(config.model, dtype=config.loaded_dtype).model
    # A run that went on from an adapter trained the whole.
    return model.merge_and_unload() if hasattr(model, "peft_config") else model

"""Merge a trained model with other users' deltas, or export it: ``Trainer.apply_deltasoup`` and ``Trainer.export``."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.modeling.weight_count import prequantised
from gym_fed.base.models import load_model, load_tokenizer, quiet_loading, resolve
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import DeltaSoupConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.factors import is_plain_lora
from gym_fed.training.model.adapters import merged_first
from gym_fed.training.model.quantization import is_quantised
from gym_fed.training.model.saving import portable_name

if TYPE_CHECKING:
    from gym_fed.export.source import Source
    from gym_fed.soup.delta_soup import SoupResult


Contributions = Mapping[str, Any] | Sequence[Any]
OWN = "self"


def soup_with(
    model: Any, config: TrainingConfig, others: Contributions, settings: DeltaSoupConfig | None
) -> tuple[Any, SoupResult]:
    """Merge a trained model with deltas of the same base.

    Args:
        model: The trained model, or a PEFT model.
        config: Config of its run; ``config.model`` specifies the base.
        others: Contributions by user, or a list of them: ``.gymdelta`` files, model folders, or models in memory.
        settings: Merge rule and codecs; by default ``DeltaSoupConfig()``. Its ``base_model`` is ignored.

    Returns:
        The base with the soup added, as a plain model, and the soup.

    Raises:
        GymError: ``USAGE`` for a duplicate user or one named ``self``; see ``DeltaSoup`` for other errors.
    """
    from gym_fed.soup.delta_soup import DeltaSoup

    named = others if isinstance(others, Mapping) else {f"{i}": other for i, other in enumerate(others, 1)}
    if OWN in named:
        reason = f"{OWN!r} is reserved for this trainer's own result"
        raise GymError(ErrorCode.USAGE, reason, "rename the contributor")
    if config.rope_scaling is not None:
        reason = "rope_scaling: a soup contains only weight differences, so the scaling would be lost"
        raise GymError(ErrorCode.USAGE, reason, "export it as huggingface or adapter")
    base = _base(config)
    model = _on_full_base(model, config)
    rules = settings or DeltaSoupConfig()
    soup = DeltaSoup(rules.model_copy(update={"base_model": None}), base=base)
    if hasattr(model, "peft_config") and (not is_plain_lora(model) or merged_first(config)):
        model = merged(copy.deepcopy(model))
    soup.contribute(user_id=OWN, model=model)
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
    format: str | None,
    codec: CodecPolicy | None,
    quantization: str = "",
    *,
    check: bool = True,
) -> Path:
    """Write a trained model; see ``Trainer.export``."""
    from gym_fed.export.choice import resolve_format
    from gym_fed.export.formats.base import Options, require_room
    from gym_fed.export.needs import Weights
    from gym_fed.export.run import export, require_new

    options = Options(dtype=config.save_dtype, codec=codec, quantization=quantization)
    chosen, options = resolve_format(format, path, options)
    require_new(path, chosen)
    weights = Weights(sum(value.numel() for value in model.parameters()))
    require_room(chosen, weights, path, options, check=check, loaded=True)
    keeps = chosen.name == "adapter" and prequantised(config.model) is not None
    exported = model if keeps else _on_full_base(model, config)
    source = _source(exported, tokenizer, config, with_files=chosen.merges or not chosen.is_file)
    with quiet_loading():
        export(source, chosen.name, path, options, check=check)
    return path


def _source(model: Any, tokenizer: Any, config: TrainingConfig, *, with_files: bool) -> Source:
    from gym_fed.export.source import Source
    from gym_fed.training.model.lora_starts import start_subtracted

    # Files that accompany the weights are copied from the folder of the base.
    folders = [] if config.model is None or not with_files else [Path(resolve(config.model))]
    return Source(
        name=str(config.output_dir.absolute()),
        model=model,
        tokenizer=tokenizer,
        base=portable_name(config.model),
        below=merged_first(config) if hasattr(model, "peft_config") else (),
        folders=folders,
        dtype=config.save_dtype or _stored_dtype(model, config),
        base_changed=config.rope_scaling is not None,
        read_base=lambda: _base(config),
        saving=start_subtracted,
    )


def _stored_dtype(model: Any, config: TrainingConfig) -> str:
    """Return the dtype in which an adapter's base is stored, or the dtype of a tuned model."""
    from gym_fed.export.source import stored_dtype

    in_memory = str(model.dtype).removeprefix("torch.")
    if not hasattr(model, "peft_config") or config.model is None:
        return in_memory
    try:
        folder = resolve(config.model)
    except GymError:
        return in_memory  # the path is relative, and the working directory has changed
    return stored_dtype(Path(folder))


def _on_full_base(model: Any, config: TrainingConfig) -> Any:
    """Move an adapter from a quantised base to the unquantised one, into which it can be merged exactly.

    Other models are returned unchanged.

    Raises:
        GymError: ``USAGE`` if the base itself is stored quantised.
    """
    if not hasattr(model, "peft_config") or not is_quantised(model.get_base_model()):
        return model
    from peft import PeftModel

    from gym_fed.base.modeling.rope import apply_base_changes
    from gym_fed.core.registries import ALGORITHMS
    from gym_fed.training.model.saving import save_tuned

    base = _base(config)
    if (method := prequantised(config.model)) is not None:
        reason = f"{config.model} is quantised by {method}, and an adapter cannot be merged into it exactly"
        raise GymError(ErrorCode.USAGE, reason, "export it as adapter")
    base = ALGORITHMS.new(config.algorithm).adapt(base, load_tokenizer(str(config.model)), config)
    with tempfile.TemporaryDirectory() as name, quiet_loading():
        save_tuned(model, config.model_copy(update={"save_dtype": None}), Path(name))
        apply_base_changes(base, Path(name))
        return PeftModel.from_pretrained(base, name).eval()


def _base(config: TrainingConfig) -> Any:
    """Load the model from which the run started."""
    if config.model is None:
        reason = "the base is unknown: the config has no model"
        remedy = "set TrainingConfig(model=...), the name or folder that training started from"
        raise GymError(ErrorCode.USAGE, reason, remedy)
    model = load_model(config.model, dtype=config.loaded_dtype).model
    # A run that started from an adapter has trained the merged model.
    return merged(model, config.model)

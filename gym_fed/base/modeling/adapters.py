"""Read PEFT adapters, check that they match a base, and merge them in order.

An adapter that was trained on a model with merged adapters contains those in its own folder, as ``base_adapters/1``,
``base_adapters/2``, ..., since it is useless without them.
"""

from __future__ import annotations

import shlex
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.adapter_limits import bounded_tensors, require_limits
from gym_fed.base.modeling.adapter_names import own_names_kept
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
BASE_ADAPTERS = "base_adapters"
_VIRTUAL_TOKENS = (
    "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT",
)  # fmt: skip
_MISFITS = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)
"""Exceptions of PEFT for a config with values of the wrong type, or of another model."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """A folder with one PEFT adapter.

    Attributes:
        name: Requested name.
        folder: Folder of the adapter.
        config: Contents of its ``adapter_config.json``.
        sha256: Hex digest of its weights file.
        below: Folders of the adapters that were merged into its base before training, in order.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    sha256: str
    below: tuple[Path, ...]

    @property
    def base(self) -> str | None:
        """Name of the base model in the adapter's config."""
        base = self.config.get("base_model_name_or_path")
        return base if isinstance(base, str) and base else None

    @property
    def kind(self) -> str:
        """PEFT type: ``LORA``, ``IA3``, ..."""
        return str(self.config.get("peft_type", "LORA"))


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read the adapter in ``folder``; its weights are hashed, not loaded.

    Raises:
        GymError: ``MODEL_INVALID`` if there is no adapter that can be added to its unchanged base.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: contains no adapter ({CONFIG} is missing)",
            "use the folder of a PEFT adapter or of a finished LoRA run; for a full model, set model",
        )
    config = read_object(file)
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = (folder / PICKLED).is_file()
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: {f'its weights are pickled ({PICKLED})' if pickled else f'{WEIGHTS} is missing'}",
            f"convert them once with: {_converting(folder)}"
            if pickled
            else "save it again with PEFT's save_pretrained",
        )
    _require_unchanged_base(name, config)
    require_limits(name, config, weights)
    below = folder / BASE_ADAPTERS
    numbered = sorted((int(entry.name), entry) for entry in below.glob("*") if entry.name.isdecimal())
    return Adapter(name, folder, config, file_sha256(weights), tuple(entry for _, entry in numbered))


def _converting(folder: Path) -> str:
    """Return the command that converts pickled weights to safetensors without running code."""
    code = (
        "import sys, torch; from safetensors.torch import save_file; "
        "found = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
        "save_file({k: v.contiguous().clone() for k, v in found.items()}, sys.argv[2], {'format': 'pt'})"
    )
    return shlex.join(["python", "-c", code, str(folder / PICKLED), str(folder / WEIGHTS)])


def _require_unchanged_base(name: str, config: dict[str, Any]) -> None:
    """Reject an adapter whose initialisation changed its base, since it computes different results on the original.

    Raises:
        GymError: ``MODEL_INVALID`` with the initialisation.
    """
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: init_lora_weights is {start}, so it fits only the base that this initialisation changed",
            "save it with PEFT's path_initial_model_for_weight_conversion, which converts it to a plain LoRA",
        )


def base_of(adapter: Adapter) -> str:
    """Return the base model that an adapter's config names.

    Raises:
        GymError: ``MODEL_INVALID`` if it names none.
    """
    if adapter.base is None:
        file = adapter.folder / CONFIG
        raise GymError(ErrorCode.MODEL_INVALID, f"{file}: has no base model", "set base_model_name_or_path")
    return adapter.base


def in_order(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Return ``adapters`` preceded by the adapters that they depend on, in merging order.

    Raises:
        GymError: ``CONFIG_INVALID`` if one was trained on adapters other than those before it.
    """
    chain: list[Adapter] = []
    for adapter in adapters:
        below = [read_adapter(str(folder), folder) for folder in adapter.below]
        if not chain:
            chain = below
        elif below and [lower.sha256 for lower in below] != [lower.sha256 for lower in chain]:
            before = ", ".join(lower.name for lower in chain)
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"adapter: {adapter.name} was trained on {counted(len(below), 'merged adapter')}, which differ from "
                f"those listed before it ({before})",
                f"list only {adapter.name}, to use those that it was trained on, or list them before it",
            )
        chain.append(adapter)
    return chain


def merge_adapters(model: Any, adapters: Sequence[Adapter]) -> Any:
    """Merge ``adapters`` into ``model``'s weights, one after the other.

    Raises:
        GymError: ``MODEL_INVALID`` for weights with wrong shapes; ``CONFIG_INVALID`` for an adapter that cannot be
            merged.
    """
    for adapter in adapters:
        require_mergeable(adapter)
        model = merged(load_on(model, adapter), adapter.name)
    return model


def merged(model: Any, name: str = "this adapter") -> Any:
    """Merge a PEFT model into a plain model with the same outputs; ``model`` must not be used afterwards.

    An output head tied to the embeddings is untied if the adapter changes only one of them.

    Args:
        model: A PEFT model; a plain model is returned unchanged.
        name: Name of the adapter in errors.

    Raises:
        GymError: ``CONFIG_INVALID`` for an adapter that cannot be represented in the weights.
    """
    if not hasattr(model, "peft_config"):
        return model
    for config in model.peft_config.values():
        _require_mergeable_config(name, config.to_dict())
    _own_head(model.get_base_model())
    tied = bool(getattr(model.get_base_model().config.get_text_config(), "tie_word_embeddings", False))
    try:
        with warnings.catch_warnings():
            # PEFT unties the config if there are two tensors; ``_tie_or_not`` compares their values.
            warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
            plain = model.merge_and_unload()
    except RuntimeError as error:
        if "lora_bias" not in str(error):
            raise
        raise _not_mergeable(name, "lora_bias adds to layers that have no bias") from error
    if tied:
        _tie_or_not(plain)
    return plain


def _own_head(model: Any) -> None:
    """Copy tied weights for the head, since merging into one of the two would change the other."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if not any(isinstance(layer, BaseTunerLayer) for layer in layers) or None in layers:
        return
    plain: list[Any] = [
        layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer for layer in layers
    ]
    words, head = plain
    if getattr(words, "weight", None) is getattr(head, "weight", False):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _tie_or_not(model: Any) -> None:
    """Tie the head and the embeddings again if their weights are equal, otherwise mark them as untied in the config.

    Without that mark, the head would be lost when the model is saved.
    """
    import torch

    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if head is None:
        return
    words = model.get_input_embeddings()
    are_equal = torch.equal(words.weight, head.weight)
    if are_equal:
        head.weight = words.weight
    config.tie_word_embeddings = model.config.tie_word_embeddings = are_equal


def require_of_weights(adapter: Adapter) -> None:
    """Reject an adapter that adds tokens to the input instead of changing weights.

    Raises:
        GymError: ``CONFIG_INVALID`` with the PEFT type.
    """
    if adapter.kind in _VIRTUAL_TOKENS:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"adapter: {adapter.name} is {adapter.kind}, which changes the input but no weights, so it cannot "
            "be merged or trained further",
            "use an adapter that changes weights, such as LoRA",
        )


def require_mergeable(adapter: Adapter) -> None:
    """Reject an adapter that cannot be merged into the weights of its base.

    Raises:
        GymError: ``CONFIG_INVALID`` with the reason.
    """
    require_of_weights(adapter)
    _require_mergeable_config(adapter.name, adapter.config)


def _require_mergeable_config(name: str, config: dict[str, Any]) -> None:
    if config.get("alora_invocation_tokens"):
        raise _not_mergeable(name, "alora_invocation_tokens enable it only at some tokens")
    if config.get("layer_replication"):
        raise _not_mergeable(name, "layer_replication lets several layers share their weights")


def _not_mergeable(name: str, why: str) -> GymError:
    return GymError(
        ErrorCode.CONFIG_INVALID,
        f"adapter: {name} cannot be merged: {why}",
        "train it without new_adapter, or load it with its base in PEFT",
    )


def load_on(model: Any, adapter: Adapter) -> Any:
    """Load one adapter onto ``model`` as a frozen ``peft.PeftModel``.

    Raises:
        GymError: ``MODEL_INVALID`` if names or shapes of its weights do not match the model; errors of
            ``require_quick_patterns``.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    from gym_fed.base.modeling.patterns import names_of, require_quick_patterns
    from gym_fed.base.modeling.rope import apply_base_changes
    from gym_fed.base.modeling.vocabulary import fit_rows

    apply_base_changes(model, adapter.folder)
    fit_rows(model, adapter.name, adapter.folder / WEIGHTS)
    require_quick_patterns(adapter.config, names_of(model), str(adapter.folder / CONFIG))
    try:
        with own_names_kept(), bounded_tensors(model, adapter.name), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            # Ignore warnings on PEFT's own patterns for routed experts, and on deprecated names of transformers.
            warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
            # Ignore the advice to untie weights; ``merged`` does so where needed.
            warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
            warnings.simplefilter("ignore", FutureWarning)
            peft_model = PeftModel.from_pretrained(model, str(adapter.folder))
        _require_all_factors(peft_model, adapter)
        return peft_model
    except (*_MISFITS, UserWarning, SafetensorError) as error:
        raise does_not_fit(adapter, type(model).__name__, str(error)) from error


def _require_all_factors(model: Any, adapter: Adapter) -> None:
    """Reject factors of layers that the config does not name, which PEFT drops silently.

    Raises:
        GymError: ``MODEL_INVALID`` with their names.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(adapter.folder / WEIGHTS, framework="pt") as file:
        keys = set(file.keys())
    known = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    # PEFT converts factors of single experts to those of fused experts.
    factors = (key for key in keys - known if ".lora_A." in key or ".lora_B." in key)
    extra = sorted(key for key in factors if ".experts." not in key)
    if extra:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{adapter.name}: has {counted(len(extra), 'tensor')} for layers that are not in its {CONFIG}, such as "
            f"{extra[0][:200]}",
            "correct target_modules, or restore the config and weights of the same adapter",
        )


def does_not_fit(adapter: Adapter, model: str, why: str) -> GymError:
    """Return the error for an adapter of a different model."""
    lines = why.strip().splitlines() or ["unknown"]
    first = next((line.strip() for line in lines if "size mismatch" in line), lines[0])
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{adapter.name}: does not match this {model}: {first[:300]}",
        f"it was trained on {adapter.base or 'an unnamed base'}",
    )


def write_base_adapters(adapters: Sequence[Adapter], folder: Path) -> None:
    """Copy the adapters merged into an adapter's base into its own ``folder``."""
    for number, adapter in enumerate(adapters, 1):
        target = folder / BASE_ADAPTERS / str(number)
        target.mkdir(parents=True)
        for file in sorted(adapter.folder.iterdir()):
            if file.name in (CONFIG, WEIGHTS, "base_changes.json", "adapter_base.json"):
                shutil.copyfile(file, target / file.name)

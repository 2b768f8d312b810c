"""Load causal language models: gym-nano, model folders, LoRA run folders, GGUF files and cached Hub models.

Nothing is downloaded: a Hub name is looked up only in the local cache. See ``gym_fed.base.downloads`` for downloads.
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.imports.folder import imported, usable_folder
from gym_fed.base.imports.gguf.reader import is_gguf, only_gguf
from gym_fed.base.modeling.loading import load_weights, readable_errors
from gym_fed.base.modeling.split_patterns import require_quick_tokenizer, without_lengths
from gym_fed.core.bounded.chat import bind_templates
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.library_env import quiet_loading as quiet_loading
from gym_fed.core.library_env import settle, without_collection

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from gym_fed.base.modeling.adapters import Adapter


settle()  # before transformers imports optional libraries

NANO = "gym-nano"
DTYPES = ("float32", "bfloat16", "float16")
MAX_ADAPTERS = 8
"""Maximum length of a chain of adapters, each the base of the one before."""
_HUB_NAME = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
_PLACING = ("distributed_config", "quantization_config", "device_map")


@dataclass
class LoadedModel:
    """A model ready for use, in evaluation mode.

    Attributes:
        model: A ``transformers`` causal LM, or a PEFT model around one.
        tokenizer: Tokenizer of the model, with a pad token.
        name: Requested name.
    """

    model: Any
    tokenizer: Any
    name: str

    def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer to a new folder, which every ``model`` argument of gym-fed accepts.

        Raises:
            GymError: ``FILE_EXISTS`` for a folder with files.
        """
        target = Path(folder)
        if target.is_file() or (target.is_dir() and any(target.iterdir())):
            raise GymError(ErrorCode.FILE_EXISTS, f"{target} exists", "use another folder")
        self.model.save_pretrained(target)
        self.tokenizer.save_pretrained(target)
        return target


def nano_path() -> Path:
    """Return the folder of the bundled base model gym-nano."""
    return Path(str(resources.files("gym_fed") / "assets" / "gym-nano"))


@without_collection()
def load_model(
    name_or_path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    arguments: dict[str, Any] | None = None,
    headless: bool = False,
    images: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer from this machine.

    Args:
        name_or_path: ``gym-nano``; a folder with a model, a PEFT adapter or a finished run; a ``.gguf`` file; or a
            Hugging Face name whose files are in the local cache.
        dtype: One of ``float32``, ``bfloat16``, ``float16``.
        device: Name of the device, as for ``pick_device``.
        arguments: Additional arguments of ``from_pretrained``; a model that they shard or quantise is not moved to a
            device.
        headless: True if the head is not used, so that the body of a reward model is accepted as well.
        images: True to also accept models that transformers has no text-only class for. It does not change the class.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` if it is not on this machine, ``MODEL_INVALID`` if it cannot be read or is not a
            language model.
    """
    import torch

    from gym_fed.base.modeling.adapters import base_of, in_order, read_adapter
    from gym_fed.base.modeling.checkpoint import class_of
    from gym_fed.base.modeling.config_checks import require_architecture, require_sizes, require_text
    from gym_fed.base.modeling.mixture_of_depths import is_mixture_of_depths, load_mixture_of_depths
    from gym_fed.base.modeling.model_class import class_for

    if dtype not in DTYPES:
        raise GymError(ErrorCode.USAGE, f"dtype {dtype!r} is unknown", f"one of {', '.join(DTYPES)}")
    target = pick_device(device)
    source = resolve(name_or_path)
    require_architecture(name_or_path, Path(source))
    if not headless:
        _require_words(name_or_path, Path(source))
    if not images:
        require_text(name_or_path, Path(source))
    adapter = Path(source) / "adapter_config.json"
    if adapter.is_file():
        require_base_model(name_or_path, Path(source))
        own = read_adapter(name_or_path, Path(source))
        return _put_on(name_or_path, base_of(own), in_order([own]), dtype, device, images)
    require_sizes(Path(source))
    with quiet_loading(), readable_errors(name_or_path):
        if is_mixture_of_depths(Path(source)):
            model: Any = load_mixture_of_depths(Path(source), getattr(torch, dtype))
        else:
            given = arguments is not None and "state_dict" in arguments  # replaces the folder's files
            kind: Any = class_of(arguments["config"]) if arguments and given else class_for(Path(source))
            model = load_weights(
                kind,
                None if given else source,
                {"dtype": getattr(torch, dtype), **(arguments or {})},
                name=name_or_path,
                headless=headless,
            )
    tokenizer = load_tokenizer(name_or_path)
    placed = arguments is not None and not arguments.keys().isdisjoint(_PLACING)
    return LoadedModel((model if placed else model.to(target)).eval(), tokenizer, name_or_path)


def _require_words(name: str, folder: Path) -> None:
    """Reject a reward model, for which transformers would create an untrained LM head."""
    kinds: list[str] = []
    for file, key in (("adapter_config.json", "task_type"), ("config.json", "architectures")):
        with suppress(OSError, ValueError, AttributeError):  # loading reports it
            names = read_object(folder / file).get(key) or []
            kinds += names if isinstance(names, list) else [str(names)]
    if any(kind == "SEQ_CLS" or str(kind).endswith("ForSequenceClassification") for kind in kinds):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: is a reward model, which scores answers and generates none",
            "use it as the grader reward_model or as ppo.critic, or use a language model",
        )


def model_name(name_or_path: str) -> str:
    """Return the name of a base in manifests: the last part of its path, so that no local paths are published."""
    path = Path(name_or_path).expanduser()
    return path.resolve().name if name_or_path != NANO and path.exists() else name_or_path


def load_tokenizer(name_or_path: str) -> Any:
    """Load only the tokenizer. Raises the errors of ``load_model``. A missing pad token is set to the EOS token."""
    from transformers import AutoTokenizer

    from gym_fed.base.modeling.config_checks import require_harmless

    source = resolve(name_or_path)
    require_harmless(Path(source))
    require_quick_tokenizer(Path(source), name_or_path)
    with quiet_loading(), readable_errors(name_or_path):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        except (AttributeError, IndexError, TypeError) as error:
            # transformers does not validate the types of values in tokenizer.json.
            raise ValueError(f"its tokenizer has values of the wrong type: {error}") from error
    # transformers would save the loading arguments with copies of the tokenizer.
    for key in ("is_local", "local_files_only", "trust_remote_code"):
        tokenizer.init_kwargs.pop(key, None)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    bind_templates(tokenizer, name_or_path)
    return without_lengths(tokenizer)


def resolve(name_or_path: str) -> str:
    """Resolve a name to a folder: the folder itself, a Hub snapshot in the local cache, or a GGUF import.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID`` for a path without a model; errors from ``imported``.
    """
    if name_or_path == NANO:
        return str(nano_path())
    if is_hub_name(name_or_path):
        return str(usable_folder(Path(_cached_snapshot(name_or_path))))
    path = Path(name_or_path).expanduser()
    exists = os.path.exists(path)  # Path's raises for a name that is too long
    if exists and is_gguf(path) and path.is_file():
        return str(imported(path))
    if exists and path.is_dir():
        if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            return str(usable_folder(path))
        if (file := only_gguf(path)) is not None:
            return str(imported(file))
        hint = "use a folder with config.json or adapter_config.json, such as a finished run"
        if (path / "config.yaml").is_file():
            hint = f"the run is not finished; resume it with: gym train {path / 'config.yaml'}"
        raise GymError(ErrorCode.MODEL_INVALID, f"no model in the folder {path}", hint)
    _require_no_variant(name_or_path)
    kind = "file" if is_gguf(path) else "folder"
    problem = f"not a {kind}" if exists else f"no such {kind}"
    raise GymError(
        ErrorCode.MODEL_NOT_FOUND,
        f"{name_or_path}: {problem}",
        "use a model folder, a .gguf file, or gym-nano",
    )


def _require_no_variant(name: str) -> None:
    """Reject ``BASE:VARIANT``, the name of a served variant, and name the commands that accept it.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` with these commands.
    """
    base, _, variant = name.rpartition(":")
    here = base == NANO or os.path.exists(Path(base).expanduser()) or (is_hub_name(base) and "/" in base)
    if base and here and "/" not in variant and not os.path.exists(name):
        quoted_base, other = shlex.quote(base), shlex.quote(variant)
        raise GymError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{name}: is a variant of gym api, but a model is required",
            f"chat with it: gym chat {quoted_base} --variant {other}; or convert the file that gym variant show "
            f"{other} prints to a model folder: gym delta apply {quoted_base} FILE -o FOLDER",
        )


def is_hub_name(name_or_path: str) -> bool:
    """Return True if ``name_or_path`` is a Hub repository: not a path, and no existing file or folder."""
    return (
        name_or_path != NANO
        and not is_gguf(Path(name_or_path))
        and _HUB_NAME.fullmatch(name_or_path) is not None
        and not any(pair in name_or_path for pair in ("--", ".."))
        and not os.path.exists(name_or_path)
    )


def _cached_snapshot(name: str) -> str:
    """Return the snapshot of ``name`` in the Hub's cache, without transformers, which would use the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise GymError(
            ErrorCode.MODEL_NOT_FOUND,
            f"no model called {name!r} on this machine",
            f"fetch it once with: gym models pull {name}; or use gym-nano or a model folder",
        ) from error


def pick_device(name: str = "auto") -> torch.device:
    """Choose a device: ``auto`` selects CUDA, then MPS, then the CPU; other devices must exist.

    Raises:
        GymError: ``USAGE`` for an unknown or missing device.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise GymError(
            ErrorCode.USAGE, f"device {name!r} is unknown", "use auto, cpu, cuda or mps"
        ) from error
    absent = (device.type == "cuda" and not torch.cuda.is_available()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if absent:
        raise GymError(
            ErrorCode.USAGE, f"device {name!r} is not available on this machine", "use auto or cpu"
        )
    return device


def load_adapted(
    name_or_path: str,
    adapters: Sequence[str],
    *,
    dtype: str = "float32",
    device: str = "cpu",
    images: bool = False,
) -> LoadedModel:
    """Load a model with additional adapters; all but the last are merged, and the last one stays separate.

    Raises:
        GymError: ``BASE_MISMATCH`` for an adapter of a different base; errors from ``load_model``.
    """
    if not adapters:
        return load_model(name_or_path, dtype=dtype, device=device, images=images)
    base, chain = chain_on(name_or_path, adapters)
    return _put_on(adapters[-1], base, chain, dtype, device, images)


def load_tuned(name: str, base: str) -> LoadedModel:
    """Load a fine-tune of ``base``; an adapter is loaded onto that base, regardless of its own config.

    Raises:
        GymError: Errors from ``load_adapted``.
    """
    if (Path(resolve(name)) / "adapter_config.json").is_file():
        return load_adapted(base, [name], images=True)
    return load_model(name, images=True)


def chain_on(name_or_path: str, adapters: Sequence[str]) -> tuple[str, list[Adapter]]:
    """Return the base of a model, and its own adapter followed by ``adapters`` in merging order.

    Raises:
        GymError: ``MODEL_NOT_FOUND``, ``MODEL_INVALID``; ``BASE_MISMATCH`` for an adapter of a different base.
    """
    from gym_fed.base.modeling.adapter_base import require_base
    from gym_fed.base.modeling.adapters import CONFIG, base_of, in_order, read_adapter

    named = [read_adapter(name, Path(resolve(name))) for name in adapters]
    folder, base = Path(resolve(name_or_path)), name_or_path
    if (folder / CONFIG).is_file():
        own = read_adapter(name_or_path, folder)
        named = [own, *named]
        base = base_of(own)
        if (Path(resolve(base)) / CONFIG).is_file():
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{name_or_path}: its base {base} is itself an adapter",
                f"merge the base first with: gym export {base} -o FOLDER, and pass --adapter {name_or_path} with the "
                "result",
            )
    for adapter in named:
        require_base(adapter, base, (folder_here(adapter.base), Path(resolve(base))))
    return base, in_order(named)


def folder_here(name: str | None) -> Path | None:
    """Return the folder of a model; None if it is not on this machine."""
    try:
        return None if name is None else Path(resolve(name))
    except GymError:
        return None


def require_base_model(name: str, folder: Path) -> None:
    """Check that the chain of bases in an adapter's config ends in a model.

    Raises:
        GymError: ``MODEL_INVALID`` for a circular or too long chain; errors from ``resolve``.
    """
    for _ in range(MAX_ADAPTERS):
        if (base := named_base(folder)) is None:
            return
        folder = Path(resolve(base))
    raise no_base_model(name)


def named_base(folder: Path) -> str | None:
    """Return the base that an adapter names; None for a model, or an adapter that loading will reject."""
    base = None
    with suppress(OSError, ValueError, AttributeError):  # loading reports it
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def no_base_model(name: str) -> GymError:
    """Return the error for a chain of adapters without a base model."""
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: more than {MAX_ADAPTERS} adapters are nested without a model below them",
        "set base_model_name_or_path in adapter_config.json to a model",
    )


def _put_on(
    name: str, base_name: str, chain: Sequence[Adapter], dtype: str, device: str, images: bool
) -> LoadedModel:
    from gym_fed.base.modeling.adapter_vocabulary import adapter_tokenizer
    from gym_fed.base.modeling.adapters import load_on, merge_adapters

    base = load_model(base_name, dtype=dtype, device=device, images=images)
    with quiet_loading(), readable_errors(name):
        model = load_on(merge_adapters(base.model, chain[:-1]), chain[-1])
    tokenizer = adapter_tokenizer(chain[-1:], base.tokenizer, model, load_tokenizer)
    return LoadedModel(model.eval(), tokenizer, name)

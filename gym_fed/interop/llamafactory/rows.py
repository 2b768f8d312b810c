"""Translate LLaMA-Factory's keys for data sources, truncation, packing and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gym_fed.core.errors import GymError
from gym_fed.core.json_files import read_object
from gym_fed.data.chat_templates.choice import NAMED
from gym_fed.interop.llamafactory.translation import Translator, names

_REMOTE = "REMOTE:"
_FOLDER = "data"
"""The folder in which LLaMA-Factory looks for ``dataset_info.json``."""


def translate_sources(translator: Translator, keys: Mapping[str, str]) -> None:
    """Translate the data sources under each of ``keys``, which maps LLaMA-Factory's keys to gym-fed's."""
    folder = str(translator.take("dataset_dir", _FOLDER))
    max_samples = translator.take("max_samples")
    if folder.startswith(_REMOTE):
        folder = _snapshot(translator, folder.removeprefix(_REMOTE)) or folder
    info = folder if folder.endswith(".json") else str(Path(folder) / "dataset_info.json")
    for key, ours in keys.items():
        if translator.has(key):
            limit = {} if max_samples is None else {"num_examples": max_samples}
            given = names(translator.take(key))
            sources = [{**_place(name, folder, info), **limit} for name in given]
            if catalogued := [source["name"] for source in sources if "name" in source]:
                found = ", ".join(catalogued)
                translator.note(
                    key, f"{info} does not exist; read from the catalogue (gym data catalogue): {found}"
                )
            translator.put(ours, sources, key)
    media = translator.take("media_dir")
    if media is not None and str(media) != folder:
        translator.lose("media_dir", "image paths are relative to the data file")


def _place(name: str, folder: str, info: str) -> dict[str, str]:
    """Return the source of a dataset: the Hub, an entry of ``dataset_info.json``, or the catalogue."""
    from gym_fed.config.train.catalogue import catalogue_entry
    from gym_fed.data.sources import is_catalogued

    if folder == "ONLINE":
        return {"hub": name}
    has_info = folder != _FOLDER or Path(info).is_file()
    if not has_info and is_catalogued(name) and catalogue_entry(name).hub is not None:
        return {"name": name}
    return {"dataset": name, "dataset_info": info}


def translate_rows(translator: Translator, algorithm: str) -> None:
    """Translate data sources, truncation, packing and the chat template."""
    translate_sources(translator, {"dataset": "data", "eval_dataset": "eval_data"})
    translator.move("tokenized_path", "tokenized_path")
    if translator.take("disable_shuffling", False):
        translator.put("shuffle", False, "disable_shuffling")
    # Written even if 0, since gym-fed holds out rows by default and LLaMA-Factory does not.
    translator.put("eval_split", translator.take("val_size", 0), "val_size")
    translator.lose_if("mix_strategy", "sources are always concatenated", harmless=("concat",))
    translator.move("cutoff_len", "max_length", 2048)
    packing, neat = translator.take("packing"), translator.take("neat_packing", False)
    if algorithm == "pretrain":
        if packing is not None:
            translator.put("packing", bool(packing), "packing")
    elif algorithm != "sft":
        for key, value in (("packing", packing), ("neat_packing", neat)):
            if value:
                translator.note(key, "applies only to pre-training and sft")
    elif packing or neat:
        key = "neat_packing" if neat else "packing"
        translator.put("packing", "bfd", key)
        if not neat:
            translator.note(
                key, "packed rows do not attend to each other, as with LLaMA-Factory's neat_packing"
            )
    for key in ("train_on_prompt", "mask_history"):
        if translator.take(key, False) and algorithm == "sft":
            translator.put(key, True, key)
    translator.move("default_system", "default_system")
    if translator.take("enable_thinking", True) is False:
        if algorithm == "sft":
            translator.put("reasoning", "off", "enable_thinking")
        else:
            translator.lose(
                "enable_thinking", "only sft excludes a template's empty thinking block from the loss"
            )
    translate_template(translator)


def _snapshot(translator: Translator, repository: str) -> str | None:
    """Return the folder of a data repository in the local cache of the Hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(repository, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        translator.lose(
            "dataset_dir",
            f"{repository} is not on this machine; download it with: hf download {repository} --repo-type dataset",
        )
        return None


def translate_template(translator: Translator) -> None:
    """Write ``chat_template`` for a known name; for others the tokenizer's own template is used, if it has one."""
    name = translator.take("template")
    if name is None or name == "empty":
        return
    if name in NAMED:
        translator.put("chat_template", name, "template")
    elif _has_template(str(translator.result.values.get("model"))):
        translator.note(
            "template", f"{name!r} is ignored; conversations are rendered with the tokenizer's own template"
        )
    else:
        translator.lose(
            "template", f"{name!r} is unknown, and the tokenizer has no template; known: {', '.join(NAMED)}"
        )


def _has_template(model: str) -> bool:
    """Return True if the model has a chat template, or is not on this machine."""
    from gym_fed.base.models import resolve

    try:
        folder = Path(resolve(model))
    except GymError:
        return True
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_object(settings).get("chat_template"))

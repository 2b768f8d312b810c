"""Write the result of a run: a model folder, or a PEFT adapter that refers to its base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.adapter_saving import cast_adapter, name_base
from gym_fed.base.modeling.adapters import write_base_adapters
from gym_fed.base.modeling.rope import BASE_CHANGES, write_base_changes
from gym_fed.base.models import NANO
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.files import full_disk_named
from gym_fed.core.registries import TUNING
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.model.adapters import merged_first, starting_adapters
from gym_fed.training.processes.group import is_main, on_main
from gym_fed.training.processes.sharding import is_split


def save_final(
    trainer: Any, model: Any, tokenizer: Any, algorithm: Algorithm, config: TrainingConfig, folder: Path
) -> None:
    """Save the result in the run folder. If the process is killed, the run stays unfinished, without a partial model.

    Args:
        trainer: The trainer after its run.
        model: The trained model or PEFT model; not changed.
        tokenizer: Tokenizer that is saved with the model.
        algorithm: Algorithm of the run, which may write further files (a critic, a head).
        config: The run's config.
        folder: The run folder.

    Raises:
        GymError: ``DISK_FULL``; the partial result is deleted, and the last checkpoint remains.
    """
    part = folder / ".final.part"
    try:
        with full_disk_named(part):
            _save_final(trainer, model, tokenizer, algorithm, config, part)
    except Exception:
        if is_main():
            shutil.rmtree(part, ignore_errors=True)
        raise


def _save_final(
    trainer: Any, model: Any, tokenizer: Any, algorithm: Algorithm, config: TrainingConfig, part: Path
) -> None:
    on_main(lambda: shutil.rmtree(part, ignore_errors=True))
    on_main(part.mkdir)
    if is_split(config):
        _gather(trainer, config, part)
    if not is_main():
        return
    if is_split(config):
        _finish_adapter(model, config, part)
    else:
        save_tuned(model, config, part)
    algorithm.save(trainer, part)
    tokenizer.save_pretrained(str(part))
    _move_into(part, part.parent)


def _move_into(part: Path, folder: Path) -> None:
    """Move everything in ``part`` to ``folder``, replacing files from a save that was killed."""
    for entry in part.iterdir():
        if (folder / entry.name).is_dir():
            shutil.rmtree(folder / entry.name)  # rename cannot replace a folder that is not empty
        entry.replace(folder / entry.name)
    part.rmdir()


def save_tuned(model: Any, config: TrainingConfig, folder: Path) -> None:
    """Write the tuned weights of a model that is not split: a model folder, or an adapter with changes to its base.

    Args:
        model: The trained model or PEFT model; not changed.
        config: The run's config.
        folder: A new or empty folder.
    """
    TUNING.new(config.finetuning).save(model, config, folder, portable_name(config.model))
    _finish_adapter(model, config, folder)


def _finish_adapter(model: Any, config: TrainingConfig, folder: Path) -> None:
    """Apply ``save_dtype`` to an adapter, and write the changes to its base, which PEFT does not save."""
    if not TUNING.new(config.finetuning).is_adapter:
        return
    if config.save_dtype is not None:
        cast_adapter(folder, config.save_dtype)
    was_scaled = any((adapter.folder / BASE_CHANGES).is_file() for adapter in starting_adapters(config))
    if config.rope_scaling is not None or was_scaled:
        write_base_changes(model.get_base_model(), folder)
    write_base_adapters(merged_first(config), folder)


def _gather(trainer: Any, config: TrainingConfig, part: Path) -> None:
    """Write a model that is sharded across processes. Every process must call this."""
    is_adapter = TUNING.new(config.finetuning).is_adapter
    # By default, PEFT loads the base's config again to detect changes to its vocabulary.
    options: dict[str, Any] = {"save_embedding_layers": False} if is_adapter else {}
    if config.distributed_strategy == "pipeline_parallel":
        save = trainer.model.save_pretrained
        trainer.write_weights(part, lambda state: save(str(part), state_dict=state, **options))
    elif trainer.is_deepspeed_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if is_main():
            trainer.model.save_pretrained(str(part), state_dict=state, **options)
    else:
        trainer.model.save_pretrained(str(part), is_main_process=is_main(), **options)
    if not is_main():
        return
    if is_adapter:
        name_base(part, portable_name(config.model))
        return
    tied = dict(getattr(trainer.model, "_tied_weights_keys", None) or {})
    tied = tied if trainer.model.config.tie_word_embeddings else {}
    _drop_duplicates(part, tied, config.save_dtype or config.dtype)


def _drop_duplicates(part: Path, tied: dict[str, str], dtype: str) -> None:
    """Drop the duplicates of tied weights in a gathered model, and convert all weights to the saved dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in part.glob("*.safetensors"):
        tensors = load_file(file)
        unique = {name: value for name, value in tensors.items() if tied.get(name) not in tensors}
        cast = {name: value.to(getattr(torch, dtype)) for name, value in unique.items()}
        save_file(cast, file, metadata={"format": "pt"})
    file = part / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), "dtype": dtype}
    file.write_text(f"{json.dumps(config, indent=2)}\n", encoding="utf-8")


def portable_name(name: str | None) -> str | None:
    """Make a path absolute, so that the adapter finds its base from any folder. Model names are returned unchanged."""
    if name is None or name == NANO or not Path(name).expanduser().exists():
        return name
    return str(Path(name).expanduser().resolve())

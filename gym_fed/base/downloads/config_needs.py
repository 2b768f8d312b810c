"""The models and Hub datasets in a training config."""

from __future__ import annotations

from gym_fed.config.train.catalogue import catalogue_entry
from gym_fed.config.train.data_source import DataConfig
from gym_fed.config.train.training import TrainingConfig


def models_of(config: TrainingConfig) -> list[str]:
    """Return all models that a run loads, including adapters, teachers, reward models and tokenizers."""
    section = getattr(config, config.algorithm, None)
    graders = [(grader.grader, grader) for grader in config.graders]
    candidates = [
        config.model,
        *config.adapter,
        config.reference_model,
        *config.reference_adapter,
        config.model_init.tokenizer if config.model_init is not None else None,
        *(getattr(section, key, None) for key in ("teacher", "critic")),
        *(getattr(grader, "model", None) for kind, grader in graders if kind == "reward_model"),
        *(getattr(grader, "tokenizer", None) for kind, grader in graders if kind == "length"),
    ]
    return [name for name in candidates if isinstance(name, str)]


def hub_places(source: DataConfig) -> list[tuple[str, str | None]]:
    """Return the Hub datasets that a source reads, each with its subset."""
    if source.hub is not None:
        return [(source.hub, source.subset)]
    if source.name is not None:
        entry = catalogue_entry(source.name)
        return [(entry.hub, entry.subset)] if entry.hub is not None else []
    return []
